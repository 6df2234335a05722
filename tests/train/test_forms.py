"""Examples of each form become the rows that a call reads and a model is to say."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.requests.prompts import read_prompt
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import CHATML, tiny_tokenizer
from tests.bridge.families import model_of

MODEL = tiny_llama(vocab_size=320, dtype=torch.float32)
MODEL.generation_config.eos_token_id = [2, 4]
TOKENIZER = tiny_tokenizer()
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML
WORDS = ["the sea", "it was", "a lamp", "<|im_end|>", "in\n\n\nit", "ß漢", "two and", " 3", ""]
ASK = {"role": "user", "content": "Who is it?"}
SAY = {"role": "assistant", "content": "It is the keeper."}


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """Messages of random roles, of which the assistant says at least one."""

    def said() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 4))) or "x"

    turns = [{"role": "system", "content": said()}] * draw.randint(0, 1)
    for _ in range(draw.randint(1, 3)):
        turns.append({"role": "user", "content": said()})
        if draw.random() < 0.3:
            turns.append({"role": "assistant", "content": said()})
            turns.append({"role": "tool", "content": said()})
        turns.append({"role": "assistant", "content": said().replace("<|im_end|>", "!")})
    return turns


def learned(row: dict[str, torch.Tensor]) -> list[bool]:
    kept = row["labels"] != -100
    assert torch.equal(row["labels"][kept], row["input_ids"][kept])
    return kept.tolist()


def texts(row: dict[str, torch.Tensor], tokenizer: Any = TOKENIZER) -> tuple[str, str]:
    """What is read only, and what is learned."""
    kept = torch.tensor(learned(row))
    ids = row["input_ids"]
    return tokenizer.decode(ids[~kept].tolist()), tokenizer.decode(ids[kept].tolist())


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_found_without_marks_in_the_template(seed: int) -> None:
    """They are those that a template with marks says, and the ids those that it gives."""
    turns = conversation(random.Random(seed))
    # The tokenizer's own end token is <eos>, the template's <|im_end|>: only the model knows both.
    row = es.read_rows([{"messages": turns}], MODEL, TOKENIZER, es.DataForm(max_length=None))[0]
    marked = tokenizer_with(MARKED).apply_chat_template(turns, return_assistant_tokens_mask=True)
    assert row["input_ids"].tolist() == marked["input_ids"]
    assert learned(row) == [one == 1 for one in marked["assistant_masks"]]


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_transformers(seed: int) -> None:
    turns = conversation(random.Random(seed))
    plain = [{**turn, "content": turn["content"].replace("<|im_end|>", "!")} for turn in turns]
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend)
    other.chat_template = MARKED
    theirs = other.apply_chat_template(plain, return_assistant_tokens_mask=True, return_dict=True)
    row = es.read_rows([{"messages": plain}], MODEL, TOKENIZER)[0]
    assert row["input_ids"].tolist() == theirs["input_ids"]
    assert learned(row) == [one == 1 for one in theirs["assistant_masks"]]
    foreign = es.read_rows([{"messages": plain}], MODEL, other)[0]
    assert foreign["labels"].tolist() == row["labels"].tolist()


def test_what_stands_before_an_answer_is_what_a_call_reads() -> None:
    """Also with the system message that a model's conversations begin with."""
    model = tiny_llama(vocab_size=320, dtype=torch.float32)
    model.generation_config.eos_token_id = [2, 4]
    model.chat_defaults = es.ChatDefaults("Be brief.")
    row = es.read_rows([{"messages": [ASK, SAY]}], model, TOKENIZER)[0]
    prompt = read_prompt(model, TOKENIZER, [ASK], starts_answer=True).input_ids
    ids = torch.as_tensor(prompt)[0].tolist()
    assert row["input_ids"].tolist()[: len(ids)] == ids
    assert learned(row)[: len(ids)] == [False] * len(ids) and learned(row)[len(ids)]
    assert texts(row)[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    own = [{"role": "system", "content": "Rhyme."}, ASK, SAY]
    assert "Be brief" not in texts(es.read_rows([{"messages": own}], model, TOKENIZER)[0])[0]


def test_an_answer_ends_with_its_end_token_and_not_behind() -> None:
    row = es.read_rows([{"messages": [ASK, SAY]}], MODEL, TOKENIZER)[0]
    assert texts(row)[1] == "It is the keeper.<|im_end|>"
    assert TOKENIZER.decode(row["input_ids"][-1:].tolist()) == "\n"
    # Where nothing says which token ends, all that the template writes of an answer is learned.
    unknown = es.read_rows([{"messages": [ASK, SAY]}], None, TOKENIZER)[0]
    assert texts(unknown)[1] == "It is the keeper.<|im_end|>\n"
    named = es.DataForm(eos_token="<|im_end|>")
    again = es.read_rows([{"messages": [ASK, SAY]}], None, TOKENIZER, named)[0]
    assert again["labels"].tolist() == row["labels"].tolist()


def test_all_messages_are_learned_on_request() -> None:
    form = es.DataForm(assistant_only_loss=False)
    row = es.read_rows([{"messages": [ASK, SAY]}], MODEL, TOKENIZER, form)[0]
    assert all(learned(row))


@pytest.mark.parametrize("written", [list, lambda tools: __import__("json").dumps(tools)])
def test_tools_are_told_to_the_template(written: Callable[[Any], Any]) -> None:
    tool = {"type": "function", "function": {"name": "tide", "parameters": {}}}
    example = {"messages": [ASK, SAY], "tools": written([tool])}
    row = es.read_rows([example], MODEL, tokenizer_with(WITH_TOOLS))[0]
    assert '"tide"' in texts(row)[0] and texts(row)[1] == "It is the keeper.<|im_end|>"
    with pytest.raises(EverystepError, match=r"example 0: .*tools"):
        es.read_rows([example], MODEL, TOKENIZER)[0]


def test_variables_of_a_template_may_be_given() -> None:
    template = "{% if thinking is defined and thinking %}THINK\n{% endif %}" + CHATML
    example = {"messages": [ASK, SAY], "chat_template_kwargs": {"thinking": True}}
    row = es.read_rows([example], MODEL, tokenizer_with(template))[0]
    assert texts(row)[0].startswith("THINK") and texts(row)[1] == "It is the keeper.<|im_end|>"


BROKEN = {
    "counts": "{{ messages | length }}\n" + CHATML,
    "forgets": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}...{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "announces": CHATML.replace("assistant\n{% endif", "assistant\nThinking{% endif"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_writes_messages_anew_is_refused(name: str) -> None:
    """Else tokens of a question would be learned, or an answer's left out."""
    tokenizer = tokenizer_with(BROKEN[name])
    turns = [ASK, SAY, ASK, SAY]
    rows = es.read_rows([{"messages": [ASK, SAY]}, {"messages": turns}], MODEL, tokenizer)
    with pytest.raises(UnsupportedError, match=r"example 1: .* message \d differently"):
        rows[1]
    if name == "forgets":  # a single answer is told apart
        assert texts(rows[0])[1] == "It is the keeper.<|im_end|>"


# --- texts ----------------------------------------------------------------------------------------


def test_a_text_is_learned_with_its_end() -> None:
    row = es.read_rows([{"text": "It was the sea."}], MODEL, TOKENIZER)[0]
    assert texts(row) == ("", "It was the sea.<eos>") and all(learned(row))
    ended = es.read_rows([{"text": "It was the sea.<eos>"}], MODEL, TOKENIZER)[0]
    assert ended["input_ids"].tolist() == row["input_ids"].tolist(), "not a second time"
    other = es.DataForm(eos_token="<|im_end|>", dataset_text_field="body")
    row = es.read_rows([{"body": "a"}], MODEL, TOKENIZER, other)[0]
    assert texts(row)[1] == "a<|im_end|>"
    bare = es.read_rows([{"text": "a"}], MODEL, TOKENIZER, es.DataForm(eos_token=""))[0]
    assert texts(bare)[1] == "a"


@pytest.mark.parametrize(
    ("prompt", "completion"), [("1, 2,", " 3"), ("1, 2, ", "3"), ("it i", "s it"), ("a ", "the")]
)
def test_a_prompt_is_read_as_by_a_call(prompt: str, completion: str) -> None:
    """Also where a token would span prompt and completion, as " the" does."""
    data = [{"prompt": prompt, "completion": completion}]
    row = es.read_rows(data, MODEL, TOKENIZER)[0]
    assert texts(row) == (prompt, completion + "<eos>")
    assert row["input_ids"].tolist()[: len(TOKENIZER.encode(prompt))] == TOKENIZER.encode(prompt)
    whole = es.read_rows(data, MODEL, TOKENIZER, es.DataForm(completion_only_loss=False))[0]
    assert all(learned(whole))


def test_messages_may_be_prompt_and_completion() -> None:
    prompt, completion = [ASK, SAY, ASK], [SAY]
    data = [{"prompt": prompt, "completion": completion}]
    row = es.read_rows(data, MODEL, TOKENIZER)[0]
    assert texts(row)[1] == "It is the keeper.<|im_end|>", "the first answer is not learned"
    form = es.DataForm(completion_only_loss=False)
    assert texts(es.read_rows(data, MODEL, TOKENIZER, form)[0])[1].count("keeper") == 2
    form = es.DataForm(assistant_only_loss=False)
    data = [{"prompt": [ASK], "completion": [SAY, ASK, SAY]}]
    row = es.read_rows(data, MODEL, TOKENIZER, form)[0]
    assert "user\nWho" in texts(row)[1] and texts(row)[1].count("keeper") == 2
    row = es.read_rows(data, MODEL, TOKENIZER)[0]
    assert "user" not in texts(row)[1] and texts(row)[1].count("keeper") == 2


def test_a_preference_is_two_rows() -> None:
    data = [
        {"prompt": "1,", "chosen": " 2", "rejected": " 3"},
        {"prompt": [ASK], "chosen": [SAY], "rejected": [{**SAY, "content": "No."}]},
    ]
    rows = es.read_rows(data, MODEL, TOKENIZER)
    assert len(rows) == 4 and rows.per_example == 2
    said = [texts(row)[1] for row in rows]
    assert said == [" 2<eos>", " 3<eos>", "It is the keeper.<|im_end|>", "No.<|im_end|>"]


# --- ids ------------------------------------------------------------------------------------------


def test_rows_of_ids_pass_with_what_they_bring() -> None:
    boxes, pixels = torch.tensor([[1, 2, 3, 4]]), torch.ones(3, 8, 8)
    given = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "bbox": boxes, "pixel_values": pixels}
    row = es.read_rows([given])[0]
    assert row["bbox"] is not None and torch.equal(row["pixel_values"], pixels)
    assert row["labels"].tolist() == [-100, 6, 7] and row["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("given", "form", "labels"),
    [
        ({}, {}, [5, 6, 7]),
        ({"attention_mask": [0, 1, 1]}, {}, [-100, 6, 7]),
        ({"completion_mask": [0, 1, 1]}, {}, [-100, 6, 7]),
        ({"completion_mask": [0, 1, 1]}, {"completion_only_loss": False}, [5, 6, 7]),
        ({"assistant_masks": [0, 0, 1]}, {}, [-100, -100, 7]),
        ({"assistant_masks": [0, 0, 1]}, {"assistant_only_loss": False}, [5, 6, 7]),
        ({"assistant_masks": [1, 0, 1], "completion_mask": [0, 1, 1]}, {}, [-100, -100, 7]),
    ],
)
def test_labels_of_ids_follow_from_their_masks(
    given: dict[str, Any], form: dict[str, Any], labels: list[int]
) -> None:
    rows = es.read_rows([{"input_ids": [5, 6, 7], **given}], form=es.DataForm(**form))
    assert rows[0]["labels"].tolist() == labels


def test_an_encoder_reads_the_prompt_and_the_decoder_learns_the_completion() -> None:
    model = es.wrap(model_of("bart"))
    data = [{"prompt": "it was", "completion": " the sea"}]
    row = es.read_rows(data, model, TOKENIZER)[0]
    assert TOKENIZER.decode(row["input_ids"].tolist()) == "it was"
    assert TOKENIZER.decode(row["labels"].tolist()) == " the sea<eos>"
    with pytest.raises(UnsupportedError, match="needs a prompt"):
        es.read_rows([{"text": "a"}], model, TOKENIZER)


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", slice(0, 4)), ("keep_end", slice(3, 7))])
def test_long_rows_are_cut_at_one_side(mode: Any, kept: slice) -> None:
    ids = [5, 6, 7, 8, 9, 10, 11]
    data = [{"input_ids": ids, "attention_mask": [1] * 7}, {"input_ids": ids[:4]}]
    rows = es.read_rows(data, form=es.DataForm(max_length=4, truncation_mode=mode))
    assert [row["input_ids"].tolist() for row in rows] == [ids[kept], ids[:4]]
    assert rows[0]["attention_mask"].tolist() == [1] * 4 and rows[0]["labels"].tolist() == ids[kept]
    assert rows.cut == {0}, "who looks can be told"


def test_what_belongs_to_ids_by_place_is_not_cut_from_them() -> None:
    given = {"input_ids": [5] * 8, "bbox": [[1, 2, 3, 4]]}
    rows = es.read_rows([given], form=es.DataForm(max_length=4))
    with pytest.raises(RequestError, match=r"example 0: a row with bbox cannot be shortened"):
        rows[0]
    assert len(es.read_rows([given], form=es.DataForm(max_length=None))[0]["input_ids"]) == 8


def test_rows_are_deterministic_and_draw_nothing() -> None:
    state = torch.random.get_rng_state()
    data = [{"messages": conversation(random.Random(seed))} for seed in range(5)]
    first = [row["labels"].tolist() for row in es.read_rows(data, MODEL, TOKENIZER)]
    rows = es.read_rows(data, MODEL, TOKENIZER)
    backwards = [rows[place]["labels"].tolist() for place in (-1, -2, -3, -4, -5)]
    assert first == backwards[::-1] and torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(IndexError):
        rows[5]
    with pytest.raises(RequestError, match="by its number"):
        rows["0"]  # type: ignore[index]


def test_keys_may_be_left_out_on_purpose() -> None:
    form = es.DataForm(remove_columns=["id", "labels"])
    row = es.read_rows([{"input_ids": [5, 6], "labels": [5], "id": "x"}], form=form)[0]
    assert row["labels"].tolist() == [5, 6] and "id" not in row
