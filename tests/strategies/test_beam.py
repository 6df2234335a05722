"""Beams keep the finished hypotheses that their bank holds, and no others."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from everystep.strategies.beam import Beam, BeamBank
from everystep.types import Finished, FinishReason, Group, Prompt, Request


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
