"""Running command lines: in this process, as a program with pipes, or as one on a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from everystep.cli import main
from tests.reading import ROOT

LONGEST = 30.0


class Outcome(NamedTuple):
    """What a finished command left behind."""

    code: int
    out: str
    err: str


def program(*arguments: str, **stage: object) -> list[str]:
    """The command line of the program with a fake model; `stage`: fields of `Stage`."""
    return [sys.executable, "-m", "tests.cli.program", json.dumps(stage), *arguments]


def everystep(*arguments: str) -> list[str]:
    """The command line of the real program."""
    return [sys.executable, "-m", "everystep", *arguments]


def surroundings(**environment: str) -> dict[str, str]:
    """The environment of a program, without what pytest and its workers say of Python's output and
    of the width of a terminal."""
    said = ("PYTHONUNBUFFERED", "COLUMNS", "LINES")
    inherited = {name: value for name, value in os.environ.items() if name not in said}
    return {**inherited, **environment}


def run(command: list[str], given: bytes = b"", **environment: str) -> Outcome:
    """A program with pipes for input and outputs."""
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        cwd=ROOT,
        env=surroundings(**environment),
        timeout=LONGEST,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclass
class Caller:
    """Runs command lines in this process."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, given: bytes = b"") -> Outcome:
        stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
        self.monkeypatch.setattr(sys, "stdin", stdin)
        code = main(arguments)
        return Outcome(code, *self.capsys.readouterr())


@dataclass
class Terminal:
    """A terminal with a program on it."""

    process: subprocess.Popen[bytes]
    master: int
    shown: str = ""

    def type(self, text: str) -> None:
        """The keys are pressed; \\x03 is Ctrl-C and \\x04 is Ctrl-D."""
        os.write(self.master, text.encode())

    def until(self, text: str, count: int = 1) -> str:
        """Waits until the text was shown that often, and returns everything shown so far."""
        deadline = time.monotonic() + LONGEST
        while self.shown.count(text) < count:
            if not self._read(deadline):
                raise AssertionError(f"{text!r} was not shown: {self.shown!r}")
        return self.shown

    def end(self) -> int:
        """Waits until the program has ended and returns its exit code."""
        deadline = time.monotonic() + LONGEST
        while self._read(deadline):
            pass
        return self.process.wait(LONGEST)

    def _read(self, deadline: float) -> bool:
        """Whether there was more to read."""
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self.master, 4096) if ready else b""
        except OSError:  # Linux's way of saying that nobody holds the other end any more
            data = b""
        # Without what readline says to have the terminal mark what is pasted.
        self.shown = (self.shown + data.decode(errors="replace")).replace("\x1b[?2004h", "")
        self.shown = self.shown.replace("\x1b[?2004l\r", "")
        return bool(data)


@contextmanager
def on_terminal(
    command: list[str], cwd: Path = ROOT, columns: int = 80, **environment: str
) -> Iterator[Terminal]:
    """A program whose input and outputs are a terminal of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cwd,
        env=surroundings(TERM="xterm", PYTHONPATH=f"{ROOT}/src:{ROOT}", **environment),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(master)
