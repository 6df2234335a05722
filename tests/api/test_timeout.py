"""`timeout`: a deadline of a whole prompt, counted from the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import everystep as es
from everystep.drivers import session
from everystep.errors import RequestError, UnsupportedError
from everystep.stops.ends import moment
from everystep.testing.models import tiny_llama

IDS = [5, 6, 7]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> es.LanguageModel:
    return tiny_llama(vocab_size=320)


def generated(model: es.LanguageModel, **given: Any) -> list[Any]:
    return list(es.generate(model, None, [IDS] * 3, return_dict_in_generate=True, **given))


def streamed(model: es.LanguageModel, **given: Any) -> list[Any]:
    with es.stream(model, None, [IDS] * 3, **given) as stream:
        list(stream)
        return [one for (one,) in stream.results()]


def served(model: es.LanguageModel, **given: Any) -> list[Any]:
    async def ask() -> list[Any]:
        async with es.AsyncEngine(model) as engine:
            whole = {**given, "return_dict_in_generate": True}
            return list(await asyncio.gather(*(engine.generate(IDS, **whole) for _ in range(3))))

    return asyncio.run(ask())


FACES = [generated, streamed, served]


@pytest.mark.parametrize("face", FACES)
def test_a_prompt_ends_at_its_deadline(
    model: es.LanguageModel, face: Callable[..., list[Any]]
) -> None:
    """Nothing is chosen after it, and a call that has time left gets what it gets without."""
    for one in face(model, timeout=1e-9, **GREEDY):
        assert (one.finish_reason.kind, one.tokens) == ("time", ())
    whole = face(model, **GREEDY)
    assert [one.tokens for one in face(model, timeout=1e6, **GREEDY)] == [o.tokens for o in whole]
    assert {len(one.tokens) for one in whole} == {4}


def test_what_a_prompt_waits_is_counted(
    model: es.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that was made long ago has no time left, where `max_time` begins with the prompt."""
    monkeypatch.setattr(session, "moment", lambda: moment() - 100)
    assert {one.finish_reason.kind for one in generated(model, timeout=50, **GREEDY)} == {"time"}
    assert {one.finish_reason.kind for one in generated(model, max_time=50, **GREEDY)} == {"length"}


@pytest.mark.parametrize("value", [0, -1.0, "soon", True])
def test_no_deadline_can_be_made_of_it(model: es.LanguageModel, value: object) -> None:
    with pytest.raises(RequestError, match=r"timeout .* a number above 0"):
        es.generate(model, None, IDS, timeout=value)  # type: ignore[call-overload]


def test_nothing_waits_in_a_run_or_in_a_rectangle(model: es.LanguageModel) -> None:
    with pytest.raises(UnsupportedError, match=r"timeout .*max_time"):
        es.open(model, None, IDS, timeout=1.0)
    with pytest.raises(UnsupportedError, match=r"timeout .*max_time"):
        model.generate([IDS], timeout=1.0)  # type: ignore[call-arg, arg-type]
