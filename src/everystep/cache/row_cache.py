"""The cache of one executor: verbs in, then a context for each step.

    step:  apply(work)            forks, truncations and frees since the last step
           begin(work) -> Context the layers of the network store and look through it

Row numbers are the engine's. Projections of encoder states are computed once per tensor and shared
by every row that looks at it. A row of a model with windows, codes or recurrent states can be cut
back to 0 and to what its last feed wanted logits of, the position before included; others to any
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everystep.cache.context import CacheContext
from everystep.cache.formats import CacheDtype, Quantization
from everystep.cache.plan import PlannedFeed, is_long
from everystep.cache.pool import CacheCounts
from everystep.cache.rows import CacheRow, CacheRows
from everystep.errors import InvariantError, message
from everystep.nn.network import Store
from everystep.types import Extra, Past, Work

_PLAIN = Extra()


class RowCache:
    """Rows for one executor; `stores`: what each layer of its network keeps of a row.

    `project`: encoder states (S, E) -> keys and values (L, 2, K, S, D), for models with an encoder.
    `kept`: in which form rows keep keys and values, None for `dtype` as it is.
    """

    def __init__(
        self,
        stores: Sequence[Sequence[Store]],
        dtype: torch.dtype,
        device: torch.device,
        project: Callable[[Tensor], Tensor] | None = None,
        kept: CacheDtype | Quantization | None = None,
    ) -> None:
        self._rows = CacheRows(stores, dtype, device, kept)
        self._project = project
        self._device = device
        self._all_alone = isinstance(kept, Quantization)

    def __getitem__(self, row: int) -> CacheRow:
        return self._rows[row]

    @property
    def counts(self) -> CacheCounts:
        """What was copied, moved and allocated so far."""
        return self._rows.counts

    @property
    def forgets(self) -> bool:
        """Whether rows drop or round what they hold, so that they cannot be cut anywhere."""
        return self._rows.forgets

    @property
    def shared(self) -> int:
        """How many segments are held, encoder states included."""
        return self._rows.shared

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

    def export(self, row: int) -> Past:
        """What the row holds, as a copy."""
        return self._rows.export(row)

    def lengths(self) -> dict[int, int]:
        """Row -> cached positions."""
        return {number: row.length for number, row in self._rows.items()}

    def apply(self, work: Work) -> None:
        """Does what happened since the last step, in order, and copies what has to be."""
        for verb in work.verbs:
            if verb.kind == "allocate":
                row = verb.row
                self.allocate(row, work.encoders.get(row), work.pasts.get(row))
            elif verb.kind == "fork":
                self._rows.fork(verb.row, verb.value)
            elif verb.kind == "truncate":
                self._rows.truncate(verb.row, verb.value)
            else:
                self._rows.free(verb.row)
        self._rows.settle()

    def begin(self, work: Work) -> CacheContext:
        """A context for the feeds of a work whose verbs were applied.

        Afterwards every fed row has the length it will have when the step is over.
        """
        arrays = (work.rows, work.starts, work.counts, work.logits)
        numbers = zip(*(array.tolist() for array in arrays), strict=True)
        feeds = [
            self._feed(index, row, start, count, wanted, work.extras.get(index, _PLAIN))
            for index, (row, start, count, wanted) in enumerate(numbers)
        ]
        fed = [feed.row for feed in feeds]
        self._rows.rest(fed)
        self._rows.make_room(fed)
        context = CacheContext(self._rows, feeds, self._device)
        self._rows.mark(context.plan.feeds)
        return context

    def _feed(
        self,
        index: int,
        number: int,
        start: int,
        count: int,
        wanted: int,
        extra: Extra,
    ) -> PlannedFeed:
        """The row holds `count` more positions, whose keys, values and states follow."""
        row = self._rows[number]
        if row.length != start:
            raise InvariantError(
                message(f"row {number} is fed at the wrong place", wanted=row.length, got=start)
            )
        mask, weights = extra.mask, extra.attentions
        alone = self._all_alone or weights or mask is not None
        before = self._rows.prepare(row)
        self._rows.extend(row, count, wanted, alone=alone or is_long(count))
        return PlannedFeed(
            index, row, start, count, wanted, before, row.parts, mask, weights, alone
        )
