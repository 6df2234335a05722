"""How forwards run where several processes train together: what wraps the trained weights.

A forward is a call that reads the model as it likes, a loss of the caller's own too. Around it the
processes meet: gradients are added up over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everystep.train.ranks import Ranks
from everystep.train.weights import TrainedWeights


class Forwards(ABC):
    """Runs forwards of a model whose weights are trained."""

    @abstractmethod
    def run(self, call: Callable[[], Any]) -> Any:
        """Return what a forward gives that reads the model."""

    def part(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of a forward of a step and its gradients; those of all processes are
        added up in the last one."""
        return nullcontext()


@final
class Alone(Forwards):
    """Forwards of one process, and of those that no gradient follows."""

    def run(self, call: Callable[[], Any]) -> Any:
        return call()


@final
class Replicated(Forwards):
    """Forwards of processes each of which has all weights, which begin as those of the first.

    The gradients become the mean over all, so that losses have to be multiplied by their number.
    """

    def __init__(self, weights: TrainedWeights, unused: bool) -> None:
        self._module = DistributedDataParallel(
            _WeightHolder(weights), find_unused_parameters=unused
        )

    def run(self, call: Callable[[], Any]) -> Any:
        return self._module(call)

    def part(self, *, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self._module.no_sync()


@final
class _WeightHolder(nn.Module):
    """A module with the weights that a run has, whose forward is any call that reads them."""

    def __init__(self, weights: TrainedWeights) -> None:
        super().__init__()
        for number, one in enumerate(weights.held()):
            if isinstance(one, nn.Parameter):
                self.register_parameter(f"held_{number}", one)
            else:
                self.register_buffer(f"held_{number}", one)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Return what the call gives."""
        return call()


def forwards_of(ranks: Ranks, weights: TrainedWeights, unused: bool) -> Forwards:
    """Return how forwards run; `unused`: whether weights are looked for that a process does not
    use, for which the others would wait."""
    return Alone() if ranks.count == 1 else Replicated(weights, unused)
