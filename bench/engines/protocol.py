"""How an engine's process answers questions about its speed.

Arguments: model, threads. A line says that the model is loaded; then each JSON object {"prompts":
[[ids]], "tokens": n} on standard input gets a line {"first": seconds until every row has its first
new token, "rest": seconds of the others, "peak_mib": the most memory so far}. Greedy, nothing ends
a row early, wall clock. Each engine runs in an environment of its own, so this file needs nothing
but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

Answer = Callable[[list[list[int]], int], tuple[float, float]]
"""Prompts and how many new tokens per row -> the seconds of the first and of the others."""


Load = Callable[[str, int], tuple[Answer, dict[str, object]]]
"""Model and threads -> what answers, and what there is to say about it."""


def serve(load: Load) -> None:
    """Loads the model that the arguments name, then answers until standard input ends."""
    # Libraries write to standard output too; what is meant for the reader goes past them.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin = time.perf_counter()
    answer, about = load(sys.argv[1], int(sys.argv[2]))
    _say(lines, {"load_s": time.perf_counter() - begin, **about})
    for line in sys.stdin:
        asked = json.loads(line)
        first, rest = answer(asked["prompts"], asked["tokens"])
        _say(lines, {"first": first, "rest": rest, "peak_mib": _peak_mib()})


def _say(lines: TextIO, answer: dict[str, object]) -> None:
    print(json.dumps(answer), file=lines, flush=True)


def _peak_mib() -> float:
    # What `getrusage` reports begins with the peak of the process that started this one.
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) / 1024


BY_DIFFERENCE: dict[str, object] = {"by_difference": True}
"""What an engine says of itself whose answers are those of `by_difference`."""


def by_difference(seconds: Callable[[list[list[int]], int], float]) -> Answer:
    """For an engine that reports a batch only at its end: seconds of a whole call.

    The first token is a call of its own, the others are what a longer call takes beyond that.
    """

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        first = seconds(prompts, 1)
        return first, seconds(prompts, tokens) - first

    return answer


def padded(prompts: list[list[int]], pad: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of one length, padded on the left, and masks that are 1 where a prompt's ids are."""
    longest = max(map(len, prompts))
    gaps = [longest - len(ids) for ids in prompts]
    rows = [[pad] * gap + ids for gap, ids in zip(gaps, prompts, strict=True)]
    return rows, [[0] * gap + [1] * (longest - gap) for gap in gaps]


def check_counts(rows: Sequence[Sequence[int]], prompts: list[list[int]], tokens: int) -> None:
    """Raises if an engine did less than it was asked to do."""
    counts = [len(row) for row in rows]
    if counts != [tokens] * len(prompts):
        raise RuntimeError(f"wanted {tokens} new tokens for each of {len(prompts)}, got {counts}")
