"""The processor as the system describes it, and where it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everystep import processor


def test_a_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast One 3\n")
    monkeypatch.setattr(processor, "_NAMES", tmp_path / "cpuinfo")
    assert processor.processor_name() == "Fast One 3"
    monkeypatch.setattr(processor, "_NAMES", tmp_path / "absent")
    assert processor.processor_name()


@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8), ("", 8)],
)
def test_a_control_group_bounds_what_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, count: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(processor, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processor.usable_processors() == count


def test_without_a_control_group_all_are_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_QUOTA", tmp_path / "absent")
    assert processor.usable_processors() == len(os.sched_getaffinity(0))
