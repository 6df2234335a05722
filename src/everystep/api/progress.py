"""A progress bar on standard error, for whoever asks for one."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """A context that gives a function to call once per finished prompt."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._progress = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        task = self._progress.add_task("prompts", total=self._total)
        return lambda: self._progress.advance(task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
