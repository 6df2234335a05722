"""Forwards that processes run together, because the weights of a module lie in parts on them.

Under FSDP and ZeRO-3 each forward gathers weights from every process. So all of them have to run
the same forwards in the same order, however many tokens each has to find: a process that has
nothing to feed runs one of a single position, and uses nothing of it (transformers' `synced_gpus`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from everystep.errors import ForeignModelError, RequestError

DECODES, ENCODES = 0, 1
_PARTS = 2


class Sharded(Protocol):
    """A module, as far as this file has to know it."""

    device: torch.device
    synced: SyncedForwards | None

    def stand_in(self, part: int, read: Mapping[str, Tensor] | None) -> None:
        """Run a forward of one position, or of an encoder on what it has read before, for
        nothing."""


class SyncedForwards:
    """The forwards of one call, which every process of the default group makes at the same time.

    `modules`: the model's, then those of the models beside it, in the same order on each process.
    Before each forward the processes vote: each says which module it would run, all run the last of
    these, some of them for nothing, and those whose turn it was not vote again. So all meet at the
    model's own decoder once a step, however long they drafted, a step waits for the slowest
    process, and a call returns when no process has anything left to run.
    """

    def __init__(self, modules: Iterable[Sharded]) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RequestError(
                "synced_gpus steps together with other processes, and none has been met",
                wanted="an initialised process group",
                got="none",
                do="Call torch.distributed.init_process_group, or leave synced_gpus out",
            )
        self._sharded = tuple(dict.fromkeys(modules))
        self._read: dict[int, Mapping[str, Tensor]] = {}
        self._failed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the forwards of these modules synced ones within, and then wait, standing in, until
        no process makes any; an error is raised after that.

        A forward that failed cannot be waited for: its error is raised at once, and the others
        learn of it when the group's timeout is over.
        """
        for module in self._sharded:
            module.synced = self
        try:
            yield
        finally:
            try:
                if not self._failed:
                    self._wait()
            finally:
                for module in self._sharded:
                    module.synced = None

    @contextmanager
    def turn(
        self, module: Sharded, part: int, read: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Run a forward within, when it is its turn. `read`: what an encoder reads, which it reads
        again where it stands in."""
        if self._failed:
            raise ForeignModelError(
                "a forward failed that other processes take part in",
                do="End all processes, and start them again",
            )
        own = self._sharded.index(module) * _PARTS + part
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
        asked = torch.zeros(len(self._sharded) * _PARTS, device=self._sharded[0].device)
        if own is not None:
            asked[own] = 1
        dist.all_reduce(asked)
        found = asked.nonzero()
        return int(found[-1]) if len(found) else None

    def _stand_in(self, agreed: int | None) -> None:
        if agreed is None:  # a vote of one's own counts
            return
        module = self._sharded[agreed // _PARTS]
        module.stand_in(agreed % _PARTS, self._read.get(agreed))


def is_in_parts(module: Any) -> bool:
    """Return whether a module's weights lie in parts on several processes, by FSDP or ZeRO-3."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    names = {kind.__name__ for one in module.modules() for kind in type(one).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        return True
    return any(hasattr(one, "ds_id") for one in module.parameters())
