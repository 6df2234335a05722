"""A second model that reads what sequences hold: a draft model, or an amateur.

It has an executor of its own and one cache row per sequence, which is forked, cut and freed with
the sequence because it is one of its memories. Whenever the model is asked, each row is fed what it
does not hold yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.engine.feed import NO_IDS
from everystep.engine.ledger import Ledger
from everystep.errors import UnsupportedError
from everystep.executors.base import Executor
from everystep.types import Prompt, Sequence, Work

_EMPTY = Prompt(NO_IDS)


@dataclass(slots=True)
class SecondRow:
    """A second model's cache row of one sequence: a memory, which holds `cached` positions.

    It can be cut back to any length from `floor` on, or to 0: see `Executor.abilities`. `skips`:
    how many visible ids it does not read, those of the pad prefix.
    """

    ledger: Ledger
    row: int
    skips: int = 0
    cached: int = 0
    floor: int = 0

    def copy(self) -> SecondRow:
        row = self.ledger.fork(self.row)
        return SecondRow(self.ledger, row, self.skips, self.cached, self.floor)

    def rewind(self, length: int) -> None:
        """The row holds at most what it reads of the first `length` visible ids."""
        self.keep(length - self.skips)

    def keep(self, length: int) -> None:
        """The row holds at most `length` positions."""
        length = max(length, 0)
        if self.cached > length:
            # What cannot be taken back is fed again.
            self.cached = length if length >= self.floor else 0
            self.floor = min(self.floor, self.cached)
            self.ledger.truncate(self.row, self.cached)

    def release(self) -> None:
        self.ledger.free(self.row)


@dataclass(slots=True)
class SecondModel:
    """A second model at work: its executor, and what happened to its rows since the last
    forward."""

    executor: Executor
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        if "truncate" not in self.executor.abilities:
            raise UnsupportedError(
                "what this second model has read cannot be taken back",
                wanted="an executor with the ability 'truncate'",
                got=", ".join(sorted(self.executor.abilities)) or "none",
                do="Choose another model as the assistant or amateur",
            )

    def new_row(self, skips: int = 0, encoder: Tensor | None = None) -> SecondRow:
        """Return a row that holds nothing, and looks at the encoder states (S, E) of a model that
        has an encoder."""
        prompt = _EMPTY if encoder is None else Prompt(NO_IDS, encoder=encoder)
        return SecondRow(self.ledger, self.ledger.allocate(prompt), skips)

    def row(self, sequence: Sequence, encoder: Tensor | None = None) -> SecondRow:
        """Return the row of a sequence whose own ids the model reads; see `new_row`."""
        key = f"second row {id(self)}"
        if key not in sequence.memo:
            sequence.memo[key] = self.new_row(sequence.request.pad_prefix, encoder)
        found: SecondRow = sequence.memo[key]
        return found

    def logits(
        self, held: list[SecondRow], lines: list[np.ndarray], wanted: list[int] | None = None
    ) -> Tensor:
        """(R, V) float32 logits after each of the last `wanted` ids of every line, one unless said
        otherwise; the rows hold their lines from now on.

        What a row holds of its line is not fed again.
        """
        wanted = wanted or [1] * len(lines)
        cuts = "cut" in self.executor.abilities
        starts, tokens = [], []
        for row, line, last in zip(held, lines, wanted, strict=True):
            # A step that was broken off may have left more in the row.
            row.keep(len(line) - last)
            starts.append(row.cached)
            tokens.append(line[row.cached :])
            row.cached, row.floor = len(line), 0 if cuts else len(line) - last
        verbs, encoders, _ = self.ledger.drain()
        work = Work(
            verbs,
            np.array([row.row for row in held]),
            np.array(starts),
            np.array([len(own) for own in tokens]),
            np.array(wanted),
            np.concatenate(tokens),
            encoders=encoders,
        )
        return self.executor.run(work).logits.to(torch.float32)

    def restart(self) -> None:
        """Every row is unused."""
        self.ledger.restart(self.executor.audit())

    def held(self) -> int:
        """Count the cache rows that it holds."""
        return len(self.ledger.held)
