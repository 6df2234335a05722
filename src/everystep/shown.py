"""What objects show of themselves: one line for a prompt, a small table for a notebook."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

from everystep.config.kinds import FLAG
from everystep.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = 100
"""Rows of a table at most."""
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "k"), (1, ""))


_NAMED = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def marked(text: str, *, spaces: bool = True) -> str:
    """Return the text with marks in place of what moves, hides or turns: controls, directions,
    half characters; with `spaces`, spaces and line breaks have marks too."""
    found = []
    for one in text:
        if one in _NAMED and (spaces or one == "\r"):
            found.append(_NAMED[one])
        elif one in "\n\t":
            found.append(one)
        elif unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            found.append(f"‹U+{ord(one):04X}›")
        else:
            found.append(one)
    return "".join(found)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return an HTML table of the texts of these values, escaped; at most 100 rows of it."""
    coming = iter(rows)
    lines = [_row("td", cells) for cells in islice(coming, _ROWS)]
    if more := sum(1 for _ in coming):
        lines.append(f'<tr><td colspan="{len(head)}">{more} more</td></tr>')
    above = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead>{_row('th', head)}</thead><tbody>{''.join(lines)}</tbody></table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    style = ' style="text-align: left; white-space: pre-wrap"'
    return "<tr>" + "".join(f"<{tag}{style}>{_text(one)}</{tag}>" for one in cells) + "</tr>"


def _text(value: object) -> str:
    """Return what a cell says: numbers in five digits, nothing for None, texts cut after a page."""
    if value is None:
        return ""
    return html.escape(cut(f"{value:.5g}" if isinstance(value, float) else str(value), 4000))


def cut(text: str, most: int = 80) -> str:
    """Return the text, or its beginning and how much there is of it."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def counted(number: int, unit: str = "") -> str:
    """Return a large number in three digits: 135M."""
    size, letter = next((one for one in _UNITS if number >= one[0]), (1, ""))
    return f"{number / size:.3g}{letter}{unit}" if size > 1 else f"{number}{unit}"


def counted_bytes(number: int) -> str:
    """Return a number of bytes in three digits: 98.2MB."""
    return counted(number).replace("B", "G") + "B"


@contextmanager
def progress_bar(progress: bool, many: Any, what: str) -> Iterator[Callable[[], None]]:
    """Yield what to call once for each of many: it moves a bar on standard error, if asked."""
    if not FLAG.checked(progress, "progress"):
        yield lambda: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("progress=True", "rich", "cli") from error

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=_console()) as shown:
        task = shown.add_task(what, total=len(many) if isinstance(many, Sized) else None)
        yield lambda: shown.advance(task)


def _console() -> Console:
    """Standard error; in a notebook a widget, or without ipywidgets a line that is written over."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter and find_spec("ipywidgets") is None:  # rich would warn and show no bar
        return Console(stderr=True, force_jupyter=False, force_terminal=True)
    return console
