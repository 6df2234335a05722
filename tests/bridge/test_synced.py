"""Modules whose weights lie in parts on two processes, which make each forward together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from tests.bridge import ranks
from tests.models.tiny import reference_decoder
from tests.ranks import found_together, shared_folder

IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return found_together("tests.bridge.ranks", shared_folder(tmp_path_factory, "synced"))


@pytest.mark.parametrize(
    "case", [*ranks.CASES, "es.generate", "es.score", "after", "asked", "an encoder"]
)
def test_each_process_gets_what_it_gets_alone(case: str, found: list[dict[str, Any]]) -> None:
    """However unlike the lengths are, and with as many forwards of each module on both."""
    (one, alone, counts), (other, its_own, others) = (each[case] for each in found)
    assert one == alone and other == its_own
    assert counts == others
    if case in ranks.CASES:
        assert ({*map(len, one)}, {*map(len, other)}) == ({4 + 1}, {4 + 50})


@pytest.mark.parametrize("case", ranks.refusals(0))
def test_a_prompt_that_one_process_refuses_keeps_no_other_waiting(
    case: str, found: list[dict[str, Any]]
) -> None:
    (refused, alone, counts), (went_on, its_own, others) = (each[case] for each in found)
    assert refused == alone and refused.startswith("RequestError") and "999999" in refused
    assert went_on == its_own and "Error" not in went_on and counts == others


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
def test_an_error_of_one_process_is_its_own(error: str, found: list[dict[str, Any]]) -> None:
    (ended, _, counts), (went_on, its_own, others) = (each[error] for each in found)
    assert error in ended and "of one process alone" in ended
    assert went_on == its_own and went_on.startswith("tensor([[ 5,  9, 17") and counts == others


def test_what_is_asked_to_be_synced_makes_forwards_for_the_others(
    found: list[dict[str, Any]],
) -> None:
    """Also where weights are whole: a process with one token makes as many as the longer one."""
    longest = max(len(one["asked"][0][0]) for one in found) - 3
    assert [one["asked"][2] for one in found] == [[longest], [longest]] and longest > 40
    (encodes, decodes), others = (one["an encoder"][2] for one in found)
    assert others == [encodes, decodes] and encodes >= 1 and decodes >= 50


def test_modules_in_parts_are_known_by_themselves(found: list[dict[str, Any]]) -> None:
    assert [one["known"] for one in found] == [[True, True, True, False]] * 2


def test_what_steps_when_its_caller_wants_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["stream"].startswith("UnsupportedError: streams, runs and engines step when")


def test_processes_have_to_meet_first() -> None:
    model = es.wrap(reference_decoder("llama", torch.float32))
    with pytest.raises(RequestError, match=r"synced_gpus.*init_process_group"):
        model.generate(IDS, max_new_tokens=2, synced_gpus=True)
    own = tiny_llama(vocab_size=97)  # whose weights are whole everywhere
    wanted = own.generate(IDS, max_new_tokens=2)
    assert torch.equal(own.generate(IDS, max_new_tokens=2, synced_gpus=True), wanted)


def test_a_loop_of_the_callers_steps_by_itself() -> None:
    model = es.wrap(reference_decoder("llama", torch.float32))
    with pytest.raises(RequestError, match=r"synced_gpus.*custom_generate"):
        model.generate(IDS, custom_generate=lambda model, ids: ids, synced_gpus=True)
