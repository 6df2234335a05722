"""Every number of a caller's has a bound, found before anything is computed; the error has both
sizes."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import CapacityError, EverystepError, OversizeError, RequestError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.cli.conftest import call  # noqa: F401  (a fixture)
from tests.cli.running import Caller
from tests.executors.models import family_model

MODEL = tiny_llama(vocab_size=320, max_position_embeddings=64)
IDS = [5, 6, 7]
QUIET: dict[str, Any] = {"max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": 2}


def many(**options: Any) -> Any:
    return es.generate(MODEL, None, [IDS], **{**QUIET, **options})


def rectangle(**options: Any) -> Any:
    return MODEL.generate(torch.tensor([IDS]), **{**QUIET, **options})


CALLS: dict[str, Callable[[int], Any]] = {
    "max_new_tokens": lambda n: many(max_new_tokens=n, eos_token_id=None),
    "max_length": lambda n: many(max_new_tokens=None, max_length=n, eos_token_id=None),
    "num_beams": lambda n: many(num_beams=n),
    "num_beam_groups": lambda n: many(num_beams=n, num_beam_groups=n, diversity_penalty=0.1),
    "num_return_sequences": lambda n: many(do_sample=True, num_return_sequences=n),
    "n_best": lambda n: many(num_beams=2, n_best=n),
    "best_of": lambda n: many(do_sample=True, best_of=n),
    "top_k": lambda n: many(penalty_alpha=0.5, top_k=n),
    "num_drafts": lambda n: many(prompt_lookup_num_tokens=2, num_drafts=n),
    "logprobs": lambda n: many(logprobs=n),
    "prompt_logprobs": lambda n: many(prompt_logprobs=n),
    "best": lambda n: es.score(MODEL, None, IDS, best=n),
    "StaticCache": lambda n: rectangle(past_key_values=es.StaticCache(MODEL.config, n)),
}


@pytest.fixture
def _no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*_: object) -> None:
        raise AssertionError("something was computed before the call was refused")

    monkeypatch.setattr("everystep.engine.Engine.step", computed)


@pytest.mark.usefixtures("_no_compute")
@pytest.mark.parametrize("size", [2_000_000_000, 10**12, 10**20])
@pytest.mark.parametrize("name", CALLS)
def test_a_number_beyond_its_bound_is_refused(name: str, size: int) -> None:
    with pytest.raises(EverystepError, match=r"wanted .*\d.*got .*\d"):
        CALLS[name](size)


@pytest.mark.usefixtures("_no_compute")
@pytest.mark.parametrize("size", [2**31, 10**12, 10**20])
@pytest.mark.parametrize("ask", [many, rectangle])
def test_a_static_cache_longer_than_positions_can_be_is_refused(ask: Any, size: int) -> None:
    told = f"max_cache_len is not valid; wanted an integer from 1 to 2147483647; got {size}"
    with pytest.raises(RequestError, match=told):
        ask(cache_implementation="static", max_cache_len=size)


def test_room_that_a_call_does_not_fill_is_not_made() -> None:
    roomy = rectangle(cache_implementation="static", max_cache_len=2_000_000_000)
    assert torch.equal(roomy, rectangle())


@pytest.mark.usefixtures("_no_compute")
def test_more_candidates_than_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match=r"at most 320, of 320 tokens; got top_k=400"):
        many(penalty_alpha=0.5, top_k=400)


def test_as_many_candidates_as_tokens_are_taken() -> None:
    assert len(rectangle(penalty_alpha=0.5, top_k=320)[0]) > len(IDS)


@pytest.mark.usefixtures("_no_compute")
def test_rows_that_only_their_length_ends_have_to_fit() -> None:
    with pytest.raises(CapacityError, match=r"with 999999999 new ones each.*Lower max_new"):
        many(max_new_tokens=1_000_000_000, eos_token_id=None)


@pytest.mark.parametrize("ends", [{"eos_token_id": 2}, {"eos_token_id": None, "max_time": 60.0}])
def test_rows_that_something_else_may_end_need_not(ends: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="beyond what the model was made for"):
        run = es.open(MODEL, None, IDS, max_new_tokens=1_000_000_000, pad_token_id=0, **ends)
    assert next(run).branches


def test_rows_that_forget_fit_however_long_they_get() -> None:
    made = family_model("mamba", state_size=4, num_hidden_layers=1)
    model = LanguageModel(made, executor="torch")
    run = es.open(model, None, IDS, max_new_tokens=1_000_000_000, pad_token_id=0, eos_token_id=None)
    assert next(run).branches


def asynchronous(model: LanguageModel, **options: Any) -> Any:
    async def main() -> Any:
        async with es.AsyncEngine(model) as engine:
            return await engine.generate(IDS, **options)

    return asyncio.run(main())


CONTEXT: dict[str, Callable[..., Any]] = {
    "model.generate": lambda model, **o: model.generate(torch.tensor([IDS]), **o),
    "es.generate": lambda model, **o: es.generate(model, None, [IDS], **o),
    "es.stream": lambda model, **o: list(es.stream(model, None, IDS, **o)),
    "es.open": lambda model, **o: es.open(model, None, IDS, **o),
    "AsyncEngine": asynchronous,
}
ENDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": [*range(2, 320)]}


@pytest.mark.parametrize("call", CONTEXT)
def test_lengths_beyond_the_context_are_said_in_every_call(call: str) -> None:  # noqa: F811
    told = "max_new_tokens=70 leads beyond.*at most 64 positions; got 3 of the prompt and up to 70"
    with pytest.warns(UserWarning, match=told):
        CONTEXT[call](MODEL, max_new_tokens=70, **ENDS)


@pytest.mark.parametrize("field", ["max_new_tokens", "max_length"])
@pytest.mark.parametrize("call", CONTEXT)
def test_lengths_of_a_checkpoint_beyond_its_context_are_said_too(
    call: str,  # noqa: F811
    field: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: 80}))
    settings = es.GenerationConfig.from_pretrained(tmp_path)
    model = LanguageModel(MODEL.core, settings, executor="torch")
    new = 80 if field == "max_new_tokens" else 77
    told = f"{field}=80 of the checkpoint leads beyond.*at most 64 positions.* up to {new} new"
    with pytest.warns(UserWarning, match=told):
        CONTEXT[call](model, **ENDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CONTEXT[call](model, **ENDS, max_new_tokens=3)


@pytest.mark.filterwarnings("default")
def test_the_command_line_says_that_a_length_leads_beyond_the_context(
    call: Caller,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = MODEL, tiny_tokenizer(320)
    monkeypatch.setattr(es, "load", lambda *_, **__: loaded, raising=False)
    outcome = call("generate", "ab", "--max-new-tokens", "70")
    assert outcome.code == 0
    assert "70 leads beyond what the model was made for" in outcome.err


def test_a_rope_that_grows_leads_beyond_the_trained_positions() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    model = tiny_llama(vocab_size=320, max_position_embeddings=64, rope_scaling=rope)
    assert (model.context, model.reach) == (64, 128)
    ids = [*range(3, 103)]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with pytest.warns(UserWarning, match="leads beyond what the model was made for"):
        (found,) = es.generate(model, None, [ids], **options)
        whole = model.generate(torch.tensor([ids]), pad_token_id=0, **options)
    assert found == whole[0, 100:].tolist()
    with pytest.raises(OversizeError, match="wanted fewer than 128 tokens; got 128"):
        es.generate(model, None, [[3] * 128], **options)


@pytest.mark.parametrize("seed", [[3], None])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n_best": 4},
        {"do_sample": True},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"force_words_ids": [[9]]},
    ],
    ids=str,
)
def test_a_search_in_which_every_token_ends(more: dict[str, Any], seed: Any) -> None:
    options = {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": [*range(MODEL.vocab_size)]}
    given = {**options, **more, "seed": seed, "pad_token_id": 0, "return_dict_in_generate": True}
    (found,) = es.generate(MODEL, None, [IDS], **given)
    each = found if isinstance(found, list) else [found]
    assert each and all(len(one.tokens) == 1 for one in each)
    assert all(one.finish_reason.kind == "stop" for one in each)
