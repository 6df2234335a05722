"""The choices of a step: scores of all groups, what strategies pick and select, what follows.

Groups with equal strategies choose together. Where a request's own code raises, its group ends with
that error, and the others choose without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.engine.apply import Change, abandoned, changes, forget
from everystep.engine.batches import History, Picked, Scored, score
from everystep.engine.feed import Fed
from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import note_choices, with_prompt
from everystep.engine.records import Capture, Counts, StepRecord
from everystep.errors import InvariantError
from everystep.types import (
    Children,
    FinishReason,
    Group,
    Sequence,
    StepOutput,
    TokenTable,
    Work,
)

# Whatever else a request's own code raises ends that request alone.
NOBODYS = (MemoryError, InvariantError)


@dataclass(slots=True)
class Choices:
    """What the first half of a step finds out, from what it fed and what the executor answered.

    `submitted`: how many requests the engine has received so far. `observed`: whether records are
    made. `history`: the scores of earlier steps, and in the end of this one too, where criteria
    read them.
    """

    table: TokenTable
    ledger: Ledger
    counts: Counts
    submitted: int
    observed: bool
    fed: Fed
    work: Work
    output: StepOutput
    history: History
    changes: list[Change] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    def make(self) -> None:
        """Every group that chooses has its change; one transfer from the device serves them all."""
        scored = [one for groups in _kinds(self.fed.ready) for one in self._scored(groups)]
        self.counts.syncs += bool(scored)
        before = self.history
        arrived = _together([picked for _, picked in scored])
        for (one, _), first in zip(scored, arrived, strict=True):
            self._selected(one, first, before)
        self._note_prompts()

    def _scored(self, groups: list[Group]) -> list[tuple[Scored, tuple[Tensor, ...]]]:
        """The scores of groups with equal strategies, and what these pick of them in the first
        round; if that fails, of each for itself."""
        try:
            scored = self._score(groups)
            return [(scored, scored.pick())]
        except NOBODYS:
            raise
        except Exception as error:
            for sequence in (s for group in groups for s in group.live):
                forget(sequence)
            if len(groups) == 1:
                self.changes += self._failed(groups, error)
                return []
            return [one for group in groups for one in self._scored([group])]

    def _score(self, groups: list[Group]) -> Scored:
        return score(groups, self.fed, self.output, self.table, self.submitted, self.history)

    def _selected(self, scored: Scored, first: tuple[np.ndarray, ...], before: History) -> None:
        """What becomes of groups that chose together; if that fails, of each for itself."""
        try:
            children = scored.select(self._rounds(scored, first))
        except NOBODYS:
            raise
        except Exception as error:
            if len(scored.groups) == 1:
                self.changes += self._failed(scored.groups, error)
                return
            apart = (pair for group in scored.groups for pair in self._scored([group]))
            for one, picked in apart:
                self._selected(one, _together([picked])[0], before)
            return
        longer = children.counts > 1
        self.counts.long_children += int(longer.sum())
        self.counts.accepted += int((children.counts[longer] - 1).sum())
        if scored.shown:
            self.history = scored.shown[: len(before) + int(children.counts.max())]
        if self.observed:
            self.records.append(_record(scored, children, self))
        children, noted = note_choices(scored.sequences, scored.first, children, scored.logits)
        self.counts.syncs += noted
        self.changes += changes(
            scored.of_sequences(), children, scored.drafts, self.table, self.ledger
        )

    def _rounds(self, scored: Scored, first: tuple[np.ndarray, ...]) -> Picked:
        """What every round of the strategy picks; each after the first sees those before it."""
        picked: Picked = (first,)
        while len(picked) < scored.groups[0].request.strategy.rounds:
            picked = (*picked, _together([scored.pick(picked)])[0])
        return picked

    def _note_prompts(self) -> None:
        """How likely prompts are, where that was asked."""
        for asked in self.fed.prompt_rows:
            change = next((one for one in self.changes if one.group is asked.group), None)
            if change is None:
                change = Change(asked.group, asked.group.without_live())
                change.after.live = asked.group.live
                self.changes.append(change)
            change.after.prompt_known = with_prompt(
                change.after.prompt_known, asked, self.output.logits
            )

    def _failed(self, groups: list[Group], error: Exception) -> list[Change]:
        return failed(groups, error, self.table, self.ledger)


def failed(
    groups: list[Group], error: Exception, table: TokenTable, ledger: Ledger
) -> list[Change]:
    """What becomes of groups that this error ends."""
    return [abandoned(group, FinishReason("error", error), table, ledger) for group in groups]


def _kinds(groups: list[Group]) -> list[list[Group]]:
    """Groups that choose together: equal in strategy, source of draws and readout."""
    if not groups or all(_is_like(groups[0], group) for group in groups):
        return [groups] if groups else []
    kinds: dict[object, list[Group]] = {}
    for group in groups:
        request = group.request
        key = (request.strategy, type(request.draws), request.readout, group.best > 0)
        kinds.setdefault(key, []).append(group)
    return list(kinds.values())


def _is_like(one: Group, other: Group) -> bool:
    """Whether they choose together for sure; comparing strategies by value costs more."""
    a, b = one.request, other.request
    same = a.strategy is b.strategy and a.readout is b.readout
    return same and type(a.draws) is type(b.draws) and (one.best > 0) == (other.best > 0)


def _together(picked: list[tuple[Tensor, ...]]) -> list[tuple[np.ndarray, ...]]:
    """The same tensors on the host: from an accelerator they travel as one block of bytes."""
    flat = [tensor for tensors in picked for tensor in tensors]
    if not flat or flat[0].device.type == "cpu":
        return [tuple(tensor.cpu().numpy() for tensor in tensors) for tensors in picked]
    block = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in flat]).cpu()
    host, start = [], 0
    for tensor in flat:
        end = start + tensor.numel() * tensor.element_size()
        # a copy aligns the bytes for the wider type
        host.append(block[start:end].clone().view(tensor.dtype).reshape(tensor.shape).numpy())
        start = end
    arrived = iter(host)
    return [tuple(next(arrived) for _ in tensors) for tensors in picked]


def _record(scored: Scored, children: Children, step: Choices) -> StepRecord:
    batch = scored.of_sequences()
    captures = _captures(scored.sequences, scored.groups, step.fed, step.output, step.work)
    return StepRecord(
        tuple(scored.groups),
        tuple(scored.sequences),
        batch.group_of,
        scored.owner,
        scored.logits,
        scored.scores.whole().values,
        children,
        captures,
    )


def _captures(
    sequences: list[Sequence], groups: list[Group], fed: Fed, output: StepOutput, work: Work
) -> dict[int, Capture]:
    """Batch index -> what the sequence's feed returned, for requests that want it."""
    captures: dict[int, Capture] = {}
    source_of = {s.line: s for group in groups for s in group.live}
    for s, sequence in enumerate(sequences):
        f = fed.feed_of[id(source_of[sequence.line])]
        answer = output.answers.get(f)
        if answer is not None and (answer.layers or answer.attentions):
            captures[s] = Capture(int(work.starts[f]), int(work.counts[f]), answer)
    return captures
