"""How far a call about many things has come, on standard error or in a notebook's cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from everystep.config.kinds import FLAG
from everystep.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar(progress: bool, many: Any, what: str) -> Iterator[Callable[[], None]]:
    """Something to call once for each of many: it moves a bar on standard error, if asked."""
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
