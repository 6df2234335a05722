"""Processes that fail, fall silent, are interrupted or end, and what the first one says of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import everystep as es
from everystep.errors import RankError
from everystep.executors.parallel import Crew
from everystep.testing.models import tiny_llama
from tests.executors.parallel import ranks
from tests.executors.parallel.ranks import CALL, IDS
from tests.reading import ROOT

PATIENCE = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with four key heads."""
    made = tmp_path_factory.mktemp("model")
    tiny_llama(num_key_value_heads=4).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What the first of two processes found that torchrun has started."""
    line = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = subprocess.run(
        [sys.executable, "-m", *line, "tests.executors.parallel.ranks", str(folder)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("raising", "RankError: .*got process 1: ValueError: of one process alone"),
        ("interrupted", "KeyboardInterrupt: in mid-step"),
        ("silent", "RankError: .*does not answer.*3000ms"),
        ("a second model", "UnsupportedError: .*parts of one model"),
        ("another number", r"RequestError: .*parallel=4.*Start as many"),
    ],
)
def test_what_ends_a_call_is_said(case: str, words: str, found: dict[str, Any]) -> None:
    assert re.match(words, str(found[case])), found[case]


@pytest.mark.parametrize("case", ["raising", "the interrupt", "the silence"])
def test_the_next_call_goes_on_with_the_same_processes(
    case: str, found: dict[str, Any], folder: Path
) -> None:
    assert found[f"after {case}"] == es.load_model(folder).generate(IDS, **CALL).tolist()


def test_silence_is_an_error_when_the_time_is_over(found: dict[str, Any]) -> None:
    assert ranks.PATIENCE <= found["silent seconds"] < ranks.PATIENCE + 10


def test_the_others_keep_no_rows_of_calls_that_failed(found: dict[str, Any], folder: Path) -> None:
    """Each of six calls opened an executor in the other; three of them ended by an error."""
    assert int((folder / "left").read_text()) <= 2


def test_a_process_that_cannot_load_says_why(tmp_path: Path) -> None:
    orders = {"folder": str(tmp_path / "nowhere"), "dtype": None, "threads": 1}
    crew = Crew.of_children(2, 30.0, orders)
    with pytest.raises(RankError, match=r"process 1 of 2 MissingFileError: there is no folder"):
        crew.ready()
    with pytest.raises(RankError, match=r"for good.*Load the model again"):
        crew.ready()


DRIVER = """
import os, sys, time
import everystep as es
from tests.executors.parallel.children import children
model = es.load_model(sys.argv[1], parallel=2)
print(children()[0], flush=True)
time.sleep(600)
"""


def test_the_others_end_with_the_first(folder: Path, tmp_path: Path) -> None:
    """Also where it is killed, and nothing of theirs is left."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)],
        cwd=ROOT,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    ) as driver:
        assert driver.stdout is not None
        child = Path("/proc", driver.stdout.readline().decode().strip())
        assert child.exists() and len([*tmp_path.iterdir()]) == 1
        driver.kill()
    until = time.monotonic() + 60
    while child.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not child.exists() and not [*tmp_path.iterdir()]
