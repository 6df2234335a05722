"""Forwards that processes run together, because the weights of a module lie in parts on them.

Under FSDP and ZeRO-3 each forward gathers weights from every process. So all of them have to run
the same forwards in the same order, however many tokens each has to find: a process that has
nothing to feed runs one of a single position, and uses nothing of it (transformers' `synced_gpus`).
`SyncedExecutor` runs a model of this library so; one of another library makes its own forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from everystep.cache.formats import CacheDtype, Quantization
from everystep.errors import RankError, RequestError
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, Within, gathers, is_one
from everystep.nn.modes import without_gradients
from everystep.types import InputSpec, Past, StepOutput, Verb, Work

FoundT = TypeVar("FoundT")

DECODES, READS = 0, 1
"""What a turn runs: a decoder, or what reads before it, an encoder or a table of embeddings. A
decoder that is left early has further ones, 1 + n for its first n layers."""


class Sharded(Protocol):
    """A model whose forwards processes may have to make together, as far as they do.

    `synced`: what they wait for while a call makes them so.
    """

    device: torch.device
    synced: SyncedForwards | None

    @property
    def module(self) -> nn.Module:
        """The module that has its weights."""

    @property
    def turns(self) -> int:
        """The number of different forwards that it makes."""

    @property
    def in_parts(self) -> bool:
        """True where its weights lie in parts on several processes."""

    def stand_in(self, part: int, read: Mapping[str, Tensor] | None) -> None:
        """Run a forward of one position, or of what reads before it on what it has read last, for
        nothing: another process needs the weights that lie here."""


class SyncedForwards:
    """The forwards of one call, which every process of the default group makes at the same time.

    `models`: that of the call, then those beside it, in the same order on each process.
    Before each forward the processes vote: each says which one it would run, all run the last of
    these, some of them for nothing, and those whose turn it was not vote again. So all meet at the
    model's own decoder once a step, however long they drafted, a step waits for the slowest
    process, and a call returns when no process has anything left to run.
    """

    def __init__(self, models: Iterable[Sharded]) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RequestError(
                "synced_gpus steps together with other processes, and none has been met",
                wanted="an initialised process group",
                got="none",
                do="Call torch.distributed.init_process_group, or leave synced_gpus out",
            )
        self._sharded = tuple(dict.fromkeys(models))
        self._each = [(one, part) for one in self._sharded for part in range(one.turns)]
        self._first = {one: self._each.index((one, DECODES)) for one in self._sharded}
        self._read: dict[int, Mapping[str, Tensor]] = {}
        self._failed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the forwards of these models synced ones within, and then wait, standing in, until
        no process makes any; an error is raised after that. Weights lie in parts again then.

        A forward that failed cannot be waited for: its error is raised at once, and the others
        learn of it when the group's timeout is over.
        """
        modules = [one.module for one in self._sharded if _is_at_rest(one.module)]
        for model in self._sharded:
            model.synced = self
        try:
            yield
        finally:
            try:
                if not self._failed:
                    self._wait()
            finally:
                for model in self._sharded:
                    model.synced = None
                for module in modules:
                    _reshard(module)

    @contextmanager
    def turn(
        self, model: Sharded, part: int, read: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Run a forward within, when it is its turn. `read`: what an encoder reads, which it reads
        again where it stands in."""
        if self._failed:
            raise RankError(
                "a forward failed that other processes take part in",
                do="End all processes, and start them again",
            )
        own = self._first[model] + part
        if read is not None:
            self._read[own] = read
        self._failed = True
        while (agreed := self._vote(own)) != own:
            self._stand_in(agreed)
        yield
        self._failed = False

    def _wait(self) -> None:
        self._failed = True
        while (agreed := self._vote(None)) is not None:
            self._stand_in(agreed)
        self._failed = False

    def _vote(self, own: int | None) -> int | None:
        """Return what all processes run next; None where none has anything to run."""
        asked = torch.zeros(len(self._each), device=self._sharded[0].device)
        if own is not None:
            asked[own] = 1
        dist.all_reduce(asked)
        found = asked.nonzero()
        return int(found[-1]) if len(found) else None

    def _stand_in(self, agreed: int | None) -> None:
        if agreed is None:  # a vote of one's own counts
            return
        model, part = self._each[agreed]
        model.stand_in(part, self._read.get(agreed))


# --- models of this library -----------------------------------------------------------------------


@final
class ShardedModel:
    """A decoder of this library each of whose layers gathers its weights when it runs.

    `module`: has its weights, gathers those outside of layers when it is called, and makes a call
    `Within`. `model`: gives it with the tensors that are in the places of its weights now, or its
    first so many layers, of `layers`.
    """

    in_parts = True

    def __init__(
        self,
        module: nn.Module,
        model: Callable[[int | None], Model],
        layers: int,
    ) -> None:
        self.module, self.model = module, model
        self.device = next(module.parameters()).device
        self.synced: SyncedForwards | None = None
        self.turns = 1 + layers
        self._scratch: dict[int, TorchExecutor] = {}

    def turned(self, part: int, call: Callable[[], FoundT]) -> FoundT:
        """Return what a call gives that reads weights, made when it is its turn."""
        if self.synced is None:
            raise RequestError(
                "the weights of this model lie in parts on processes that step together within a "
                "call, and no call is under way",
                do="Let every process make a new call",
            )
        with self.synced.turn(self, part):
            return self._made(call)

    def stand_in(self, part: int, read: Mapping[str, Tensor] | None) -> None:
        self._made(_nothing if part == READS else partial(self._feed_for_nothing, part))

    def _made(self, call: Callable[[], FoundT]) -> FoundT:
        # What is gathered first is kept for training too, so it must be no tensor of inference.
        with without_gradients():
            made: FoundT = self.module(Within(call))
        return made

    def _feed_for_nothing(self, part: int) -> None:
        """Feed a row of its own with one position, and free it."""
        model = self.model(None if part == DECODES else part - READS)
        if part not in self._scratch:
            self._scratch[part] = _opened(model)
        scratch = self._scratch[part]
        scratch.follow(model)
        scratch.run(_ONE_POSITION)
        scratch.run(_FREED)


@final
class SyncedExecutor:
    """One engine's executor on a model whose weights lie in parts, each of whose steps is one
    forward on every process, whatever the others have to do then.

    `layers`: the first so many are run, None for all.
    """

    host_threads: int | None = None

    def __init__(
        self,
        sharded: ShardedModel,
        quantization: Quantization | None = None,
        cache_dtype: CacheDtype | None = None,
        layers: int | None = None,
    ) -> None:
        self._sharded, self._layers = sharded, layers
        self._part = DECODES if layers is None else READS + layers
        self._own = sharded.turned(
            READS, lambda: _opened(sharded.model(layers), quantization, cache_dtype)
        )
        self.vocab_size: int = self._own.vocab_size
        self.device: torch.device = sharded.device
        self.abilities: frozenset[str] = self._own.abilities
        self.inputs: Mapping[str, InputSpec] = self._own.inputs

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds together with the other processes, return what
        they want; errors and rows are as those of `TorchExecutor`."""
        if not len(work.rows):  # verbs read no weights
            return self._own.run(work)
        return self._turned(self._part, partial(self._own.run, work))

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids (n,) -> (n, E), on the device of the model, when it is their turn."""
        return self._turned(READS, partial(self._own.embed, ids))

    def _turned(self, part: int, call: Callable[[], FoundT]) -> FoundT:
        """Return what a call gives that reads the weights of that moment."""

        def followed() -> FoundT:
            self._own.follow(self._sharded.model(self._layers))
            return call()

        return self._sharded.turned(part, followed)

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy."""
        return self._own.export(row)

    def audit(self) -> dict[int, int]:
        """Return how many positions are cached in every row that is allocated."""
        return self._own.audit()


def _opened(
    model: Model,
    quantization: Quantization | None = None,
    cache_dtype: CacheDtype | None = None,
) -> TorchExecutor:
    return TorchExecutor(model, quantization, cache_dtype, modes=without_gradients)


def _nothing() -> None:
    """Read no weight."""


def _work(*verbs: Verb, feeds: int) -> Work:
    """Return a work on row 0 that feeds it one position, or nothing."""
    one = np.ones(feeds, dtype=np.int64)
    return Work(verbs, one * 0, one * 0, one, one, one * 0)


_ONE_POSITION = _work(Verb("allocate", 0), feeds=1)
_FREED = _work(Verb("free", 0), feeds=0)


# --- modules --------------------------------------------------------------------------------------


def is_in_parts(module: nn.Module) -> bool:
    """Return whether a module's weights lie in parts on several processes, by FSDP or ZeRO-3."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    if any(gathers(one) or is_one(one, "FullyShardedDataParallel") for one in module.modules()):
        return True
    return any(hasattr(one, "ds_id") for one in module.parameters())


def _is_at_rest(module: nn.Module) -> bool:
    """Return whether nothing of a module is gathered that FSDP2 has in parts."""
    return all(hasattr(one, "full_tensor") for one in module.parameters())


def _reshard(module: Any) -> None:
    """Free what forwards have left gathered, which an optimizer's step would not change."""
    for one in module.modules():
        if gathers(one):
            one.reshard()
