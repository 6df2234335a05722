"""Models of this library whose weights lie in parts on two processes, which step together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bridge.ranks import CALLS, refusals
from tests.executors import ranks
from tests.ranks import found_together, shared_folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return found_together("tests.executors.ranks", shared_folder(tmp_path_factory, "own parts"))


@pytest.mark.parametrize(
    "case", [*CALLS, *ranks.GIVEN, "es.generate", "es.score", "after", "after training"]
)
def test_each_process_gets_what_it_gets_alone(case: str, found: list[dict[str, Any]]) -> None:
    """However unlike the lengths are, and with as many forwards of each layer on both."""
    (one, alone, counts), (other, its_own, others) = (each[case] for each in found)
    assert one == alone and other == its_own
    assert counts == others
    if case in CALLS:
        assert ({*map(len, one)}, {*map(len, other)}) == ({4 + 1}, {4 + 50})


def test_a_step_is_one_forward(found: list[dict[str, Any]]) -> None:
    """50 of each layer for the longer of the two, as many of the module around them and one more,
    in which executors are opened; none of the second model's."""
    assert [*CALLS][:2] == ["greedy", "sample"]
    for one in found:
        assert one["greedy"][2] == [51, 0, 50, 50, 0, 0]
        assert one["sample"][2] == [102, 0, 100, 100, 0, 0]


@pytest.mark.parametrize("case", sorted(refusals(0).keys() - {"a refused prefix"}))
def test_a_prompt_that_one_process_refuses_keeps_no_other_waiting(
    case: str, found: list[dict[str, Any]]
) -> None:
    """A prefix of weights that learn is refused anyway."""
    (refused, alone, counts), (went_on, its_own, others) = (each[case] for each in found)
    assert refused == alone and refused.startswith("RequestError") and "999999" in refused
    assert went_on == its_own and "Error" not in went_on and counts == others


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
def test_an_error_of_one_process_is_its_own(error: str, found: list[dict[str, Any]]) -> None:
    (ended, _, counts), (went_on, its_own, others) = (each[error] for each in found)
    assert error in ended and "of one process alone" in ended
    assert went_on == its_own and went_on.startswith("tensor([[ 5,  9, 17") and counts == others


def test_what_steps_when_its_caller_wants_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["stream"].startswith("UnsupportedError: streams, runs and engines step when")


def test_each_process_holds_half(found: list[dict[str, Any]]) -> None:
    """Between steps, and it trains from there as one that generated nothing."""
    for one in found:
        held, whole = one["held"]
        assert held <= 0.51 * whole
        assert one["losses"][0] == pytest.approx(one["losses"][1], rel=1e-12)


def test_a_gathered_copy_steps_alone(found: list[dict[str, Any]]) -> None:
    for one in found:
        rows, counts = one["gathered"]
        assert counts == one["after training"][2] and len(rows[0]) == 3 + 9
