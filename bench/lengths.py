"""Does the cost of a token follow its bytes and operations, or are there cliffs?

    scripts/bench lengths [--format Q4_1] [--longest 4000] [--widest 64] [--out NAME]

Measures the seconds per token of reading prompts of 8 to 4,000 tokens, of decoding after them, and
of decoding batches of 1 to 64, with the default model, natively and greedily. A model predicts each
step: the time for its bytes (weights once, keys and values of every row) at the memory's speed in
the same run, or the time for its operations at the best rate seen for that kind of weights,
whichever is longer. A cliff is a point whose cost divided by the prediction is higher than at its
left neighbour; its factor says how much higher. Writes to bench/results/; `plot` draws it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from parts.models import Models
from parts.processes import EngineProcess
from parts.report import options, write

from everystep.memory import memory_speed

LENGTHS = (8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513)
LONG = (768, 1024, 1025, 1536, 2048, 2049, 3072, 4000)
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 40, 48, 56, 64)
TOKENS = 24
BOUND = 1.5


@dataclass(frozen=True)
class Shape:
    """What a step costs: bytes of weights and of a position; operations of a token in the layers,
    per position that it sees, and where its row gets scores."""

    weight_bytes: int
    position_bytes: int
    token_operations: int
    seen_operations: int
    head_operations: int

    @classmethod
    def of(cls, about: dict[str, Any], config: dict[str, Any]) -> Shape:
        """From what an engine says of itself and the model's config."""
        width, layers = config["hidden_size"], config["num_hidden_layers"]
        keys = config["num_key_value_heads"] / config["num_attention_heads"]
        layer = width * width * (2 + 2 * keys) + 3 * width * config["intermediate_size"]
        return cls(
            weight_bytes=about["weight_bytes"],
            position_bytes=about["position_bytes"],
            token_operations=int(2 * layers * layer),
            seen_operations=4 * layers * width,
            head_operations=2 * width * config["vocab_size"],
        )

    def step(self, rows: int, fed: int, seen: float) -> tuple[float, float]:
        """Bytes and operations of a step: rows, tokens fed to each, positions that these see."""
        bytes = self.weight_bytes + rows * seen * self.position_bytes
        token = self.token_operations + seen * self.seen_operations
        return bytes, rows * (fed * token + self.head_operations)


@dataclass(frozen=True)
class Point:
    """A measured cost: `at` is the length or the batch, `seconds` those of a step."""

    curve: str
    at: int
    tokens: int
    seconds: float
    bytes: float
    operations: float


def measure(process: EngineProcess, shape: Shape, args: argparse.Namespace) -> list[Point]:
    """Points of the three curves."""
    points = []
    for length in (n for n in LENGTHS + LONG if n <= args.longest):
        first, step = _seconds(process, 1, length, args.repeats)
        work = shape.step(1, length, length / 2)
        points.append(Point("prompt", length, length, first, *work))
        work = shape.step(1, 1, length + TOKENS / 2)
        points.append(Point("decode, by length", length, 1, step, *work))
        print(f"{length:5} tokens: {first / length * 1e6:8.1f} us, then {step * 1e6:8.1f} us each")
    for batch in (n for n in BATCHES if n <= args.widest):
        _, step = _seconds(process, batch, 32, args.repeats)
        work = shape.step(batch, 1, 32 + TOKENS / 2)
        points.append(Point("decode, by batch", batch, batch, step, *work))
        print(f"{batch:5} rows:   {step / batch * 1e6:8.1f} us a token")
    return points


def _seconds(process: EngineProcess, batch: int, length: int, repeats: int) -> tuple[float, float]:
    """Medians of the time to the first token and of a step after it."""
    generator = torch.Generator().manual_seed(batch * 10_000 + length)
    firsts, steps = [], []
    for run in range(repeats + 1):
        prompts = torch.randint(100, 40_000, (batch, length), generator=generator).tolist()
        answer = process.ask(prompts, TOKENS if run else 2)
        firsts.append(answer["first"])
        steps.append(answer["rest"] / (TOKENS - 1))
    return statistics.median(firsts[1:]), statistics.median(steps[1:])


def modelled(points: Iterable[Point], bytes_per_s: float) -> list[dict[str, Any]]:
    """Each point with the model's seconds and the cost's factor over them."""
    points = list(points)
    rate = max(point.operations / point.seconds for point in points)
    rows = []
    for point in points:
        model = max(point.bytes / bytes_per_s, point.operations / rate)
        rows.append(
            {
                "curve": point.curve,
                "at": point.at,
                "token_s": point.seconds / point.tokens,
                "model_s": model / point.tokens,
                "over_model": point.seconds / model,
            }
        )
    return rows


def cliffs(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Per curve the greatest rise of cost over model from a point to the next one."""
    for curve in dict.fromkeys(row["curve"] for row in rows):
        line = [row for row in rows if row["curve"] == curve]
        rises = [
            (right["over_model"] / left["over_model"], right["at"])
            for left, right in pairwise(line)
        ]
        factor, at = max(rises)
        yield {"curve": curve, "at": at, "factor": factor, "bound": BOUND}


def main() -> None:
    """Measures the three curves and writes a dated file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--format", default="Q4_1")
    parser.add_argument("--longest", type=int, default=LONG[-1])
    parser.add_argument("--widest", type=int, default=BATCHES[-1])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path, speed = Models.default().gguf(args.format), memory_speed()
    process = EngineProcess(sys.executable, "everystep_engine.py", path, args.threads)
    try:
        shape = Shape.of(process.about, process.about["config"])
        rows = modelled(measure(process, shape, args), speed)
    finally:
        process.close()
    steepest = list(cliffs(rows))
    for cliff in steepest:
        print(f"{cliff['curve']}: at most {cliff['factor']:.2f} x, at {cliff['at']}")
    content = {"bytes_per_s": speed, "cliffs": steepest, "rows": rows}
    write(f"lengths-{args.format}", args, content)


if __name__ == "__main__":
    main()
