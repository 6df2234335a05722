"""How much memory does a model take beside its weights and one row?

    scripts/bench memory [--models NAME,FILE,...] [--out NAME]

In a process of its own for each model: what importing costs, then what loading adds and what one
row of 32 + 64 positions adds, and the most that there was meanwhile, all as resident memory. What
was added is of two kinds: memory of its own, and pages of the libraries' files that imports mapped
and a first use brings in, which the system shares and may drop.
Prints, and writes to bench/results/, the shares of weights, keys and values: of all that was added,
and of memory of its own. Without --models: the default model, and bfloat16 and Q4_K_M files of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch
from parts.models import Models
from parts.report import options, write

import everystep as es

PROMPT, NEW = 32, 64


def resident(key: str = "VmRSS") -> int:
    """Bytes of this process that are in memory; with VmHWM the most that ever were, with RssFile
    those that are pages of files."""
    with open("/proc/self/status", encoding="ascii") as status:
        return 1024 * int(next(line for line in status if line.startswith(key)).split()[1])


def measure(source: str) -> dict[str, Any]:
    """Figures of one model, in this process."""
    import everystep.api.load
    import everystep.drivers.rectangle  # noqa: F401

    imported, mapped = resident(), resident("RssFile")
    model: Any = es.load_model(source)
    loaded = resident()
    model.generate(torch.arange(5, 5 + PROMPT)[None], max_new_tokens=NEW, do_sample=False)
    weights = sum(model.weight_bytes.values())
    spec = model.core.spec
    kept = (PROMPT + NEW) * len(spec.layers) * spec.attention.kv_heads * spec.attention.head_dim
    held = weights + 2 * 4 * kept
    added, from_files = resident() - imported, resident("RssFile") - mapped
    return {
        "weights_and_row": held,
        "imported": imported,
        "loaded": loaded - imported,
        "after_one_row": added,
        "pages_of_files": from_files,
        "most": resident("VmHWM") - imported,
        "share": round(added / held, 3),
        "share_of_its_own": round((added - from_files) / held, 3),
        "share_of_most": round((resident("VmHWM") - imported) / held, 3),
    }


def main() -> None:
    """Starts a process per model."""
    parser = options(__doc__, threads=torch.get_num_threads())
    parser.add_argument("--models")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    if args.models is None:
        models = Models.default()
        files = [models.gguf("Q4_1"), models.gguf("BF16"), models.quantised("Q4_K_M")]
        args.models = ",".join(map(str, files))
    figures = {}
    for model in args.models.split(","):
        line = [sys.executable, __file__, "--one", model]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        name = model.rpartition("/")[2]
        figures[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, figures[name], flush=True)
    args.models = ",".join(figures)
    write("memory", args, {"figures": figures})


if __name__ == "__main__":
    main()
