"""The processes that hold a model in parts, and what goes between them: numbers, and no objects.

They meet at a store, as often as one of them has been lost: after any error in a step all leave,
since none can know where another has stopped, and the next step begins with another meeting. Only
the first waits for a limited time; the others wait for it as long as it lives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from everystep.errors import RankError, UnsupportedError
from everystep.nn.modes import ordinary_mode
from everystep.nn.split import Split, entries_of

Store = Any
"""Where processes meet: a store of torch's, which has no types."""

_torch: Any = dist  # of which these classes are not exported
_FOREVER = timedelta(days=1000)
_LOOPBACK = "127.0.0.1"


@final
class RankGroup(Split):
    """The processes as one of them sees them. `patience`: the seconds after which one that does not
    answer is taken for lost, None for as long as it takes. `here`: all are on this machine, and
    nothing is to be reached from another."""

    def __init__(
        self, number: int, count: int, store: Store, patience: float | None, *, here: bool
    ) -> None:
        self.number, self.count, self.store = number, count, store
        self.patience = patience
        self.meeting = 0
        self._here = here
        self._met: Any = None  # torch's group, whose class has no types
        self._stepping: int | None = None

    @property
    def met(self) -> bool:
        """True from a meeting to the next error."""
        return self._met is not None

    def meet(self, meeting: int) -> None:
        """Meet the others, who all come to the meeting of this number; RankError where one does
        not."""
        options = _torch.ProcessGroupGloo._Options()
        options._timeout = _FOREVER if self.patience is None else timedelta(seconds=self.patience)
        if self._here:
            options._devices = [_torch.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        else:
            options._devices = [_torch.ProcessGroupGloo.create_default_device()]
        place = _torch.PrefixStore(f"meeting {meeting}", self.store)
        self.meeting = meeting
        with self._answering():
            self._met = _torch.ProcessGroupGloo(place, self.number, self.count, options)

    def leave(self) -> None:
        """Leave the others, who notice it at once."""
        self._met = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let this thread compute a step with the others within."""
        self._stepping = threading.get_ident()
        try:
            yield
        finally:
            self._stepping = None

    def total(self, part: Tensor) -> Tensor:
        whole = part.contiguous()
        with self._answering():
            self._own().allreduce([whole]).wait()
        return whole

    def joined(self, part: Tensor, dim: int, size: int) -> Tensor:
        sizes = [
            end - first
            for first, end in (entries_of(size, n, self.count) for n in range(self.count))
        ]
        line = part.movedim(dim, 0)
        most = max(sizes)
        if line.shape[0] < most:
            line = torch.cat([line, line.new_zeros(most - line.shape[0], *line.shape[1:])])
        line = line.contiguous()
        options = _torch.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(line) for _ in sizes] if self.is_first else []
        with self._answering():
            self._own().gather([parts] if parts else [], [line], options).wait()
        if not parts:
            return part
        found = torch.cat([one[:count] for one, count in zip(parts, sizes, strict=True)])
        return found.movedim(0, dim)

    def send(self, message: bytes) -> None:
        """Send bytes from the first process to all others."""
        with self._answering(), ordinary_mode():
            self._broadcast(torch.tensor([len(message)]))
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Return the next bytes that the first process sends."""
        with self._answering(), ordinary_mode():
            size = self._broadcast(torch.zeros(1, dtype=torch.int64))
            data = self._broadcast(torch.zeros(int(size), dtype=torch.uint8))
        return data.numpy().tobytes()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        self._own().broadcast(tensor, 0).wait()
        return tensor

    def _own(self) -> Any:
        if self._stepping != threading.get_ident():
            raise UnsupportedError(
                "the weights lie in parts on several processes, and this would read the whole",
                wanted="a call that generates, or that scores texts",
                got=f"{self.count} processes",
                do="Load the model without parallel for that",
            )
        if self._met is None:
            raise RankError("the processes of a model have not met")
        return self._met

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn torch's error about a process that does not answer into a RankError."""
        try:
            yield
        except (RankError, UnsupportedError):
            raise
        except RuntimeError as error:
            raise RankError(
                "a process that holds a part of the model does not answer",
                got=str(error).partition("\n")[0],
            ) from error

    # --- what is written down for the others ------------------------------------------------------

    def note(self, what: str, text: str = "") -> None:
        """Write something down where the others can read it; nothing where nobody can any more."""
        with suppress(RuntimeError):
            self.store.set(what, text)

    def noted(self, what: str) -> str | None:
        """Return what was written down, None for nothing."""
        if not self.store.check([what]):
            return None
        return str(self.store.get(what).decode())

    def fail(self, error: BaseException) -> None:
        """Write down why this process leaves."""
        self.note(failure(self.number, self.meeting), f"{type(error).__name__}: {error}")


def file_store(file: Path) -> Store:
    """Return a store in a file, for processes of one machine."""
    return _torch.FileStore(str(file), -1)


def failure(number: int, meeting: int) -> str:
    """Return under what the process of a number writes why it left a meeting."""
    return f"failure {number} {meeting}"


def readiness(number: int, meeting: int) -> str:
    """Return under what the process of a number writes that it comes to a meeting."""
    return f"ready {number} {meeting}"


def call_for(meeting: int) -> str:
    """Return under what the first process calls for a meeting."""
    return f"meet {meeting}"


OVER = "over"
"""The others end when this is written down."""
