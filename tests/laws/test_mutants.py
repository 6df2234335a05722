"""The laws bite: every named defect breaks one of them within the default run's first mixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everystep.engine import batches
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model
from everystep.types import Rows, Scores, Verb, Work
from tests.executors.models import family_model
from tests.judges.laws import Laws
from tests.judges.mixes import random_mix
from tests.judges.mutants import MUTANTS, STORE_MUTANTS, Mutant, mutant

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


def read_again(model: Model) -> bool:
    """Whether rows that were cut back give the logits of a forward over everything."""
    read = np.arange(3, 83) % 40
    expected = model.forward(torch.from_numpy(read)[None])[0]
    executor, length, verbs = TorchExecutor(model), 0, (Verb("allocate", 0),)
    for count, back in ((20, 4), (1, 1), (30, 9), (5, 2), *[(1, 0)] * 25):
        arrays = [np.array([n]) for n in (0, length, count, max(back, 1))]
        found = executor.run(Work(verbs, *arrays, read[length : length + count])).logits
        length += count
        if not torch.allclose(found, expected[length - len(found) : length], atol=1e-8):
            return False
        verbs = (Verb("truncate", 0, length - back),) if back else ()
        length -= back
    return True


@pytest.mark.parametrize("name", STORE_MUTANTS)
def test_a_mutant_of_stores_is_killed(name: str) -> None:
    with STORE_MUTANTS[name]():
        assert not all(map(read_again, forgetful()))
    assert all(map(read_again, forgetful()))


def forgetful() -> list[Model]:
    return [family_model("mistral", sliding_window=5), family_model("mamba", state_size=4)]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    with MUTANTS[name]():
        assert not survives(MIXES)


def test_a_mutant_is_undone() -> None:
    for broken in MUTANTS.values():
        with broken():
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


def test_a_mutant_that_cannot_be_called_is_refused() -> None:
    """What fails when it is called would pass for a mutant that is killed."""
    found: dict[str, Mutant] = {}
    with pytest.raises(TypeError, match="'stages'"):

        @mutant("of an older signature", (batches, "apply"), kind=found)
        def _without_stages(rows: Rows, scores: Scores, *, owned: bool = False) -> Scores:
            return scores

    assert not found
