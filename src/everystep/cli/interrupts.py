"""Ctrl-C as a wish.

An exception could strike the engine in the middle of a step; here the first Ctrl-C is only
remembered, for code that asks between two steps. The second one raises KeyboardInterrupt after all,
and while a line is typed the first one does. Installed for a whole chat, it leaves no moment in
which Ctrl-C would end the program.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """A context in which Ctrl-C sets `wished`, and a further one raises."""

    def __init__(self) -> None:
        self.wished = False
        self._raises = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # Only the main thread may say what a signal does; elsewhere none arrives.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Ctrl-C raises at once inside, and what was wished before is forgotten."""
        self.wished = False
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _remember(self, *_: object) -> None:
        if self._raises or self.wished:
            raise KeyboardInterrupt
        self.wished = True
