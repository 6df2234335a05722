"""Fetching and loading a model, with progress shown.

On a terminal a bar shows what is fetched and a spinner that something happens; otherwise standard
error gets one line per stage of a fetch, and nothing when there is nothing to fetch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import everystep as es
from everystep.cli.terminal import harmless, is_terminal, note
from everystep.files.sources import known_licence, resolve_source

if TYPE_CHECKING:  # imported where they are drawn: a program at the other end sees none of them
    from rich.progress import Progress, TaskID


class Watched:
    """A context whose value is a progress callback: (bytes done, bytes in all, what)."""

    def __init__(self, name: str) -> None:
        self._name = harmless(name)
        self._stage = ""
        self._shown: Progress | None = None  # a spinner, then a bar; None without a terminal
        self._bar: TaskID | None = None

    def __enter__(self) -> Watched:
        if is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn

            console, text = Console(stderr=True), TextColumn("{task.description}", markup=False)
            self._shown = Progress(SpinnerColumn(), text, console=console, transient=True)
            self._shown.add_task(f"loading {self._name}")
            self._shown.start()
        return self

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show how far a stage of a fetch has come, and first what the model is licensed under."""
        begins, self._stage = what != self._stage, what
        licence = known_licence(self._name) if begins and what == "downloading" else None
        if licence is not None:
            note(f"{self._name} is licensed under {licence}")
        if self._shown is None:
            if begins:
                note(f"{what} {self._name} ({total / 1e6:.0f} MB)")
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._shown.stop()  # a console shows one of them at a time
            text = TextColumn("{task.description}", markup=False)
            columns = (text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._shown = Progress(*columns, console=Console(stderr=True))
            self._bar = self._shown.add_task(what)
            self._shown.start()
        self._shown.update(
            self._bar, description=f"{what} {self._name}", completed=done, total=total
        )

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on a terminal while something takes its time."""
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def fetch(source: str, offline: bool) -> Path:
    """Return the local path of a model, fetched if it was not there."""
    with Watched(source) as progress:
        return resolve_source(source, offline=offline, progress=progress)


def load(
    source: str, dtype: str | None, quantize: Any, cache_dtype: Any, device: str, offline: bool
) -> tuple[Any, Any]:
    """Return (model, tokenizer), fetched if they were not there, for a device that is."""
    if device != "cpu":
        from everystep.models.load import usable_device  # imports torch

        usable_device(device)
    with Watched(source) as progress:
        with _without_collections():
            loaded = es.load  # this imports torch and all that runs a model
        return loaded(
            source,
            dtype=None if dtype is None else _named(dtype),
            quantize="auto" if quantize is None else quantize.value,
            cache_dtype=None if cache_dtype is None else cache_dtype.value,
            device=device,
            offline=offline,
            progress=progress,
        )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Search for no garbage within, nor later among what was made within.

    Importing makes hundreds of thousands of objects that stay. To look at them again and again took
    an eighth of the time to the first token.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _named(dtype: str) -> Any:
    import torch  # a second, which is better spent while the spinner turns

    return getattr(torch, dtype)
