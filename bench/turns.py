"""Is this version slower anywhere than an earlier one?

    scripts/bench turns --before FOLDER [--pairs 9] [--only TEXT] [--out NAME]

FOLDER is a checkout of the earlier version with its native library built. Each version has a
process of its own, and the two take turns on the same short piece of work, first one, then the
other, so that a machine whose speed swings is as fast for both. The ratio of a pair is the time
before, divided by the time now; printed and written to bench/results/ are the medians of both and
the median and quartiles of the ratios. Covers `generate` on the native executor and on torch
operators, and steps of the engine alone, as `bench/engine_overhead.py` and `bench/native_step.py`
of each version time them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A piece of work; `kind`: "generate", "prompt", "overhead" or "beside".

    `model`: a format for the native executor, "torch" for float32 on torch operators, or how many
    tokens the vocabulary of an engine without a model has. `way`: how it decodes.
    """

    kind: str
    model: str
    way: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.model} {self.way} b{self.batch}"


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4},
    "sample": {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 0.8, "seed": 1},
}
# The places of the same ways among the kinds of the other benchmarks.
OVERHEAD = {"greedy": 0, "sample": 4, "4 beams": 5}
BESIDE = {"greedy": 0, "4 beams": 1, "sample": 2}
CASES = (
    *(Case("generate", "Q4_1", "greedy", batch) for batch in (1, 8, 32)),
    Case("generate", "Q4_1", "sample", 1),
    *(Case("generate", "Q4_1", "4 beams", batch) for batch in (1, 8)),
    *(Case("generate", "Q8_0", "greedy", batch) for batch in (1, 8)),
    *(Case("generate", "F32", "greedy", batch) for batch in (1, 8)),
    *(Case("prompt", model, "greedy", 1) for model in ("Q4_1", "F32")),
    *(Case("generate", "torch", "greedy", batch) for batch in (1, 8)),
    Case("generate", "torch", "4 beams", 1),
    Case("prompt", "torch", "greedy", 1),
    *(Case("beside", "Q4_1", way, batch) for way in BESIDE for batch in (1, 8)),
    *(Case("overhead", "1000", way, batch) for way in OVERHEAD for batch in (1, 32)),
    *(Case("overhead", "49152", way, batch) for way in OVERHEAD for batch in (1, 8)),
)


# --- one version ----------------------------------------------------------------------------------


def work_of(case: Case, threads: int) -> Callable[[], float]:
    """Does the case once more and returns its seconds."""
    if case.kind == "overhead":
        import engine_overhead

        kind = engine_overhead.KINDS[OVERHEAD[case.way]]
        return lambda: engine_overhead.measure(kind, int(case.model), case.batch, 40) / 1e6
    model = _model(case.model)
    if case.kind == "beside":
        import native_step

        step = native_step.KINDS[BESIDE[case.way]]
        core = model.core
        return lambda: native_step.engine_us(core, step, case.batch, 40, False)["beside"] / 1e6
    return _generate(model, case)


def _model(name: str) -> Any:
    from parts.models import Models

    import everystep as es

    if name == "torch":
        return es.load_model(Models.default().float32(), executor="torch")
    import torch

    dtype = torch.float32 if name == "F32" else None
    return es.load_model(Models.default().gguf(name), dtype=dtype)


def _generate(model: Any, case: Case) -> Callable[[], float]:
    import torch

    length, new = (512, 1) if case.kind == "prompt" else (32, 24)
    ids = torch.randint(
        100, 40000, (case.batch, length), generator=torch.Generator().manual_seed(0)
    )
    model.generation_config.eos_token_id = None

    def run() -> float:
        begin = time.perf_counter()
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **WAYS[case.way]
        )
        seconds = time.perf_counter() - begin
        if out.shape[1] != length + new:
            raise RuntimeError(f"{case.name} made {out.shape[1] - length} tokens, not {new}")
        return seconds

    return run


def serve(threads: int) -> None:
    """Answers lines: a case is prepared and warmed up, an empty line is one more turn of it."""
    import torch

    torch.set_num_threads(threads)
    work: Callable[[], float] = float
    for line in sys.stdin:
        if line.strip():
            work = work_of(Case(**json.loads(line)), threads)
        print(json.dumps(work()), file=sys.__stdout__, flush=True)


# --- both -----------------------------------------------------------------------------------------


class Version:
    """The process of one checkout."""

    def __init__(self, root: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'bench'}"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=root,
        )

    def turn(self, case: Case | None = None) -> float:
        """Seconds of one more turn, or of the first one of a new case."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(
            "" if case is None else json.dumps(asdict(case)), file=self._process.stdin, flush=True
        )
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process ended in {case}")
        return float(json.loads(answer))


def compare(case: Case, before: Version, now: Version, pairs: int) -> dict[str, Any]:
    """Medians in milliseconds, and the ratios of pairs."""
    from parts.clock import alternated

    for version in (before, now):
        version.turn(case)
    times = alternated(pairs, before.turn, now.turn)
    first, second = (statistics.median(one) * 1e3 for one in zip(*times, strict=True))
    ratios = statistics.quantiles([a / b for a, b in times], n=4)
    return {"case": case.name, "before_ms": first, "now_ms": second, "ratio": ratios}


def main() -> None:
    """Compares every case and writes a dated file."""
    sys.path.append(str(Path(__file__).parent))
    from parts.report import options, write

    parser = options(__doc__ or "", threads=2)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.threads)
        return
    if args.before is None:
        parser.error("--before is missing: the folder of an earlier checkout")
    rows = []
    before, now = (Version(root, args.threads) for root in (args.before.resolve(), ROOT))
    for case in (case for case in CASES if args.only in case.name):
        row = compare(case, before, now, args.pairs)
        low, middle, high = row["ratio"]
        times = f"{row['before_ms']:9.2f} ms  {row['now_ms']:9.2f} ms"
        print(f"{case.name:32} {times}  ratio {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)
        rows.append(row)
    args.before = args.before.name
    write("turns", args, {"rows": rows})


if __name__ == "__main__":
    main()
