"""How long does the native call of a step take, and how near is it to the memory's limit?

    scripts/bench native_step [--formats Q8_0,Q4_1,Q4_0] [--cases 1x32,1x512,8x32,32x32]
                              [--cache-dtypes float32,float16,int8]

Measures the default model in several formats. The case 8x32 feeds one token each to 8 rows that
hold 32 positions; the figure is the median time of the compiled function over `--steps` steps. The
limit is the bytes of weights, keys and values that a step reads, divided by the memory's speed.
That is measured before and after each case, with a sum over 1 GiB, because it varies where memory
is shared with other machines. `--cache-dtypes` are the types in which rows keep keys and values.

`--prompt N` also times reading N tokens at once. `--engine 1,8` also times whole steps of the
engine with so many requests, and the part outside the compiled function: greedy, four beams, and
sampling with temperature, top-k and top-p (from the best of a row, from whole rows, and drawn from
torch's generator as transformers does), each with and without running ahead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from parts.clock import MemorySpeed
from parts.models import Models
from parts.report import options, write
from parts.steps import WARPERS, Kind

import everystep as es
from everystep.cache.formats import CacheDtype, KvFormat
from everystep.draws import SharedDraws
from everystep.engine import Engine, Lockstep
from everystep.executors.native import NativeExecutor
from everystep.models import Model, weight_bytes
from everystep.strategies import Beam, Greedy, Sample
from everystep.types import Verb, Work

PROMPT, WARM_UP = 16, 5
NONE = np.zeros(0, np.int64)
FREED = Work((Verb("free", 0),), NONE, NONE, NONE, NONE, NONE)


class Timed:
    """The library, with a clock around its step."""

    def __init__(self, library: object) -> None:
        self._library = library
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)

    def es_run(self, *arguments: object) -> int:
        begin = time.perf_counter()
        failed: int = self._library.es_run(*arguments)  # type: ignore[attr-defined]
        self.seconds.append(time.perf_counter() - begin)
        return failed


def feed(rows: int, start: int, count: int) -> Work:
    """The same number of random tokens for every row; rows begin to exist at position 0."""
    each = np.ones(rows, np.int64)
    verbs = () if start else tuple(Verb("allocate", row) for row in range(rows))
    tokens = np.random.default_rng(start).integers(100, 40000, rows * count)
    return Work(verbs, np.arange(rows), start * each, count * each, each, tokens)


def step_seconds(
    model: Model, kept: CacheDtype, rows: int, held: int, steps: int
) -> tuple[float, float]:
    """Medians of the native call and of all of `run`, in seconds."""
    executor = NativeExecutor(model, kept, ahead=False)
    executor._library = timed = Timed(executor._library)  # type: ignore[assignment]
    executor.run(feed(rows, 0, held))
    timed.seconds.clear()
    whole = []
    for step in range(steps):
        work = feed(rows, held + step, 1)
        begin = time.perf_counter()
        executor.run(work)
        whole.append(time.perf_counter() - begin)
    return statistics.median(timed.seconds), statistics.median(whole)


def prompt_ms(model: Model, kept: CacheDtype, count: int) -> float:
    """The median of the native calls that read a prompt, in milliseconds."""
    executor = NativeExecutor(model, kept, ahead=False)
    executor._library = timed = Timed(executor._library)  # type: ignore[assignment]
    for _ in range(5):
        executor.run(feed(1, 0, count))
        executor.run(FREED)
    return 1e3 * statistics.median(timed.seconds)


class WholeRows(NativeExecutor):
    """Reports whole rows alone."""

    def __init__(self, model: Model, *, ahead: bool) -> None:
        super().__init__(model, ahead=ahead)
        self.abilities -= {"best"}


SHARED = SharedDraws()
KINDS = (
    Kind("greedy", Greedy()),
    Kind("4 beams", Beam(4)),
    Kind("sample", Sample(), WARPERS),
    Kind("sample, whole rows", Sample(), WARPERS, listed=False),
    Kind("sample, unseeded", Sample(), WARPERS, lambda _: SHARED),
)


def engine_us(model: Model, kind: Kind, batch: int, steps: int, ahead: bool) -> dict[str, float]:
    """Medians of a step of one token per request: all of it, the native call, and the rest."""
    executor = (NativeExecutor if kind.listed else WholeRows)(model, ahead=ahead)
    executor._library = timed = Timed(executor._library)  # type: ignore[assignment]
    engine, whole = Engine(executor, Lockstep()), []
    for index in range(batch):
        ids = np.random.default_rng(index).integers(100, 40000, PROMPT)
        engine.submit(kind.request(index, ids, WARM_UP + steps + 1, end=-1))
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - begin)
    native, whole = timed.seconds[-steps:], whole[-steps:]
    beside = [all_of_it - call for all_of_it, call in zip(whole, native, strict=True)]
    parts = {"whole": whole, "native": native, "beside": beside}
    return {name: 1e6 * statistics.median(seconds) for name, seconds in parts.items()}


def engine_steps(
    format: str, model: Model, args: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Whole steps of the engine, in microseconds."""
    for batch in map(int, filter(None, args.engine.split(","))):
        for kind, ahead in product(KINDS, (False, True)):
            with MemorySpeed() as memory:
                found = engine_us(model, kind, batch, args.steps, ahead)
            about = {"format": format, "engine": kind.name, "requests": batch, "ahead": ahead}
            held = PROMPT + WARM_UP + args.steps // 2
            least = read_bytes(model, "float32", batch, held) / memory.bytes_per_s * 1e6
            yield {**about, **found, "limit": least, "share": least / found["whole"]}


def read_bytes(model: Model, kept: CacheDtype, rows: int, held: int) -> int:
    """Weights once, and keys and values of every row."""
    form = KvFormat(torch.float32, kept)
    sizes = [(one.heads, form.width(one.key_dim)) for (one,) in model.network.stores]
    position = 2 * sum(heads * width for heads, width in sizes) * form.dtype.itemsize
    return sum(weight_bytes(model).values()) + rows * held * position


def measure(kind: str, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """All cases of one format, times in milliseconds."""
    dtype = torch.float32 if kind == "F32" else None
    model = es.load_model(Models.default().gguf(kind), dtype=dtype).core
    for kept in args.cache_dtypes.split(","):
        about = {"format": kind, "kept": kept}
        for case in filter(None, args.cases.split(",")):
            rows, held = map(int, case.split("x"))
            with MemorySpeed() as memory:
                native, whole = step_seconds(model, kept, rows, held, args.steps)
            least = read_bytes(model, kept, rows, held + args.steps // 2) / memory.bytes_per_s
            found = {"native": native * 1e3, "run": whole * 1e3, "limit": least * 1e3}
            yield {**about, "rows": rows, "held": held, **found, "share": least / native}
        if args.prompt:
            yield {**about, "prompt": args.prompt, "native": prompt_ms(model, kept, args.prompt)}
    yield from engine_steps(kind, model, args)


def main() -> None:
    parser = options(__doc__, threads=2)
    parser.add_argument("--formats", default="Q8_0,Q4_1,Q4_0")
    parser.add_argument("--cases", default="1x32,1x512,8x32,32x32")
    parser.add_argument("--cache-dtypes", default="float32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--engine", default="1,32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for kind in args.formats.split(","):
        for row in measure(kind, args):
            print(
                {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True
            )
            rows.append(row)
    print(f"written to {write('native-step', args, {'rows': rows})}")


if __name__ == "__main__":
    main()
