"""How much memory a step takes, before there is one.

What a forward keeps for its gradients is measured, not guessed: two forwards are run, of the
shortest row and of the longest, and every tensor that autograd would keep of them is counted. What
both keep is the model's own, such as weights. The process takes more: the libraries that it has
loaded, and memory that the system's allocator does not give back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from everystep.memory import memory_left
from everystep.shown import counted_bytes
from everystep.train.arguments import Optimiser

_STATES = {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0}
"""Tensors of the size of a weight that an optimizer keeps of it."""


@final
@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the tensors that training holds at once.

    `weights`: of the model as they are stored, and of an adapter. `gradients`, `optimizer`: of
    what is trained. `activations`: of a batch of the longest rows, until its gradients are there.
    `left`: what the device still has beside the weights, None where nobody says.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    left: int | None

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.more

    @property
    def more(self) -> int:
        """All that is not there before the first step."""
        return self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = [
            f"{counted_bytes(size)} {name}"
            for name in ("weights", "gradients", "optimizer", "activations")
            if (size := getattr(self, name))
        ]
        left = "" if self.left is None else f"; {counted_bytes(self.left)} are left for the last"
        return f"about {counted_bytes(self.total)} of memory: {', '.join(parts)}{left}"


def estimated(
    weights: int, trained: Iterable[Tensor], optimiser: Optimiser | None, activations: int
) -> MemoryEstimate:
    """Return the estimate of these parts. `optimiser`: its name among those of the arguments, or
    None for one of the caller's, which is taken for one like AdamW."""
    tensors = list(trained)
    size = sum(one.nbytes for one in tensors)
    states = 2 if optimiser is None else _STATES[optimiser]
    device = tensors[0].device if tensors else None
    return MemoryEstimate(weights, size, states * size, activations, memory_left(device))


def kept_bytes(shortest: Callable[[], Tensor], longest: Callable[[], Tensor]) -> int:
    """Return how many bytes a graph of the longest row keeps that one of the shortest does not.

    Each call makes a loss; the graphs are dropped.
    """
    own: dict[int, int] = {}
    other: dict[int, int] = {}
    with _keeping(own):
        first = shortest()
    with _keeping(other):
        second = longest()
    found = sum(size for place, size in other.items() if place not in own)
    del first, second
    return found


def _keeping(found: dict[int, int]) -> AbstractContextManager[object]:
    """Return a context that notes the memory of each tensor kept for gradients, by its place."""

    def note(one: Tensor) -> Tensor:
        storage = one.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return one

    hooks: AbstractContextManager[object] = saved_tensors_hooks(note, lambda one: one)
    return hooks
