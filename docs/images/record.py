"""Draws the pictures of docs/images: what a terminal shows when a command has run.

    .venv/bin/python docs/images/record.py            every picture
    .venv/bin/python docs/images/record.py demo chat  these

Each command of the table really runs, on a terminal of its own with the default model; what it
prints is drawn unchanged, but for names of folders. So does the first Python of the README, which
stands beside its picture. The pictures load no fonts from elsewhere.
"""

from __future__ import annotations

import fcntl
import io
import os
import platform
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
PATIENCE = 300.0
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
QUESTION = "Why is the sky blue?"


@dataclass(frozen=True)
class Picture:
    """`shown` is the command line above what the program prints that `everystep` with `arguments`
    is; `typed` are lines for its prompts. Where there is `code`, Python runs it instead."""

    shown: str
    arguments: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    columns: int = 88
    code: str | None = None

    @property
    def command(self) -> list[str]:
        """The program and its arguments."""
        run = ["-m", "everystep"] if self.code is None else ["-c", self.code]
        return [sys.executable, *run, *self.arguments]


def first_python(document: Path) -> str:
    """The first block of Python in a document."""
    return document.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]


PICTURES: Mapping[str, Picture] = {
    # scripts/demo ends in this command; what it does before prints nothing the second time.
    "demo": Picture(f'scripts/demo "{QUESTION}"', ("chat", QUESTION)),
    "generate": Picture(
        'everystep generate "The capital of France is" -n 24',
        ("generate", "The capital of France is", "-n", "24"),
    ),
    "chat": Picture(
        "everystep chat -n 48",
        ("chat", "-n", "48"),
        (
            "/system Answer in one short sentence.",
            "Tell me the capital of France.",
            "/set temperature 0.7",
            "What is it known for?",
            "/undo",
            "/exit",
        ),
    ),
    "step": Picture("python step.py", columns=60, code=first_python(ROOT / "README.md")),
    "info": Picture("everystep info", ("info",), columns=112),
    "bench": Picture("everystep bench", ("bench",)),
    "doctor": Picture(
        "everystep doctor smollm2-135m-instruct", ("doctor", "smollm2-135m-instruct")
    ),
}


def recorded(picture: Picture) -> str:
    """Everything that a command writes to the terminal it runs on, its echo included."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, picture.columns, 0, 0))
    with tempfile.TemporaryDirectory() as history:
        process = subprocess.Popen(
            picture.command,
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            # A dumb terminal is sent no spinner and no cursor movements.
            env=surroundings(Path(history)),
            start_new_session=True,
        )
        os.close(terminal)
        shown = conversation(reader, picture.typed)
        os.close(reader)
        if process.wait() != 0:
            raise SystemExit(f"{picture.shown} failed:\n{shown}")
    return shown.replace(history, "~/.cache")


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a program: a dumb terminal, and a cache folder that has the models of
    this machine and no history."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everystep"
    (folder / "everystep").mkdir()
    (folder / "everystep" / "models").symlink_to(cache / "models")
    return {**os.environ, "TERM": "dumb", "XDG_CACHE_HOME": str(folder)}


def conversation(terminal: int, lines: tuple[str, ...]) -> str:
    """What is shown until the program ends, while each line is typed at a prompt of its own."""
    shown, waiting = b"", list(lines)
    deadline = time.monotonic() + PATIENCE
    while data := read_or_end(terminal, deadline):
        shown += data
        if waiting and shown.endswith(b"> "):
            os.write(terminal, f"{waiting.pop(0)}\n".encode())
    return shown.decode().replace("\r\n", "\n")


def read_or_end(terminal: int, deadline: float) -> bytes:
    """The next bytes; none when the program has ended."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise SystemExit(f"nothing came for {PATIENCE:g} seconds")
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux reports the end of a terminal's last program as an error
        return b""


def drawn(name: str, picture: Picture, output: str) -> str:
    """The picture of a terminal with a command and its output."""
    release = platform.release()
    short = ".".join(release.split(".")[:2])
    output = output.replace(sys.executable, ".venv/bin/python").replace(release, short)
    console = Console(record=True, width=picture.columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (picture.shown, "bold")))
    console.print(Text.from_ansi(output.strip("\n")))
    return local_fonts(console.export_svg(title="everystep", theme=MONOKAI, unique_id=name))


def local_fonts(picture: str) -> str:
    """The picture with fonts of the reader's machine only, with the spaces that lines begin with,
    and without those that they end with."""
    picture = picture.replace('-matrix">', '-matrix" xml:space="preserve">')
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
    picture = re.sub(
        r"font-family: (?:Fira Code, monospace|arial);", f"font-family: {FONTS};", picture
    )
    return re.sub(r"[ \t]+$", "", picture, flags=re.M).strip() + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        output = recorded(PICTURES[name])
        picture = drawn(name, PICTURES[name], output)
        (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")
