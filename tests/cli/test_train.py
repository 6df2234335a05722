"""`everystep train`: a LoRA from a file, that other commands run with."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.train.callbacks import log_of
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model

DATA = [
    {"prompt": "the cat sat", "completion": " on the mat"},
    {"prompt": "the dog sat", "completion": " by the door"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model, with examples and a configuration beside it."""
    lines = [json.dumps(one) + "\n" for one in DATA]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    held_out = {"prompt": "a cat sat", "completion": " on the mat"}
    (tmp_path / "eval.jsonl").write_text(json.dumps(held_out) + "\n")
    (tmp_path / "run.toml").write_text(
        "learning_rate = 2e-2\nlogging_steps = 5\nsave_strategy = 'steps'\nsave_steps = 10\n"
        "[lora]\nr = 4\ntarget_modules = ['q_proj', 'down_proj']\n[data]\nmax_length = 64\n"
    )
    return write_tiny_model(tmp_path / "tiny")


def test_an_adapter_is_made_that_other_commands_run_with(folder: Path, call: Caller) -> None:
    beside = folder.parent
    files = ("--data", str(beside / "data.jsonl"), "--eval", str(beside / "eval.jsonl"))
    line = ("train", *files, "--config", str(beside / "run.toml"), "-m", str(folder))
    out = call(*line, "--steps", "20", "--output", str(beside / "mine")).out
    assert "2 rows with" in out and "⟦" in out
    assert "steps: 20" in out and "before" in out and "after" in out
    assert f"everystep chat --adapter {beside / 'mine'}" in out
    config = json.loads((beside / "mine" / "adapter_config.json").read_text())
    assert config["r"] == 4 and sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", out))
    logged = [one["eval_loss"] for one in log_of(beside / "mine") if "eval_loss" in one]
    assert after < before and logged[-1] == pytest.approx(after, abs=1e-4)
    prompt = ("generate", "the cat sat", "-m", str(folder), "-n", "4")
    adapted = call(*prompt, "--adapter", str(beside / "mine")).out
    model, tokenizer = es.load(folder)
    model.load_adapter(beside / "mine", "mine")
    options = {"max_new_tokens": 4, "adapter_names": "mine"}
    wanted = es.generate(model, tokenizer, "the cat sat", **options)
    assert adapted.rstrip("\n") == wanted.rstrip("\n")
    again = call(*line, "--steps", "20", "--output", str(beside / "mine"), "--resume").out
    assert "steps: 20" in again


class Steps(es.TrainerCallback):
    """Notes the steps of a run, and interrupts it in the middle of one, as Ctrl-C does."""

    def __init__(self, last: int | None) -> None:
        self.seen: list[int] = []
        self._last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(state.global_step)
        if state.global_step == self._last:
            raise KeyboardInterrupt


def test_a_run_that_was_interrupted_goes_on_to_the_bit(
    folder: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its checkpoint, and its adapter is that of a run that nothing stopped."""
    beside, made = folder.parent, es.Trainer
    files = ("--data", str(beside / "data.jsonl"), "--eval", str(beside / "eval.jsonl"))
    line = ("train", *files, "--config", str(beside / "run.toml"), "-m", str(folder))
    line += ("--steps", "20", "--batch-size", "1", "--output")

    def told(output: Path, *more: str, last: int | None = None) -> tuple[int, list[int]]:
        steps = Steps(last)
        torch.manual_seed(3)  # with which a new adapter begins
        monkeypatch.setattr(es, "Trainer", partial(made, callbacks=[steps]))
        return call(*line, str(output), *more).code, steps.seen

    assert told(beside / "whole") == (0, [*range(1, 21)])
    code, seen = told(beside / "cut", last=13)
    assert code != 0 and seen[-1] == 13
    assert not (beside / "cut" / "adapter_model.safetensors").exists()
    assert told(beside / "cut", "--resume") == (0, [*range(11, 21)])
    found, wanted = (
        (beside / one / "adapter_model.safetensors").read_bytes() for one in ("cut", "whole")
    )
    assert found == wanted
    early = beside / "cut" / "checkpoint-10" / "adapter_model.safetensors"
    assert early.read_bytes() != wanted  # it learned something after the checkpoint


def test_an_adapter_goes_on_learning(folder: Path, call: Caller) -> None:
    """Of a kind that the command makes none of; the new folder is of the same kind."""
    beside = folder.parent
    model = es.load_model(folder)
    model.add_adapter("other", es.LoHaConfig(r=3, target_modules=["q_proj", "up_proj"]))
    model.save_adapter(beside / "other", "other")
    held_out = ("--eval", str(beside / "eval.jsonl"))
    line = ("train", "--data", str(beside / "data.jsonl"), *held_out, "-m", str(folder))
    line += ("--steps", "12", "--learning-rate", "0.05")
    first = call(*line, "--adapter", str(beside / "other"), "-o", str(beside / "first"))
    assert first.code == 0 and "training 960 numbers of an adapter" in first.err
    settings = json.loads((beside / "first" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"]) == ("LOHA", 3)
    again = call(*line, "--adapter", f"x={beside / 'first'}", "-o", str(beside / "second"))
    losses = [
        float(one) for out in (first.out, again.out) for one in re.findall(r"([\d.]+) (?:b|a)", out)
    ]
    before, after, then, last = losses
    assert before > after and then == pytest.approx(after, abs=1e-3) and last < then


@pytest.mark.parametrize(
    "given, told",
    [
        (("--adapter", "a", "--rank", "4"), "--rank has no effect beside --adapter"),
        (("--adapter", "a", "--config", "lora.toml"), "[lora] of"),
        (("--adapter", "a@0.5"), "has a weight, and one is trained"),
        (("--adapter", "a", "--adapter", "b"), "gives a mix, and one is trained; wanted DIR"),
        (("--adapter", "nowhere"), "nowhere is not the folder of an adapter"),
        (("--eval", "eval.jsonl"), "--eval has no effect without --data"),
        (("--data", "none.jsonl"), "none.jsonl"),
        (("--data", "data.jsonl", "--config", "none.toml"), "none.toml is not there"),
        (("--data", "data.jsonl", "--config", "data.jsonl"), "is no TOML file"),
        (("--data", "data.jsonl", "--config", "wrong.toml"), "[lora] knows no 'rank'"),
        (("--data", "data.jsonl", "--learning-rate", "-1"), "learning_rate"),
        (("--data", "data.jsonl", "--epochs", "1", "--steps", "2"), "two lengths of a run"),
    ],
)
def test_what_is_wrong_is_named(
    given: tuple[str, ...], told: str, folder: Path, call: Caller
) -> None:
    beside = folder.parent
    (beside / "lora.toml").write_text("[lora]\nr = 4\n")
    (beside / "wrong.toml").write_text("[lora]\nrank = 4\n")
    files = [str(beside / one) if "." in one and one[0] != "-" else one for one in given]
    found = call("train", *files, "-m", str(folder), "--output", str(beside / "out"))
    assert found.code in (1, 2) and told in " ".join(found.err.split())
