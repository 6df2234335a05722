"""A file is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everystep.errors import FileError
from everystep.files import atomic
from everystep.files.atomic import atomic_file, atomic_files, remove_leftovers, write_atomic


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


def test_files_of_a_folder_come_with_the_last_one_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at any moment finds either no last file or all files that belong to it."""
    folder, seen = tmp_path / "folder", []
    folder.mkdir()
    for name in ("config", "old", "weights", "others"):
        (folder / name).write_text("before")
    replace = os.replace

    def watched(one: Path, two: Path) -> None:
        seen.append(names(folder))
        replace(one, two)

    with atomic_files(folder, last="config", stale=lambda name: name == "old") as new:
        for name in ("config", "weights"):
            (new / name).write_text("after")
        assert (folder / "weights").read_text() == "before"
        monkeypatch.setattr(atomic.os, "replace", watched)
    assert names(folder) == ["config", "others", "weights"]
    assert [(folder / name).read_text() for name in names(folder)] == ["after", "before", "after"]
    assert all("config" not in one and "old" not in one for one in seen)


@pytest.mark.parametrize("there", [False, True])
def test_files_that_fail_leave_a_folder_as_it_was(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if there:
        folder.mkdir()
        (folder / "config").write_text("before")
    with (
        pytest.raises(KeyboardInterrupt),
        atomic_files(folder, last="config", stale=lambda name: True) as new,
    ):
        (new / "config").write_text("after")
        raise KeyboardInterrupt
    assert names(tmp_path) == (["folder"] if there else [])
    if there:
        assert names(folder) == ["config"] and (folder / "config").read_text() == "before"


def test_a_file_takes_no_files(target: Path) -> None:
    target.write_text("a file")
    with (
        pytest.raises(FileError, match="is a file"),
        atomic_files(target, last="config", stale=lambda name: True),
    ):
        pass


def test_of_two_writers_of_a_folder_one_wins(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with (
        pytest.raises(FileError, match="is there already"),
        atomic.atomic_folder(target) as slow,
    ):
        (slow / "a").write_text("slow")
        with atomic.atomic_folder(target) as fast:
            (fast / "a").write_text("fast")
    assert (target / "a").read_text() == "fast"
    assert names(tmp_path) == ["model"]
