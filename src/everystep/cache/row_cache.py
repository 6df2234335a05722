"""The cache as an executor sees it: the four verbs, and a context per step.

Row numbers are chosen by the engine. What the network computes is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from everystep.cache.context import Context
from everystep.cache.kv_format import CacheDtype
from everystep.cache.plan import Feed
from everystep.cache.pool import Counts
from everystep.cache.rows import Rows
from everystep.errors import InvariantError, message
from everystep.nn.network import KvShape
from everystep.types import Past, Work


class Verbs(Protocol):
    """What happens to rows."""

    def allocate(
        self,
        row: int,
        encoder: Tensor | None = None,
        past: Past | None = None,
    ) -> None: ...
    def fork(self, row: int, source: int) -> None: ...
    def truncate(self, row: int, length: int) -> None: ...
    def free(self, row: int) -> None: ...


def perform(rows: Verbs, work: Work) -> None:
    """The verbs of a work have happened to the rows, in order."""
    for verb in work.verbs:
        if verb.kind == "allocate":
            rows.allocate(verb.row, work.encoders.get(verb.row), work.pasts.get(verb.row))
        elif verb.kind == "fork":
            rows.fork(verb.row, verb.value)
        elif verb.kind == "truncate":
            rows.truncate(verb.row, verb.value)
        else:
            rows.free(verb.row)


class Held(Protocol):
    """A row, as far as a feed asks."""

    @property
    def length(self) -> int:
        """How many positions are cached."""
        ...


FedRow = TypeVar("FedRow", bound=Held)


def fed_rows(work: Work, row_of: Callable[[int], FedRow]) -> Iterator[tuple[FedRow, int, int]]:
    """Each fed row with the start and count of its feed; InvariantError if it ends elsewhere."""
    numbers = zip(work.rows.tolist(), work.starts.tolist(), work.counts.tolist(), strict=True)
    for number, start, count in numbers:
        row = row_of(number)
        if row.length != start:
            raise InvariantError(
                message(f"row {number} is fed at the wrong place", wanted=row.length, got=start)
            )
        yield row, start, count


class RowCache:
    """Rows of keys and values for one executor.

    `project`: encoder states (S, E) -> keys and values (L, 2, K, S, D), for models with an encoder.
    `kept`: the type in which rows keep keys and values, None for `dtype`.
    """

    def __init__(
        self,
        shape: KvShape,
        dtype: torch.dtype,
        device: torch.device,
        project: Callable[[Tensor], Tensor] | None = None,
        kept: CacheDtype | None = None,
    ) -> None:
        self._rows = Rows(shape, dtype, device, kept)
        self._project = project
        self._device = device

    @property
    def counts(self) -> Counts:
        """What was copied, moved and allocated so far."""
        return self._rows.counts

    @property
    def shared(self) -> int:
        """How many segments are held, encoder states included."""
        return self._rows.shelf.held + self._rows.across.held

    def allocate(
        self,
        row: int,
        encoder: Tensor | None = None,
        past: Past | None = None,
    ) -> None:
        """The row exists and holds `past`; it looks at `encoder` (S, E) where the model has one."""
        self._rows.allocate(row)
        if past is not None:
            self._rows.restore(row, past)
        if encoder is not None and self._project is not None:
            self._rows.attach(row, encoder, self._project)

    def fork(self, row: int, source: int) -> None:
        """The row holds what `source` holds."""
        self._rows.fork(row, source)

    def truncate(self, row: int, length: int) -> None:
        """The row holds its first `length` positions."""
        self._rows.truncate(row, length)

    def free(self, row: int) -> None:
        """The row is gone, and with it every segment that no other row refers to."""
        self._rows.free(row)

    def export(self, row: int) -> Past:
        """What the row holds, as a copy."""
        return self._rows.export(row)

    def lengths(self) -> dict[int, int]:
        """Row -> cached positions."""
        return {number: row.length for number, row in self._rows.items()}

    def apply(self, work: Work) -> None:
        """Does what happened since the last step, in order, and copies what has to be."""
        perform(self, work)
        self._rows.settle()

    def begin(self, work: Work) -> Context:
        """A context for the feeds of a work whose verbs were applied.

        Afterwards every fed row has the length it will have when the step is over.
        """
        feeds = []
        fed = fed_rows(work, self._rows.__getitem__)
        for index, (row, start, count) in enumerate(fed):
            row.tail += count
            feeds.append(Feed(index, row, row.slot, start, count))
        self._rows.make_room(feed.row for feed in feeds)
        return Context(self._rows, feeds, self._device, work.extras)
