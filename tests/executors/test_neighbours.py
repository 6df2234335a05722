"""What one feed brings or wants changes no bit and no path of the feeds beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from everystep.cache.context import CacheContext
from everystep.executors.base import Executor
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.testing.hash_model import HashExecutor
from everystep.testing.strict import StrictExecutor
from everystep.types import Extra, Given, StepOutput, Verb, Work
from tests.executors.models import PLAIN, random_model
from tests.executors.works import ints
from tests.judges.numpy_executor import NumpyExecutor

LAYERS = len(PLAIN.layers)
OPEN = tuple(Verb("allocate", row) for row in range(4))
COUNTS = (2, 9, 12, 1)
HELD = 5
SEEN = torch.ones(9, HELD + 9).tril(HELD).bool()
SEEN[:, 1] = False
EXTRAS: dict[str, Extra] = {
    "hidden": Extra(hidden=True),
    "layers": Extra(layers=True),
    "attentions": Extra(attentions=True),
    "positions": Extra(positions=torch.arange(9) * 3),
    "mask": Extra(mask=SEEN[None]),
    "embeds": Extra(inputs=(Given("embeds", 0, torch.ones(9, 32)),)),
}


def warm() -> Work:
    """Four rows of `HELD` positions, the third of which stays empty."""
    counts = ints(HELD, HELD, HELD)
    ids = torch.arange(3 * HELD).numpy() % 40
    return Work(OPEN, ints(0, 1, 3), ints(0, 0, 0), counts, counts * 0, ids)


def beside(extra: Extra | None) -> Work:
    """Feeds of all lengths; the second has the extra."""
    counts = ints(*COUNTS)
    ids = torch.arange(sum(COUNTS)).numpy() * 7 % 40
    if extra is not None and extra.inputs:
        ids[COUNTS[0] : COUNTS[0] + COUNTS[1]] = -1
    extras = {} if extra is None else {1: extra}
    return Work((), ints(0, 1, 2, 3), ints(HELD, HELD, 0, HELD), counts, counts, ids, extras)


def ran(executor: Executor, extra: Extra | None) -> StepOutput:
    executor.run(warm())
    return executor.run(beside(extra))


def of_others(output: StepOutput) -> Tensor:
    """The logits of all feeds but the second."""
    first, own = COUNTS[:2]
    return torch.cat([output.logits[:first], output.logits[first + own :]])


def executors() -> dict[str, Callable[[], StrictExecutor]]:
    return {
        "hash": partial(HashExecutor, 40, 32),
        "numpy": partial(NumpyExecutor, random_model(PLAIN)),
    }


@pytest.mark.parametrize("kind", ["hash", "numpy"])
@pytest.mark.parametrize("name", EXTRAS)
def test_the_bits_of_neighbours_stay(kind: str, name: str) -> None:
    plain, other = executors()[kind](), executors()[kind]()
    wanted, found = ran(plain, None), ran(other, EXTRAS[name])
    assert torch.equal(of_others(found), of_others(wanted))
    assert set(found.answers) <= {1}
    assert plain.counts == other.counts


@pytest.mark.native
@pytest.mark.parametrize("name", sorted(EXTRAS.keys() - {"mask"}))
def test_natively_the_bits_of_neighbours_stay(name: str) -> None:
    model = random_model(PLAIN, dtype=torch.float32)
    wanted = ran(NativeExecutor(model), None)
    found = ran(NativeExecutor(model), EXTRAS[name])
    assert torch.equal(of_others(found), of_others(wanted))
    changed = name in ("positions", "embeds")
    assert torch.equal(found.logits, wanted.logits) is not changed


@pytest.mark.parametrize("name", EXTRAS)
def test_on_torch_the_paths_of_neighbours_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(method: str) -> None:
        before = getattr(CacheContext, method)

        def call(self: CacheContext, *given: Any) -> Tensor:
            calls[method] += 1
            result: Tensor = before(self, *given)
            return result

        monkeypatch.setattr(CacheContext, method, call)

    model = random_model(PLAIN)
    wanted = ran(TorchExecutor(model), None)
    other = TorchExecutor(model)
    other.run(warm())
    for method in ("_rectangle", "_span"):
        counted(method)
    found = other.run(beside(EXTRAS[name]))
    # The first and the last feed are the rectangle, the second and the third a span each, whether
    # the second is computed by itself or not.
    assert calls == Counter({"_rectangle": LAYERS, "_span": 2 * LAYERS})
    torch.testing.assert_close(of_others(found), of_others(wanted), rtol=0, atol=1e-12)
