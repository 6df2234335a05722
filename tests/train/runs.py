"""Small runs of training, the same in every process that makes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import everystep as es
from everystep.errors import TrainingError
from everystep.testing.models import tiny_llama


def padded(rows: Sequence[Any]) -> dict[str, Tensor]:
    """A batch of rows, filled up on the right."""
    length = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.stack(
            [
                torch.cat(
                    [torch.as_tensor(row[name]), torch.full((length - len(row[name]),), fill)]
                )
                for row in rows
            ]
        )
        for name, fill in fills.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    return batch


class Noisy:
    """Examples that draw from every global generator each time they are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        length = 4 + index % 7
        ids = [1 + (index * 13 + place * 7) % 90 for place in range(length)]
        ids[0] = random.randrange(1, 90)
        ids[1] = int(np.random.randint(1, 90))
        ids[2] = int(torch.randint(1, 90, ()))
        ids[-1] = 2  # the end
        return {"input_ids": ids, "labels": [-100, *ids[1:]]}


class StopAt(es.TrainerCallback):
    """Stops a run after a step, with a checkpoint of it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def trainer(folder: Path, **given: Any) -> es.Trainer:
    """A run over noisy examples, in which batches of a step are ragged."""
    usual: dict[str, Any] = {
        "max_steps": 14,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 4,
        "save_steps": 3,
        "disable_tqdm": True,
    }
    of_trainer = {
        name: given.pop(name)
        for name in ("callbacks", "compute_loss", "eval_dataset", "peft_config", "model")
        if name in given
    }
    model = of_trainer.pop("model", None) or tiny_llama(vocab_size=97, dtype=torch.float32)
    args = es.TrainingArguments(output_dir=folder, **{**usual, **given})
    return es.Trainer(model, args, padded, Noisy(31), **of_trainer)


def outcome(run: es.Trainer) -> dict[str, Any]:
    """What two runs agree in if they are equal to the bit, without times."""
    named = {name: one.detach().clone() for name, one in run.weights.named().items()}
    timed = ("train_runtime", "samples_per_second", "steps_per_second", "_runtime")
    logs = [
        {key: value for key, value in one.items() if not key.endswith(timed)}
        for one in run.state.log_history
    ]
    return {"weights": named, "logs": logs, "seen": run.state.num_input_tokens_seen}


def require_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Fail unless two outcomes are equal to the bit."""
    assert found["logs"] == wanted["logs"]
    assert found["seen"] == wanted["seen"]
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, one in wanted["weights"].items():
        assert torch.equal(found["weights"][name], one), name


def train_in_process(folder: str, steps: int) -> None:
    """Go on with the run in a folder, or begin it, and end it."""
    torch.set_num_threads(1)
    whole = any(Path(folder).glob("checkpoint-*"))
    run = trainer(Path(folder), max_steps=steps, save_steps=2, save_total_limit=3)
    run.train(resume_from_checkpoint=whole)
    run.save_model(Path(folder) / "end")


def train_beside_others(folder: str, rank: int, attempt: int, steps: int, fsdp: bool) -> None:
    """Go on with the run in a folder as one of two processes, and end it; exit by 3 where the other
    was lost."""
    torch.set_num_threads(1)
    meeting = Path(folder, f"meeting-{attempt}")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    Path(folder, f"met-{attempt}-{rank}").touch()
    whole = any(Path(folder).glob("checkpoint-*"))
    try:
        run = trainer(
            Path(folder),
            max_steps=steps,
            save_steps=2,
            save_total_limit=3,
            per_device_train_batch_size=2,
            **({"fsdp": True} if fsdp else {}),
        )
        run.train(resume_from_checkpoint=whole)
        run.save_model(Path(folder) / "end")
    except TrainingError as error:
        assert "another process of the run was lost" in str(error), error
        raise SystemExit(3) from error
    if rank == 0:
        Path(folder, "ended").touch()
    dist.destroy_process_group()
