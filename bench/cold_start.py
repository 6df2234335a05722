"""How long after the start of a process does `everystep generate` write its first token?

scripts/bench cold_start [--turns 9] [--out NAME]

Beside it a process that imports torch and nothing else: until it has the module, and until it has
ended. The default model, whose file is in the page cache; the two kinds of process take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from parts.clock import alternated
from parts.report import options, write

IMPORT = [sys.executable, "-c", "import torch; print(torch.__version__, flush=True)"]
GENERATE = [sys.executable, "-m", "everystep", "generate", "-n", "1", "The capital of France is"]


def process(command: list[str], threads: int) -> tuple[float, float]:
    """Seconds until the first byte of output, and until the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    begin = time.perf_counter()
    started = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert started.stdout is not None
    started.stdout.read(1)
    first = time.perf_counter() - begin
    started.communicate()
    if started.returncode:
        raise RuntimeError(f"{command} ended with {started.returncode}")
    return first, time.perf_counter() - begin


def main() -> None:
    """Medians per kind of process, and a dated file."""
    parser = options(__doc__ or "", threads=2)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    pairs = alternated(
        args.turns + 1,
        lambda: process(IMPORT, args.threads),
        lambda: process(GENERATE, args.threads),
    )[1:]
    rows = []
    for name, taken in zip(("import torch", "generate"), zip(*pairs, strict=True), strict=True):
        first, end = (statistics.median(one) for one in zip(*taken, strict=True))
        print(f"{name:14} first output {first:.2f} s, end {end:.2f} s")
        rows.append({"process": name, "first_s": first, "end_s": end})
    write("cold-start", args, {"rows": rows})


if __name__ == "__main__":
    main()
