"""What goes on from a source that was encoded once is what each call would have encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.bridge.core import ForeignModel
from everystep.drivers.session import Session
from everystep.engine import audit
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.models import Model
from tests.api.test_second_encoders import nearby
from tests.api.test_speech import heard
from tests.api.test_speech import pair as listener
from tests.models.tiny import ours, reference_pair, sounds

BEGUN, REST = [3, 14, 25, 36], [7, 18]
QUIET: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 7},
    "several": {"do_sample": True, "seed": 3, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "penalised": {"repetition_penalty": 1.7, "encoder_repetition_penalty": 1.3},
    "guided": {"guidance_scale": 1.5},
}
EXECUTORS = ("native", "torch", "bridge")
KINDS = ("t5", "whisper")


@cache
def reference(kind: str, dtype: torch.dtype) -> Any:
    """transformers' model, whose decoder starts with the id 3."""
    torch.manual_seed(1)
    made = reference_pair(kind, dtype)
    made.generation_config.update(decoder_start_token_id=3, eos_token_id=None)
    return made


@cache
def model_of(kind: str, executor: str) -> es.LanguageModel:
    """A tiny model on an executor."""
    dtype = torch.float32 if executor == "native" else torch.float64
    theirs = reference(kind, dtype)
    if executor == "bridge":
        return es.wrap(theirs)
    settings = es.GenerationConfig(decoder_start_token_id=3)
    return es.LanguageModel(ours(theirs), settings, executor=executor)


@pytest.fixture(params=[f"{kind} {name}" for kind in KINDS for name in EXECUTORS])
def model(request: pytest.FixtureRequest) -> es.LanguageModel:
    return model_of(*request.param.split())


def source(model: es.LanguageModel, number: int = 0) -> dict[str, Tensor]:
    """One row of what the encoder reads; another for each number."""
    torch.manual_seed(20 + number)
    if model.core.source is not None:
        return {"input_features": sounds(1, model.dtype)}
    return {"input_ids": torch.randint(4, 80, (1, 7 + number))}


def row(given: dict[str, Tensor], ids: list[int] | None = None) -> dict[str, Any]:
    """The same as a prompt, with what the decoder begins with."""
    begun = {} if ids is None else {"decoder_input_ids": ids}
    return {**{name: one[0] for name, one in given.items()}, **begun}


def begun(model: es.LanguageModel, ids: list[int], number: int = 0) -> es.Prefix:
    return es.prefill(model, **source(model, number), decoder_input_ids=torch.tensor([ids]))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The name of each encoder that has read something."""
    found: list[str] = []
    for kind, name in ((Model, "encode"), (ForeignModel, "encode")):
        true = getattr(kind, name)

        def counted(self: Any, *given: Any, true: Any = true, **named: Any) -> Any:
            found.append(type(self).__name__)
            return true(self, *given, **named)

        monkeypatch.setattr(kind, name, counted)
    yield found


def told(results: Any) -> list[tuple[Any, ...]]:
    """Tokens of each continuation, and how likely they were."""
    each = results if isinstance(results, list) else [results]
    return [(one.tokens, one.logprobs.logprobs) for one in each]


def require_alike(found: Any, wanted: Any, model: es.LanguageModel) -> None:
    near = 1e-5 if model.dtype == torch.float32 else 1e-9
    for (ids, likely), (own, expected) in zip(told(found), told(wanted), strict=True):
        assert ids == own
        torch.testing.assert_close(likely, expected, atol=near, rtol=near)


@pytest.mark.filterwarnings("ignore:encoder_repetition_penalty")
@pytest.mark.parametrize("way", WAYS)
def test_a_call_goes_on_without_an_encoder(
    model: es.LanguageModel, way: str, encoded: list[str]
) -> None:
    asked = {**QUIET, **WAYS[way], "return_dict_in_generate": True, "logprobs": 1}
    given = source(model)
    for head in ([3], BEGUN):
        prefix = begun(model, head)
        assert len(prefix) == len(head) and prefix.ids == tuple(head)
        for rest in ([], REST):
            (wanted,) = es.generate(model, None, [row(given, [*head, *rest])], **asked)
            encoded.clear()
            after = {"decoder_input_ids": rest} if rest else {}
            (found,) = es.generate(model, None, [after], prefix=prefix, **asked)
            assert not encoded
            require_alike(found, wanted, model)
            first = found[0] if isinstance(found, list) else found
            assert first.cached_tokens == len(head) - 1
            assert first.prompt_tokens == len(head) + len(rest)


def test_the_encoder_reads_once_for_many_calls(model: es.LanguageModel, encoded: list[str]) -> None:
    prefix = es.prefill(model, **source(model))
    assert len(encoded) == 1 and prefix.source is not None and prefix.past is None
    longer = es.prefill(model, prompt={"decoder_input_ids": BEGUN[1:]}, prefix=prefix)
    assert longer.ids == tuple(BEGUN)
    wanted = es.generate(model, None, [row(source(model), [*BEGUN, *REST])], **QUIET)
    encoded.clear()
    for one, rest in ((prefix, [*BEGUN[1:], *REST]), (longer, REST)):
        prompt = {"decoder_input_ids": rest}
        assert es.generate(model, None, [prompt], prefix=one, **QUIET) == wanted
        stream = es.stream(model, None, [prompt, prompt], prefix=one, **QUIET)
        assert [event.token for event in stream if event.request_id == "1"] == wanted[0]
        assert [[*own[0].tokens] for own in stream.results()] == wanted * 2
        run = es.open(model, None, prompt, prefix=one, **QUIET)
        next(run)
        assert [*run.result().tokens] == wanted[0]
    assert not encoded


def test_each_prompt_has_a_source_of_its_own(model: es.LanguageModel) -> None:
    prefixes = [begun(model, BEGUN, number) for number in range(3)]
    options = [{"prefix": one} for one in prefixes]
    prompts = [row(source(model, number), [*BEGUN, *REST]) for number in range(3)]
    alone = [es.generate(model, None, [one], **QUIET)[0] for one in prompts]
    rest = [{"decoder_input_ids": REST}] * 3
    assert es.generate(model, None, rest, options=options, **QUIET) == alone

    async def asked() -> list[Any]:
        async with es.AsyncEngine(model, None, max_positions=60, token_budget=8) as engine:
            calls = (
                engine.generate(one, **own, **QUIET)
                for one, own in zip(rest * 2, options * 2, strict=True)
            )
            return await asyncio.gather(*calls)

    assert asyncio.run(asked()) == alone * 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_of_a_rectangle_and_chunks(executor: str) -> None:
    model = model_of("t5", executor)
    prefix = begun(model, BEGUN)
    tails = torch.tensor([REST, [0, 9]])
    mask = torch.tensor([[1, 1], [0, 1]])
    asked = {**QUIET, "return_dict_in_generate": True, "output_logits": True, "num_beams": 2}
    out = model.generate(
        decoder_input_ids=tails,
        decoder_attention_mask=mask,
        prefix=prefix,
        prefill_chunk_size=2,
        **asked,
    )
    for number, ids in enumerate(([*BEGUN, *REST], [*BEGUN, 9])):
        given = {**source(model), "decoder_input_ids": torch.tensor([ids])}
        alone = model.generate(**given, **asked)
        assert out.new_tokens[number] == alone.new_tokens[0]
    without = model.generate(prefix=prefix, **QUIET)
    whole = {**source(model), "decoder_input_ids": torch.tensor([BEGUN])}
    assert torch.equal(without, model.generate(**whole, **QUIET))


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_drafts(kind: str) -> None:
    model = model_of(kind, "torch")
    near = es.LanguageModel(ours(nearby(reference(kind, torch.float64))))
    wanted = es.generate(model, None, [row(source(model), [*BEGUN, *REST])], **QUIET)
    prefix, prompt = begun(model, BEGUN), {"decoder_input_ids": REST}
    assert (
        es.generate(model, None, [prompt], prefix=prefix, assistant_model=near, **QUIET) == wanted
    )


def test_preemption_changes_nothing(model: es.LanguageModel) -> None:
    prefix = begun(model, BEGUN)
    wanted = es.generate(model, None, [row(source(model), [*BEGUN, *REST])], **QUIET)
    session = Session(model, None, [[1]], None, 3, {"prefix": prefix, **QUIET})
    driver, box = session.submit(session.request({"decoder_input_ids": REST}, 0))
    while driver.engine.pending:
        driver.step()
        audit(driver.engine)
        for group in driver.engine.scheduler.groups:
            driver.engine.preempt(group)
    assert [[*done.tokens] for done in box.groups[0].done] == wanted


def test_a_saved_run_goes_on_from_its_source_alone(
    model: es.LanguageModel, tmp_path: Path, encoded: list[str]
) -> None:
    prefixes = [begun(model, BEGUN, number) for number in (0, 0, 1)]
    run = es.open(model, None, {"decoder_input_ids": REST}, prefix=prefixes[0], **QUIET)
    next(run)
    file = tmp_path / "run"
    run.save(file)
    encoded.clear()
    assert es.resume(file, model, prefix=prefixes[1]).result().tokens == run.result().tokens
    with pytest.raises(RequestError, match="another prefix"):
        es.resume(file, model, prefix=prefixes[2])
    assert not encoded


def test_a_text_is_scored_after_a_prefix(model: es.LanguageModel, encoded: list[str]) -> None:
    text, given = [11, 12, 13, 14], source(model)
    for head in ([3], BEGUN):
        prefix = begun(model, head)
        wanted = es.score(model, None, text, after=row(given, [*head, *REST]), best=2)
        encoded.clear()
        found = es.score(
            model, None, text, after={"decoder_input_ids": REST}, prefix=prefix, best=2
        )
        assert not encoded
        torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-5)
        assert torch.equal(found.top_tokens, wanted.top_tokens)
        assert len(es.score(model, None, text, prefix=prefix).tokens) == len(text)


def test_states_of_the_caller_are_a_source() -> None:
    model, theirs = model_of("t5", "torch"), reference("t5", torch.float64)
    padded = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
    }
    states = theirs.get_encoder()(**padded)
    wanted = model.generate(**padded, **QUIET)
    for given in (padded, {"encoder_outputs": states, "attention_mask": padded["attention_mask"]}):
        prefix = es.prefill(model, **given)
        assert prefix.source is not None and len(prefix.source.states[0]) == 4
        assert torch.equal(model.generate(prefix=prefix, **QUIET), wanted)


# --- transcripts ----------------------------------------------------------------------------------

SPOKEN: dict[str, dict[str, Any]] = {
    "found out": {},
    "a language": {"language": "de", "task": "translate"},
    "beams": {"language": "en", "num_beams": 3},
    "several": {"language": "en", "num_return_sequences": 2, "num_beams": 2},
    "timestamps": {"language": "en", "return_timestamps": True},
    "doubts": {
        "language": "en",
        "return_timestamps": True,
        "logprob_threshold": -1.0,
        "no_speech_threshold": 0.01,
        "temperature": (0.0, 0.5),
        "compression_ratio_threshold": 1.0,
    },
}


@pytest.mark.parametrize("way", SPOKEN)
def test_a_transcript_goes_on_from_sounds_that_were_heard(way: str, encoded: list[str]) -> None:
    _, model = listener()
    given = {"input_features": heard(32, 1)["input_features"]}
    torch.manual_seed(3)
    wanted = model.generate(**given, **SPOKEN[way])
    prefix = es.prefill(model, **given)
    encoded.clear()
    torch.manual_seed(3)
    assert torch.equal(model.generate(prefix=prefix, **SPOKEN[way]), wanted)
    if "return_timestamps" not in SPOKEN[way]:  # later windows are other sounds
        assert not encoded


@pytest.mark.parametrize(("name", "value"), [("language", "de"), ("task", "translate")])
def test_a_language_is_said_in_the_calls_that_go_on(
    name: str, value: str, encoded: list[str]
) -> None:
    _, model = listener()
    said: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"got {name}. Pass these to the calls that go on"):
        es.prefill(model, **heard(32, 1), **said)
    assert not encoded
    with pytest.raises(UnsupportedError, match=r"model\.generate of a model that listens"):
        es.prefill(model_of("t5", "torch"), input_ids=OTHER, **said)


def test_a_prefix_may_begin_the_transcript() -> None:
    _, model = listener()
    given = heard(32, 1)
    ids = torch.tensor([[60, 62, 65, 68]])
    prefix = es.prefill(model, **given, decoder_input_ids=ids)
    wanted = model.generate(**given, language="de", task="translate")
    assert torch.equal(model.generate(prefix=prefix), wanted)
    with pytest.raises(RequestError, match=r"begun the transcript; .*language"):
        model.generate(prefix=prefix, language="en")
    with pytest.raises(RequestError, match=r"another source; .*input_features"):
        model.generate(**given, prefix=prefix)


# --- wrong calls ----------------------------------------------------------------------------------

Call = Callable[[es.LanguageModel, es.Prefix], Any]
OTHER = torch.tensor([[5, 6, 7]])
STATES = (torch.zeros(1, 3, 32, dtype=torch.float64),)
WRONG: dict[str, tuple[Call, str]] = {
    "ids": (lambda m, p: m.generate(OTHER, prefix=p), "brings another source; .*got input_ids"),
    "a mask": (
        lambda m, p: m.generate(attention_mask=torch.ones(1, 3), prefix=p),
        "another source; .*attention_mask",
    ),
    "states": (
        lambda m, p: m.generate(encoder_outputs=STATES, prefix=p),
        "another source; .*encoder_outputs",
    ),
    "a prompt": (lambda m, p: es.generate(m, None, [[5, 6]], prefix=p), "brings another source"),
    "a mapping": (
        lambda m, p: es.generate(m, None, {"input_ids": [5, 6]}, prefix=p),
        "brings another source; .*got input_ids",
    ),
    "a stream": (lambda m, p: [*es.stream(m, None, [[5, 6]], prefix=p)], "another source"),
    "a run": (lambda m, p: es.open(m, None, [5, 6], prefix=p), "another source"),
    "a score": (lambda m, p: es.score(m, None, [5, 6], after=[7], prefix=p), "another source"),
    "a prefix": (lambda m, p: es.prefill(m, None, [5, 6], prefix=p), "another source"),
    "a start": (
        lambda m, p: m.generate(prefix=p, decoder_start_token_id=7),
        "begun the decoder's row; .*got 7. Leave decoder_start_token_id out",
    ),
    "gradients": (
        lambda m, p: es.score(m, None, [5, 6], prefix=p, requires_grad=True),
        "what a prefix holds has no gradients",
    ),
    "holes": (
        lambda m, p: m.generate(
            decoder_input_ids=OTHER, decoder_attention_mask=torch.tensor([[1, 0, 1]]), prefix=p
        ),
        "holes after it",
    ),
    "a cache": (
        lambda m, p: m.generate(
            decoder_input_ids=OTHER,
            past_key_values=m.generate(
                OTHER, return_dict_in_generate=True, max_new_tokens=2
            ).past_key_values,
            prefix=p,
        ),
        "both say what comes first",
    ),
    "hidden states": (
        lambda m, p: m.generate(prefix=p, penalty_alpha=0.5, top_k=3),
        "lacks hidden states",
    ),
    "another model": (
        lambda m, p: model_of("whisper", "torch").generate(prefix=p),
        "of another model",
    ),
    "several rows": (
        lambda m, p: es.prefill(m, input_ids=torch.tensor([[5, 6], [7, 8]])),
        "one row",
    ),
    "states of a draft model": (
        lambda m, p: es.prefill(m, input_ids=OTHER, assistant_encoder_outputs=STATES),
        "a prefix is of one model",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_go_on_is_refused_before_anything_is_encoded(
    name: str, encoded: list[str]
) -> None:
    call, text = WRONG[name]
    model = model_of("t5", "torch")
    prefix = begun(model, BEGUN)
    encoded.clear()
    with pytest.raises(EverystepError, match=text):
        call(model, prefix)
    assert len(encoded) <= (name == "a cache")


def test_a_decoder_scores_after_no_prefix() -> None:
    from everystep.testing.models import tiny_llama

    model = tiny_llama()
    with pytest.raises(RequestError, match="gives no likelihoods after a prefix"):
        es.score(model, None, [5, 6], prefix=es.prefill(model, None, [1, 2, 3]))
