"""How forwards run where several processes train together: what wraps the trained weights.

A forward is a call that reads the model as it likes, a loss of the caller's own too. Around it the
processes meet: gradients are added up over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everystep.errors import RequestError, UnsupportedError
from everystep.models import LayerModule, Model
from everystep.models.decoder import Decoder
from everystep.train.checkpoints import rows_here
from everystep.train.ranks import Ranks
from everystep.train.weights import OwnWeights, TrainedWeights


class Forwards(ABC):
    """Runs forwards of a model whose weights are trained."""

    @abstractmethod
    def run(self, call: Callable[[], Any]) -> Any:
        """Return what a forward gives that reads the model."""

    def part(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of a forward of a step and its gradients; those of all processes are
        added up in the last one."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[object]:
        """Return a context in which all weights are whole; all processes enter it together."""
        return nullcontext()

    def lay(self, of: Any, shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> Tensor:
        """Return what the optimizer keeps `of` a trained tensor, of that shape, as this process
        holds it; `read` gives rows of it."""
        return read(0, shape[0] if shape else 1)


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
class InParts(Forwards):
    """Forwards of processes each of which has a part of the weights, gathered layer by layer when
    they are used (FSDP2); gradients as those of `Replicated`."""

    def __init__(self, weights: TrainedWeights) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        module = weights.model.as_module()
        shard: Any = fully_shard
        if any(isinstance(one, DTensor) for one in module.parameters()):
            do = "Load the model again for another Trainer"
            raise RequestError("the weights lie in parts on the processes already", do=do)
        for one in module.parameters():  # which begin as those of the first process
            dist.broadcast(one.detach(), 0)
        self._made: Any = DTensor.from_local
        mesh = init_device_mesh(weights.model.device.type, (dist.get_world_size(),))
        layers = [one for one in module.modules() if isinstance(one, LayerModule)]
        for layer in layers:
            shard(layer, mesh=mesh)
        self._module = shard(_Around(module), mesh=mesh, reshard_after_forward=True)
        self._each: list[Any] = [*layers, self._module]

    def run(self, call: Callable[[], Any]) -> Any:
        return self._module(call)

    @contextmanager
    def whole(self) -> Iterator[None]:
        for one in self._each:
            one.unshard()
        try:
            yield
        finally:
            for one in self._each:
                one.reshard()

    def lay(self, of: Any, shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> Tensor:
        found = rows_here(of)
        if found is None or tuple(of.shape) != shape:
            return super().lay(of, shape, read)
        rows, first = found
        values = read(first, first + len(rows)).to(rows.device)
        how = {"run_check": False, "shape": of.shape, "stride": of.stride()}
        made: Tensor = self._made(values, of.device_mesh, of.placements, **how)
        return made


@final
class _Around(nn.Module):
    """A module whose forward is any call that reads the weights of another."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = module

    def forward(self, call: Callable[[], Any]) -> Any:
        """Return what the call gives."""
        return call()


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


def forwards_of(
    ranks: Ranks, weights: TrainedWeights, *, looks_for_unused: bool, shards: bool
) -> Forwards:
    """Return how forwards run. `looks_for_unused`: whether weights are looked for that a process
    does not use, for which the others would wait. `shards`: whether each has a part of them."""
    if not shards:
        return Replicated(weights, looks_for_unused) if ranks.count > 1 else Alone()
    if ranks.count == 1:
        raise RequestError(
            "fsdp shares weights among several processes",
            wanted="two or more",
            got="one",
            do="Run the script under torchrun, or leave fsdp out",
        )
    if not isinstance(weights, OwnWeights) or not isinstance(weights.model.core, Model):
        raise UnsupportedError(
            "fsdp shares the weights of a model of this library that are trained themselves",
            wanted="a model of everystep.load_model, and no peft_config",
            got=type(weights).__name__,
            do="Leave fsdp out: each process has the weights then, and gradients are shared",
        )
    core = weights.model.core
    if not isinstance(core.network, Decoder) or weights.may_be_unused:
        raise UnsupportedError(
            "fsdp is for decoders all of whose weights are used in each forward",
            wanted="a decoder without experts, encoders or a vision tower",
            got=type(core.network).__name__,
            do="Leave fsdp out: each process has the weights then, and gradients are shared",
        )
    return InParts(weights)
