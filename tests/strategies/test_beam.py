"""Beams keep the finished hypotheses that their bank holds, and no others."""

from __future__ import annotations

import numpy as np

from everystep.draws import SeededDraws
from everystep.strategies.beam import Beam, BeamBank
from everystep.types import Finished, FinishReason, Group, Prompt, Request


def _finished(score: float, serial: int = -1) -> Finished:
    return Finished(np.array([1]), score, FinishReason("stop", 1), 0, 0, {}, serial)


def test_a_hypothesis_that_the_bank_has_dropped_is_not_returned() -> None:
    beam = Beam(width=3, returns=3)
    group = Group(Request("", Prompt(ids=np.array([1])), beam, SeededDraws(0)), 0)
    scores = np.array([-1.0, -1.0, -1e9], np.float32)
    group.state = (BeamBank(scores, np.array([True, True, False]), np.array([4, 2, 8])),)
    first, second = _finished(-1.0, serial=4), _finished(-1.0, serial=2)
    dropped, cut = _finished(-0.5, serial=5), _finished(-2.0)
    group.done = [second, dropped, cut, first]
    # Of equals the one that the bank lists first; what was cut short asked for no place.
    assert beam.best(group) == [first, second, cut]
