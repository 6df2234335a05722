"""The processor: what it is called, and how many of its threads this process may use."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_NAMES = Path("/proc/cpuinfo")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def processor_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        lines = _NAMES.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def usable_processors() -> int:
    """Return how many threads can run at once.

    These are as many as the system lets this process run on, or fewer where its control group may
    use less time than they have.
    """
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return found
    return found if quota == "max" else min(found, max(1, math.ceil(int(quota) / int(period))))
