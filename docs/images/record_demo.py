"""Draws `docs/images/demo.svg`: what a terminal shows when `scripts/demo` has run.

    .venv/bin/python docs/images/record_demo.py

The demo really runs, on a terminal of its own; its output is drawn unchanged, except that lines are
broken between words. The picture loads no fonts from elsewhere.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "demo.svg"
QUESTION = "Why is the sky blue?"
COLUMNS = 88
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def recorded(command: list[str]) -> str:
    """Everything that a command writes to the terminal it runs on."""
    reader, terminal = pty.openpty()
    # The spinner on standard error leaves nothing on the screen, so nothing of it is recorded.
    process = subprocess.Popen(command, cwd=ROOT, stdout=terminal, stderr=subprocess.DEVNULL)
    os.close(terminal)
    chunks = []
    while chunk := read_or_end(reader):
        chunks.append(chunk)
    os.close(reader)
    if process.wait() != 0:
        raise SystemExit(f"{command[0]} failed with exit code {process.returncode}")
    return b"".join(chunks).decode().replace("\r\n", "\n")


def read_or_end(terminal: int) -> bytes:
    """The next bytes; none when the program has ended."""
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux reports the end of a terminal's last program as an error
        return b""


def drawn(prompt: str, output: str) -> str:
    """The picture of a terminal with a command and its output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (prompt, "bold")))
    console.print(Text.from_ansi(output.rstrip("\n")))
    return local_fonts(console.export_svg(title="everystep", theme=MONOKAI, unique_id="everystep"))


def local_fonts(picture: str) -> str:
    """The picture with fonts of the reader's machine only, and no spaces at ends of lines."""
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
    picture = re.sub(
        r"font-family: (?:Fira Code, monospace|arial);", f"font-family: {FONTS};", picture
    )
    return re.sub(r"[ \t]+$", "", picture, flags=re.M).strip() + "\n"


if __name__ == "__main__":
    answer = recorded(["scripts/demo", QUESTION])
    PICTURE.write_text(drawn(f'scripts/demo "{QUESTION}"', answer), encoding="utf-8")
