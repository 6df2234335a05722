"""Trains a model with `es.Trainer` on the workers of Ray Train.

    python ray_train.py MODEL DATA OUTPUT [--workers 2] [--rows 4] [--steps 100] [--address A]

MODEL is a folder or a name, DATA a file of JSON lines, and OUTPUT a folder that all workers share.
Ray starts the workers and lets them meet; the Trainer takes the process group that Ray has made.
Where a worker dies, Ray starts all of them again, and they go on from the newest whole checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Take the steps of one worker, as each of them does."""
    import everystep as es  # on the worker, whose environment it is

    model, tokenizer = es.load(config["model"])
    args = es.TrainingArguments(
        output_dir=config["output"],
        max_steps=config["steps"],
        per_device_train_batch_size=config["rows"],
        logging_steps=1,
        save_steps=config["save"],
        disable_tqdm=True,
    )
    data = es.read_rows(config["data"], model, tokenizer)
    trainer = es.Trainer(model, args, train_dataset=data, processing_class=tokenizer)
    begun = any(Path(config["output"]).glob("checkpoint-*/checkpoint.json"))
    trainer.train(resume_from_checkpoint=begun)
    trainer.save_model(f"{config['output']}/end")


def main() -> None:
    """Read the line, and train on the cluster that it names or on one of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="examples of a worker in a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--address", help="of a cluster; without it, one of this machine alone")
    parser.add_argument("--gpu", action="store_true", help="a device for each worker")
    line = parser.parse_args()
    ray.init(line.address, log_to_driver=False)
    config = {name: getattr(line, name) for name in ("model", "rows", "steps", "save")}
    config |= {name: str(getattr(line, name).resolve()) for name in ("data", "output")}
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="nccl" if line.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=line.workers, use_gpu=line.gpu),
        run_config=RunConfig(
            storage_path=config["output"], name="ray", failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()
    print(f"trained: {line.output / 'end'}")


if __name__ == "__main__":
    main()
