"""Contrastive decoding by two models: what the request's own model, the expert, finds much more
likely than a weaker one, the amateur, does.

The amateur is a second model (`second.py`). Before each choice it reads what the sequence holds and
it does not, drafts included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.engine.apply import forget
from everystep.engine.feed import Feeds, Grant, fed, write_draft
from everystep.engine.guests import Failed, Host, together_or_apart, unused
from everystep.engine.second import SecondModel
from everystep.errors import RequestError
from everystep.executors.base import Executor
from everystep.processors.guidance import contrasted
from everystep.types import Group, Request
from everystep.types.protocols import Predictions, Readout


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
    narrows: ClassVar[bool] = True

    def mix(self, given: Predictions) -> Tensor:
        """(R, V) logits of the sequences and of the amateur -> (R, V)."""
        return contrasted(given.logits, given.companions[0], self.alpha, self.beta, given.allowed)


@dataclass(slots=True)
class Amateurs:
    """The amateurs at work for an engine, by the readout that each serves: a guest."""

    host: Host
    at_work: dict[Readout, SecondModel] = field(default_factory=dict)

    def open(self, request: Request) -> None:
        """Let the amateur of the request's readout work; RequestError where its vocabulary is
        another."""
        readout, vocabulary = request.readout, self.host.executor.vocab_size
        if not isinstance(readout, Contrast) or readout in self.at_work:
            return
        amateur = SecondModel(readout.open())
        if amateur.executor.vocab_size != vocabulary:
            raise RequestError(
                "the amateur has another vocabulary",
                wanted=f"{vocabulary} ids",
                got=amateur.executor.vocab_size,
                do="Choose a smaller model of the same family",
            )
        self.at_work[readout] = amateur

    def before(self, grants: list[Grant], feeds: Feeds, groups: list[Group]) -> Failed:
        """Add the logits that the amateurs of choosing groups give; return those whose amateur
        fails."""
        for idle in unused(self.at_work, [group.request.readout for group in groups]):
            del self.at_work[idle]
        using: dict[Readout, list[Group]] = {}
        for group in feeds.ready:
            readout = group.request.readout
            if readout is not None and readout in self.at_work:
                using.setdefault(readout, []).append(group)
        failed: Failed = []
        for readout, own in using.items():
            serve = partial(self._read, readout, feeds)
            failed += together_or_apart(own, serve, partial(self._restart, readout, groups, feeds))
        return failed

    def _read(self, readout: Readout, feeds: Feeds, own: list[Group]) -> None:
        """The feeds have the amateur's logits for every row of scores of these groups."""
        amateur, sequences = self.at_work[readout], [s for group in own for s in fed(group, feeds)]
        rows, lines, wanted = [], [], []
        for sequence in sequences:
            drafted = len(write_draft(sequence, feeds))
            row = amateur.row(sequence, sequence.request.second.amateur)
            rows.append(row)
            lines.append(feeds.table.data[sequence.line, row.skips : sequence.visible + drafted])
            wanted.append(1 + drafted)
        found = on_device(self.host.executor.device, amateur.logits(rows, lines, wanted))
        logits = torch.split(found, wanted)
        for sequence, own_logits in zip(sequences, logits, strict=True):
            feeds.adding(sequence).beside = own_logits

    def _restart(self, readout: Readout, groups: list[Group], feeds: Feeds) -> None:
        """Makes the amateur and the sequences that it reads drop everything."""
        for group in groups:
            if group.request.readout == readout:
                for sequence in fed(group, feeds):
                    forget(sequence)
        self.at_work[readout].restart()

    def after(self, feeds: Feeds) -> None:
        """Note nothing: an amateur learns nothing of choices."""

    def restart(self) -> None:
        """Let every amateur drop what it holds for sequences."""
        for amateur in self.at_work.values():
            amateur.restart()

    def held(self) -> int:
        """Count the cache rows that amateurs hold."""
        return sum(amateur.held() for amateur in self.at_work.values())
