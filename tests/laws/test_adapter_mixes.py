"""Law 5 as a property: every law on random mixes of requests whose adapters are random too.

Requests of any strategy ask for none of a model's adapters, one, or several with weights. What each
comes to alone is what it comes to beside others, in chunks, after preemption and with rows shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from everystep.engine import prefixes
from everystep.errors import InvariantError
from everystep.executors.base import Executor
from everystep.executors.native import NativeExecutor
from everystep.executors.native.changes import AdaptersOfStep
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model
from everystep.types import Request
from tests.executors.models import family_model, narrow_model
from tests.executors.native.test_adapters import KINDS, Mixed, extra_of
from tests.judges.laws import Laws
from tests.judges.mixes import Mix, random_mix
from tests.judges.mutants import replaced
from tests.laws.test_executors import for_decoder

pytestmark = pytest.mark.native

BLOCK = 6
MORE = [pytest.param(block, marks=pytest.mark.slow) for block in range(1, 40)]


def random_adapters(rng: np.random.Generator) -> Mixed:
    """None of a model's adapters, or up to three with weights, in an order; one may come twice."""
    count = int(rng.integers(0, 4))
    weights = (1.0, 0.5, -0.5, 1.5)
    return tuple((str(rng.choice(KINDS)), float(rng.choice(weights))) for _ in range(count))


def adapted_mix(seed: int, model: Model) -> Mix:
    """A random mix whose requests ask for random adapters, some for those of another."""
    mix, rng = for_decoder(random_mix(seed)), np.random.default_rng([seed, 11])
    requests: list[Request] = []
    for request in mix.requests:
        extra = extra_of(model, random_adapters(rng))
        if requests and rng.random() < 0.3:
            extra = replace(
                extra, adapters=requests[-1].adapters, resolved=tuple(requests[-1].resolved)
            )
        requests.append(replace(request, adapters=extra.adapters, resolved=extra.resolved))
    return replace(mix, requests=tuple(requests))


def checked(opens: Callable[[Model], Executor], model: Model, seeds: range) -> Counter[str]:
    """Ask every law of the mixes, and return what they went through."""
    laws, found = Laws(lambda mix, max_rows: opens(model)), Counter[str]()
    for seed in seeds:
        mix = adapted_mix(seed, model)
        laws.check(mix)
        asked = {request.adapters for request in mix.requests}
        found.update(mixes=len(asked - {()}), together=len(asked) > 1)
    return found + laws.coverage


@pytest.mark.parametrize("block", [0, *MORE])
@pytest.mark.parametrize("rounding", [None, "int8", "int4"])
def test_the_laws_hold_natively(rounding: Any, block: int) -> None:
    seeds = range(BLOCK * block, BLOCK * block + BLOCK)
    found = checked(NativeExecutor, narrow_model("llama", rounding), seeds)
    assert found["mixes"] > BLOCK / 2 and found["together"] > BLOCK / 3


@pytest.mark.parametrize("block", [0, *MORE])
def test_the_laws_hold_on_torch_operators(block: int) -> None:
    seeds = range(BLOCK * block, BLOCK * block + BLOCK)
    assert checked(TorchExecutor, family_model("llama"), seeds)["mixes"] > BLOCK / 2


def _first_of_all(self: AdaptersOfStep, step: Any) -> None:
    """Every row that wants any adapter gets the first of the step."""
    self._places = np.zeros_like(self._places)
    _true_write(self, step)


def _key_without_adapters(request: Request) -> prefixes.Key:
    return _true_key(request)._replace(adapters=(), resolved=())


_true_write, _true_key = AdaptersOfStep.write, prefixes.key_of
MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the adapter of another row": partial(replaced, _first_of_all, (AdaptersOfStep, "write")),
    "a prefix of another mix": partial(replaced, _key_without_adapters, (prefixes, "key_of")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    with MUTANTS[name](), pytest.raises(InvariantError):
        checked(NativeExecutor, narrow_model("llama", "int4"), range(60))
