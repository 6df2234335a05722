"""The processes of a run, each with a rank, and what they tell each other beside gradients.

A run has one process, or as many as `torchrun` or the caller started. What all have to agree in is
decided once, by the first or by a sum over all. Messages are numbers and JSON, so that nothing that
a process says can be code for another.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from everystep.errors import EverystepError, InvariantError, TrainingError

_SIGNS_OF_LOSS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
"""Texts of torch's errors about processes that no longer answer."""
_LAST_MOMENT = 0.05
"""Seconds in which threads of gloo get the interpreter before Python ends."""
_KINDS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)
"""Types of tensors that processes gather, by number."""


def _leave() -> None:
    """Give up the groups that were made here, before Python ends.

    A thread of gloo that drops the tensors of its last work needs the interpreter for that, and
    aborts the process where it gets it only when Python is ending: it gets it now.
    """
    time.sleep(_LAST_MOMENT)
    if dist.is_initialized():
        dist.destroy_process_group()


@final
@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a run: the `number` of this one among `count`.

    Every method but `own` is called by all of them, in the same order.
    """

    number: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def met(cls, patience: int) -> Ranks:
        """Return those of the default process group, which is made here under `torchrun`; one alone
        where there is neither.

        `patience`: the seconds after which a process that does not answer is taken for lost, of
        groups that are made here.
        """
        if not dist.is_available():
            return cls()
        timeout = timedelta(seconds=patience)
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched():
                return cls()
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timeout)
            atexit.register(_leave)
        group = dist.group.WORLD
        if dist.get_world_size() > 1 and "gloo" not in dist.get_backend_config():
            group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_first(self) -> bool:
        """True in the process that logs, decides and writes."""
        return self.number == 0

    @property
    def number_here(self) -> int:
        """The number of this process among those of its machine."""
        return 0 if self.count == 1 else dist.get_node_local_rank(self.number)

    def own(self, examples: Sequence[int]) -> list[int]:
        """Return those of the examples of all that are this process's: one in `count`, so that long
        ones that stand together are shared out."""
        return list(examples[self.number :: self.count])

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sums of the values over all processes."""
        if self.count == 1:
            return list(values)
        found = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(found, group=self.group)
        return [float(one) for one in found]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return of each flag whether a process has it."""
        return [one > 0 for one in self.sums([float(flag) for flag in flags])]

    def told(self, value: Any) -> list[Any]:
        """Return what each process says, as JSON holds it, the first one's first."""
        if self.count == 1:
            return [value]
        data = bytearray(json.dumps(value).encode())
        parts = self.gathered(torch.frombuffer(data, dtype=torch.uint8))
        return [json.loads(one.numpy().tobytes()) for one in parts]

    def once(self, make: Callable[[], Any]) -> Any:
        """Return what the first process makes, as JSON holds it; an error of it is one of all."""
        if self.count == 1:
            return make()
        found: list[Any] = []
        error: BaseException | None = None
        if self.is_first:
            try:
                found = [make()]
            except Exception as caught:
                error = caught
        said = self.told(None if error is None else _line(error))
        if error is not None:
            raise error
        if said[0] is not None:
            raise TrainingError("the first process of the run failed", got=said[0])
        return self.told(found)[0][0]

    def together(self, make: Callable[[], Any]) -> list[Any]:
        """Return what each process makes, as JSON holds it; an error of one is one of all."""
        if self.count == 1:
            return [make()]
        made, error = None, None
        try:
            made = make()
        except Exception as caught:
            error = caught
        said = self.told([made, None if error is None else _line(error)])
        if error is not None:
            raise error
        for number, (_, fault) in enumerate(said):
            if fault is not None:
                raise TrainingError(f"the process of rank {number} failed", got=fault)
        return [one for one, _ in said]

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes on the CPU, whose shapes and types may differ."""
        if self.count == 1:
            return [tensor]
        own = tensor.detach().cpu().contiguous()
        if own.dtype not in _KINDS:
            raise InvariantError("processes cannot gather this type", got=own.dtype)
        head = torch.zeros(10, dtype=torch.int64)
        head[: own.dim() + 2] = torch.tensor([_KINDS.index(own.dtype), own.dim(), *own.shape])
        heads = [torch.zeros_like(head) for _ in range(self.count)]
        dist.all_gather(heads, head, group=self.group)
        shapes = [one[2 : 2 + int(one[1])].tolist() for one in heads]
        kinds = [_KINDS[int(one[0])] for one in heads]
        empty = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
        most = max(one.nbytes for one in empty)
        if not most:
            return empty
        parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.count)]
        line = torch.zeros(most, dtype=torch.uint8)
        line[: own.nbytes] = own.reshape(-1).view(torch.uint8)
        dist.all_gather(parts, line, group=self.group)
        return [
            part[: one.nbytes].view(one.dtype).reshape(one.shape)
            for part, one in zip(parts, empty, strict=True)
        ]

    @contextmanager
    def answering(self, do: Callable[[], str]) -> Iterator[None]:
        """Turn an error of torch about a process that does not answer into a TrainingError; `do`:
        what helps then."""
        try:
            yield
        except RuntimeError as error:
            lost = not isinstance(error, EverystepError) and any(
                sign in str(error) for sign in _SIGNS_OF_LOSS
            )
            if self.count == 1 or not lost:
                raise
            raise TrainingError(
                "another process of the run was lost, or does not answer",
                wanted=f"{self.count} processes",
                got=str(error).splitlines()[0],
                do=do(),
            ) from error


ALONE = Ranks()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
