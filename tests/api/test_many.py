"""Many prompts in one call: options of their own, errors of their own, and nothing ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import CapacityError, EverystepError, RequestError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

PROMPTS: list[list[int]] = [[5, 6, 7], [8, 9], [11, 12, 13, 14]]
TOKENIZER = tiny_tokenizer(320)


def ban(token: int) -> Any:
    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, token] = -torch.inf
        return scores

    return processor


def fails_at(length: int) -> Any:
    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == length:
            raise ArithmeticError("on purpose")
        return scores

    return processor


MIXED: list[dict[str, Any]] = [
    {"max_new_tokens": 3},
    {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6},
    {"do_sample": True, "temperature": 0.7, "seed": 9, "max_new_tokens": 8},
    {"prompt_lookup_num_tokens": 3},
    {"penalty_alpha": 0.6, "top_k": 3},
    {"logits_processor": [ban(7)], "stopping_criteria": [es.EosTokenCriteria(12)]},
    {"stop_strings": ["e"], "return_dict_in_generate": True, "logprobs": 2},
]


def test_each_prompt_has_options_of_its_own(model: LanguageModel) -> None:
    prompts = [PROMPTS[i % 3] for i in range(len(MIXED))]
    common: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None}
    many = es.generate(model, TOKENIZER, prompts, options=MIXED, **common)
    for prompt, own, found in zip(prompts, MIXED, many, strict=True):
        alone = es.generate(model, TOKENIZER, prompt, **{**common, **own})
        if isinstance(found, es.Generated):
            assert found.logprobs is not None and torch.equal(
                found.logprobs.top_tokens, alone.logprobs.top_tokens
            )
            found, alone = found.text, alone.text
        assert found == alone


def test_options_may_be_configurations(model: LanguageModel) -> None:
    configs = [es.GenerationConfig(max_new_tokens=n) for n in (2, 5, 3)]
    many = es.generate(model, None, PROMPTS, options=configs, max_new_tokens=9, eos_token_id=None)
    assert list(map(len, many)) == [2, 5, 3]


def test_a_stream_takes_them_too(model: LanguageModel) -> None:
    options: list[dict[str, Any]] = [{"max_new_tokens": 2}, {}, {"num_beams": 2}]
    common: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None}
    stream = es.stream(model, None, PROMPTS, options=options, **common)
    list(stream)
    many = es.generate(model, None, PROMPTS, options=options, **common)
    assert [list(one.tokens) for (one,) in stream.results()] == many


def test_the_engine_has_room_for_as_many_rows_as_a_prompt_takes(model: LanguageModel) -> None:
    wide: list[dict[str, Any]] = [{"penalty_alpha": 0.6, "top_k": 40}, {}, {"num_beams": 40}]
    common: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}
    many = es.generate(model, None, PROMPTS, options=wide, **common)
    for prompt, own, found in zip(PROMPTS, wide, many, strict=True):
        ids = model.generate(torch.tensor([prompt]), **common, **own)
        assert found == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ([{}], RequestError, ["options do not fit", "3", "got 1"]),
        ({"max_new_tokens": 3}, RequestError, ["options do not fit", "dict"]),
        ([{}, {"max_new_token": 3}, {}], TypeError, ["options[1]", "max_new_tokens"]),
        ([{}, {}, {"do_sample": False, "top_p": 0.5}], RequestError, ["options[2]", "top_p"]),
        ([{}, {}, 7], RequestError, ["options[2]", "mapping", "int"]),
        ([{}, {"seed": [1, 2]}, {}], RequestError, ["options[1]", "seed"]),
        ([{}, {"output_scores": True}, {}], RequestError, ["options[1]", "output_scores"]),
        ([{}, {"tokenizer": TOKENIZER}, {}], TypeError, ["options[1]", "tokenizer"]),
        ([{}, {"num_beams": 2, "constraints": [7]}, {}], RequestError, ["options[1]", "Phrasal"]),
        (
            [{}, {"cache_implementation": "quantized"}, {}],
            RequestError,
            ["options[1]", "cache_implementation", "prompt 0"],
        ),
    ],
)
@pytest.mark.parametrize("ask", [es.generate, es.stream])
def test_wrong_options_are_refused_before_any_compute(
    model: LanguageModel,
    ask: Any,
    options: Any,
    error: type[Exception],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def computes(*_: object, **__: object) -> None:
        raise AssertionError("the call reached the model")

    monkeypatch.setattr(LanguageModel, "executor", computes)
    with pytest.raises(error) as caught:
        ask(model, None, PROMPTS, options=options)
    assert isinstance(caught.value, EverystepError)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_prompts_that_come_one_by_one_have_no_options_each(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"one by one.*options each.*list"):
        es.generate(model, None, iter(PROMPTS), options=[{}, {}, {}])


# --- errors ---------------------------------------------------------------------------------------

SHORT = 16
BAD: list[tuple[Any, type[Exception]]] = [
    ([5] * SHORT, CapacityError),
    ([], RequestError),
    ([5, 400], RequestError),
    ([-1], RequestError),
    ([5, 6.5], RequestError),
    ([[5, 6]], RequestError),
    ("text", RequestError),
    (None, RequestError),
]


@pytest.mark.parametrize(("bad", "kind"), BAD, ids=[str(i) for i in range(len(BAD))])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_bad_prompt_takes_nothing_from_the_others(
    bad: Any, kind: type[Exception], place: int
) -> None:
    short = tiny_llama(vocab_size=320, max_position_embeddings=SHORT)
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None}
    wanted = es.generate(short, None, PROMPTS, **options)
    prompts = [*PROMPTS[:place], bad, *PROMPTS[place:]]
    found = es.generate(short, None, prompts, on_error="return", **options)
    failed = found.pop(place)
    assert found == wanted
    assert failed.finish_reason.kind == "error"
    assert isinstance(failed.finish_reason.matched, kind)
    assert (failed.tokens, failed.text) == ((), "")
    with pytest.raises(kind) as caught:
        es.generate(short, None, prompts, **options)
    results = caught.value.results  # type: ignore[attr-defined]
    assert results.pop(place).finish_reason.kind == "error"
    assert results == wanted
    assert caught.value.__notes__ == [f"This was prompt {place}."]


def test_a_processor_that_raises_ends_its_prompt_alone(model: LanguageModel) -> None:
    common: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
    options: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 4},
        {"logits_processor": [fails_at(5)]},
        {"num_beams": 2, "num_return_sequences": 2},
    ]
    healthy = [{**options[0]}, {}, {**options[2]}]
    wanted = es.generate(model, None, PROMPTS, options=healthy, **common)
    found = es.generate(model, None, PROMPTS, options=options, on_error="return", **common)
    assert [found[0], found[2]] == [wanted[0], wanted[2]]
    assert found[1].finish_reason.kind == "error"
    assert isinstance(found[1].finish_reason.matched, ArithmeticError)
    assert list(found[1].tokens) == wanted[1][:3]
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        es.generate(model, None, PROMPTS, options=options, **common)
    results = caught.value.results  # type: ignore[attr-defined]
    assert [results[0], results[2]] == [wanted[0], wanted[2]]


def test_the_first_error_is_raised(model: LanguageModel) -> None:
    options: list[dict[str, Any]] = [{}, {"logits_processor": [fails_at(9)]}, {}]
    with pytest.raises(ArithmeticError) as caught:
        es.generate(model, None, [PROMPTS[0], PROMPTS[1], []], options=options, max_new_tokens=9)
    kinds = [getattr(one, "finish_reason", None) for one in caught.value.results]  # type: ignore[attr-defined]
    assert [kind is not None for kind in kinds] == [False, True, True]


def test_a_single_prompt_raises_its_error_or_returns_it(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        es.generate(model, None, [5, 400])
    found = es.generate(model, None, [5, 400], on_error="return")
    assert isinstance(found.finish_reason.matched, RequestError)


def test_a_stream_reports_an_error_as_the_last_event_of_its_prompt(model: LanguageModel) -> None:
    options: list[dict[str, Any]] = [{}, {"logits_processor": [fails_at(4)]}, {}]
    common: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None}
    stream = es.stream(model, TOKENIZER, PROMPTS, options=options, **common)
    events = list(stream)
    own = [event for event in events if event.request_id == "1"]
    assert [event.finish is None for event in own] == [True] * (len(own) - 1) + [False]
    assert own[-1].finish.kind == "error"
    assert isinstance(own[-1].finish.matched, ArithmeticError)
    wanted = es.generate(model, None, PROMPTS, **common)
    (first,), (failed,), (last,) = stream.results()
    assert [list(first.tokens), list(last.tokens)] == [wanted[0], wanted[2]]
    assert list(failed.tokens) == wanted[1][:2] == [e.token for e in own if e.token >= 0]


def test_generate_raises_the_error_of_a_row(model: LanguageModel) -> None:
    with pytest.raises(ArithmeticError, match="on purpose"):
        model.generate(torch.tensor([PROMPTS[0]]), logits_processor=[fails_at(5)])


def test_on_error_is_raise_or_return(model: LanguageModel) -> None:
    wrong: Any = "ignore"
    with pytest.raises(RequestError, match=r"on_error.*'raise' or 'return'.*'ignore'"):
        es.generate(model, None, PROMPTS, on_error=wrong)
    with pytest.raises(RequestError, match="options and on_error are for prompts"):
        es.generate(model, input_ids=torch.tensor([[5]]), on_error="return")


# --- nothing is ignored ---------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [es.generate, es.stream])
@pytest.mark.parametrize(
    ("option", "do"),
    [
        ({"output_scores": True, "return_dict_in_generate": True}, "logprobs"),
        ({"output_logits": True, "return_dict_in_generate": True}, "logprobs"),
        ({"use_cache": False}, "Leave use_cache out"),
        ({"prefill_chunk_size": 4}, "Leave prefill_chunk_size out"),
        ({"generation_config": es.GenerationConfig(use_cache=False)}, "Leave use_cache out"),
    ],
)
def test_what_only_a_rectangle_has_is_refused(
    model: LanguageModel, ask: Any, option: dict[str, Any], do: str
) -> None:
    with pytest.raises(UnsupportedError, match=do):
        ask(model, None, PROMPTS, **option)


def test_settings_of_rectangles_in_a_checkpoint_are_not_asked_for() -> None:
    model = tiny_llama(vocab_size=320)
    model.generation_config = es.GenerationConfig.from_checkpoint({"use_cache": False})
    assert len(es.generate(model, None, PROMPTS, max_new_tokens=2)) == 3


@pytest.mark.parametrize("ask", [es.generate, es.stream])
@pytest.mark.parametrize("prompts", [[1.5, 2.5], torch.tensor([1.0, 2.0]), np.array([1.5])])
def test_prompts_of_floats_are_not_cut_to_integers(
    model: LanguageModel, ask: Any, prompts: Any
) -> None:
    with pytest.raises(RequestError, match="wanted integers"):
        ask(model, None, prompts)


def test_prompts_may_be_arrays_and_tensors(model: LanguageModel) -> None:
    wanted = es.generate(model, None, PROMPTS, max_new_tokens=3)
    for made in (torch.tensor, np.array):
        assert es.generate(model, None, [made(one) for one in PROMPTS], max_new_tokens=3) == wanted
        assert es.generate(model, None, made(PROMPTS[0]), max_new_tokens=3) == wanted[0]


@pytest.mark.parametrize("prompts", [5, {"a": 1}, b"text"])
def test_what_is_no_prompt_is_refused(model: LanguageModel, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"no known kind|a prompt has no 'a'"):
        es.generate(model, None, prompts)
