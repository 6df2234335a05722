"""Law 5: merged adapters equal unmerged ones, and a row's adapters do not leak to its neighbours.

Requests of every strategy run side by side, each with adapters of its own or none. Each must come
to what it comes to alone, without adapters, on a model whose weights were merged by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.adapters import Adapter, Delta, adapter, read_adapter
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, named_weights
from everystep.types import Extra, Request, Verb, Work
from tests.adapters.making import PROJECTIONS, merge, random_lora, write_folder
from tests.executors.models import SPECS, random_model
from tests.executors.requests import REQUESTS
from tests.judges.dice import Dice
from tests.judges.drive import Drive, run_scheduled, run_together
from tests.judges.mixes import random_schedule
from tests.judges.mutants import replaced
from tests.judges.textbook import Hypothesis

Pairs = tuple[tuple[str, float], ...]

MODELS = ("plain", "biases", "plus one", "tied")
# Rank and projections of each adapter.
ADAPTERS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "all": (3, PROJECTIONS),
    "few": (2, ("q_proj", "v_proj")),
    "mlp": (4, ("up_proj", "down_proj")),
}
CHOICES: tuple[Pairs, ...] = (
    (("all", 1.0),),
    (),
    (("few", 0.5), ("mlp", -1.0)),
    (("few", 1.0),),
    (("all", 0.7), ("all", -0.2), ("few", 1.5)),
)


@cache
def tensors(name: str, one: str) -> dict[str, Tensor]:
    rank, projections = ADAPTERS[one]
    weights = dict(named_weights(random_model(SPECS[name])))
    return random_lora(weights, sum(map(ord, one)), projections, rank)


@cache
def merged(name: str, pairs: Pairs) -> Model:
    model = random_model(SPECS[name])
    for one, weight in pairs:
        merge(dict(named_weights(model)), tensors(name, one), weight)
    return model


@cache
def adapters(name: str) -> dict[str, Adapter]:
    found, model = {}, random_model(SPECS[name])
    with TemporaryDirectory() as folder:
        for one, (rank, _) in ADAPTERS.items():
            place = write_folder(Path(folder) / one, tensors(name, one), r=rank)
            found[one] = read_adapter(place, model).now()
    return found


def executor(name: str) -> TorchExecutor:
    return TorchExecutor(random_model(SPECS[name]))


def resolved(name: str, pairs: Pairs) -> tuple[Adapter, ...]:
    return tuple(adapters(name)[one] for one, _ in pairs)


@cache
def alone(name: str, index: int, pairs: Pairs) -> list[Hypothesis]:
    """What a request comes to by itself, on merged weights."""
    request = REQUESTS[index]
    return run_together([request], TorchExecutor(merged(name, pairs))).results[request.request_id]


def requests(name: str, turn: int) -> tuple[Request, ...]:
    """Every request, each with the adapters whose turn it is."""
    return tuple(
        replace(request, adapters=pairs, resolved=resolved(name, pairs))
        for index, request in enumerate(REQUESTS)
        for pairs in (CHOICES[(index + turn) % len(CHOICES)],)
    )


def runs(name: str, turn: int) -> Iterator[Drive]:
    """The requests side by side: in lockstep, in chunks, and as they come and lose their rows."""
    asked = requests(name, turn)
    yield run_together(asked, executor(name))
    yield run_together(asked, executor(name), chunk=2)
    schedule = random_schedule(asked, Dice(np.random.default_rng(turn)))
    schedule = replace(schedule, cancels=(None,) * len(asked), preempt_rate=0.3)
    yield run_scheduled(asked, schedule, executor(name))


def holds(name: str, turn: int) -> bool:
    for run in runs(name, turn):
        for index, request in enumerate(requests(name, turn)):
            wanted, found = alone(name, index, request.adapters), run.results[request.request_id]
            for one, other in zip(found, wanted, strict=True):
                if one.tokens != other.tokens or one.score != pytest.approx(other.score, abs=1e-5):
                    return False
    return True


@pytest.mark.parametrize("turn", range(len(CHOICES)))
@pytest.mark.parametrize("name", MODELS)
def test_merged_equals_unmerged_and_nothing_leaks(name: str, turn: int) -> None:
    assert holds(name, turn)


def test_the_adapters_matter() -> None:
    results = {pairs: alone("plain", 0, pairs)[0].tokens for pairs in CHOICES}
    assert len(set(results.values())) == len(CHOICES)


# --- logits ---------------------------------------------------------------------------------------


def work(name: str, asked: Mapping[int, Pairs]) -> Work:
    """Three rows of 7, 1 and 4 ids, of which all logits are wanted."""
    counts = np.array([7, 1, 4])
    return Work(
        verbs=tuple(Verb("allocate", row) for row in range(3)),
        rows=np.arange(3),
        starts=np.zeros(3, np.int64),
        counts=counts,
        logits=counts,
        tokens=np.random.default_rng(3).integers(0, 40, 12),
        extras={
            feed: Extra(adapters=pairs, resolved=resolved(name, pairs))
            for feed, pairs in asked.items()
        },
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_merged_weights(name: str) -> None:
    asked = {0: CHOICES[2], 2: CHOICES[4]}
    found = executor(name).run(work(name, asked)).logits.split([7, 1, 4])
    for feed, logits in enumerate(found):
        judge = TorchExecutor(merged(name, asked.get(feed, ())))
        wanted = judge.run(work(name, {})).logits.split([7, 1, 4])[feed]
        # Root mean squares are taken in float32, whose rounding may fall either way.
        assert (logits - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_logits_are_those_of_merged_weights_to_the_last_bits() -> None:
    name, asked = "layer norm", {0: CHOICES[2], 2: CHOICES[4]}
    found = executor(name).run(work(name, asked)).logits.split([7, 1, 4])
    for feed, logits in enumerate(found):
        judge = TorchExecutor(merged(name, asked.get(feed, ())))
        wanted = judge.run(work(name, {})).logits.split([7, 1, 4])[feed]
        assert (logits - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_a_neighbours_adapter_changes_no_bit(name: str) -> None:
    plain = executor(name).run(work(name, {})).logits.split([7, 1, 4])
    beside = executor(name).run(work(name, {1: CHOICES[0]})).logits.split([7, 1, 4])
    assert torch.equal(beside[0], plain[0]) and torch.equal(beside[2], plain[2])
    assert not torch.allclose(beside[1], plain[1])


# --- mutants --------------------------------------------------------------------------------------

_true_uses = adapter._together


def _everybody_asks(decoder: Any, asked: Any) -> Any:
    asked = list(asked)
    everywhere = torch.cat([places for _, places in asked])
    return _true_uses(decoder, [(uses, everywhere) for uses, _ in asked])


def _without_scale(delta: Delta, x: Tensor) -> Tensor:
    return (x @ delta.a.T) @ delta.b.T


def _weights_are_one(decoder: Any, asked: Any) -> Any:
    changed = [(tuple(one._replace(weight=1.0) for one in uses), places) for uses, places in asked]
    return _true_uses(decoder, changed)


MUTANTS = {
    "adapter of a neighbour": partial(replaced, _everybody_asks, (adapter, "_together")),
    "scale forgotten": partial(replaced, _without_scale, (Delta, "__call__")),
    "weight forgotten": partial(replaced, _weights_are_one, (adapter, "_together")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    with MUTANTS[name]():
        assert not holds("plain", 0)
