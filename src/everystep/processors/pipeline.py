"""Runs the processors of all rows of a step, in as few calls as their parameters allow.

Rows of one request, and of requests that share a tuple of processors, run as one. Otherwise it goes
slot by slot of the canonical order: equal processors in one call, and different ones that
may differ per row as one instance. A tuple in another order runs by itself. From the first
processor on that leaves few tokens of wide rows, all others get a shortlist of those. Where that is
known beforehand, the best of the rows will do in place of the rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.processors.base import (
    LogitsProcessor,
    Narrowing,
    Permitting,
    UserProcessor,
    reads_rows,
)
from everystep.processors.best import is_few
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.order import RANK
from everystep.processors.stacking import stack_key, stacked
from everystep.processors.stages import Stages
from everystep.processors.warpers import TemperatureLogitsWarper, TopKLogitsWarper
from everystep.types import MOST_BEST, Rows, Scores
from everystep.types.protocols import Processor

Processors = tuple[Processor, ...]
Group = tuple[Processors, list[int]]  # with the indices of their rows
_USER = RANK[UserProcessor]


def best_read(processors: Processors, vocabulary: int) -> int:
    """Return how many best scores of a row they have to see in place of the row; 0 for all of it.

    Lists of the best then take the way that rows would have taken from the first processor on that
    leaves few tokens.
    """
    if not all(_keeps_lists(one) for one in processors):
        return 0
    # A temperature leaves the scores in their order.
    others = (one for one in processors if not isinstance(one, TemperatureLogitsWarper))
    first = next(others, None)
    count = first.best if isinstance(first, TopKLogitsWarper) else 0
    return count if is_few(count, vocabulary) else 0


def _keeps_lists(processor: Processor) -> bool:
    """Return whether it is one of ours that leaves a list of every list."""
    return type(processor) in RANK and isinstance(processor, Narrowing) and processor.keeps_lists


def decided(processors: Processors, vocabulary: int) -> bool:
    """Return whether the best that they leave of a row can be found.

    It is found among as many of its best as an executor reports, or by reading the row.
    """
    masks = all(isinstance(one, GrammarMask) for one in processors)
    return masks and is_few(MOST_BEST, vocabulary)


def apply(
    rows: Rows, scores: Scores, *, owned: bool = False, stages: Stages | None = None
) -> Scores:
    """Process the scores of R rows, each as its own request asks.

    The result is lists where processors leave few tokens of wide rows. Whole values may be written
    to if they are `owned`; otherwise no argument is changed. `stages`: gets what every processor
    left.
    """
    in_place = owned and scores.tokens is None and scores.values.is_contiguous()
    canvas = _Canvas(rows, scores.rising(), in_place, stages=stages)
    shared = rows.sequences[0].request.processors
    if all(sequence.request.processors is shared for sequence in rows.sequences):
        canvas.run_all(shared)
    else:
        _apply_mixed(canvas)
    return canvas.settled()


def allowed_tokens(rows: Rows, scores: Tensor) -> Tensor | None:
    """Return (R, V) bool of the tokens that grammars and allowed sequences let follow each row.

    None where no row has any of these.
    """
    owners: dict[Permitting, list[int]] = {}
    for r, sequence in enumerate(rows.sequences):
        for one in sequence.request.processors:
            if isinstance(one, Permitting):
                owners.setdefault(one, []).append(r)
    if not owners:
        return None
    found = torch.ones(scores.shape, dtype=torch.bool)
    for one, indices in owners.items():
        found[indices] &= one.may_follow(rows.select(np.array(indices)), scores.shape[1])
    return on_device(scores.device, found)


@dataclass(slots=True)
class _Canvas:
    """The scores so far; `owned` says that they may be written to in place.

    `temperature`: what wide scores are still to be divided by; it waits for a processor that asks
    it of few of them.
    """

    rows: Rows
    scores: Scores
    owned: bool
    temperature: TemperatureLogitsWarper | None = None
    stages: Stages | None = None

    def run_all(self, processors: Processors) -> None:
        """Run the processors, one after another, on all rows."""
        for processor in processors:
            waits = self.scores.tokens is None and self.temperature is None
            if waits and type(processor) is TemperatureLogitsWarper:
                self.temperature = processor
            elif (few := self._few(processor)) is not None:
                self.scores, self.owned, self.temperature = few, True, None
            else:
                self._change(processor)
            if self.stages is not None:
                self.stages.note(self.rows, self.scores, waiting=self.temperature)

    def _few(self, processor: Processor) -> Scores | None:
        """Return what one of ours leaves as lists; None where that is not known to be little."""
        if type(processor) not in RANK or not isinstance(processor, Narrowing):
            return None
        divisor = self.temperature.temperature if self.temperature else 1.0
        return processor.few(self.rows, self.scores, divisor)

    def settled(self) -> Scores:
        """Return the scores, with nothing that waits."""
        if self.temperature:
            waiting, self.temperature = self.temperature, None
            self._change(waiting)
        return self.scores

    def _whole(self) -> Tensor:
        """Return (R, V) the scores, with nothing that waits."""
        self.scores = self.settled().whole()
        return self.scores.values

    def _change(self, processor: Processor) -> None:
        """Run the processor on whole rows."""
        before = self._whole()
        if isinstance(processor, LogitsProcessor) and reads_rows(processor):
            change = processor.overwrite if self.owned else processor.process
            values = change(self.rows, before)
            self.owned |= values is not before
        else:
            values = processor(self.rows, before)
            # A caller may keep what his processor returned.
            self.owned &= values is before
        self.scores = Scores.of(values)

    def run(self, processors: Processors, indices: list[int]) -> None:
        """Run the processors, one after another, on the given rows."""
        if len(indices) == len(self.rows) and indices == sorted(indices):
            self.run_all(processors)
            return
        scores, chosen = self.settled(), np.array(indices)
        at = on_device(scores.values.device, chosen)
        part = _Canvas(self.rows.select(chosen), scores.select(at), owned=True, stages=self.stages)
        part.run_all(processors)
        self._put(at, part.settled())

    def _put(self, at: Tensor, changed: Scores) -> None:
        """Give the rows `at`, (n,), these scores."""
        if self.scores.tokens is not None and changed.tokens is not None:
            self.scores = self.scores.put(at, changed)
            return
        values = self._whole()
        if not self.owned:
            values, self.owned = values.clone(), True
        values[at] = changed.whole().values
        self.scores = Scores.of(values)


def _apply_mixed(canvas: _Canvas) -> None:
    # By rank, the distinct processors, each with the rows that have it.
    slots: dict[int, dict[Hashable, Group]] = {}
    for processors, indices in _by_tuple(canvas.rows):
        ranks = [RANK.get(type(processor), _USER) for processor in processors]
        if not _is_canonical(ranks):
            canvas.run(processors, indices)
            continue
        for rank in dict.fromkeys(ranks):
            same = tuple(p for p, r in zip(processors, ranks, strict=True) if r == rank)
            slot = slots.setdefault(rank, {})
            slot.setdefault(_identity(same), (same, []))[1].extend(indices)
    for rank in sorted(slots):
        for processors, indices in _in_few_calls(list(slots[rank].values())):
            canvas.run(processors, sorted(indices))


def _in_few_calls(groups: list[Group]) -> Iterator[Group]:
    """Yield the groups of a rank; those whose processors may differ per row as one."""
    if len(groups) == 1:
        yield groups[0]
        return
    families: dict[Hashable, list[Group]] = {}
    for group in groups:
        families.setdefault(stack_key(group[0][0]), []).append(group)
    for key, family in families.items():
        if key is None or len(family) == 1:
            yield from family
        else:
            owner = {i: processors[0] for processors, indices in family for i in indices}
            rows = sorted(owner)
            yield (stacked([owner[i] for i in rows]),), rows


def _by_tuple(rows: Rows) -> list[Group]:
    """Return each distinct tuple object with its rows."""
    found: dict[int, Group] = {}
    for r, sequence in enumerate(rows.sequences):
        processors = sequence.request.processors
        found.setdefault(id(processors), (processors, []))[1].append(r)
    return list(found.values())


def _is_canonical(ranks: list[int]) -> bool:
    """Return whether the ranks rise, and none but the caller's own occurs twice."""
    return all(a < b or a == b == _USER for a, b in pairwise(ranks))


def _identity(processors: Processors) -> Hashable:
    """Return a key that is equal for processors that may run in one call."""
    try:
        hash(processors)
    except TypeError:
        return tuple(id(processor) for processor in processors)
    return processors
