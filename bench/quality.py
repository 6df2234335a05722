"""What do quantised weights lose against float32, and against llama.cpp on the same files?

    scripts/bench quality [--every N] [--formats int8,Q4_1,...] [--llama] [--out NAME]

Reads a text of 62,140 tokens (bench/data) in windows of 512 with a stride of 384, and scores the
positions that each window adds, so that each has at least 128 tokens before it. Prints, and writes
to bench/results/, per format the perplexity, the mean Kullback-Leibler divergence from float32 in
nats, and how often the most probable token is the same as in float32. float32 is the shipped Q4_1
file dequantised; int8, int4, Q8_0 and Q4_0 are rounded from it, Q4_K_M, Q5_K_M and Q6_K by
llama.cpp. `--llama` installs llama.cpp where `peers` does. A type of keys and values may follow a
slash: `float32/int8`, `Q4_1/float16`. `Q4_K_M:values` are the dequantised values of that file.
`q4_k_m` and its like are files that `everystep quantize` makes of the same values, `q4_k_m:weighed`
with the last 20,000 characters of the text as its importance, which are then not scored.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from parts.environments import PEERS, python_of
from parts.models import SHIPPED, Models
from parts.report import options, write
from torch import Tensor

import everystep
from everystep.cache.formats import CacheDtype
from everystep.executors.native import NativeExecutor
from everystep.files.gguf import read_gguf
from everystep.models import Model, build_gguf_model, build_model, named_weights
from everystep.text import Tokenizer
from everystep.types import Verb, Work

HERE = Path(__file__).parent
WINDOW, STRIDE = 512, 384
FORMATS = ("int8", "int4", "Q8_0", "Q4_1", "Q4_0")
FILES = ("Q8_0", "Q4_1", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")
OWN = ("q8_0", "q6_k", "q5_k_m", "q4_k_m")
IMPORTANCE = 20_000

Engine = Callable[[list[int]], Tensor]
"""Ids -> (T, V) float32 logits."""


@dataclass
class Tally:
    """Sums over scored positions."""

    positions: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, logits: Tensor, base: Tensor, targets: Tensor) -> None:
        """Log-probabilities of an engine and of float32, (T, V), and the ids that follow, (T,)."""
        self.positions += len(targets)
        self.surprise -= float(logits.gather(1, targets[:, None]).sum(dtype=torch.float64))
        pointwise = base.exp() * (base - logits)
        self.divergence += float(pointwise.sum(dtype=torch.float64))
        self.agreed += int((logits.argmax(1) == base.argmax(1)).sum())

    def figures(self) -> dict[str, float]:
        """The means."""
        count = self.positions
        return {
            "positions": count,
            "perplexity": round(math.exp(self.surprise / count), 4),
            "kl_divergence": round(self.divergence / count, 6),
            "top1_agreement": round(self.agreed / count, 5),
        }


@dataclass(frozen=True)
class Held:
    """A model's weights as a source of another."""

    weights: dict[str, Tensor]

    def names(self) -> list[str]:
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.weights[name].shape)

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.weights[name].to(dtype)


def windows(ids: list[int]) -> Iterator[tuple[list[int], int]]:
    """(ids of a window, how many of its last ones are scored)."""
    for start in range(0, len(ids) - WINDOW + 1, STRIDE):
        yield ids[start : start + WINDOW], WINDOW - 1 if start == 0 else STRIDE


def engine_of(model: Model, kept: CacheDtype | None = None) -> Engine:
    """Ours, on the native executor: one row, fed at once."""
    executor = NativeExecutor(model, kept)

    def logits(ids: list[int]) -> Tensor:
        row, start, count = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(ids)])
        verbs = (Verb("allocate", 0),)
        found = executor.run(Work(verbs, row, start, count, count, np.array(ids)))
        nothing = np.zeros(0, np.int64)
        executor.run(Work((Verb("free", 0),), *(nothing,) * 5))
        return found.logits

    return logits


def ours(path: Path, dtype: torch.dtype | None = None) -> Model:
    """The model of a file as the native executor reads it; floats where a type is given."""
    return build_gguf_model(read_gguf(path), dtype=dtype, in_panels=lambda spec: True)


def llama_engine(python: str, model: Path, threads: int, folder: Path) -> Engine:
    """llama.cpp in a process of its own, which ends with this one."""
    target = folder / f"{model.stem}.logits"
    script = HERE / "parts" / "llama_logits.py"
    line = [python, str(script), str(model), str(threads), str(WINDOW), str(target)]
    child = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    asked, answered = child.stdin, child.stdout

    def logits(ids: list[int]) -> Tensor:
        asked.write(json.dumps(ids) + "\n")
        asked.flush()
        shape = json.loads(answered.readline())
        return torch.from_numpy(np.fromfile(target, np.float32)).view(shape)

    return logits


def rounded(base: Model, format: Any) -> Model:
    """The float32 model in int8 or int4."""
    return build_model(
        base.config.to_dict(),
        Held(dict(named_weights(base))),
        quantize=format,
        in_panels=lambda spec: True,
    )


def engines(args: argparse.Namespace, models: Models, folder: Path, text: str) -> dict[str, Engine]:
    """Every engine by name, float32 first. `text`: what importance is taken from."""
    base = ours(models.gguf(SHIPPED), torch.float32)
    found = {"float32": engine_of(base)}
    for name in args.formats.split(","):
        weights, _, kept = name.partition("/")
        weights, _, values = weights.partition(":")
        if weights in FILES:
            path = models.quantised(weights) if "_K" in weights else models.gguf(weights)
            model = ours(path, torch.float32 if values else None)
        elif weights in OWN:
            target = folder / f"{weights}{values}.gguf"
            importance = text if values == "weighed" else None
            written: Any = weights
            model = ours(
                everystep.quantize(models.float32(), target, written, importance=importance)
            )
        else:
            model = base if weights == "float32" else rounded(base, weights)
        found[name] = engine_of(model, cast(CacheDtype, kept) if kept else None)
        if args.llama and name in FILES:
            python = str(python_of(PEERS["llama.cpp"], models.folder))
            found[f"llama.cpp {name}"] = llama_engine(python, path, args.threads, folder)
    return found


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Figures by engine; every engine reads a window before the next window is read."""
    text = (HERE / "data" / "opticks.txt").read_text(encoding="utf-8")
    models = Models.default()
    tokenizer = Tokenizer.from_gguf(read_gguf(models.gguf(SHIPPED)).metadata)
    kept = text[:-IMPORTANCE] if "weighed" in args.formats else text
    ids = list(tokenizer(kept)["input_ids"])
    every = engines(args, models, folder, text[-IMPORTANCE:])
    tallies = {name: Tally() for name in every}
    for index, (window, scored) in enumerate(windows(ids)):
        if index % args.every:
            continue
        targets = torch.tensor(window[-scored:])
        base = None
        for name, engine in every.items():
            logits = engine(window)[-scored - 1 : -1].log_softmax(-1)
            base = logits if base is None else base
            tallies[name].add(logits, base, targets)
        print(index, {name: tally.figures() for name, tally in tallies.items()}, flush=True)
    return {name: tally.figures() for name, tally in tallies.items()}


def main() -> None:
    """Reads the text with every engine and writes a dated file."""
    parser = options(__doc__, threads=torch.get_num_threads())
    parser.add_argument("--every", type=int, default=1, help="read only every Nth window")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--llama", action="store_true", help="beside llama.cpp on the same files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, Path(folder))
    print(json.dumps(figures, indent=1))
    write("quality", args, {"window": WINDOW, "stride": STRIDE, "figures": figures})


if __name__ == "__main__":
    main()
