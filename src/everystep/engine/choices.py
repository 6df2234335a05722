"""The choices of a step: scores of all groups, what strategies pick and select, what follows.

Groups with equal strategies choose together. Where a request's own code raises, its group ends with
that error, and the others choose without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.engine.alternatives import drop_outdone
from everystep.engine.apply import Change, abandoned, changes, forget
from everystep.engine.batches import History, Scored, score
from everystep.engine.counts import Counts
from everystep.engine.feed import Feeds, fed
from everystep.engine.ledger import Ledger
from everystep.engine.lengths import note_drafts
from everystep.engine.logprobs import note_choices, with_prompt
from everystep.engine.watching import StepRecord, WatchedStep
from everystep.errors import NOBODYS
from everystep.strategies.single import Picked
from everystep.types import (
    Answer,
    Event,
    FinishReason,
    Group,
    StepOutput,
    TokenTable,
)


@dataclass(frozen=True, slots=True)
class Commit:
    """All changes of a step: to put them in place twice is the same as once.

    `over`: groups whose last event is among the `events`, which are all that wait to be taken.
    `told`: what watchers have still to be told.
    """

    changes: list[Change]
    over: list[Group]
    events: deque[Event]
    history: History
    records: deque[StepRecord]
    told: deque[WatchedStep]


@dataclass(slots=True)
class Choices:
    """The choices of a step, made from what it fed and what the executor answered.

    `submitted`: how many requests the engine has received so far. `observed`: whether records are
    made. `history`: the scores of earlier steps, and in the end of this one too, where criteria
    read them.
    """

    feeds: Feeds
    output: StepOutput
    counts: Counts
    submitted: int
    observed: bool
    history: History
    changes: list[Change] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    def make(self) -> None:
        """Every group that chooses has its change; one transfer from the device serves them all."""
        scored = [one for groups in _kinds(self.feeds.ready) for one in self._scored(groups)]
        self.counts.syncs += bool(scored)
        before = self.history
        arrived = _together([picked for _, picked in scored])
        for (one, _), first in zip(scored, arrived, strict=True):
            self._selected(one, first, before)
        for change in self.changes:
            drop_outdone(change, self.feeds)
        self._note_prompts()

    def _scored(self, groups: list[Group]) -> list[tuple[Scored, tuple[Tensor, ...]]]:
        """The scores of groups with equal strategies, and what these pick of them in the first
        round; if that fails, of each for itself."""
        try:
            scored = score(groups, self.feeds, self.output, self.submitted, self.history)
            return [(scored, scored.pick())]
        except NOBODYS:
            raise
        except Exception as error:
            for sequence in (s for group in groups for s in fed(group, self.feeds)):
                forget(sequence)
            if len(groups) == 1:
                self._fail(groups, error)
                return []
            return [one for group in groups for one in self._scored([group])]

    def _selected(self, scored: Scored, first: tuple[np.ndarray, ...], before: History) -> None:
        """Let groups that chose together select; if that fails, each by itself."""
        picked: Picked = (first,)
        try:
            # Each round after the first sees those before it.
            while len(picked) < scored.groups[0].request.strategy.rounds:
                picked = (*picked, *_together([scored.pick(picked)]))
            children = scored.select(picked)
        except NOBODYS:
            raise
        except Exception as error:
            if len(scored.groups) == 1:
                self._fail(scored.groups, error)
                return
            apart = (pair for group in scored.groups for pair in self._scored([group]))
            for one, tensors in apart:
                self._selected(one, _together([tensors])[0], before)
            return
        layout = scored.layout
        if layout.drafted:
            longer = children.counts > 1
            self.counts.long_children += int(longer.sum())
            self.counts.accepted += int((children.counts[longer] - 1).sum())
            note_drafts(layout, children.parent.tolist(), (children.counts - 1).tolist())
        if layout.alternatives:
            self.counts.alternatives += sum(
                layout.origin[parent] != parent for parent in children.parent.tolist()
            )
            scored, children = scored.only(children)
            layout = scored.layout
        if scored.shown:
            self.history = scored.shown[: len(before) + int(children.counts.max())]
        if self.observed or any(group.request.watcher is not None for group in scored.groups):
            self.records.append(StepRecord(scored, children, dict(self._captures(scored))))
        if any(group.request.wants.logprobs is not None for group in scored.groups):
            children, noted = note_choices(layout.sequences, layout.first, children, scored.logits)
            self.counts.syncs += noted
        table, ledger = self.feeds.table, self.feeds.ledger
        self.changes += changes(scored.of_sequences(), children, layout.drafts, table, ledger)

    def _note_prompts(self) -> None:
        """Note how likely prompts are, where that was asked."""
        for group, row, positions in self.feeds.prompt_rows:
            change = next((one for one in self.changes if one.group is group), None)
            if change is None:
                change = Change(group, group.without_live())
                change.after.live = group.live
                self.changes.append(change)
            logits = self.output.logits[row : row + len(positions)]
            change.after.prompt_known = with_prompt(group, positions, logits)

    def _fail(self, groups: list[Group], error: Exception) -> None:
        self.changes += failed(groups, error, self.feeds.table, self.feeds.ledger)

    def _captures(self, scored: Scored) -> Iterator[tuple[int, tuple[int, Answer]]]:
        """Yield what the feeds of sequences returned beside logits, for requests that want it."""
        for s, source in enumerate(scored.layout.sources):
            f = self.feeds.feed_of[id(source)]
            answer = self.output.answers.get(f)
            if answer is not None and (answer.layers or answer.attentions):
                yield s, (self.feeds.made[f].start, answer)


def failed(
    groups: list[Group], error: Exception, table: TokenTable, ledger: Ledger
) -> list[Change]:
    """End the groups with this error."""
    return [abandoned(group, FinishReason("error", error), table, ledger) for group in groups]


def _kinds(groups: list[Group]) -> list[list[Group]]:
    """Groups that choose together: equal in strategy, source of draws and readout."""
    same: dict[object, list[Group]] = {}
    for group in groups:
        request = group.request
        key = (id(request.strategy), type(request.draws), id(request.readout), group.best > 0)
        same.setdefault(key, []).append(group)
    if len(same) < 2:  # comparing strategies by value costs more
        return list(same.values())
    equal: dict[object, list[Group]] = {}
    for kind in same.values():
        request = kind[0].request
        value = (request.strategy, type(request.draws), request.readout, kind[0].best > 0)
        equal.setdefault(value, []).extend(kind)
    return list(equal.values())


def _together(picked: list[tuple[Tensor, ...]]) -> list[tuple[np.ndarray, ...]]:
    """The same tensors on the host: from an accelerator they travel as one block of bytes."""
    flat = [tensor for tensors in picked for tensor in tensors]
    if not flat or flat[0].device.type == "cpu":
        return [tuple([tensor.cpu().numpy() for tensor in tensors]) for tensors in picked]
    block = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in flat]).cpu()
    host, start = [], 0
    for tensor in flat:
        end = start + tensor.numel() * tensor.element_size()
        # a copy aligns the bytes for the wider type
        host.append(block[start:end].clone().view(tensor.dtype).reshape(tensor.shape).numpy())
        start = end
    arrived = iter(host)
    return [tuple(next(arrived) for _ in tensors) for tensors in picked]
