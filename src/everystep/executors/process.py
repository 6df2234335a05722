"""What the process around a step may do to it: run out of memory, be forked, end.

Threads of torch's OpenMP pool stay where they are when a process is forked, and their child would
wait for them without end. So before each `os.fork` (multiprocessing too) the forking thread ends
its pool; both processes make a new one when they need it. Forks that Python does not know of, and
forks inside a parallel operation, are not covered.

When the interpreter ends, threads that still compute are stopped where they next want the
interpreter, and inside an operation of torch that ends the process by `abort`. So the end waits for
daemon threads that are inside this package, and those leave it at their next step, by SystemExit.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from everystep.errors import CapacityError

_PACKAGE = __name__.partition(".")[0]
_PATIENCE = 5.0  # seconds
_HARD = 2  # omp_pause_hard


@contextmanager
def in_process() -> Iterator[None]:
    """Run a step within.

    Raise SystemExit where the interpreter ends, CapacityError where memory runs out.
    """
    leave_if_ending()
    with _shortages("memory ran out in a step", "Run fewer or shorter sequences at once"):
        yield


@contextmanager
def loading() -> Iterator[None]:
    """Load a model within, on one thread.

    Raise CapacityError where memory runs out. What was freed goes back to the system.
    """
    what, do = "memory ran out while a model was loaded", "Free some, or choose quantize='int8'"
    try:
        with _shortages(what, do), one_thread():
            yield
    finally:
        _give_back()


def _give_back() -> None:
    """Return free memory to the system, where the allocator is glibc's: it keeps what it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _shortages(what: str, do: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        got = str(error).partition("\n")[0] or None
        raise CapacityError(what, got=got, do=do) from error


def leave_if_ending() -> None:
    """Raise SystemExit in a daemon thread once the interpreter has begun to end."""
    if _end.begun and threading.get_ident() != _end.thread:
        raise SystemExit("the interpreter is ending")


def is_shortage(error: Exception) -> bool:
    """Return whether Python, numpy or torch says with this error that memory ran out."""
    # On the CPU torch raises a plain RuntimeError.
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "allocate memory" in str(error)


def _of_openmp(name: str) -> Callable[[int], object]:
    """Return a function of the OpenMP that torch was linked with.

    Where there is none, it does nothing.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library))[name]
    except (OSError, AttributeError):
        return lambda _: None
    function.argtypes, function.restype = (ctypes.c_int,), None
    return function


class _End:
    """The end of the interpreter: not begun, until the last of its exit functions runs."""

    begun = False
    forked = False
    thread: int | None = None

    def note_fork(self) -> None:
        """Note that this is a forked child, with the memory of threads that it does not have."""
        self.forked = True

    def begin(self) -> None:
        """Wait until other threads have left this package, `_PATIENCE` seconds at most."""
        if self.forked:
            # Torch has a second pool of threads, which it joins when the process ends, though they
            # are in the parent. Being set to what it is, torch replaces the pool by one of its own.
            torch.set_num_threads(torch.get_num_threads())
        self.thread, self.begun = threading.get_ident(), True
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and any(map(_is_inside, self._others())):
            time.sleep(0.001)

    def _others(self) -> list[FrameType]:
        frames = sys._current_frames().items()
        return [frame for thread, frame in frames if thread != self.thread]


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            return True
        frame = frame.f_back
    return False


set_threads_here = _of_openmp("omp_set_num_threads")
"""Torch uses so many threads for what the calling thread asks of it. For other threads, and for
those to come, nothing changes. Called in a `finally`, no interrupt comes between."""
_pause = _of_openmp("omp_pause_resource_all")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work in the calling thread alone within.

    What is made of thousands of small operations would wait for the slowest of all threads in each
    of them, which on a busy machine takes ten times as long.
    """
    threads = torch.get_num_threads()
    try:
        set_threads_here(1)
        yield
    finally:
        set_threads_here(threads)


def pause_torch_threads() -> None:
    """End the pool of threads that torch keeps for the calling thread."""
    _pause(_HARD)


_end = _End()
atexit.register(_end.begin)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=pause_torch_threads, after_in_child=_end.note_fork)
