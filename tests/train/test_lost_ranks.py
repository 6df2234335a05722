"""A process that is killed ends the run of all; it goes on from a checkpoint that is whole."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor, equal
from torch.testing import assert_close

from everystep.train.checkpoints import checkpoints_in, fault_of
from tests.train.runs import train_beside_others, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
STEPS, LOST = 24, 3
"""Steps of a run, and how a process ends that has lost another."""


def started(folder: Path, attempt: int, fsdp: bool) -> list[BaseProcess]:
    """Two processes that have met."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.runs", "everystep.train.trainer"])
    each = []
    for rank in range(2):
        given = str(folder), rank, attempt, STEPS, fsdp
        each.append(context.Process(target=train_beside_others, args=given))
        each[-1].start()
    while not all((folder / f"met-{attempt}-{rank}").exists() for rank in range(2)):
        assert all(one.exitcode is None for one in each), [one.exitcode for one in each]
        time.sleep(0.01)
    return each


def killed_until_it_ends(folder: Path, kills: int, draw: random.Random, fsdp: bool) -> int:
    """Kill one of the processes so many times at random moments, then let them end."""
    folder.mkdir()
    done = 0
    for attempt in range(kills + 1):
        each = started(folder, attempt, fsdp)
        if attempt < kills:
            victim = each[draw.randrange(2)]
            victim.join(draw.uniform(0.05, 1.5))
            if victim.is_alive():
                victim.kill()
                done += 1
        for one in each:
            one.join()
        codes = sorted(one.exitcode or 0 for one in each)
        if codes == [0, 0] or (folder / "ended").exists():
            break
        assert codes == [-signal.SIGKILL, LOST]
        for checkpoint in checkpoints_in(folder):
            assert fault_of(checkpoint) is None, checkpoint
    return done


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights that a run ended with."""
    return weights_of(folder / "end")


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, in however many files they lie."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: one for file in files for name, one in load_file(file).items()}


def killed(tmp_path: Path, kills: int, seed: int, *, fsdp: bool = False) -> None:
    draw = random.Random(seed)
    assert killed_until_it_ends(tmp_path / "whole", 0, draw, fsdp) == 0
    wanted = weights_in(tmp_path / "whole")
    count, runs = 0, 0
    while count < kills:
        folder, runs = tmp_path / f"killed-{runs}", runs + 1
        assert runs <= 2 * kills, f"of {runs} runs {count} were killed before they ended"
        count += killed_until_it_ends(folder, kills - count, draw, fsdp)
        found = weights_in(folder)
        assert found.keys() == wanted.keys()
        assert all(equal(found[name], one) for name, one in wanted.items())
        assert not list(folder.glob(".*"))


def test_kills_of_either_process_change_no_bit(tmp_path: Path) -> None:
    killed(tmp_path, 4, 1)


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_process_goes_on_where_one_of_two_was_killed(tmp_path: Path, fsdp: bool) -> None:
    """With the examples that two had, from a checkpoint that each of them wrote a part of."""
    folder = tmp_path / "killed"
    folder.mkdir()
    each = started(folder, 0, fsdp)
    while not (folder / "checkpoint-4" / "checkpoint.json").exists():
        assert all(one.is_alive() for one in each)
        time.sleep(0.005)
    each[1].kill()
    for one in each:
        one.join()
    assert [one.exitcode for one in each] == [LOST, -signal.SIGKILL]
    newest = checkpoints_in(folder)[-1]
    assert fault_of(newest) is None and newest.name != f"checkpoint-{STEPS}"
    assert len(list(newest.glob("optimizer-*.safetensors"))) == 2
    for place, begun in ((folder, True), (tmp_path / "alone", False)):
        run = trainer(place, max_steps=STEPS, save_steps=2, per_device_train_batch_size=4)
        run.train(resume_from_checkpoint=begun)
        run.save_model(place / "end")
    found, wanted = weights_in(folder), weights_in(tmp_path / "alone")
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    before = weights_of(newest)
    assert not any(equal(found[name], one) for name, one in before.items()), "it went on"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_kills_change_no_bit(seed: int, tmp_path: Path) -> None:
    """Of processes that have all weights, and of processes that have parts of them."""
    killed(tmp_path, 10, 100 + seed, fsdp=seed % 2 == 1)
