"""Which cache rows are in use, and what changed since the executor last heard of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from everystep.types import Verb


@dataclass(slots=True)
class Ledger:
    """Hands out row numbers, those freed last first, and writes down every verb in order."""

    verbs: list[Verb] = field(default_factory=list)
    encoders: dict[int, Tensor] = field(default_factory=dict)
    columns: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    _free: list[int] = field(default_factory=list)

    def allocate(self, encoder: Tensor | None = None, *, columns: bool = False) -> int:
        """A new, empty row."""
        row = self._take()
        self.verbs.append(Verb("allocate", row))
        if encoder is not None:
            self.encoders[row] = encoder
        if columns:
            self.columns.add(row)
        return row

    def fork(self, source: int) -> int:
        """A new row that holds what `source` holds."""
        row = self._take()
        self.verbs.append(Verb("fork", row, source))
        return row

    def truncate(self, row: int, length: int) -> None:
        """The row holds its first `length` positions only."""
        self.verbs.append(Verb("truncate", row, length))

    def free(self, row: int) -> None:
        """The row holds nothing and may be handed out again."""
        self.verbs.append(Verb("free", row))
        self.held.remove(row)
        self._free.append(row)

    def restart(self, stored: Iterable[int]) -> None:
        """Nobody holds a row; those that the executor stores are to be freed first of all."""
        self.verbs[:] = [Verb("free", row) for row in stored]
        self.encoders.clear()
        self.columns.clear()
        self.held.clear()
        self._free.clear()

    def drain(self) -> tuple[tuple[Verb, ...], Mapping[int, Tensor], frozenset[int]]:
        """What happened since the last call: verbs, encoder states and columns of new rows."""
        news = (tuple(self.verbs), dict(self.encoders), frozenset(self.columns))
        self.verbs.clear()
        self.encoders.clear()
        self.columns.clear()
        return news

    def _take(self) -> int:
        row = self._free.pop() if self._free else len(self.held)
        self.held.add(row)
        return row
