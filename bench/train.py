"""How fast is a LoRA trained, in how much memory, compared with transformers and PEFT?

    scripts/bench train [--steps 6] [--repeats 3] [--sides ours,ours in float32,peft] [--out NAME]
                        [--dialogues]

The default model, the 200 dialogues of `everystep train`, batches of 8, rank 8 on all projections,
AdamW. "ours" trains over the weights as they are stored (Q4_1), "ours in float32" over the same
values as floats, and "peft" is transformers' Trainer over a PEFT model of these floats. Each round
runs each side in a process of its own, in turn; figures are medians of the seconds per step after
the first two, and the most memory that a process had. The losses of all steps are compared.

With --dialogues, instead: `everystep train` as it is without options, its seconds, and the loss on
dialogues that it was not trained on, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from memory import resident
from parts.report import options, write

import everystep as es

SIDES = ("ours", "ours in float32", "peft")
MODEL = "smollm2-135m-instruct"
WARM = 2
CHOICES: dict[str, Any] = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 8,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


class Clock(es.TrainerCallback):
    """Notes when steps end; a callback of either library, of whose events it takes no notice."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **given: None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the moment."""
        self.ends.append(time.perf_counter())


def rows_of(folder: Path) -> list[dict[str, list[int]]]:
    """The dialogues as ids and labels, the same for every side."""
    kept = json.loads((folder / "rows.json").read_text())
    return [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in kept]


def measured(side: str, folder: Path, steps: int) -> dict[str, Any]:
    """Figures of one side, in this process."""
    clock, given = Clock(), {**CHOICES, "max_steps": steps, "output_dir": str(folder / "run")}
    rows, imported = rows_of(folder), 0
    if side == "peft":
        import peft
        import transformers

        imported = resident()
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "floats", dtype=torch.float32
        )
        torch.manual_seed(0)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "floats")
        collator = transformers.DataCollatorForSeq2Seq(tokenizer)
        args = transformers.TrainingArguments(use_cpu=True, report_to="none", **given)
        trainer: Any = transformers.Trainer(model, args, collator, rows, callbacks=[clock])
    else:
        imported = resident()
        source = folder / "floats" if side == "ours in float32" else MODEL
        own, tokenizer = es.load(source)
        args = es.TrainingArguments(**given)
        torch.manual_seed(0)
        trainer = es.Trainer(
            own,
            args,
            None,
            rows,
            None,
            tokenizer,
            peft_config=es.LoraConfig(**LORA),
            callbacks=[clock],
        )
    trainer.train()
    taken = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    return {
        "seconds": taken[WARM - 1 :],
        "most": resident("VmHWM"),
        "beside_imports": resident("VmHWM") - imported,
        "losses": [one["loss"] for one in trainer.state.log_history if "loss" in one],
    }


def prepare(folder: Path) -> None:
    """Write the model's values as floats, and the rows."""
    model, tokenizer = es.load(MODEL)
    model.save_pretrained(folder / "floats", dtype=torch.float32)
    tokenizer.save_pretrained(folder / "floats")
    data = Path(str(files("everystep.train") / "dialogues.jsonl"))
    rows = es.read_rows(data, model, tokenizer)
    kept = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in rows]
    (folder / "rows.json").write_text(json.dumps(kept))


def child(args: argparse.Namespace, *line: str) -> str:
    """What a process of its own printed."""
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    environment = {**os.environ, **threads}
    done = subprocess.run(line, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def compared(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per side."""
    sides, found = args.sides.split(","), {}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for _ in range(args.repeats):
            for side in sides:
                line = (sys.executable, __file__, "--one", side, "--folder", name)
                out = child(args, *line, "--steps", str(args.steps))
                found.setdefault(side, []).append(json.loads(out.splitlines()[-1]))
    rows = []
    for side in sides:
        runs = found[side]
        step = statistics.median(x for run in runs for x in run["seconds"])
        row = {
            "side": side,
            "seconds_per_step": step,
            "most_mb": statistics.median(run["most"] for run in runs) / 1e6,
            "beside_imports_mb": statistics.median(run["beside_imports"] for run in runs) / 1e6,
            "losses": runs[0]["losses"],
            "runs": runs,
        }
        print(
            f"{side:16} {step:6.2f} s per step, {row['most_mb']:6.0f} MB at most, "
            f"{row['beside_imports_mb']:6.0f} beside imports; losses "
            + " ".join(f"{one:.4f}" for one in row["losses"])
        )
        rows.append(row)
    return rows


def of_dialogues(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What `everystep train` comes to."""
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        command = (sys.executable, "-m", "everystep", "train", "--output", name)
        out = child(args, *command)
        seconds = time.perf_counter() - begin
    print(out)
    before, after = (float(x) for x in re.findall(r"([\d.]+) (?:before|after),?", out)[:2])
    print(f"{seconds:.0f} s; held-out loss {before} -> {after}, {1 - after / before:.1%} less")
    return [{"seconds": seconds, "before": before, "after": after, "printed": out.splitlines()}]


def main() -> None:
    """A line per side, and a dated file."""
    parser = options(__doc__ or "", threads=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--dialogues", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one, args.folder, args.steps)))
        return
    rows = of_dialogues(args) if args.dialogues else compared(args)
    for name in ("one", "folder"):
        delattr(args, name)
    name = "train-dialogues" if args.dialogues else "train"
    write(name, args, {"rows": rows}, ("transformers", "peft"))


if __name__ == "__main__":
    main()
