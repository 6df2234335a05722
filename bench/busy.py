"""How much longer do steps take beside programs that want every core?

    scripts/bench busy [--programs 0,1,2] [--tokens 150] [--turns 3] [--threads 2] [--out NAME]

The default model answers one prompt while so many programs compute without an end, and a step is
the time between two tokens. Programs that share the cores evenly with the threads of a step leave
it threads / (threads + programs) of them, once there are more than cores. transformers does the
same work in float32, in turns with ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from parts.models import Models, reference
from parts.neighbours import busy
from parts.report import options, write

import everystep as es

_FIRST = 10  # steps that are left out
Ways = dict[str, Callable[[int], list[float]]]


def ways_of(prompt: str) -> Ways:
    """What takes the steps, by name: each returns when its tokens came."""
    model, tokenizer = es.load(Models.default().gguf("Q4_1"))
    theirs = reference()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])

    def ours(tokens: int) -> list[float]:
        asked: Any = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return [time.perf_counter() for _ in es.stream(model, tokenizer, prompt, **asked)]

    def transformers(tokens: int) -> list[float]:
        moments: list[float] = []

        def look(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            moments.append(time.perf_counter())
            return scores

        theirs.generate(ids, max_new_tokens=tokens, do_sample=False, logits_processor=[look])
        return moments

    return {"everystep, Q4_1": ours, "transformers, float32": transformers}


def measured(ways: Ways, counts: list[int], tokens: int, turns: int) -> list[dict[str, Any]]:
    """A row for each way and number of programs, of all turns."""
    steps: dict[tuple[str, int], list[float]] = {(way, n): [] for way in ways for n in counts}
    for _ in range(turns):
        for (way, count), found in steps.items():
            with busy(count):
                moments = ways[way](tokens)
            found += [late - early for early, late in pairwise(moments)][_FIRST:]
    return [{"way": way, "programs": count, **_summed(s)} for (way, count), s in steps.items()]


def _summed(steps: list[float]) -> dict[str, float]:
    return {
        "mean": statistics.mean(steps),
        "median": statistics.median(steps),
        "99 of 100": statistics.quantiles(steps, n=100)[98],
        "longest": max(steps),
    }


def main() -> None:
    """A line for each way and number of programs, and a dated file."""
    parser = options(__doc__ or "", threads=2)
    parser.add_argument("--programs", default="0,1,2")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = [int(one) for one in args.programs.split(",")]
    rows = measured(ways_of("A short story about the sea:"), counts, args.tokens, args.turns)
    for row in rows:
        told = "  ".join(f"{name} {1e3 * row[name]:7.1f}" for name in row if name not in _NAMED)
        print(f"{row['way']:24} beside {row['programs']}: {told} ms")
    write("busy", args, {"rows": rows}, ("transformers",))


_NAMED = ("way", "programs")

if __name__ == "__main__":
    main()
