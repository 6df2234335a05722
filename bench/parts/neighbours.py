"""Programs that keep cores busy beside what is measured."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_START = 0.3  # seconds until a program computes


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """So many programs compute without an end."""
    line = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(line) for _ in range(programs)]
    try:
        time.sleep(_START)
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()
