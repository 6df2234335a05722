"""Before the first step: what is learned is shown, and what cannot be meant is an error by name."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, RequestError, UnknownArgumentError
from everystep.testing.models import tiny_document, tiny_llama
from everystep.testing.tokenizer import CHATML, tiny_tokenizer
from tests.bridge.families import model_of

MODEL = tiny_llama(vocab_size=320, dtype=torch.float32)
MODEL.generation_config.eos_token_id = [2, 4]
TOKENIZER = tiny_tokenizer()
GOOD = {"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}
PAIR = {"prompt": "1, 2,", "completion": " 3"}
ASK = {"role": "user", "content": "Who is it?"}
SAY = {"role": "assistant", "content": "It is the keeper."}
CHAT = {"messages": [ASK, SAY]}


def test_what_is_learned_is_marked() -> None:
    rows = es.read_rows([PAIR, {"prompt": "a", "completion": " b"}], MODEL, TOKENIZER)
    found = es.inspect_rows(rows, MODEL, TOKENIZER, collator=es.DataCollatorWithPadding(TOKENIZER))
    assert repr(found).splitlines() == [
        "2 rows with 12 tokens, of which 6 (50 %) are learned; the longest has 8",
        "example 0: 1, 2,⟦ 3<eos>⟧",
        "example 1: a⟦ b<eos>⟧",
    ]
    html = found._repr_html_()
    assert "<td" in html and "learned" in html and "&lt;eos&gt;" in html
    assert found.batch[1] == (es.TrainedPiece("a", False), es.TrainedPiece(" b<eos>", True))
    assert (found.rows, found.tokens, found.trained, found.longest) == (2, 12, 6, 8)
    assert found.warnings == ()


def test_without_a_tokenizer_ids_are_shown() -> None:
    found = es.inspect_rows([GOOD], MODEL)
    assert repr(found).splitlines()[1] == "example 0: 5⟦6 2⟧"


def test_an_encoder_and_its_decoder_are_shown_one_after_the_other() -> None:
    model = es.wrap(copy.deepcopy(model_of("bart")))
    row = {"input_ids": [5, 6, 7], "labels": [8, 3]}
    found = es.inspect_rows([row], model)
    assert repr(found).splitlines()[1] == "example 0: 5 6 7⟦8 3⟧"
    collator = es.DataCollatorForSeq2Seq(TOKENIZER, model=model)
    es.inspect_rows([row], model, collator=collator)


def test_a_document_brings_its_boxes_and_pixels() -> None:
    model = tiny_document()
    box, patch = (one.token for one in sorted(model.prompt_inputs, key=lambda one: one.name))
    row = {
        "input_ids": [patch] * 4 + [9, box, 10, 2],
        "labels": [-100] * 6 + [10, 2],
        "bbox": [[1, 2, 3, 4]],
        "pixel_values": torch.zeros(3, 32, 32),
    }
    found = es.inspect_rows(
        es.read_rows([row]), model, collator=es.DataCollatorWithPadding(TOKENIZER)
    )
    assert found.trained == 2


# --- warnings -------------------------------------------------------------------------------------


def warned(*rows: Any, **how: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = es.inspect_rows([*rows] if len(rows) > 1 else rows[0], MODEL, TOKENIZER, **how)
    assert [str(one.message) for one in caught] == [*found.warnings]
    assert all(f"warning: {one}" in repr(found) for one in found.warnings)
    return "\n".join(found.warnings)


def test_some_rows_without_an_end_are_a_warning() -> None:
    said = warned(GOOD, {"input_ids": [5, 6], "labels": [-100, 6]})
    assert said == "1 of 2 rows teach no end token (2, 4)"


def test_ids_without_any_end_are_a_warning() -> None:
    assert "1 of 1 rows teach no end" in warned([{"input_ids": [5, 6], "labels": [-100, 6]}])


def test_rows_that_were_cut_are_a_warning() -> None:
    data = [PAIR, {"prompt": "1, 2,", "completion": " 3" * 40}]
    rows = es.read_rows(data, MODEL, TOKENIZER, es.DataForm(max_length=20))
    said = warned(rows)
    assert "1 of 2 rows were longer than max_length" in said and "1 of 2 rows teach no end" in said


def test_prompts_that_are_evaluated_and_trained_on_are_a_warning() -> None:
    rows = es.read_rows([{"prompt": "x", "completion": "y"}, PAIR], MODEL, TOKENIZER)
    same = es.read_rows([{**PAIR, "completion": " 4"}], MODEL, TOKENIZER)
    said = warned(rows, eval_rows=same)
    assert said == "1 of 1 prompts of the evaluation are trained on: row 0 has that of row 1"
    other = es.read_rows([{"prompt": "z", "completion": " 4"}], MODEL, TOKENIZER)
    assert warned(rows, eval_rows=other) == ""


# --- ends -----------------------------------------------------------------------------------------


def test_a_template_that_leaves_the_end_to_the_next_message_is_found() -> None:
    """The loss goes down, and the model never stops: the most expensive of these mistakes."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    )
    rows = es.read_rows([CHAT, CHAT], MODEL, tokenizer)
    with pytest.raises(RequestError, match=r"no example teaches the end token.*one of 2, 4"):
        es.inspect_rows(rows, MODEL, tokenizer)


@pytest.mark.parametrize("example", [PAIR, CHAT])
def test_answers_without_an_end_are_refused(example: dict[str, Any]) -> None:
    model = tiny_llama(vocab_size=320, dtype=torch.float32)
    model.generation_config.eos_token_id = 3  # of another model
    rows = es.read_rows([example], model, TOKENIZER)
    with pytest.raises(RequestError, match="teaches the end token"):
        es.inspect_rows(rows, model, TOKENIZER)


# --- 60 wrong inputs ------------------------------------------------------------------------------

IDS = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
NAN = torch.tensor([[[float("nan")]]])
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    # rows of ids
    "all labels -100": ({**IDS, "labels": [-100] * 3}, {}, "nothing is learned from example 1"),
    "only the first label": ({**IDS, "labels": [5, -100, -100]}, {}, "nothing is learned"),
    "a single id": ({"input_ids": [5], "labels": [5]}, {}, "nothing is learned"),
    "fewer labels": (
        {**IDS, "labels": [-100, 6]},
        {},
        "labels has another length; wanted 3; got 2",
    ),
    "more labels": ({**IDS, "labels": [-100, 6, 7, 8]}, {}, "labels has another length"),
    "labels upright": ({**IDS, "labels": [[5], [6], [7]]}, {}, "labels stand on another axis"),
    "labels of a batch": ({**IDS, "labels": [[5, 6, 7]]}, {}, "labels stand on another axis"),
    "labels as floats": ({**IDS, "labels": [0.5, 1.0, 2.0]}, {}, "labels are no ids"),
    "a class as label": ({**IDS, "labels": 1}, {}, "labels stand on another axis"),
    "ids of a batch": ({"input_ids": [[5, 6, 7]]}, {}, "input_ids is no row.*\\[0\\]"),
    "ids as floats": ({"input_ids": [5.0, 6.0]}, {}, "input_ids are no ids"),
    "ids as flags": ({"input_ids": [True, False]}, {}, "input_ids are no ids"),
    "ids as a text": ({"input_ids": "5 6 7"}, {}, "input_ids is a text"),
    "ids as texts": ({"input_ids": ["5", "6"]}, {}, "input_ids is not a tensor"),
    "an id that is None": ({"input_ids": [5, None]}, {}, "input_ids is not a tensor"),
    "no ids": ({"input_ids": [], "labels": []}, {}, "is empty"),
    "a number as ids": ({"input_ids": 5}, {}, "input_ids is no row"),
    "an id beyond the vocabulary": ({"input_ids": [5, 320]}, {}, "outside the vocabulary.*got 320"),
    "a label beyond it": ({**IDS, "labels": [-100, 6, 400]}, {}, "labels holds an id outside"),
    "a negative id": ({"input_ids": [5, -100]}, {}, "input_ids are negative"),
    "another negative label": ({**IDS, "labels": [-1, 6, 7]}, {}, "labels holds an id outside"),
    "beyond 64 bits": ({"input_ids": [5, 1 << 70]}, {}, "input_ids"),
    "longer than the context": ({"input_ids": [5] * 257}, {}, "longer than the model reaches"),
    "no mapping": ([5, 6, 7], {}, "no mapping.*got list"),
    "a text by itself": ("It was.", {}, "no mapping.*\\{'text': \\.\\.\\.\\}"),
    "None": (None, {}, "no mapping"),
    "an empty mapping": ({}, {}, "no known form"),
    "a mask of another length": ({**IDS, "attention_mask": [1]}, {}, "attention_mask has another"),
    "padding that is learned": ({**IDS, "attention_mask": [1, 1, 0]}, {}, "learns padding"),
    "a pad label": (
        {"input_ids": [5, 6, 0], "labels": [-100, 6, 0]},
        {},
        "learns padding.*place 2",
    ),
    "all is masked": ({"input_ids": [5, 6], "attention_mask": [0, 0]}, {}, "nothing is learned"),
    "positions of another length": ({**IDS, "position_ids": [0]}, {}, "position_ids has another"),
    "a key that nobody takes": ({**IDS, "bbox": [[1, 2, 3, 4]]}, {}, "takes no 'bbox'"),
    "a key that is mistyped": ({**IDS, "atention_mask": [1]}, {}, "meant attention_mask"),
    "token types": ({**IDS, "token_type_ids": [0, 0, 0]}, {}, "takes no 'token_type_ids'"),
    "a text among numbers": ({**IDS, "source": "web"}, {}, "source is a text"),
    "a key that is no text": ({**IDS, 3: [1]}, {}, "a key that is no text"),
    "nan among embeddings": (
        {"inputs_embeds": torch.full((3, 32), float("nan")), "labels": [-100, 6, 7]},
        {},
        "inputs_embeds is not finite; got nan",
    ),
    "inf among embeddings": (
        {"inputs_embeds": torch.full((3, 32), float("inf")), "labels": [-100, 6, 7]},
        {},
        "inputs_embeds is not finite; got inf",
    ),
    "embeddings without labels": ({"inputs_embeds": torch.ones(3, 32)}, {}, "no labels"),
    "labels and a mask": ({**IDS, "completion_mask": [0, 1, 1]}, {}, "both say"),
    "a mask of what is said": ({"input_ids": [5, 6], "completion_mask": [1]}, {}, "length"),
    "no completion in ids": ({"input_ids": [5, 6]}, {"completion_only_loss": True}, "completion"),
    # texts
    "an empty text": ({"text": ""}, {}, "text is empty"),
    "a number as text": ({"text": 5}, {}, "text is no text"),
    "another field": ({"body": "a"}, {}, "no known form"),
    "a field of others": ({"content": "a"}, {}, "dataset_text_field='content'"),
    "a text and more": ({"text": "a", "source": "web"}, {}, "no 'source'.*remove_columns"),
    "two forms": ({"text": "a", **PAIR}, {}, "this example has 2 forms"),
    "an unknown end": ({"text": "a"}, {"eos_token": "</end>"}, "eos_token is not in the vocab"),
    "a prompt alone": ({"prompt": "a"}, {}, "no known form"),
    "an empty completion": ({**PAIR, "completion": ""}, {}, "completion is empty"),
    "a prompt that fills the row": ({**PAIR, "prompt": "1" * 40}, {"max_length": 20}, "nothing is"),
    "a text has no completion": ({"text": "a"}, {"completion_only_loss": True}, "no completion"),
    "tools beside a text": ({**PAIR, "tools": []}, {}, "tools are for messages"),
    "an alpaca": ({"instruction": "a", "output": "b"}, {}, "\\{'prompt'"),
    # messages
    "no messages": ({"messages": []}, {}, "messages are no messages"),
    "messages as a text": ({"messages": "hello"}, {}, "messages are no messages"),
    "a message without role": ({"messages": [ASK, {"content": "a"}]}, {}, "message 1 is none"),
    "a message without content": ({"messages": [ASK, {"role": "assistant"}]}, {}, "no content"),
    "nobody answers": ({"messages": [ASK]}, {}, "nothing is learned"),
    "an answer to nothing": ({"messages": [SAY]}, {}, "begins with an answer"),
    "a sharegpt": ({"conversations": [{"from": "human", "value": "a"}]}, {}, "\\{'messages'"),
    "messages and a text": ({"prompt": [ASK], "completion": "It."}, {}, "both are"),
    "a sound": (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}, SAY]},
        {},
        "messages hold no sounds",
    ),
    "answers without a prompt": ({"chosen": [SAY], "rejected": [SAY]}, {}, "as 'prompt'"),
    "tools that are none": ({**CHAT, "tools": 5}, {}, "tools are no list"),
    "tools in broken JSON": ({**CHAT, "tools": "[{"}, {}, "tools is not valid JSON"),
    "a variable of ours": (
        {**CHAT, "chat_template_kwargs": {"tokenize": False}},
        {},
        "may not set tokenize",
    ),
}


def whole_of(wrong: Any) -> list[Any]:
    """A good example of the form before the wrong one, where the wrong one has a form."""
    if isinstance(wrong, dict):
        for key, good in (("input_ids", GOOD), ("inputs_embeds", GOOD), ("messages", CHAT)):
            if key in wrong and "prompt" not in wrong:
                return [good, wrong]
        if "prompt" in wrong and "completion" in wrong and "text" not in wrong:
            return [PAIR, wrong]
    return [GOOD, wrong] if not isinstance(wrong, dict) else [wrong]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:.*teach no end")
def test_a_wrong_input_is_an_error_before_the_first_step(name: str) -> None:
    wrong, form, says = WRONG[name]
    data = whole_of(wrong)
    with pytest.raises(EverystepError, match=says) as caught:
        made = es.DataForm(**form)
        es.inspect_rows(es.read_rows(data, MODEL, TOKENIZER, made), MODEL, TOKENIZER)
    assert isinstance(caught.value, ValueError), "as ported code catches it"
    by_form = ("no completion", "completion_only_loss")
    if not any(one in str(caught.value) for one in by_form):
        assert f"example {len(data) - 1}" in str(caught.value), "it names the example"


def test_there_are_sixty_of_them() -> None:
    assert len(WRONG) >= 60


def test_the_good_ones_are_let_through() -> None:
    """So that it is the mistake that is refused."""
    for good in (GOOD, PAIR, CHAT):
        es.inspect_rows(es.read_rows([good, good], MODEL, TOKENIZER), MODEL, TOKENIZER)


@pytest.mark.parametrize(
    ("other", "says"),
    [(CHAT, "the form changes"), ({"text": "a"}, "the form changes"), (7, "no mapping")],
)
def test_a_form_that_changes_is_refused(other: Any, says: str) -> None:
    rows = es.read_rows([PAIR, other], MODEL, TOKENIZER)
    with pytest.raises(RequestError, match=f"example 1: .*{says}"):
        es.inspect_rows(rows, MODEL, TOKENIZER)


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 0},
        {"max_length": 1.5},
        {"truncation_mode": "middle"},
        {"completion_only_loss": 1},
        {"assistant_only_loss": None},
        {"dataset_text_field": ""},
        {"eos_token": 2},
        {"remove_columns": "id"},
    ],
)
def test_forms_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(RequestError, match=name):
        es.DataForm(**options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (((), MODEL), "no examples|no rows"),
        (([CHAT], MODEL), "needs a tokenizer"),
        (([CHAT], MODEL, TOKENIZER, {"max_length": 5}), "no form of data"),
    ],
)
def test_rows_of_nothing_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        es.read_rows(*arguments)


def batch_of(**changes: Any) -> Any:
    whole = es.DataCollatorWithPadding(TOKENIZER)([GOOD, GOOD])
    return lambda rows: {**whole, **changes}


@pytest.mark.parametrize(
    ("collator", "says"),
    [
        (lambda rows: [1], "no batch"),
        (batch_of(labels=torch.ones(3, 2)), "labels stand on the wrong axis"),
        (batch_of(labels=torch.ones(2, 2)), "labels do not fit the ids"),
        (batch_of(labels=torch.full((2, 3), -100)), "all labels are -100"),
        (batch_of(ids=[1, 2]), "ids is no tensor"),
        (batch_of(box=torch.ones(1)), "takes no 'box'"),
        (lambda rows: {"input_ids": torch.ones(2, 3)}, "has no labels"),
    ],
)
def test_batches_of_a_collator_are_judged(collator: Any, says: str) -> None:
    with pytest.raises(RequestError, match=f"the first batch: .*{says}|{says}"):
        es.inspect_rows([GOOD, GOOD], MODEL, TOKENIZER, collator=collator)


def test_errors_of_the_evaluation_say_so() -> None:
    rows = es.read_rows([PAIR], MODEL, TOKENIZER)
    with pytest.raises(RequestError, match="evaluation example 0"):
        es.inspect_rows(rows, MODEL, TOKENIZER, eval_rows=[{**GOOD, "labels": [-100] * 3}])


def test_a_wrapped_model_names_the_keys_that_it_takes() -> None:
    model = es.wrap(copy.deepcopy(model_of("llama")))
    good = {"input_ids": [5, 6, 3], "labels": [-100, 6, 3]}
    es.inspect_rows([good], model)
    with pytest.raises(UnknownArgumentError, match="takes no 'bbox'"):
        es.inspect_rows([{**good, "bbox": [[1, 2, 3, 4]]}], model)


def test_only_the_first_rows_are_looked_at_on_request() -> None:
    bad = {**GOOD, "labels": [-100] * 3}
    assert es.inspect_rows([GOOD, GOOD, bad], MODEL, TOKENIZER, most=2).rows == 2
    assert CHATML  # the template of the tokenizer, which marks nothing
