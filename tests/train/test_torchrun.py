"""Lines of `torchrun` as the guide has them, in a folder of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

from everystep.train.callbacks import log_of
from tests.cli.tiny_model import write_tiny_model
from tests.reading import ROOT
from tests.train.test_lost_ranks import weights_of

PAGE = (ROOT / "docs" / "guide" / "many-ranks.md").read_text(encoding="utf-8")
SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[0]
PATIENCE = 300


def ran(folder: Path, *line: str) -> str:
    """What a line prints, in the folder."""
    places = [str(ROOT / one) if one in ("src", ".") else one for one in sys.path]
    done = subprocess.run(
        [sys.executable, "-m", *line],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("fsdp", [False, True])
def test_the_script_of_the_guide(
    fsdp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of 2 examples say and write what one of 4 does, also with parts of weights."""
    [line] = re.findall(r"^\$ torchrun (.*)$", PAGE, re.M)
    together, alone = tmp_path / "together", tmp_path / "alone"
    for folder in (together, alone):
        folder.mkdir()
    script = SCRIPT.replace("max_steps=6,", "max_steps=6,\n    fsdp=True,") if fsdp else SCRIPT
    assert (script != SCRIPT) == fsdp
    (together / "train.py").write_text(script, encoding="utf-8")
    out = ran(together, "torch.distributed.run", *shlex.split(line))
    assert out.splitlines() == ["6"]
    monkeypatch.chdir(alone)
    exec(SCRIPT.replace("train_batch_size=2", "train_batch_size=4"), {})
    logs = [log_of(folder / "ranks") for folder in (together, alone)]
    first, second = ([one["loss"] for one in each if "loss" in one] for each in logs)
    assert len(first) == 6 and first == pytest.approx(second, rel=1e-5)
    found, wanted = (weights_of(one / "ranks/end") for one in (together, alone))
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    checkpoints = sorted(one.name for one in (together / "ranks").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-3", "checkpoint-6"]


def test_the_command_line(tmp_path: Path) -> None:
    """One of two processes says how the training of both goes."""
    folder = write_tiny_model(tmp_path / "tiny")
    rows = [{"prompt": "the cat sat", "completion": f" on {one}"} for one in "abcd"]
    lines = "".join(json.dumps(one) + "\n" for one in rows)
    (tmp_path / "data.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "eval.jsonl").write_text(lines.replace("cat", "dog"), encoding="utf-8")
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "everystep")
    given = ("--data", "data.jsonl", "--eval", "eval.jsonl", "--batch-size", "2", "--steps", "4")
    out = ran(tmp_path, *start, "train", *given, "-m", str(folder), "-o", "mine")
    assert out.count("steps: 4") == out.count("eval_loss: ") == out.count("everystep chat") == 1
    assert (tmp_path / "mine" / "adapter_model.safetensors").exists()
    assert len([one for one in log_of(tmp_path / "mine") if "train_loss" in one]) == 1
