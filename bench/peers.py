"""How fast is greedy decoding on the same file, beside llama.cpp, and how near the memory's limit?

    scripts/bench peers --llama PYTHON [--formats F32,Q8_0,Q4_1,Q4_0] [--cases 1x32,8x32]

The default model as shipped (Q4_1), and copies of it in F32, Q8_0 and Q4_0. Each engine has a
process of its own and they take turns; every run generates `TOKENS` tokens per row from random ids,
and the medians of `--repeats` runs are printed with their ratio. `--llama`: a Python that has
llama-cpp-python. The memory's speed is that of a sum over 1 GiB, measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from parts.gguf_copy import write_copy

from everystep.files.sources import DEFAULT_MODEL, resolve_source

HERE = Path(__file__).parent
TOKENS = 48
SHIPPED = "Q4_1"


def serve(path: str, threads: int) -> None:
    """Answers lines on standard input as `parts/llama_speed.py` does, with this library."""
    import everystep as es

    torch.set_num_threads(threads)
    dtype = torch.float32 if Path(path).stem == "F32" else None
    model = es.load_model(path, dtype=dtype)
    model.generation_config.eos_token_id = None
    print(
        json.dumps({"weights": sum(model.weight_bytes.values()), "on": model.runs_on}), flush=True
    )
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["prompts"])
        out = model.generate(
            ids,
            max_new_tokens=asked["tokens"],
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        assert out.sequences.shape[1] == ids.shape[1] + asked["tokens"]
        times = {"first": out.timings["prompt_seconds"], "rest": out.timings["decode_seconds"]}
        print(json.dumps(times), flush=True)


class Engine:
    """A process that answers questions."""

    def __init__(self, line: list[str]) -> None:
        self._process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, question: dict[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def bandwidth() -> float:
    """Bytes per second of a sum over 1 GiB."""
    values = torch.ones(1 << 28)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - begin)
    return values.nbytes / statistics.median(times)


def measure(
    args: argparse.Namespace, kind: str, path: Path, speed: float
) -> list[dict[str, object]]:
    """All cases of one format, engines in turn."""
    ours = Engine([sys.executable, __file__, "--serve", str(path), "--threads", str(args.threads)])
    about = ours.read()
    script = str(HERE / "parts" / "llama_speed.py")
    theirs = Engine([args.llama, script, str(path), str(args.threads)]) if args.llama else None
    rows = []
    for case in args.cases.split(","):
        batch, length = map(int, case.split("x"))
        prompts = torch.randint(100, 40000, (batch, length)).tolist()
        question = {"prompts": prompts, "tokens": TOKENS}
        found: dict[str, list[dict[str, float]]] = {"everystep": [], "llama.cpp": []}
        for _ in range(args.repeats + 1):
            found["everystep"].append(ours.ask(question))
            if theirs is not None:
                found["llama.cpp"].append(theirs.ask(question))
        row: dict[str, object] = {"format": kind, "batch": batch, "prompt": length}
        for name, runs in found.items():
            if runs:
                counted = runs[1:]
                rest = statistics.median(run["rest"] for run in counted)
                row[f"{name} tokens/s"] = batch * (TOKENS - 1) / rest
                row[f"{name} first"] = statistics.median(run["first"] for run in counted)
        if batch == 1:
            row["share of limit"] = row["everystep tokens/s"] * about["weights"] / speed  # type: ignore[operator]
        if theirs is not None:
            row["ratio"] = row["everystep tokens/s"] / row["llama.cpp tokens/s"]  # type: ignore[operator]
        print(
            {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True
        )
        rows.append(row)
    ours.close()
    if theirs is not None:
        theirs.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--formats", default="F32,Q8_0,Q4_1,Q4_0")
    parser.add_argument("--cases", default="1x32,8x32,32x32,1x512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="peers")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.threads)
        return
    torch.set_num_threads(args.threads)
    shipped, speed, rows = resolve_source(DEFAULT_MODEL), bandwidth(), []
    print(f"memory: {speed / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.formats.split(","):
            copy = Path(folder) / f"{kind}.gguf"
            path = shipped if kind == SHIPPED else write_copy(shipped, copy, kind)
            rows += measure(args, kind, path, speed)
    today = datetime.date.today().isoformat()
    about = {
        "date": today,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "torch": version("torch"),
        "memory bytes/s": speed,
        "tokens": TOKENS,
        "repeats": args.repeats,
        "rows": rows,
    }
    target = HERE / "results" / f"{today}-{args.out}.json"
    target.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"written to {target}")


if __name__ == "__main__":
    main()
