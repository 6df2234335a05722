"""Strategies are found by name, those of other distributions too, and run as the built-in ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everystep.engine import PromptLookup
from everystep.errors import RequestError, UnknownArgumentError
from everystep.strategies import (
    Beam,
    Contrastive,
    Greedy,
    Sample,
    base,
    strategy,
    strategy_named,
    strategy_names,
)
from everystep.testing.hash_model import HashExecutor
from everystep.types import Prompt, Request
from tests.distributions import distribution
from tests.executors.requests import REQUESTS, ids, request
from tests.judges.drive import run_scheduled, run_together
from tests.judges.mixes import Schedule
from tests.judges.textbook import Prefix, follow

SECOND_BEST = '''
"""A strategy of a distribution of its own: the token of the n-th highest score."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from everystep.strategies.base import Reads
from everystep.types import Children


@dataclass(frozen=True)
class Nth:
    n: int = 2
    width: ClassVar[int] = 1
    returns: ClassVar[int] = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(alone=True)
    rounds: ClassVar[int] = 1

    def pick(self, batch, scores, earlier=()):
        return (scores.whole().values.topk(self.n).indices[:, -1],)

    def select(self, batch, picked):
        tokens, parents = picked[0][0], np.arange(len(batch))
        return Children(
            parents,
            tokens[:, None],
            np.ones(len(batch), dtype=np.int64),
            np.zeros(len(batch)),
            batch.stops(parents, tokens),
        )

    def finish(self, group):
        return list(group.done)
'''
FOUND = "n-th best"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    """The registry, which is as it was afterwards."""
    monkeypatch.setattr(base, "_REGISTERED", dict(base._REGISTERED))
    yield base._REGISTERED


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"everystep.strategies": {FOUND: "everystep_nth_best:Nth"}}
    distribution(tmp_path, "everystep_nth_best", SECOND_BEST, groups)
    monkeypatch.syspath_prepend(tmp_path)


# --- names ----------------------------------------------------------------------------------------


def test_the_built_in_ones_have_names() -> None:
    named = {"greedy": Greedy, "sample": Sample, "beam": Beam, "contrastive": Contrastive}
    assert {name: strategy_named(name) for name in named} == named
    assert set(named) <= set(strategy_names())


def test_a_decorated_class_is_found(registered: dict[str, type]) -> None:
    @strategy("own")
    @dataclass(frozen=True)
    class Own(Greedy):
        pass

    assert strategy_named("own") is Own
    assert "own" in strategy_names()
    assert strategy("own")(Own) is Own  # the same class again takes nothing from anybody


def test_a_name_that_is_taken_is_an_error(registered: dict[str, type]) -> None:
    with pytest.raises(RequestError, match=r"two strategies are called 'greedy'.*Greedy and .*Own"):

        @strategy("greedy")
        class Own:
            pass

    assert strategy_named("greedy") is Greedy


@pytest.mark.parametrize(
    ("name", "near"), [("gredy", "greedy"), ("contrastiv", "contrastive"), ("beams", "beam")]
)
def test_an_unknown_name_proposes_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownArgumentError, match=rf"'{name}'[\s\S]*meant {near}\.$"):
        strategy_named(name)


def test_a_name_like_no_other_proposes_none() -> None:
    with pytest.raises(
        UnknownArgumentError,
        match=r"beam, best_of, constrained_beam[\s\S]*Install the package",
    ):
        strategy_named("zzz")


# --- of another distribution ----------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_an_installed_one_is_found_by_name_alone() -> None:
    assert FOUND in strategy_names()
    kind = strategy_named(FOUND)
    assert (kind.__module__, kind.__name__) == ("everystep_nth_best", "Nth")
    with pytest.raises(UnknownArgumentError, match=f"meant {FOUND}"):
        strategy_named("nth best")


def test_it_is_gone_where_it_is_not_installed() -> None:
    assert FOUND not in strategy_names()
    with pytest.raises(UnknownArgumentError):
        strategy_named(FOUND)


def test_an_installed_one_takes_no_name_of_the_librarys_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"everystep.strategies": {"greedy": "everystep_taken:Nth"}}
    distribution(tmp_path, "everystep_taken", SECOND_BEST, groups)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match=r"called 'greedy'.*Greedy and Nth"):
        strategy_named("greedy")


def expected(asked: Request, n: int) -> tuple[int, ...]:
    """The n-th best token after the other, by the book."""
    prefix = Prefix(asked, HashExecutor(40, 32).function)
    return follow(prefix, lambda scores, _: int(scores.topk(n).indices[-1])).tokens


def mixed(kind: Any) -> list[Request]:
    """Three requests for it, one with drafts, between all those of the library's own."""
    asked = [
        request("second", kind(2), Prompt(ids(21, 6))),
        request("also second", kind(2), Prompt(ids(22, 11))),
        request("third", kind(3), Prompt(ids(23, 4)), drafter=PromptLookup(4, 2)),
    ]
    return [*REQUESTS[:4], *asked, *REQUESTS[4:]]


@pytest.mark.usefixtures("installed")
def test_it_runs_in_a_mixed_batch() -> None:
    requests = mixed(strategy_named(FOUND))
    run = run_together(requests, HashExecutor(40, 32))
    for name, n in (("second", 2), ("also second", 2), ("third", 3)):
        (found,) = run.results[name]
        assert found.tokens == expected(run.groups[name].request, n)
    assert run.engine.counts.drafted > 0
    own = run_together(REQUESTS, HashExecutor(40, 32)).results
    assert {name: run.results[name] for name in own} == own


@pytest.mark.usefixtures("installed")
def test_it_is_scheduled_streamed_and_preempted_as_any_other() -> None:
    requests = tuple(mixed(strategy_named(FOUND)))
    whole = run_together(requests, HashExecutor(40, 32)).results
    count = len(requests)
    schedule = Schedule(tuple(range(count)), (None,) * count, 9, 8, 60, 0.3, True, 1)
    run = run_scheduled(requests, schedule, HashExecutor(40, 32, max_rows=8))
    assert run.results == whole
    assert run.engine.counts.preemptions > 0
