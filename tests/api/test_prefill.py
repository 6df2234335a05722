"""`es.prefill`: what many calls go on from is what each of them would have fed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.api.prefill import _held
from everystep.drivers.session import Session
from everystep.engine import audit
from everystep.errors import RequestError
from everystep.requests.door import sort
from everystep.requests.inputs import Inputs
from everystep.requests.prepare import prepare
from everystep.requests.reading import read_options
from everystep.types import Prompt
from tests.executors.layout import SIDES, layout_model
from tests.executors.models import family_model, narrow_model
from tests.judges.drive import run_together
from tests.laws.calls import tokenizer as spelled

HEAD = [5, 9, 23, 1, 7, 30, 12, 8, 33, 2, 4, 11, 19, 27, 3, 6, 14, 22]
TAILS = torch.tensor([[8, 4, 19], [1, 3, 5]])
WHOLE = torch.cat([torch.tensor([HEAD, HEAD]), TAILS], dim=1)
PADDED = torch.tensor([[8, 4, 19], [0, 3, 5]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])
WIDE = torch.cat([torch.ones(2, len(HEAD), dtype=torch.long), MASK], dim=1)
QUIET = {"pad_token_id": 0, "max_new_tokens": 6, "eos_token_id": None}
WINDOW = {"sliding_window": 5}

MODELS: dict[str, Callable[[], LanguageModel]] = {
    "native": lambda: LanguageModel(narrow_model("llama", None, panels=True)),
    "torch": lambda: LanguageModel(family_model("llama"), executor="torch"),
    "windows": lambda: LanguageModel(family_model("mistral", **WINDOW), executor="torch"),
    "states": lambda: LanguageModel(family_model("mamba", state_size=4)),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"do_sample": True, "seed": 7},
    "returns": {"do_sample": True, "seed": [3, 4], "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "penalised": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "lengths": {"max_length": 24, "max_new_tokens": None},
    "guided": {"guidance_scale": 1.5},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return MODELS[request.param]()


def same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
        return
    assert torch.equal(one.sequences, other.sequences)
    for mine, theirs in zip(one.scores, other.scores, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_goes_on_as_if_it_had_fed_all_of_it(model: LanguageModel, way: str) -> None:
    prefix = es.prefill(model, None, HEAD)
    assert len(prefix) == len(HEAD) and prefix.ids == tuple(HEAD)
    settings = {**QUIET, **WAYS[way]}
    for _ in range(2):  # and leaves the handle as it was
        same(
            model.generate(TAILS, prefix=prefix, **settings),
            model.generate(WHOLE, **settings),
        )


def test_rows_of_other_lengths_go_on(model: LanguageModel) -> None:
    prefix = es.prefill(model, None, HEAD)
    whole = [WHOLE[0].tolist(), [*HEAD, 3, 5]]
    for ids, mask in ((PADDED, MASK), (PADDED.roll(-1, 1), MASK.flip(1))):
        if mask is not MASK:
            ids, mask = torch.tensor([[8, 4, 19], [3, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
        out = model.generate(
            ids, attention_mask=mask, prefix=prefix, return_dict_in_generate=True, **QUIET
        )
        for row, alone in zip(out.new_tokens, whole, strict=True):
            assert row == model.generate(torch.tensor([alone]), **QUIET)[0, len(alone) :].tolist()
        assert out.cached_tokens == [len(HEAD)] * 2


@pytest.mark.parametrize("way", ["greedy", "seeded", "returns", "beams", "lookup"])
def test_many_prompts_and_streams_go_on(model: LanguageModel, way: str) -> None:
    prefix = es.prefill(model, None, HEAD)
    settings = {**QUIET, **WAYS[way]}
    tails = [row.tolist() for row in TAILS]
    whole = [row.tolist() for row in WHOLE]
    expected = es.generate(model, None, whole, **settings)
    assert es.generate(model, None, tails, prefix=prefix, **settings) == expected
    if way in ("greedy", "seeded"):
        stream = es.stream(model, None, tails, prefix=prefix, **settings)
        for event in stream:
            assert event.token in expected[int(event.request_id)]
        assert [list(one[0].tokens) for one in stream.results()] == expected


def test_prompts_may_have_prefixes_of_their_own(model: LanguageModel) -> None:
    prefixes = [es.prefill(model, None, HEAD[:count]) for count in (3, 18)]
    options = [{"prefix": prefixes[0]}, {"prefix": prefixes[1]}, {}]
    tails = [[8, 4]] * 3
    found = es.generate(model, None, tails, options=options, return_dict_in_generate=True, **QUIET)
    whole = [[*HEAD[:count], 8, 4] for count in (3, 18, 0)]
    assert [list(one.tokens) for one in found] == es.generate(model, None, whole, **QUIET)
    assert [one.cached_tokens for one in found] == [3, 18, 0]
    assert [one.prompt_tokens for one in found] == [5, 20, 2]


def test_a_prefix_goes_on_from_a_prefix(model: LanguageModel) -> None:
    longer = es.prefill(model, None, HEAD[7:], prefix=es.prefill(model, None, HEAD[:7]))
    assert longer.ids == tuple(HEAD)
    found = model.generate(TAILS, prefix=longer, **QUIET)
    assert torch.equal(found, model.generate(WHOLE, **QUIET))


def test_natively_no_bit_changes() -> None:
    model = MODELS["native"]()
    settings = {**QUIET, "return_dict_in_generate": True, "output_logits": True}
    for count in (1, 15, 16, 17, 18):
        prefix = es.prefill(model, None, HEAD[:count])
        rest = torch.cat([torch.tensor([HEAD[count:]] * 2).long(), TAILS], dim=1)
        one = model.generate(rest, prefix=prefix, **settings)
        other = model.generate(WHOLE, **settings)
        assert all(map(torch.equal, one.logits, other.logits))


def test_one_past_is_stored_once_for_all_rows() -> None:
    model = MODELS["native"]()
    prefix = es.prefill(model, None, HEAD * 8)
    session = Session(model, None, [[1]] * 9, None, 3, {"prefix": prefix, **QUIET})
    boxes = [session.submit(session.request([n + 1, 4], n)) for n in range(9)]
    (driver,) = {driver for driver, _ in boxes}
    driver.step()
    rows = driver.engine.executor.rows
    assert rows.pool.in_use <= 9 + 9 + 1 and rows.pool.counts.forks == 8
    while driver.engine.pending:
        driver.step()
        audit(driver.engine)
    assert {group.cached_tokens for _, box in boxes for group in box.groups} == {len(HEAD) * 8}


# --- embeddings, positions ------------------------------------------------------------------------


def decoder() -> LanguageModel:
    return LanguageModel(family_model("llama"), executor="torch")


def test_embeddings_go_before_and_after() -> None:
    model = decoder()
    embed = model.get_input_embeddings()
    expected = model.generate(WHOLE, **QUIET)[:, WHOLE.shape[1] :]
    seen = es.prefill(model, inputs_embeds=embed(torch.tensor([HEAD])))
    assert seen.ids is None
    found = model.generate(TAILS, prefix=seen, **QUIET)
    assert torch.equal(found[:, TAILS.shape[1] :], expected)
    for prefix in (seen, es.prefill(model, None, HEAD)):
        found = model.generate(inputs_embeds=embed(TAILS), prefix=prefix, **QUIET)
        assert torch.equal(found, expected)
    both = es.prefill(
        model, inputs_embeds=embed(torch.tensor([HEAD])), input_ids=torch.tensor([HEAD])
    )
    assert torch.equal(model.generate(TAILS, prefix=both, **QUIET), model.generate(WHOLE, **QUIET))


def test_what_follows_stands_after_the_greatest_position() -> None:
    model = decoder()
    head = torch.arange(len(HEAD)) * 2
    prefix = es.prefill(model, input_ids=torch.tensor([HEAD]), position_ids=head[None])
    places = torch.cat([head, int(head[-1]) + 1 + torch.arange(3)]).expand(2, -1)
    expected = model.generate(WHOLE, position_ids=places, **QUIET)
    assert torch.equal(model.generate(TAILS, prefix=prefix, **QUIET), expected)
    own = torch.tensor([[50, 51, 52]] * 2)
    given = model.generate(TAILS, position_ids=own, prefix=prefix, **QUIET)
    whole = torch.cat([head.expand(2, -1), own], dim=1)
    assert torch.equal(given, model.generate(WHOLE, position_ids=whole, **QUIET))


def test_boxes_of_the_prefix_and_of_what_follows_are_read_once() -> None:
    """Nothing modal is missed where a prompt goes on from a prefix, and nothing is given twice."""
    model, count = LanguageModel(layout_model()), len(HEAD)
    ids, boxes = WHOLE[0].numpy(), torch.arange(4 * WHOLE.shape[1]).view(-1, 4) % SIDES

    def chosen(prompt: Prompt, **given: Any) -> list[int]:
        options = read_options(model, sort("rectangle", model, {**given, **QUIET}), None)
        inputs = Inputs((prompt,), (0,), (0,), width=len(prompt.ids))  # type: ignore[arg-type]
        (request,) = prepare(model, options, inputs).requests
        (done,) = run_together([request], model.executor(request.needs)).results["0"]
        return list(done.tokens)

    head = Prompt(ids=ids[:count], inputs={"bbox": boxes[:count]})
    with torch.inference_mode():
        prefix = es.Prefix(head, _held(model, head), model.core)
    after = Prompt(ids=ids[count:], inputs={"bbox": boxes[count:]})
    whole = Prompt(ids=ids, inputs={"bbox": boxes})
    assert chosen(after, prefix=prefix) == chosen(whole)


# --- texts and automatic reuse --------------------------------------------------------------------


class Spelled:
    """A tokenizer of three-letter words, with a begin token and a plain chat template."""

    chat_template = "plain"

    def __init__(self) -> None:
        self._own = spelled(40)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [10 + "abc".index(letter) for letter in text]
        return [39, *ids] if add_special_tokens else ids

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, **_: Any) -> Any:
        ids = [39]
        for one in messages:
            ids += [35, *self.encode(one["content"], False), 36]
        return [*ids, 37] if add_generation_prompt else ids


def test_texts_and_messages_go_on() -> None:
    model, tokenizer = decoder(), Spelled()
    prefix = es.prefill(model, tokenizer, "abca")
    assert prefix.ids == (39, 10, 11, 12, 10)
    found = es.generate(model, tokenizer, ["cb", "a"], prefix=prefix, **QUIET)
    assert found == es.generate(model, tokenizer, ["abcacb", "abcaa"], **QUIET)
    messages = [{"role": "system", "content": "abcabc"}, {"role": "user", "content": "ba"}]
    prefix = es.prefill(model, tokenizer, messages[:1])
    given = {"return_dict_in_generate": True, "do_sample": False, **QUIET}
    found = es.generate(model, tokenizer, messages, prefix=prefix, **given)
    expected = es.generate(model, tokenizer, messages, **given)
    assert found.tokens == expected.tokens
    assert (found.cached_tokens, expected.cached_tokens) == (9, 0)
    other = [{"role": "system", "content": "ccc"}, *messages[1:]]
    with pytest.raises(RequestError, match="not the beginning of these messages"):
        es.generate(model, tokenizer, other, prefix=prefix, **QUIET)


@pytest.mark.parametrize("salted", [False, True])
def test_prompts_that_begin_alike_share_unless_salted(salted: bool) -> None:
    model = MODELS["native"]()
    prompts = [[*HEAD, *HEAD, n] for n in range(1, 6)]
    options = [{"cache_salt": str(n)} for n in range(5)] if salted else None
    given = {"return_dict_in_generate": True, "options": options, **QUIET}
    found = es.generate(model, None, prompts, **given)
    assert [one.cached_tokens for one in found] == ([0] * 5 if salted else [0, *[36] * 4])
    alone = [model.generate(torch.tensor([ids]), **QUIET)[0, 37:].tolist() for ids in prompts]
    assert [list(one.tokens) for one in found] == alone


# --- wrong calls ----------------------------------------------------------------------------------


def wrong(**more: Any) -> Callable[[LanguageModel, es.Prefix], Any]:
    return lambda model, prefix: model.generate(TAILS, **{"prefix": prefix, **QUIET, **more})


WRONG: dict[str, tuple[Callable[[LanguageModel, es.Prefix], Any], str]] = {
    "kind": (wrong(prefix=HEAD), "prefix is of another kind"),
    "uncached": (wrong(use_cache=False), "contradicts use_cache"),
    "both": (
        lambda m, p: m.generate(
            WHOLE[:, :5],
            attention_mask=torch.ones(2, 5 + len(HEAD)),
            past_key_values=m.generate(
                WHOLE[:, : len(HEAD)],
                return_dict_in_generate=True,
                **{**QUIET, "max_new_tokens": 1},
            ).past_key_values,
            prefix=p,
        ),
        "both say what comes first",
    ),
    "a cache of the whole": (
        lambda m, p: m.generate(
            WHOLE,
            past_key_values=m.generate(
                WHOLE[:, :5], return_dict_in_generate=True, **QUIET
            ).past_key_values,
            attention_mask=torch.ones(WHOLE.shape),
            prefix=p,
        ),
        "both say what comes first",
    ),
    "holes": (wrong(attention_mask=torch.tensor([[1, 0, 1]] * 2)), "holes after it"),
    "hidden states": (wrong(penalty_alpha=0.5, top_k=3), "lacks hidden states"),
    "quantised": (wrong(cache_implementation="quantized"), "full precision"),
    "prompt logprobs": (
        wrong(prompt_logprobs=1, return_dict_in_generate=True),
        "hides logits of the prompt",
    ),
    "loop": (wrong(custom_generate=lambda model, input_ids, **_: input_ids), "prefix"),
    "another model": (lambda m, p: decoder().generate(TAILS, prefix=p, **QUIET), "another model"),
    "prefill of a batch": (lambda m, p: es.prefill(m, input_ids=TAILS), "one row"),
    "prefill of nothing": (lambda m, p: es.prefill(m), "needs one prompt"),
    "prefill of a cache": (
        lambda m, p: es.prefill(m, input_ids=TAILS[:1], past_key_values=es.DynamicCache()),
        "made from what is fed",
    ),
    "unknown": (lambda m, p: es.prefill(m, input_ids=TAILS[:1], boxes=3), "boxes"),
    "messages": (
        lambda m, p: es.generate(
            m,
            Spelled(),
            [{"role": "user", "content": "a"}],
            prefix=es.prefill(m, inputs_embeds=torch.zeros(1, 2, 32)),
        ),
        "no ids that messages could begin with",
    ),
    "salt": (lambda m, p: es.generate(m, None, [[1, 2]], cache_salt=3), "cache_salt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_go_on_is_refused(name: str) -> None:
    call, text = WRONG[name]
    model = decoder()
    with pytest.raises(RequestError, match=text):
        call(model, es.prefill(model, None, HEAD))


def test_a_handle_cannot_be_changed() -> None:
    prefix = es.prefill(decoder(), None, np.array(HEAD))
    with pytest.raises(AttributeError):
        prefix.past = None  # type: ignore[misc]
    assert prefix.nbytes == 2 * 2 * 2 * 8 * len(HEAD) * 8
    assert "18 positions" in repr(prefix)
