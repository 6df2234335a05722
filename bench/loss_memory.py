"""How much memory does a loss take at its peak, with logits of all positions and without?

    scripts/bench loss_memory [--model NAME] [--rows N] [--positions N] [--out NAME]

In a process of its own for each way: a LoRA of rank 8 learns beside the stored weights, and one
loss with its gradients is computed. Prints, and writes to bench/results/, the resident memory at
its peak beyond what the loaded model with its adapter held, and the bytes of (B, T, V) logits in
float32. Without --model: the default one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch
from memory import resident
from parts.report import options, write

import everystep as es
from everystep.files.sources import DEFAULT_MODEL

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def measure(model: str, rows: int, positions: int, *, logits: bool) -> dict[str, Any]:
    """Figures of one loss, in this process."""
    loaded: Any = es.load_model(model)
    loaded.add_adapter("learns", es.LoraConfig(**LORA))
    loaded.train()
    ids = torch.randint(0, loaded.vocab_size, (rows, positions), generator=torch.Generator())
    before = resident()
    given = {"labels": ids, "adapter_names": "learns", "output_logits": logits}
    loss = loaded(ids, **given).loss
    loss.backward()
    most = resident("VmHWM") - before
    return {"logits": logits, "loss": float(loss.detach()), "most": most}


def main() -> None:
    """Starts a process per way."""
    parser = options(__doc__, threads=torch.get_num_threads())
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--one", choices=["yes", "no"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measure(args.model, args.rows, args.positions, logits=args.one == "yes")))
        return
    found = []
    for logits in ("yes", "no"):
        line = [sys.executable, __file__, *sys.argv[1:], "--one", logits]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout))
        print(f"logits of all positions: {logits:3}   most {found[-1]['most'] / 2**20:,.0f} MiB")
    size = 4 * args.rows * args.positions * es.load_model(args.model).vocab_size
    print(f"these logits alone: {size / 2**20:,.0f} MiB")
    write("loss-memory", args, {"logits_bytes": size, "ways": found})


if __name__ == "__main__":
    main()
