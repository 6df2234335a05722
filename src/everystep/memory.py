"""How much memory there is, how fast it is, and an error where something needs more.

Needs are the least that something takes for certain: what is refused could never have run.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from pathlib import Path

import torch

from everystep.errors import CapacityError

# What is smaller is not worth asking the system for.
_SMALL = 256 << 20
_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self/status")


def require_memory(needed: int, what: str, do: str, device: torch.device | None = None) -> None:
    """Raise CapacityError if fewer than `needed` bytes are left on the device (None: the CPU)."""
    if needed < _SMALL:
        return
    left = memory_left(device)
    if left is not None and needed > left:
        wanted, got = f"at most {_readable(left)}", f"{_readable(needed)} at least"
        raise CapacityError(f"{what} needs more memory than is left", wanted=wanted, got=got, do=do)


def memory_left(device: torch.device | None = None) -> int | None:
    """Return how many bytes this process could still get, None where the system does not say.

    On the CPU that is what the system says is available, less where a control group allows less.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [one for one in (_of_system(), _of_group()) if one is not None]
    return min(found, default=None)


def peak_memory(device: torch.device | None = None) -> int | None:
    """Return the most bytes that this process has held at once, on a GPU the tensors there; None
    where the system does not say."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    line = next((x for x in _text(_PROCESS).splitlines() if x.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) << 10


def give_back() -> None:
    """Give the system back what was freed, where the allocator would keep it for later."""
    torch.cuda.empty_cache()  # which does nothing where there is none
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)


def memory_speed(size: int = 1 << 30) -> float:
    """Return the bytes per second of a sum over so many bytes, on the threads that torch has."""
    values = torch.ones(size // 4)
    taken = []
    for _ in range(8):
        begin = time.perf_counter()
        values.sum()
        taken.append(time.perf_counter() - begin)
    return values.nbytes / statistics.median(taken[3:])


def _of_system() -> int | None:
    lines = _text(_SYSTEM).splitlines()
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) << 10


def _of_group() -> int | None:
    """Return what the control group has left; pages of files that it counts could be dropped."""
    most, used = (_text(_GROUP / name).strip() for name in ("memory.max", "memory.current"))
    if not most.isdigit() or not used.isdigit():
        return None
    lines = (line.split() for line in _text(_GROUP / "memory.stat").splitlines())
    files = next((int(number) for name, number in lines if name == "file"), 0)
    return max(int(most) - int(used) + files, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _readable(size: int) -> str:
    if size >= 10**300:
        return f"10^{int(math.log10(size)) - 9} GB"
    return f"{size / 1e9:.1f} GB" if size < 10**15 else f"{size / 1e9:.1e} GB"
