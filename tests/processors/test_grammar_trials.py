"""Grammars on trial: what strangers ask for is compiled in a process with bounds, first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tokenizers

from everystep.errors import CapacityError, EverystepError, RequestError
from everystep.processors.grammars import trials as module
from everystep.processors.grammars.grammar import (
    GrammarPlace,
    compile_grammar,
    compiled,
    tokens_in,
)
from everystep.processors.grammars.source import GrammarSource, Kind, read_source
from everystep.processors.grammars.trials import GrammarTrials, TrialBounds, on_trial
from everystep.processors.grammars.vocabulary import (
    packed_vocabulary,
    unpacked_vocabulary,
    vocabulary_of,
)
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Settings, Tokenizer
from tests.processors.test_grammars import HOSTILE

ENDLESS = "start: A\nA: " + "&".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(30))
"""A grammar whose compiling takes longer than anybody has."""
OWN = vocabulary_of(tiny_tokenizer(), len(tiny_tokenizer()))
SOUND: list[tuple[Kind, Any]] = [
    ("schema", {"type": "object", "properties": {"ä": {"enum": [1, None, "b"]}}}),
    ("schema", '{"type": "array", "items": {"type": "number", "minimum": 0.5}}'),
    ("regex", "a+(b|c){2,5}"),
    ("grammar", 'start: "a" b\nb: /[0-9]+/'),
    ("choices", ["yes", "no", "yes"]),
]
WRONG: list[tuple[Kind, Any]] = [
    ("schema", {"type": "objet"}),
    ("schema", {"not": {}}),
    ("schema", "{"),
    ("schema", 7),
    ("regex", "a(?=b)"),
    ("regex", {"a": 1}),
    ("regex", ""),
    ("grammar", "start: b"),
    ("grammar", "start: start"),
    ("choices", ["a", 1]),
    ("regex", "\ud800"),
    *((kind, value) for kind, value in HOSTILE.values()),
]


@pytest.fixture(scope="module")
def usual() -> Iterator[GrammarTrials]:
    trials = GrammarTrials()
    yield trials
    trials.close()


def outcome(kind: Kind, value: Any, trials: GrammarTrials | None) -> Any:
    try:
        if trials is not None:
            return trials.read(kind, value, OWN)
        return compile_grammar(read_source(kind, value), OWN).source
    except EverystepError as error:
        return type(error), str(error)


@pytest.mark.parametrize("number", range(len(SOUND) + len(WRONG)))
def test_a_trial_says_what_compiling_here_would(usual: GrammarTrials, number: int) -> None:
    kind, value = (SOUND + WRONG)[number]
    wanted = outcome(kind, value, None)
    assert outcome(kind, value, usual) == wanted
    assert isinstance(wanted, GrammarSource) or number >= len(SOUND)


def test_a_vocabulary_is_the_same_in_another_process() -> None:
    other = unpacked_vocabulary(packed_vocabulary(OWN))
    assert other.size == OWN.size and other.number != OWN.number
    assert other.spelled.tokens == OWN.spelled.tokens
    assert other.spelled.special_token_ids == OWN.spelled.special_token_ids
    assert other.spelled("hello the") == OWN.spelled("hello the")


def test_what_takes_too_long_is_ended_and_its_process_replaced() -> None:
    trials = GrammarTrials(TrialBounds(seconds=0.3, processes=1))
    assert trials.read("regex", "ab", OWN) == GrammarSource("regex", "ab")
    (first,) = trials.processes
    for _ in range(2):
        with pytest.raises(
            RequestError,
            match=r"grammar takes too long to compile; wanted at most "
            r"0\.3 s",
        ):
            trials.read("grammar", ENDLESS, OWN)
    assert trials.count == 2  # it was remembered
    assert not os.path.exists(f"/proc/{first}") and trials.processes == []
    assert trials.read("regex", "abc", OWN) == GrammarSource("regex", "abc")
    assert len(trials.processes) == 1
    trials.close()
    assert trials.processes == []


def test_memory_is_bounded() -> None:
    trials = GrammarTrials(TrialBounds(memory=32 << 20, processes=1))
    with pytest.raises(
        RequestError, match="takes too much memory to compile; wanted at most 32 MB"
    ):
        trials.read("regex", "a{1000000}", OWN)
    assert trials.read("regex", "a{10}", OWN) == GrammarSource("regex", "a{10}")
    trials.close()


def test_a_process_that_was_killed_is_replaced(usual: GrammarTrials) -> None:
    usual.read("regex", "kill", OWN)
    for pid in usual.processes:
        os.kill(pid, signal.SIGKILL)
    assert usual.read("regex", "killed", OWN) == GrammarSource("regex", "killed")


def test_a_large_grammar_is_not_kept(usual: GrammarTrials) -> None:
    with on_trial(usual):
        small, large = (usual.read("regex", one, OWN) for one in ("a{7}", "a{500000}"))
        assert compiled(small, OWN) is compiled(small, OWN)
        assert compiled(large, OWN) is not compiled(large, OWN)


def test_what_is_remembered_is_bounded(
    usual: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 10)
    for number in range(30):
        usual.read("regex", f"a{{{number + 1}}}", OWN)
    assert len(usual._known) <= 10
    monkeypatch.setattr(module, "_KEPT_CHARACTERS", 3_000)
    for number in range(5):
        usual.read("choices", [f"{number}" * 1_000], OWN)
    assert usual._characters == sum(len(one.text) for one in usual._known.values()) <= 3_000


def test_there_are_only_so_many_processes() -> None:
    trials = GrammarTrials(TrialBounds(processes=2))
    other = vocabulary_of(tiny_tokenizer(), len(tiny_tokenizer()) + 1)
    most = []

    def read(number: int) -> None:
        trials.read("regex", f"a{{{number + 1}}}", OWN if number % 2 else other)
        most.append(len(trials.processes))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(12)))
    assert max(most) <= 2 and trials.count == 12
    trials.close()


def test_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = GrammarTrials(TrialBounds(seconds=0.1, processes=1))
    trials._busy = 1
    monkeypatch.setattr(module, "_PATIENCE", 0.01)
    with pytest.raises(CapacityError, match="no process that compiles grammars was free"):
        trials.read("regex", "a", OWN)


def test_without_a_process_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = GrammarTrials()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(CapacityError, match="does not start"):
        trials.read("regex", "a", OWN)
    assert trials._busy == 0


def long_tokenizer() -> Tokenizer:
    """A tokenizer with tokens of 1 to 600 bytes."""
    names = ["<end>", "b", "c", *("a" * length for length in range(1, 601))]
    merges = [("a" * length, "a") for length in range(1, 600)]
    model = tokenizers.models.BPE(vocab={one: id for id, one in enumerate(names)}, merges=merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return Tokenizer(backend, Settings(special={"eos_token": "<end>"}))


@pytest.mark.parametrize("most", [1, 253, 254, 255, 256, 599, 600])
def test_tokens_of_any_length_are_followed(usual: GrammarTrials, most: int) -> None:
    own = long_tokenizer()
    size = len(own)
    vocabulary = vocabulary_of(own, size)
    with on_trial(usual):
        grammar = compiled(usual.read("regex", f"a{{0,{most}}}(b|c)", vocabulary), vocabulary)
    place, line = GrammarPlace(grammar, 0, (0,)), np.zeros(4, np.int64)
    first = tokens_in(place.mask(line, 0), size)  # type: ignore[arg-type]
    assert first is not None and first.tolist() == [1, 2, *range(3, 3 + most)]
    line[0] = 2 + most
    after = tokens_in(place.mask(line, 1), size)  # type: ignore[arg-type]
    assert after is not None and after.tolist() == [1, 2]
