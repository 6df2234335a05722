"""What do adapters cost natively, and how fast are they on torch operators beside PEFT?

    scripts/bench adapters [--new 64] [--pairs 9] [--values float32,bfloat16] [--rows 1,32]
                           [--targets all,default] [--peft-rows 8] [--threads 2] [--out NAME]

Decodes with the default model in its 4 bits, rows in turn with adapters of rank 16 and without, and
takes the medians of the ratios: one row with one adapter, and more rows, each with one of eight.
`--targets`: all seven projections of a layer, or those that PEFT adapts by default, queries and
values. `--values`: the type in which the adapters were saved; what 16 bits hold is kept in them.

Then the same adapters on torch operators in float32, as our model runs them with executor="torch"
and as PEFT does with `adapter_names`, on the same weights, in turn. Tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from parts.clock import MemorySpeed, alternated, seconds
from parts.models import SHIPPED, Models, reference
from parts.report import options, write
from safetensors.torch import save_file

import everystep as es
from everystep.adapters.targets import targets_of
from everystep.models import Model

RANK, ADAPTERS, PROMPT, SPREAD = 16, 8, 16, 0.02
TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "default": ("q_proj", "v_proj"),
}


def write_adapter(folder: Path, core: Model, seed: int, targets: str, dtype: torch.dtype) -> Path:
    """A LoRA of random numbers, in the form in which PEFT saves it."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, target in targets_of(core).items():
        if not module.endswith(TARGETS[targets]):
            continue
        rows, width = target.shape
        for side, shape in (("A", (RANK, width)), ("B", (rows, RANK))):
            drawn = torch.randn(shape, generator=generator) * SPREAD
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = drawn.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = list(TARGETS[targets])
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    config |= {"target_modules": names, "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def names_of(rows: int) -> list[str]:
    """An adapter for each row, in turn."""
    return [f"a{row % ADAPTERS}" for row in range(rows)]


def prompts(rows: int) -> torch.Tensor:
    """(rows, PROMPT) ids."""
    return torch.randint(100, 40000, (rows, PROMPT), generator=torch.Generator().manual_seed(rows))


def decode(model: Any, rows: int, new: int, **more: Any) -> torch.Tensor:
    """The ids after greedy steps without an end."""
    ids = prompts(rows)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    length = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    found: torch.Tensor = model.generate(**given, **length, **more)
    return found


def beside_none(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Native decoding with adapters and without."""
    for targets, values in product(args.targets.split(","), args.values.split(",")):
        model = es.load_model(Models.default().gguf(SHIPPED))
        for seed in range(ADAPTERS):
            own = folder / "native" / targets / values / str(seed)
            write_adapter(own, model.core, seed, targets, getattr(torch, values))
            model.load_adapter(own, f"a{seed}")
        for rows in map(int, args.rows.split(",")):
            names = names_of(rows)
            plain = partial(decode, model, rows, args.new)
            mixed = partial(plain, adapters=names)
            plain(), mixed()
            with MemorySpeed() as memory:
                pairs = alternated(args.pairs, partial(seconds, plain), partial(seconds, mixed))
            without, beside = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = sorted(one / other for one, other in pairs)
            yield {
                "runs on": model.runs_on,
                "targets": targets,
                "values": values,
                "rows": rows,
                "tokens/s without": rows * args.new / without,
                "tokens/s with": rows * args.new / beside,
                "share": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4)[::2],
                "memory GB/s": memory.bytes_per_s / 1e9,
            }


def beside_peft(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Torch operators, ours and PEFT's."""
    from peft import PeftModel

    ours = es.load_model(Models.default().float32(), dtype=torch.float32, executor="torch")
    theirs: Any = None
    for seed in range(ADAPTERS):
        name, own = f"a{seed}", folder / "peft" / str(seed)
        write_adapter(own, ours.core, seed, "all", torch.float32)
        ours.load_adapter(own, name)
        if theirs is None:
            theirs = PeftModel.from_pretrained(reference(), own, adapter_name=name).eval()
        else:
            theirs.load_adapter(own, adapter_name=name)
    for rows in map(int, filter(None, args.peft_rows.split(","))):
        names = names_of(rows)

        mine = partial(decode, ours, rows, args.new, adapter_names=names)
        peft = partial(decode, theirs, rows, args.new, adapter_names=names)
        alike = bool((mine() == peft()).all())
        pairs = alternated(args.pairs, partial(seconds, mine), partial(seconds, peft))
        own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        yield {
            "torch operators": rows,
            "same tokens": alike,
            "tokens/s ours": rows * args.new / own,
            "tokens/s PEFT": rows * args.new / other,
            "times PEFT": statistics.median(second / first for first, second in pairs),
        }


def main() -> None:
    parser = options(__doc__, threads=2)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--values", default="float32,bfloat16")
    parser.add_argument("--targets", default="all,default")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--peft-rows", default="8")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = []
    with TemporaryDirectory() as folder:
        for part in (beside_none, beside_peft):
            for row in part(Path(folder), args):
                print(row, flush=True)
                found.append(row)
    write("adapters", args, {"rows": found}, packages=("transformers", "peft"))


if __name__ == "__main__":
    main()
