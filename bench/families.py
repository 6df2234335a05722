"""How fast do models of other shapes decode and read, compared with every peer that loads them?

    scripts/bench families [--shapes mistral-7b,...] [--formats 8,4] [--engines llama.cpp,...]

Two layers, with embeddings and head, in the shapes of Mistral 7B, Qwen3 0.6B, Gemma 3 270M, the
mixture of experts Qwen3 30B-A3B and Mamba 2.8B, and all of Qwen3 0.6B, with random weights, rounded
to 8 and to 4 bits, or (`--formats 16,Q4_K_M`) as GGUF files that others read too. Engines take
turns as in `peers`; cases are one row, eight rows, a prompt of 512, and 32 rows.
transformers runs in bfloat16 and in float32, the types that it decodes in on a processor. What an
engine cannot load is listed with the cause.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts.environments import PEERS, Unavailable, default_folder
from parts.report import options, write
from parts.slices import SHAPES, Shape, Slices
from peers import OURS, Case, Contender, Reader, measure, start

CASES = (Case(1, 32, 32, 64), Case(8, 32, 32, 48), Case(1, 512, 512, 16), Case(32, 32, 32, 32))
OWN_FORMATS = {"8": "int8", "4": "int4"}
BLOCKS = {"16": "BF16", "8": "Q8_0", "4": "Q4_0"}
ENGINES = (OURS, "llama.cpp", "openvino-genai", "transformers")


def readers(shape: Shape, bits: str, slices: Slices) -> Iterator[Reader]:
    """Who reads which form of a shape."""
    blocks = BLOCKS.get(bits, bits)
    gguf = slices.gguf if bits in BLOCKS else slices.quantised

    def reader(engine: str, reads: str, make: Any) -> Reader:
        return Reader(bits, engine, reads, lambda _: make())

    if own := OWN_FORMATS.get(bits):
        yield reader(OURS, f"its own {own}", partial(slices.rounded, shape, own))
    else:
        yield reader(OURS, f"a {blocks} file", partial(gguf, shape, blocks))
    for engine in ("llama.cpp", "openvino-genai"):
        yield reader(engine, f"a {blocks} file", partial(gguf, shape, blocks))
    for dtype in ("bfloat16", "float32"):
        yield reader("transformers", dtype, partial(slices.floats, shape, dtype))


def measure_shape(shape: Shape, bits: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every case of a shape, and a line for each engine that could not take part."""
    slices, contenders, absent, rows = Slices(args.peers), [], [], []
    try:
        for reader in readers(shape, bits, slices):
            if reader.engine not in args.engines.split(","):
                continue
            try:
                contenders.append(start(reader, slices, args.threads))
            except Unavailable as cause:
                absent.append({"engine": reader.engine, "cause": str(cause)})
                print(f"{shape.name} {reader.engine}: {cause}", flush=True)
        for case in CASES[: args.cases]:
            print(f"{shape.name}, {bits} bits", flush=True)
            rows += measured(contenders, case, args.repeats)
    finally:
        for one in contenders:
            one.process.close()
    return {"shape": shape.name, "bits": bits, "rows": rows, "absent": absent}


def measured(contenders: list[Contender], case: Case, repeats: int) -> list[dict[str, Any]]:
    """A row per contender, and over ours the best of the others."""
    rows = measure(contenders, case, repeats)
    ours, *others = rows
    if ours["engine"] == OURS and others:
        best = max(row["tokens_per_s"] or 0 for row in others)
        first = min(row["first_s"] for row in others)
        ratios = {"decode": ours["tokens_per_s"] / best, "first": first / ours["first_s"]}
        print(f"   over the best: decoding {ratios['decode']:.2f}, prompt {ratios['first']:.2f}")
        ours["over_the_best"] = ratios
    return rows


def main() -> None:
    """Measures the shapes one after another and writes one file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default="8,4", help="16, 8, 4 or Q4_K_M")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--peers", type=Path, default=default_folder(), metavar="FOLDER")
    parser.add_argument("--cases", type=int, default=3, help="how many of the cases")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    versions = dict(pin.split("==") for one in ENGINES[1:] for pin in PEERS[one].pins)
    results = [
        measure_shape(SHAPES[name], bits, args)
        for name in args.shapes.split(",")
        for bits in args.formats.split(",")
    ]
    write("families", args, {"results": results}, versions=versions)


if __name__ == "__main__":
    main()
