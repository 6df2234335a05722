"""Beams keep the finished hypotheses that their bank holds, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.strategies.beam import Beam, BeamBank
from everystep.strategies.beams import NEVER
from everystep.types import Finished, FinishReason, Group, Prompt, Request, Scores
from tests.strategies.making import END, VOCABULARY, batch_of


def _finished(score: float, serial: int = -1) -> Finished:
    return Finished(np.array([1]), score, FinishReason("stop", 1), 0, 0, {}, serial)


def test_a_hypothesis_that_the_bank_has_dropped_is_not_kept() -> None:
    beam = Beam(width=3)
    bank = BeamBank(
        np.array([[-1.0, -1e9, -1e9]], np.float32),
        np.array([[True, False, False]]),
        np.array([[4, 9, 8]]),
        np.array([[True]]),
    )
    group = Group(Request("", Prompt(ids=np.array([1])), beam, cast(Any, None)), 0, state=bank)
    held, dropped, cut = _finished(-1.0, 4), _finished(-1e9, 5), _finished(-2.0)
    group.done = [dropped, cut, held]
    assert beam.best(group) == [held, cut]


def test_what_goes_on_has_no_number() -> None:
    beam = Beam(width=2)
    batch = batch_of(beam, [[-1.0, -2.0], [-1.0, -2.0]])
    scores = np.array([[-1.5, -1.6, -1.7, -1.8], [-1.5, -1.6, -1.7, -1.8]], np.float32)
    flat = np.array([[END, 4, VOCABULARY + 3, 6], [3, 4, VOCABULARY + END, 6]])
    children = beam.select(batch, ((scores, flat),))
    ended = [reason is not None for reason in children.finish]
    assert ended == [True, False, False, False, False]
    assert children.serial is not None
    assert [number >= 0 for number in children.serial.tolist()] == ended
    assert children.tokens.ravel().tolist() == [END, 4, 3, 3, 4]
    assert children.parent.tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("listed", range(1, VOCABULARY + 1))
def test_a_list_stands_for_the_row_where_it_is_long_enough(listed: int) -> None:
    beam = Beam(width=2)
    batch = batch_of(beam, [[-1.0, -4.0], [-3.0, -3.1]])
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(listed))
    values, tokens = torch.sort(logits, dim=-1, descending=True)
    rest, read = values[:, listed - 1 : listed], list[int]()

    def whole(rows: Tensor) -> Tensor:
        read.extend(rows.tolist())
        return logits[rows]

    lists = Scores(values[:, :listed], tokens[:, :listed], VOCABULARY, rest, read=whole)
    found, wanted = beam.pick(batch, lists), beam.pick(batch, Scores.of(logits))
    assert all(map(torch.equal, found, wanted))
    assert read == ([] if listed >= beam.ranked else [0, 1, 2, 3])


# --- the bank -------------------------------------------------------------------------------------


def random_bank(pick: np.random.Generator, width: int) -> BeamBank:
    """Best first, with equals, some places empty, open or closed."""
    count = int(pick.integers(0, width + 1))
    bank = BeamBank.empty(width)
    bank.scores[0, :count] = np.sort(pick.integers(-5, 0, count))[::-1]
    bank.filled[0, :count] = True
    bank.serials[0, :count] = pick.permutation(9)[:count]  # below those of later steps
    bank.open[0, 0] = pick.random() < 0.7
    return bank


def ranked_anew(
    bank: BeamBank, final: np.ndarray, just: list[bool], serials: list[int]
) -> tuple[list[Any], ...]:
    """The bank after all candidates were ranked with what it holds."""
    offered = torch.tensor([x if y else x + NEVER for x, y in zip(final, just, strict=True)])
    merged = torch.cat([torch.from_numpy(bank.scores[0]), offered.float()])
    best = torch.topk(merged, bank.scores.shape[1])
    filled = [*bank.filled[0].tolist(), *just]
    numbers = [*bank.serials[0].tolist(), *serials]
    at = best.indices.tolist()
    return best.values.tolist(), [filled[i] for i in at], [numbers[i] for i in at]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("gathers", [True, False])
def test_a_bank_holds_the_best_of_all_that_ended(early: bool, gathers: bool) -> None:
    beam, pick = Beam(width=3, early_stopping=early, gathers=gathers), np.random.default_rng(0)
    for _ in range(300):
        banks = [random_bank(pick, 3) for _ in range(3)]
        final = -np.sort(-pick.integers(-6, 2, (3, beam.ranked)), axis=1).astype(np.float32)
        ended = pick.random((3, beam.ranked)) < pick.choice([0.0, 0.3])
        after, search, rank, serial = BeamBank.joined(banks).enter(final, ended, [7, 8, 9], beam)
        told = [*zip(search.tolist(), rank.tolist(), strict=True)]
        for n, (old, new) in enumerate(zip(banks, after.of_requests(), strict=True)):
            numbers = [(7 + n) * beam.ranked + place for place in range(beam.ranked)]
            offered = [bool(ended[n, place]) and place < 3 for place in range(beam.ranked)]
            takes = old.open.all() and not (early and old.filled.all())
            just = [one and bool(takes) for one in offered]
            wanted = ranked_anew(old, final[n], just, numbers) if takes else old_rows(old)
            held = new.scores[0].tolist(), new.filled[0].tolist(), new.serials[0].tolist()
            assert held[:2] == wanted[:2]
            pairs = zip(held[2], wanted[2], held[1], strict=True)
            assert all(one == other for one, other, taken in pairs if taken)
            kept = [place for place in range(beam.ranked) if numbers[place] in wanted[2]]
            entered = offered if gathers else [just[p] and p in kept for p in range(beam.ranked)]
            assert [rank for group, rank in told if group == n] == list(np.flatnonzero(entered))
        assert serial.tolist() == [(7 + n) * beam.ranked + place for n, place in told]


def old_rows(bank: BeamBank) -> tuple[list[Any], ...]:
    return bank.scores[0].tolist(), bank.filled[0].tolist(), bank.serials[0].tolist()


def test_a_bank_is_known_by_its_types_and_shapes() -> None:
    beam, bank = Beam(width=3), BeamBank.empty(3)
    assert beam.knows(bank) and beam.knows(None) and not beam.knows("bank")
    for name, wrong in (
        ("scores", bank.scores.astype(np.float64)),
        ("filled", bank.filled.astype(np.int64)),
        ("serials", bank.serials.astype(np.int32)),
        ("scores", bank.scores[:, :2]),
        ("filled", bank.filled[0]),
        ("serials", bank.serials[:, :0]),
        ("open", np.ones((1, 3), bool)),
    ):
        assert not beam.knows(replace(bank, **{name: wrong})), name
    assert not Beam(width=2).knows(bank) and Beam(width=2, keeps=3).knows(bank)
