"""Brings the events of a call to a streamer in the form that it expects.

A streamer of transformers' kind gets the prompt and then one id per row and step; one that
defines `on_event` gets the events themselves. Whatever happens, it learns of the end once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from everystep.nn.modes import ordinary_mode
from everystep.streamers.wording import Wording
from everystep.types import Event


class Delivery:
    """Calls one streamer for R rows: those of the prompt, `returns` times each.

    `fill`: the id that stands where a row has nothing to say. Events hold the row of the prompt as
    `request_id` and, beside it, the index of the sequence.
    """

    def __init__(self, streamer: Any, rows: int, returns: int, fill: int, wording: Wording) -> None:
        self._streamer = streamer
        self._rows = rows * returns
        self._returns = returns
        self._fill = fill
        self._wording = wording
        self._on_event: Callable[[Event], None] | None = getattr(streamer, "on_event", None)

    @contextmanager
    def open(self, prompt: np.ndarray) -> Iterator[Delivery]:
        """Pass on the prompt, (rows, T), and at the end that it is over, or the error behind it."""
        try:
            self._put(prompt.repeat(self._returns, axis=0))
            yield self
        except BaseException as error:
            fail = getattr(self._streamer, "fail", None)
            if fail is None:
                self._streamer.end()
            else:
                fail(error)
            raise
        self._streamer.end()

    def __call__(self, events: list[Event]) -> None:
        """Pass on what became known in a step."""
        if self._on_event is not None:
            for event in events:
                self._on_event(self._wording(event))
            return
        columns = self._columns(events)
        if self._rows == 1 and len(columns) > 1:
            self._put([[id for (id,) in columns]])
            return
        for column in columns:
            self._put(column)

    def _put(self, ids: Any) -> None:
        """Put an ordinary tensor: the streamer may be used, and keep what it gets, anywhere."""
        with ordinary_mode():
            self._streamer.put(torch.tensor(ids))

    def _columns(self, events: list[Event]) -> list[tuple[int, ...]]:
        """Return the first new id of every row, then the second, and so on."""
        by_row: list[list[int]] = [[] for _ in range(self._rows)]
        for event in events:
            if event.token >= 0:
                by_row[int(event.request_id) * self._returns + event.index].append(event.token)
        return list(zip_longest(*by_row, fillvalue=self._fill))
