"""The laws bite: every named defect breaks one of them within the default run's first mixes."""

from __future__ import annotations

import pytest

from everystep.testing.laws import Laws
from everystep.testing.mutants import MUTANTS
from everystep.testing.requests import random_mix

MIXES = 125


def survives(mixes: int) -> bool:
    """Whether the first mixes of the default run show no fault."""
    laws = Laws()
    try:
        for seed in range(mixes):
            laws.check(random_mix(seed))
    except Exception:  # a defect may break a law or crash; either is noticed
        return False
    return True


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    with MUTANTS[name].applied():
        assert not survives(MIXES)


def test_a_mutant_is_undone() -> None:
    for mutant in MUTANTS.values():
        with mutant.applied():
            pass
    assert survives(5)


def test_no_promised_mutant_is_missing() -> None:
    promised = {
        "aliasing fork",
        "missing truncate",
        "leaked row",
        "leaked companion",
        "order-dependent draw",
        "chunk that swallows the last token",
        "stale position",
        "normalising after processors",
    }
    assert promised <= set(MUTANTS)
