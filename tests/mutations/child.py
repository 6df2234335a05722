"""Reads broken inputs of one format in a process of its own, which may end by any of them.

    python -m tests.mutations.child FOLDER FORMAT SEED FIRST END

The seed and n decide how input number n is broken. Before each one its number is in the file
FOLDER/at, so that whoever started this knows which one ended it. What is found is printed as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch

from everystep.errors import EverystepError
from tests.mutations.formats import Format, formats

SECONDS = 5.0  # of processor time for one input
MEMORY = 1 << 30  # bytes above what the process has before the first one


def broken(format: Format, seed: int, number: int) -> bytes:
    """Input `number` of a seed."""
    rng = random.Random(seed * 1_000_003 + number)
    data = rng.choice(format.mutators)(rng, format.whole)
    return rng.choice(format.mutators)(rng, data) if data and rng.random() < 0.2 else data


def main() -> None:
    """Reads the inputs [FIRST, END)."""
    folder, name, *numbers = sys.argv[1:]
    seed, first, end = map(int, numbers)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(dir=folder) as own, open(Path(folder) / "at", "wb") as at:
        format = formats(Path(own))[name]
        format.read()  # which is whole, and imports what reading needs
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, end):
            at.seek(0)
            at.write(b"%12d" % number)
            at.flush()
            try:
                data = broken(format, seed, number)
            except (ValueError, IndexError):  # a second change finds no JSON, or nothing
                continue
            format.path.write_bytes(data)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
            try:
                format.read()
                outcomes["read"] += 1
            except EverystepError:
                outcomes["refused"] += 1
            except BaseException:
                findings.append((number, traceback.format_exc(limit=-4)[-1500:]))
            signal.setitimer(signal.ITIMER_PROF, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(json.dumps({"outcomes": outcomes, "findings": findings, "grown": grown}))


if __name__ == "__main__":
    main()
