"""How fast is greedy decoding compared with every peer, and how near is it to the memory's limit?

    scripts/bench peers [--formats F32,BF16,...] [--engines llama.cpp,...] [--peers FOLDER]

Measures the default model as shipped (Q4_1) and copies of the file in other formats. Peers
that do not read GGUF get what their converters make of its float32 values; READERS lists which
engine reads which format. Peers are installed into environments of their own under `--peers`. Each
engine has its own process, and they take turns on the same random ids, which are new in every run
so that no cache of prefixes helps. One file per format in bench/results/ holds, for every run, the
seconds to the first token and from there on, the peak memory, and the memory's speed, a sum over 1
GiB. An engine that reports nothing before a batch ends is asked for one token and then for all;
where the difference is smaller than the scatter of the first, its speed is left out. `--busy`
repeats a few cases beside another process that keeps a core busy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parts.clock import MemorySpeed
from parts.environments import PEERS, Unavailable, default_folder, python_of
from parts.models import Models
from parts.neighbours import busy
from parts.processes import EngineProcess
from parts.report import options, write

OURS = "everystep"
SCRIPTS = {
    OURS: "everystep_engine.py",
    "llama.cpp": "llama_cpp_engine.py",
    "onnxruntime-genai": "onnxruntime_engine.py",
    "ctranslate2": "ctranslate2_engine.py",
    "openvino-genai": "openvino_engine.py",
    "transformers": "transformers_engine.py",
}
REST = 0.1  # seconds after an answer, in which threads that still spin fall asleep


@dataclass(frozen=True)
class Reader:
    """An engine that stands for a format, and what it reads of it; `ragged`: rows of several
    lengths come out right; `like`: its precision is the format's."""

    format: str
    engine: str
    reads: str
    model: Callable[[Models], Path]
    ragged: bool = True
    like: bool = True


def _gguf(format: str, *engines: str) -> Iterator[Reader]:
    for engine in engines:
        yield Reader(format, engine, f"the {format} file", lambda models: models.gguf(format))


def _quantised(kind: str, *engines: str) -> Iterator[Reader]:
    for engine in engines:
        yield Reader(kind, engine, f"llama.cpp's {kind}", lambda models: models.quantised(kind))


READERS = (
    *_gguf("F32", OURS, "llama.cpp"),
    # Its attention takes no padding on the left: such rows get other tokens than alone.
    Reader(
        "F32", "onnxruntime-genai", "its own fp32", lambda models: models.onnx("fp32"), ragged=False
    ),
    Reader("F32", "ctranslate2", "its own float32", lambda models: models.ctranslate2("float32")),
    Reader(
        "F32",
        "openvino-genai",
        "an F16 file, in bfloat16 where the processor has it",
        lambda models: models.gguf("F16"),
        like=False,
    ),
    Reader("F32", "transformers", "float32 safetensors", lambda models: models.float32()),
    *_gguf("BF16", OURS, "llama.cpp", "openvino-genai"),
    Reader("BF16", "transformers", "bfloat16 safetensors", lambda models: models.bfloat16()),
    *_gguf("F16", OURS, "llama.cpp", "openvino-genai"),
    *_quantised("Q4_K_M", OURS, "llama.cpp", "openvino-genai"),
    *_gguf("Q8_0", OURS, "llama.cpp", "openvino-genai"),
    Reader("Q8_0", "ctranslate2", "its own int8", lambda models: models.ctranslate2("int8")),
    *_gguf("Q4_1", OURS, "llama.cpp", "openvino-genai"),
    *_gguf("Q4_0", OURS, "llama.cpp", "openvino-genai"),
    Reader(
        "Q4_0",
        "onnxruntime-genai",
        "its own int4",
        lambda models: models.onnx("int4"),
        ragged=False,
    ),
)


@dataclass(frozen=True)
class Case:
    """`shortest` to `longest`: the lengths of prompts; `tokens`: new ones per row."""

    batch: int
    shortest: int
    longest: int
    tokens: int

    @property
    def prompt(self) -> str:
        """One length, or the shortest and the longest."""
        ragged = self.shortest < self.longest
        return f"{self.shortest}-{self.longest}" if ragged else str(self.longest)

    def prompts(self, run: int) -> list[list[int]]:
        """Random ids that no other run has; lengths from the shortest to the longest, evenly."""
        generator = torch.Generator().manual_seed(1000 * run + self.batch + self.longest)
        lengths = torch.linspace(self.shortest, self.longest, self.batch).long().tolist()
        return [torch.randint(100, 30_000, (n,), generator=generator).tolist() for n in lengths]


CASES = (
    Case(1, 32, 32, 64),
    Case(8, 32, 32, 48),
    Case(32, 32, 32, 32),
    Case(1, 512, 512, 48),
    Case(8, 8, 200, 32),
    Case(32, 8, 200, 16),
)
BUSY_CASES = (Case(1, 32, 32, 64), Case(8, 32, 32, 32))
BUSY_ENGINES = (OURS, "llama.cpp")
WARM_UP = 8  # ids of a prompt, and new tokens, in the run that is not counted


@dataclass(frozen=True)
class Contender:
    """A reader whose process runs."""

    reader: Reader
    process: EngineProcess


def start(reader: Reader, models: Models, threads: int) -> Contender:
    """Installs, converts and loads what the reader needs; Unavailable if that cannot be."""
    if reader.engine == OURS:
        python = sys.executable
    else:
        python = str(python_of(PEERS[reader.engine], models.folder))
    model = reader.model(models)
    return Contender(reader, EngineProcess(python, SCRIPTS[reader.engine], model, threads))


def measure(contenders: list[Contender], case: Case, repeats: int) -> list[dict[str, Any]]:
    """A row per engine; they take turns, and a short run of each comes first."""
    for one in contenders:
        one.process.ask([ids[:WARM_UP] for ids in case.prompts(0)], WARM_UP)
    runs: list[list[dict[str, float]]] = [[] for _ in contenders]
    with MemorySpeed() as memory:
        time.sleep(REST)
        for run in range(1, repeats + 1):
            for one, answers in zip(contenders, runs, strict=True):
                answers.append(one.process.ask(case.prompts(run), case.tokens))
                time.sleep(REST)
    speed = memory.bytes_per_s
    return [_row(one, case, own, speed) for one, own in zip(contenders, runs, strict=True)]


def _row(
    one: Contender, case: Case, runs: list[dict[str, float]], bytes_per_s: float
) -> dict[str, Any]:
    firsts, rests = [run["first"] for run in runs], [run["rest"] for run in runs]
    first, rest = statistics.median(firsts), statistics.median(rests)
    known = rest > max(firsts) - min(firsts) or "by_difference" not in one.process.about
    row = {
        "format": one.reader.format,
        "engine": one.reader.engine,
        "reads": one.reader.reads,
        "like": one.reader.like,
        "batch": case.batch,
        "prompt": case.prompt,
        "tokens": case.tokens,
        "first_s": first,
        "tokens_per_s": case.batch * (case.tokens - 1) / rest if known else None,
        "peak_mib": runs[-1]["peak_mib"],
        "bytes_per_s": bytes_per_s,
        "firsts_s": firsts,
        "rests_s": rests,
    }
    speed = f"{row['tokens_per_s']:9.1f}" if known else " unknown "
    print(
        f"{one.reader.format:5} {case.batch:3} x {case.prompt:6} {one.reader.engine:18}"
        f"{speed} tokens/s   first {first * 1e3:8.1f} ms"
        f"   peak {row['peak_mib']:6.0f} MiB   memory {bytes_per_s / 1e9:5.1f} GB/s",
        flush=True,
    )
    return row


def measure_format(format: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every case of a format, and a line for each engine that could not take part."""
    models, rows, contenders, absent = Models(args.peers), [], [], []
    for reader in READERS:
        if reader.format == format and reader.engine in args.engines.split(","):
            try:
                contenders.append(start(reader, models, args.threads))
            except Unavailable as cause:
                absent.append({"engine": reader.engine, "cause": str(cause)})
                print(f"{format:5} {reader.engine}: {cause}", flush=True)
    try:
        for case in CASES[: args.cases]:
            fit = [one for one in contenders if one.reader.ragged or case.shortest == case.longest]
            rows += measure(fit, case, args.repeats)
        busy = _measure_busy(contenders, args.repeats) if args.busy else []
    finally:
        for one in contenders:
            one.process.close()
    about = {one.reader.engine: one.process.about for one in contenders}
    return {"about": about, "rows": rows, "busy": busy, "absent": absent}


def _measure_busy(contenders: list[Contender], repeats: int) -> list[dict[str, Any]]:
    print("with a busy neighbour:")
    chosen = [one for one in contenders if one.reader.engine in BUSY_ENGINES]
    with busy(1):
        return [row for case in BUSY_CASES for row in measure(chosen, case, repeats)]


def main() -> None:
    """Measures the formats one after another and writes a file for each."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--formats", default="F32,BF16,F16,Q8_0,Q4_K_M,Q4_1,Q4_0")
    parser.add_argument("--engines", default=",".join(SCRIPTS))
    parser.add_argument("--peers", type=Path, default=default_folder(), metavar="FOLDER")
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    versions = {
        pin.split("==")[0]: pin.split("==")[1] for peer in PEERS.values() for pin in peer.pins
    }
    for format in args.formats.split(","):
        write(f"peers-{format}", args, measure_format(format, args), versions=versions)


if __name__ == "__main__":
    main()
