"""A file is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


IMPOSSIBLE = {
    "in no folder": ("gone/target", FileNotFoundError, "gone/target cannot be written: the folder"),
    "below a file": ("file/target", FileNotFoundError, "file/target cannot be written: the folder"),
    "a folder": ("folder", FileError, "folder is a folder"),
    "a link to no folder": ("lost", FileNotFoundError, "lost cannot be written: the folder"),
    "a link to itself": ("round", FileError, "round cannot be written"),
    "no name": ("a\0b", FileError, "cannot be written; got embedded null byte"),
    "too long a name": ("a" * 300, FileError, "cannot be written; got .*too long"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_path_is_found_before_anything_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "lost").symlink_to(tmp_path / "gone" / "target")
    (tmp_path / "round").symlink_to("round")
    before = names(tmp_path)
    path, error, text = IMPOSSIBLE[name]
    with pytest.raises(error, match=text):
        atomic.require_writable(tmp_path / path)
    with pytest.raises(error, match=text), atomic_file(tmp_path / path):
        raise AssertionError("the block was entered")
    assert names(tmp_path) == before


def test_a_folder_that_nobody_may_write_is_found_before(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic.os, "access", lambda *_: False)  # to root the system says yes
    with pytest.raises(FileError, match="target cannot be written: nothing may be written into"):
        atomic.require_writable(target)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o400])
def test_a_file_keeps_its_mode(target: Path, mode: int) -> None:
    target.touch()
    target.chmod(mode)
    with atomic_file(target) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == mode  # before a byte is written
        file.write(b"new")
    assert stat.S_IMODE(target.stat().st_mode) == mode and target.read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "chown"), reason="owners of a POSIX system")
def test_a_file_keeps_its_owner_where_that_is_allowed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.touch()
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(atomic.os, "chown", lambda _, *owner: given.append(owner))
    write_atomic(target, b"new")
    assert given == [(target.stat().st_uid, target.stat().st_gid)]

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(atomic.os, "chown", refused)
    write_atomic(target, b"newer")
    assert target.read_bytes() == b"newer"


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    place, link = tmp_path / "place", tmp_path / "link"
    place.mkdir()
    (place / "file").write_bytes(b"old")
    link.symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to("place/file")
    write_atomic(link, b"new")
    assert link.is_symlink() and (tmp_path / "other").is_symlink()
    assert (place / "file").read_bytes() == b"new" and names(place) == ["file"]
    (place / "file").unlink()
    write_atomic(link, b"made")  # to where nothing is yet
    assert (place / "file").read_bytes() == b"made"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of a POSIX system")
@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_gets_the_bytes_and_stays(tmp_path: Path, linked: bool) -> None:
    pipe = target = tmp_path / "pipe"
    os.mkfifo(pipe)
    if linked:
        target = tmp_path / "link"
        target.symlink_to(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)
        write_atomic(target, b"whole" * 100_000)
        assert read.result() == b"whole" * 100_000
    assert stat.S_ISFIFO(pipe.stat().st_mode) and target.is_symlink() == linked
    with pytest.raises(ValueError), atomic_file(target) as file:
        file.write(b"half")
        raise ValueError  # nothing waits for a reader, who would get half of it


NULL = (1, 3)  # the numbers of the device that forgets what it is given


def test_a_device_gets_the_bytes_and_stays(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(*NULL))
        device.open("wb").close()
    except (AttributeError, OSError):
        pytest.skip("only root may make a device, and not on every file system")
    write_atomic(device, b"forgotten")
    atomic.require_writable(device)
    assert stat.S_ISCHR(device.stat().st_mode) and names(tmp_path) == ["null"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of a POSIX system")
def test_a_folder_with_a_pipe_in_the_place_of_a_file_takes_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "weights")
    (tmp_path / "config").write_text("before")
    with (
        pytest.raises(FileError, match="weights is no regular file"),
        atomic_files(tmp_path, last="config", stale=lambda name: True) as new,
    ):
        (new / "weights").write_text("after")
        (new / "config").write_text("after")
    assert names(tmp_path) == ["config", "weights"]
    assert (tmp_path / "config").read_text() == "before"


def test_files_of_a_folder_keep_their_modes_and_replace_links(tmp_path: Path) -> None:
    folder, blob = tmp_path / "folder", tmp_path / "blob"
    folder.mkdir()
    blob.write_text("of others too")
    (folder / "weights").symlink_to(blob)
    (folder / "config").touch(0o600)
    with atomic_files(folder, last="config", stale=lambda name: False) as new:
        (new / "weights").write_text("after")
        (new / "config").write_text("after")
    assert stat.S_IMODE((folder / "config").stat().st_mode) == 0o600
    assert blob.read_text() == "of others too"
    assert not (folder / "weights").is_symlink() and (folder / "weights").read_text() == "after"


def test_a_link_in_a_folder_of_a_model_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("of others too")
    (tmp_path / "link").symlink_to("blob")
    write_atomic(tmp_path / "link", b"new", follows=False)
    assert (tmp_path / "blob").read_text() == "of others too"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_text() == "new"


def test_an_empty_folder_is_filled_through_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir(0o700)
    (tmp_path / "link").symlink_to("place")
    write("files", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "place"]
    assert stat.S_IMODE((tmp_path / "place").stat().st_mode) == 0o700
    assert (tmp_path / "place" / "a").read_text() == "whole"


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
