"""Which cache rows are in use, and what changed since the executor last got a work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from everystep.types import Past, Prompt, Verb


class News(NamedTuple):
    """Verbs in order, and of new rows: encoder states, and what they hold from the start."""

    verbs: tuple[Verb, ...]
    encoders: Mapping[int, Tensor]
    pasts: Mapping[int, Past]


@dataclass(slots=True)
class Ledger:
    """Hands out row numbers, those freed last first, and writes down every verb in order."""

    verbs: list[Verb] = field(default_factory=list)
    encoders: dict[int, Tensor] = field(default_factory=dict)
    pasts: dict[int, Past] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    _free: list[int] = field(default_factory=list)

    def allocate(self, prompt: Prompt) -> int:
        """A new row, which holds nothing but what the prompt brings."""
        row = self._take()
        self.verbs.append(Verb("allocate", row))
        if prompt.encoder is not None:
            self.encoders[row] = prompt.encoder
        if prompt.past is not None:
            self.pasts[row] = prompt.past
        return row

    def fork(self, source: int) -> int:
        """A new row that holds what `source` holds."""
        row = self._take()
        self.verbs.append(Verb("fork", row, source))
        return row

    def truncate(self, row: int, length: int) -> None:
        """Cuts the row to its first `length` positions."""
        self.verbs.append(Verb("truncate", row, length))

    def free(self, row: int) -> None:
        """Frees the row, which may then be handed out again."""
        self.verbs.append(Verb("free", row))
        self.held.remove(row)
        self._free.append(row)

    def restart(self, stored: Iterable[int]) -> None:
        """Marks every row as unused; those that the executor stores are to be freed first."""
        self.verbs[:] = [Verb("free", row) for row in stored]
        self.encoders.clear()
        self.pasts.clear()
        self.held.clear()
        self._free.clear()

    def drain(self) -> News:
        """What happened since the last call."""
        news = News(tuple(self.verbs), dict(self.encoders), dict(self.pasts))
        self.verbs.clear()
        self.encoders.clear()
        self.pasts.clear()
        return news

    def _take(self) -> int:
        row = self._free.pop() if self._free else len(self.held)
        self.held.add(row)
        return row
