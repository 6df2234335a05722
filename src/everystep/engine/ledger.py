"""Which cache rows are in use, and what changed since the executor last got a work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from everystep.types import Past, Prompt, Sequence, Verb


def _nobody(ending: Sequence) -> None:
    """No row is kept."""


@dataclass(slots=True)
class Ledger:
    """Hands out row numbers, those freed last first, and writes down every verb in order.

    `encoders`, `pasts`: the encoder states of new rows, and what they hold from the start. `keep`:
    what may take over the row of a sequence that is about to end.
    """

    verbs: list[Verb] = field(default_factory=list)
    encoders: dict[int, Tensor] = field(default_factory=dict)
    pasts: dict[int, Past] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    keep: Callable[[Sequence], None] = _nobody
    _free: list[int] = field(default_factory=list)

    def allocate(self, prompt: Prompt) -> int:
        """A new row, which holds nothing but what the prompt brings; a past that came with another
        new row is not stored twice."""
        for other, past in self.pasts.items():
            if past is prompt.past and self.encoders.get(other) is prompt.encoder:
                return self.fork(other)
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

    def drain(self) -> tuple[tuple[Verb, ...], dict[int, Tensor], dict[int, Past]]:
        """The verbs, encoder states and pasts since the last call."""
        news = tuple(self.verbs), dict(self.encoders), dict(self.pasts)
        self.verbs.clear()
        self.encoders.clear()
        self.pasts.clear()
        return news

    def _take(self) -> int:
        row = self._free.pop() if self._free else len(self.held)
        self.held.add(row)
        return row
