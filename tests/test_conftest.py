"""The rules of conftest.py hold in the process that the tests run in."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import torch

from tests import conftest
from tests.reading import ROOT


def test_other_machines_are_out_of_reach() -> None:
    with pytest.raises(RuntimeError, match="a test tried to reach"):
        urllib.request.urlopen("http://example.com")
    with pytest.raises(RuntimeError, match="a test tried to reach"):
        socket.create_connection(("192.0.2.1", 80))


def test_this_machine_is_within_reach() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        pass


def test_unwritten_memory_is_not_a_number() -> None:
    assert torch.empty(8).isnan().all()


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_starts_from_the_same_seeds(turn: int) -> None:
    drawn = (random.random(), float(np.random.random()), float(torch.rand(())))
    assert drawn == pytest.approx((0.8444218515250481, 0.5488135039273248, 0.4962565898895264))


def test_parts_together_are_everything() -> None:
    names = [f"tests/test_a.py::test[{i}]" for i in range(3000)]
    parts = [conftest.part_of(name, 3) for name in names]
    assert set(parts) == {1, 2, 3}
    assert min(parts.count(part) for part in (1, 2, 3)) > 900


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--shard wants I/N"):
        conftest._shard(text)


def test_with_all_a_skip_becomes_a_failure() -> None:
    report = pytest.TestReport("a", ("a", 1, "a"), {}, "skipped", "no device", "call")
    conftest._forbid_skip(report)
    assert (report.outcome, "no device" in str(report.longrepr)) == ("failed", True)


def test_an_expected_failure_stays_one() -> None:
    report = pytest.TestReport("a", ("a", 1, "a"), {}, "skipped", None, "call")
    report.wasxfail = "known"  # type: ignore[attr-defined]
    conftest._forbid_skip(report)
    assert report.outcome == "skipped"


def test_interrupts_arrive_where_the_tests_were_started_to_ignore_them() -> None:
    """As in the background of a script."""
    test = "tests/cli/test_interrupts.py::test_the_second_raises"
    started = f"trap '' INT; exec {sys.executable} -m pytest -q -n0 -p no:cacheprovider {test}"
    done = subprocess.run(["sh", "-c", started], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
