"""Contrastive decoding by two models: what the request's own model, the expert, finds much more
likely than a weaker one, the amateur, does.

The amateur has an executor of its own and one cache row per sequence, which is forked, truncated
and freed with the sequence because it is one of its memories. Before each choice it reads what the
sequence holds and it does not, drafts included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.engine.feed import Feeds, write_draft
from everystep.engine.ledger import Ledger
from everystep.errors import NOBODYS, RequestError
from everystep.executors.base import Executor
from everystep.processors.guidance import contrasted
from everystep.types import Group, Prompt, Sequence, Work
from everystep.types.protocols import Readout


@dataclass(frozen=True)
class Contrast:
    """log p - `beta` * log q, with the amateur's q, of tokens whose p is at least `alpha` times the
    highest.

    `open`: a fresh executor of the amateur. Source: Li et al. 2023, "Contrastive Decoding:
    Open-ended Text Generation as Optimization", with beta 1.
    """

    open: Callable[[], Executor] = field(repr=False)
    alpha: float = 0.1
    beta: float = 1.0
    layers: ClassVar[tuple[int, ...]] = ()

    def mix(self, logits: Tensor, companions: list[Tensor], early: Tensor | None = None) -> Tensor:
        """(R, V) logits of the sequences and of the amateur -> (R, V)."""
        return contrasted(logits, companions[0], self.alpha, self.beta)


@dataclass(slots=True)
class AmateurRow:
    """The amateur's cache row of one sequence: a memory, which holds `cached` positions.

    It can be cut back to any length from `floor` on, or to 0. `shift`: a visible index minus its
    position.
    """

    ledger: Ledger
    row: int
    shift: int
    cached: int = 0
    floor: int = 0

    def copy(self) -> AmateurRow:
        row = self.ledger.fork(self.row)
        return AmateurRow(self.ledger, row, self.shift, self.cached, self.floor)

    def rewind(self, length: int) -> None:
        """The row holds at most the positions of the first `length` visible ids."""
        kept = max(length - self.shift, 0)
        if self.cached > kept:
            # What cannot be taken back is fed again.
            self.cached = kept if kept >= self.floor else 0
            self.floor = min(self.floor, self.cached)
            self.ledger.truncate(self.row, self.cached)

    def release(self) -> None:
        self.ledger.free(self.row)


@dataclass(slots=True)
class AmateurRows:
    """An amateur at work: its executor and the rows of all sequences that it reads."""

    executor: Executor
    ledger: Ledger = field(default_factory=Ledger)

    def read(self, sequences: list[Sequence], feeds: Feeds) -> None:
        """The feeds have the amateur's logits for every row of scores of these sequences."""
        rows, starts, tokens, wanted = [], [], [], []
        for sequence in sequences:
            more, held = len(write_draft(sequence, feeds)), self._row(sequence)
            # A step that was broken off may have left more in the row.
            held.rewind(sequence.visible - 1)
            rows.append(held.row)
            starts.append(held.cached)
            first, end = held.cached + held.shift, sequence.visible + more
            tokens.append(feeds.table.data[sequence.line, first:end])
            wanted.append(1 + more)
            held.cached = sequence.length + more
            held.floor = 0 if "cut" in self.executor.abilities else sequence.length - 1
        verbs, _, _ = self.ledger.drain()
        counts = np.array([len(ids) for ids in tokens])
        output = self.executor.run(
            Work(verbs, np.array(rows), np.array(starts), counts, np.array(wanted),
                 np.concatenate(tokens))
        )  # fmt: skip
        logits = torch.split(output.logits, wanted)
        feeds.beside.update(zip(map(id, sequences), logits, strict=True))

    def _row(self, sequence: Sequence) -> AmateurRow:
        key, request = f"amateur row {id(self)}", sequence.request
        if key not in sequence.memo:
            row = self.ledger.allocate(Prompt(request.prompt.ids))
            sequence.memo[key] = AmateurRow(self.ledger, row, request.shift)
        held: AmateurRow = sequence.memo[key]
        return held

    def restart(self) -> None:
        """Every row is unused."""
        self.ledger.restart(self.executor.audit())


@dataclass(slots=True)
class Amateurs:
    """The amateurs at work for an engine, by the readout that each serves."""

    at_work: dict[Any, AmateurRows] = field(default_factory=dict)

    def open(self, readout: Readout | None, vocabulary: int) -> None:
        """What the readout reads beside is at work; RequestError where its vocabulary is
        another."""
        if not isinstance(readout, Contrast) or readout in self.at_work:
            return
        executor = readout.open()
        if executor.vocab_size != vocabulary or "truncate" not in executor.abilities:
            raise RequestError(
                "the amateur cannot read what the model writes",
                wanted=f"a model of {vocabulary} ids whose rows can be cut back",
                got=f"{executor.vocab_size} ids",
                do="Choose a smaller model of the same family",
            )
        self.at_work[readout] = AmateurRows(executor)

    def read(self, feeds: Feeds, groups: list[Group]) -> list[tuple[Group, Exception]]:
        """The feeds have the logits that the amateurs of choosing groups give; those whose amateur
        fails. `groups`: all that are not over."""
        using: dict[Any, list[Group]] = {}
        for group in feeds.ready if self.at_work else ():
            if group.request.readout in self.at_work:
                using.setdefault(group.request.readout, []).append(group)
        failed: list[tuple[Group, Exception]] = []
        asking = list(using.items())
        for readout, own in asking:
            try:
                self.at_work[readout].read([s for group in own for s in group.live], feeds)
            except NOBODYS:
                raise
            except Exception as error:
                self._restart(readout, groups)
                if len(own) == 1:
                    failed.append((own[0], error))
                else:
                    asking.extend((readout, [group]) for group in own)
        return failed

    def restart(self) -> None:
        for rows in self.at_work.values():
            rows.restart()

    def held(self) -> int:
        """How many cache rows they hold."""
        return sum(len(rows.ledger.held) for rows in self.at_work.values())

    def _restart(self, readout: Any, groups: list[Group]) -> None:
        """The amateur and the sequences that it reads drop everything."""
        for group in groups:
            if group.request.readout == readout:
                for sequence in group.live:
                    sequence.forget()
        self.at_work[readout].restart()
