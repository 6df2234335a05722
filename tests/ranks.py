"""Processes that a test starts together, each with a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.reading import ROOT

PATIENCE = 300


def found_together(module: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """What each of the processes `python -m MODULE FOLDER RANK COUNT` saved as FOLDER/RANK.pt."""
    each = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(count)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=ROOT,
        )
        for rank in range(count)
    ]
    assert [one.wait(PATIENCE) for one in each] == [0] * count
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]
