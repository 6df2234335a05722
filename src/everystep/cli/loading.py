"""Fetching and loading a model, with progress shown.

On a terminal a bar shows what is fetched and a spinner that something happens; otherwise standard
error gets one line per stage of a fetch, and nothing when there is nothing to fetch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

import everystep as es
from everystep.cli.options import ModelChoice
from everystep.cli.terminal import is_terminal, note
from everystep.files.sources import resolve_source


class Watched:
    """A context whose value is a progress callback: (bytes done, bytes in all, what)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage = ""
        self._spinner: Progress | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Watched:
        if is_terminal(sys.stderr):
            console = Console(stderr=True)
            self._spinner = Progress(
                SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True
            )
            self._spinner.add_task(f"loading {self._name}")
            self._spinner.start()
        return self

    def __call__(self, done: int, total: int, what: str) -> None:
        """Shows how far a stage of a fetch has come."""
        if self._spinner is None:
            self._tell(total, what)
        else:
            self._show(done, total, what)

    def _tell(self, total: int, what: str) -> None:
        if what != self._stage:
            self._stage = what
            note(f"{what} {self._name} ({total / 1e6:.0f} MB)")

    def _show(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            self._stop(self._spinner)  # a console shows one of them at a time
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(what)
            self._bar.start()
        text = f"{what} {self._name}"
        self._bar.update(self._task, description=text, completed=done, total=total)

    def _stop(self, progress: Progress | None) -> None:
        if progress is not None:
            progress.stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(self._spinner)
        self._stop(self._bar)


def fetch(source: str, offline: bool) -> Path:
    """The local path of a model, fetched if it was not there."""
    with Watched(source) as progress:
        return resolve_source(source, offline=offline, progress=progress)


def load(choice: ModelChoice) -> tuple[Any, Any]:
    """(model, tokenizer), fetched if they were not there, for a device that is."""
    from everystep.models.load import usable_device  # imports torch, as `_torch_dtype` does

    usable_device(choice.device)
    with Watched(choice.source) as progress:
        return es.load(
            choice.source,
            dtype=_torch_dtype(choice),
            quantize="auto" if choice.quantize is None else choice.quantize.value,
            cache_dtype=None if choice.cache_dtype is None else choice.cache_dtype.value,
            device=choice.device,
            offline=choice.offline,
            progress=progress,
        )


def _torch_dtype(choice: ModelChoice) -> Any:
    if choice.dtype is None:
        return None
    import torch  # a second of importing that commands without a model do not need

    return getattr(torch, choice.dtype.value)
