"""What several tests of calls watch."""

from __future__ import annotations

from typing import Any

import pytest

from everystep.api.model import LanguageModel
from everystep.engine import Engine
from everystep.testing.models import tiny_llama


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """A tiny Llama with the vocabulary of the tiny tokenizer; some files have one of their own."""
    return tiny_llama(vocab_size=320)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After every step of an engine, how many tokens that engine was fed so far."""
    counts: list[int] = []
    step = Engine.step

    def counted(engine: Engine) -> Any:
        events = step(engine)
        counts.append(engine.counts.fed)
        return events

    monkeypatch.setattr(Engine, "step", counted)
    return counts
