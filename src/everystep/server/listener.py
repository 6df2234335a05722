"""uvicorn's server, with signals left to whoever runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class Listener(uvicorn.Server):
    """A server of uvicorn without its handlers of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are."""
        yield
