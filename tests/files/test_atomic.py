"""A file is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everystep.files import atomic
from everystep.files.atomic import atomic_file, remove_leftovers, write_atomic


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_file_appears_when_the_block_ends(target: Path) -> None:
    with atomic_file(target) as file:
        file.write(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new"
    assert names(target.parent) == ["target"]


def test_an_old_file_is_replaced(target: Path) -> None:
    target.write_bytes(b"old and longer")
    write_atomic(target, b"new")
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_any_exception_leaves_the_old_file_and_nothing_else(
    target: Path, error: type[BaseException]
) -> None:
    target.write_bytes(b"old")
    with pytest.raises(error), atomic_file(target) as file:
        file.write(b"half")
        raise error
    assert target.read_bytes() == b"old"
    assert names(target.parent) == ["target"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failure_of_the_disk_leaves_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, function, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(target, b"new")
    assert names(target.parent) == []


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "gone" / "target", b"")


def test_the_bytes_are_on_the_disk_before_the_name(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def record_replace(old: Path, new: Path) -> None:
        order.append("name")
        replace(old, new)

    monkeypatch.setattr(atomic.os, "fsync", record_fsync)
    monkeypatch.setattr(atomic.os, "replace", record_replace)
    write_atomic(target, b"new")
    assert order == ["file", "name", "folder"]


def test_a_planted_link_is_not_followed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda count: "0")
    (tmp_path / ".target.0.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomic(target, b"new")
    assert victim.read_bytes() == b"precious"


def test_the_permissions_are_those_of_any_new_file(target: Path) -> None:
    plain = target.with_name("plain")
    plain.write_bytes(b"")
    write_atomic(target, b"")
    assert target.stat().st_mode == plain.stat().st_mode


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.01.partial", "b.partial", ".c", "d"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".c", "b.partial", "d"]
