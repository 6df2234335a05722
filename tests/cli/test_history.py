"""Lines of earlier chats: kept in a private file, called back with the arrow keys, bounded."""

from __future__ import annotations

import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from everystep.cli import lines
from tests.cli.running import LONGEST, Terminal, on_terminal, program, surroundings
from tests.reading import ROOT

pytest.importorskip("readline", reason="this build of Python has no readline")
UP = "\x1b[A"


def talk(cache: Path, *typed: str) -> Terminal:
    """A chat with a cache folder, in which these lines are typed, that was left."""
    with on_terminal(program("chat"), XDG_CACHE_HOME=str(cache)) as terminal:
        for count, line in enumerate(typed, 1):
            terminal.until("> ", count=count)
            terminal.type(f"{line}\n")
        terminal.until("> ", count=len(typed) + 1)
        terminal.type("\x04")
        assert terminal.end() == 0
    return terminal


def test_lines_of_an_earlier_chat_come_back(tmp_path: Path) -> None:
    talk(tmp_path, "why not", " not this one")
    file = tmp_path / "everystep" / "chat_history"
    assert file.read_text() == "why not\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = talk(tmp_path, UP)
    assert second.shown.count("why not") == 2  # as it is typed, and as it is answered


def test_a_history_is_bounded_and_those_of_two_chats_meet(tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    lines._keep(file, [f"line {number}" for number in range(5000)])
    lines._keep(file, ["another chat's"])
    kept = file.read_text().splitlines()
    assert len(kept) == lines.MOST_LINES and kept[-2:] == ["line 4999", "another chat's"]
    lines._keep(file, ["x" * (1 << 20), "last"])
    assert file.stat().st_size <= 1 << 20 and lines._kept(file) == ["last"]


def test_a_history_that_is_damaged_is_no_end_of_a_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "everystep" / "chat_history"
    file.parent.mkdir()
    file.write_bytes(b"a\x1b[2J\n\xff\nfine\n")
    assert lines._kept(file)[-1] == "fine" and "a\x1b[2J" not in lines._kept(file)
    file.unlink()
    file.mkdir()
    shown = talk(tmp_path, "hello").shown
    assert "cannot be read" in shown and "cannot be kept" in shown


@pytest.mark.skipif("libedit" in (lines.readline.__doc__ or ""), reason="libedit marks no pastes")
def test_a_pasted_text_of_several_lines_is_one_message(tmp_path: Path) -> None:
    pasted = "/first line\rsecond line\\\rthird"
    with on_terminal(program("chat"), XDG_CACHE_HOME=str(tmp_path)) as terminal:
        terminal.until("> ")
        terminal.type(f"\x1b[200~{pasted}\x1b[201~")
        terminal.until("third")
        terminal.type("\n")
        # The fake model answers with what it was asked.
        terminal.until("/first line\r\nsecond line\\\r\nthird\r\n")
        assert terminal.until("> ", count=2).count("> ") == 2
        terminal.type("\x04")
        assert terminal.end() == 0


@pytest.mark.skipif("libedit" in (lines.readline.__doc__ or ""), reason="libedit marks no pastes")
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_pasted_text_is_one_message_in_tmux(tmp_path: Path) -> None:
    socket, pasted = ["tmux", "-f", "/dev/null", "-S", str(tmp_path / "socket")], tmp_path / "text"
    pasted.write_text("first line\nsecond line\nthird")
    environment = surroundings(
        TERM="xterm", PYTHONPATH=f"{ROOT}/src:{ROOT}", XDG_CACHE_HOME=str(tmp_path)
    )

    def tmux(*said: str) -> str:
        command = [*socket, *said]
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    def until(text: str) -> None:
        end = time.monotonic() + LONGEST
        while text not in (shown := tmux("capture-pane", "-p")):
            assert time.monotonic() < end, shown
            time.sleep(0.1)

    try:
        tmux("new-session", "-d", "-x", "80", "-y", "24", "-c", str(ROOT), *program("chat"))
        until("\n>")
        tmux("load-buffer", str(pasted))
        tmux("paste-buffer", "-p")
        until("> first line\nsecond line\nthird")
        tmux("send-keys", "Enter")
        # The fake model answers with what it was asked.
        until("third\nfirst line\nsecond line\nthird\n>")
    finally:
        tmux("kill-server")
