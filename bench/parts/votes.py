"""What a vote of synced forwards costs: processes on loopback that vote again and again.

Under FSDP and ZeRO-3 each forward is preceded by one, so that all processes run the same forward.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from everystep.executors.synced import DECODES, SyncedForwards

_WARM_UP = 20


@dataclass(frozen=True)
class VoteCosts:
    """Seconds of a vote, and of the all-reduce of a number that it stands on: each the median and
    the least."""

    vote: float
    least_vote: float
    sum: float
    least_sum: float


class IdleModule:
    """A module that takes no time."""

    in_parts, turns = True, 2

    def __init__(self) -> None:
        self.device, self.synced = torch.device("cpu"), None
        self.module = torch.nn.Module()

    def stand_in(self, part: int, read: Mapping[str, Tensor] | None) -> None:
        """Do nothing."""


def _timed(call: Callable[[], None], times: int) -> tuple[float, float]:
    found = []
    for _ in range(_WARM_UP + times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found[_WARM_UP:]), min(found[_WARM_UP:])


def _vote(rank: int, ranks: int, folder: str, times: int) -> None:
    """Be one of the processes; the first one writes what it found."""
    torch.set_num_threads(1)
    patience, meeting = timedelta(seconds=120), f"file://{Path(folder, 'meeting')}"
    dist.init_process_group(
        "gloo", init_method=meeting, timeout=patience, rank=rank, world_size=ranks
    )
    module, number = IdleModule(), torch.zeros(1)
    synced = SyncedForwards([module])

    def vote() -> None:
        with synced.turn(module, DECODES):
            pass

    with synced.held():
        votes = _timed(vote, times)
    sums = _timed(lambda: dist.all_reduce(number), times)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps([*votes, *sums]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def vote_costs(times: int, ranks: int = 2) -> VoteCosts:
    """Return what so many votes of so many processes cost, one of them in the median."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, ranks, folder, times) for rank in range(ranks)]
        each = [context.Process(target=_vote, args=one) for one in given]
        for one in each:
            one.start()
        for one in each:
            one.join()
        if any(one.exitcode for one in each):
            raise RuntimeError("a process that voted has failed; its own error is above")
        return VoteCosts(*json.loads(Path(folder, "found").read_text(encoding="utf-8")))
