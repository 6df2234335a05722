"""A file is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


WRITERS = {
    "file": "with atomic_file(target) as file:\n    file.write(b'half'); file.flush(); stop()",
    "folder": "with atomic_folder(target) as new:\n    (new / 'half').write_text(''); stop()",
    "files": "with atomic_files(target, 'a', lambda name: False) as new:\n"
    "    (new / 'half').write_text(''); stop()",
}


@contextmanager
def writer(kind: str, target: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of writing `target`."""
    begin = (
        "import sys, time\nfrom pathlib import Path\nfrom everystep.files.atomic import *\n"
        "def stop():\n    print('half', flush=True); time.sleep(600)\n"
        f"target = Path({str(target)!r})\n"
    )
    command = [sys.executable, "-c", begin + WRITERS[kind]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "half\n"
        try:
            yield child
        finally:
            child.kill()


def write(kind: str, target: Path) -> None:
    if kind == "file":
        write_atomic(target, b"whole")
    elif kind == "folder":
        with atomic.atomic_folder(target) as new:
            (new / "a").write_text("whole")
    else:
        with atomic_files(target, "a", lambda name: False) as new:
            (new / "a").write_text("whole")


needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")


@needs_locks
@pytest.mark.parametrize("kind", [*WRITERS, "files of a folder"])
def test_what_a_killed_writer_left_goes_and_what_a_live_one_writes_stays(
    kind: str, target: Path
) -> None:
    kind, old = kind.split()[0], " of a " in kind
    if old:
        target.mkdir()
        (target / "a").write_text("old")
    place = target if old else target.parent
    with writer(kind, target) as killed:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    left = {one for one in names(place) if one.endswith(".partial")}
    assert len(left) == 1
    with writer(kind, target):
        live = {one for one in names(place) if one.endswith(".partial")}
        assert len(live) == 1 and not live & left
        write(kind, target)
        assert {one for one in names(place) if one.endswith(".partial")} == live
        found = target if kind == "file" else target / "a"
        assert found.read_text() == "whole"
    remove_leftovers(place)
    assert names(target.parent) == ["target"]
    assert kind == "file" or names(target) == ["a"]


@needs_locks
def test_leftovers_beside_a_folder_go_when_its_files_are_written(target: Path) -> None:
    with writer("files", target) as killed:
        killed.kill()
        killed.wait()
    target.mkdir()
    (target / "b").write_text("made by somebody else")
    write("files", target)
    assert names(target.parent) == ["target"] and names(target) == ["a", "b"]


@needs_locks
def test_leftovers_of_other_targets_stay(tmp_path: Path) -> None:
    others = [".targets.0123456789abcdef.partial", ".a.target.0123456789abcdef.partial"]
    for name in (*others, ".target.0123456789abcdef.partial"):
        (tmp_path / name).mkdir()
    write_atomic(tmp_path / "target", b"whole")
    assert names(tmp_path) == sorted([*others, "target"])


@needs_locks
def test_a_partial_that_is_taken_away_before_it_is_locked_is_made_again(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = atomic._lock, []

    def late(path: Path, *, wait: bool) -> int | None:
        if wait and not taken:
            taken.append(path)
            remove_leftovers(path.parent)
        return lock(path, wait=wait)

    monkeypatch.setattr(atomic, "_lock", late)
    write_atomic(target, b"whole")
    assert taken and target.read_bytes() == b"whole" and names(target.parent) == ["target"]


@needs_locks
def test_where_there_are_no_locks_leftovers_stay(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    left = target.with_name(".target.0123456789abcdef.partial")
    left.touch()
    monkeypatch.setattr(atomic.fcntl, "flock", none)
    write_atomic(target, b"whole")
    assert names(target.parent) == [left.name, "target"]


@needs_locks
def test_only_files_and_folders_are_leftovers(tmp_path: Path) -> None:
    """A link, a pipe or a device of such a name is neither followed nor waited for."""
    (tmp_path / "precious").write_text("precious")
    link = tmp_path / ".target.0123456789abcdef.partial"
    link.symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / ".target.0000000000000000.partial")
    write_atomic(tmp_path / "target", b"whole")
    assert len(names(tmp_path)) == 4 and (tmp_path / "precious").read_text() == "precious"


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
