"""Processes that a test starts together, each with a rank."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reading import ROOT

PATIENCE = 300


def found_together(module: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """What each of the processes `python -m MODULE FOLDER RANK COUNT` saved as FOLDER/RANK.pt.

    Where several ask with one folder, the first starts them, and the others wait for it.
    """
    saved = [folder / f"{rank}.pt" for rank in range(count)]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(one.exists() for one in saved):
            _run_together(module, folder, count)
    return [torch.load(one) for one in saved]


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that all workers of a run of the tests have."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def _run_together(module: str, folder: Path, count: int) -> None:
    each = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(count)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=ROOT,
        )
        for rank in range(count)
    ]
    try:
        assert [one.wait(PATIENCE) for one in each] == [0] * count
    finally:
        for one in each:
            one.kill()
            one.wait()
