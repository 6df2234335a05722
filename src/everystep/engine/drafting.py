"""Drafters: what guesses how sequences go on, so that one forward can verify several tokens.

A drafter is part of the engine. Prompt lookup needs nothing but the ids; a draft model has an
executor and cache rows of its own, one per sequence, which are forked, truncated and freed with the
sequence because they are one of its memories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from everystep.engine.batches import later
from everystep.engine.feed import NO_IDS
from everystep.engine.ledger import Ledger
from everystep.errors import NOBODYS, RequestError
from everystep.executors.base import Executor
from everystep.processors.pipeline import apply
from everystep.strategies.base import Batch
from everystep.types import (
    Columns,
    Group,
    Prompt,
    Rows,
    Scores,
    Sequence,
    TokenTable,
    Work,
    is_memory,
)
from everystep.types.protocols import Drafter, Drafting


@dataclass(frozen=True)
class PromptLookup:
    """What followed the latest n-gram where it first stood before.

    Tries n-grams of `max_ngram` ids down to one; drafts at most `tokens` ids, none at or after an
    id of `stop_ids`. Source: Saxena 2023; the reference's PromptLookupCandidateGenerator.
    """

    tokens: int = 10
    max_ngram: int = 2
    stop_ids: tuple[int, ...] = ()

    def start(self, vocabulary: int) -> PromptLookup:
        return self

    def propose(self, sequences: list[Sequence], table: TokenTable) -> list[np.ndarray]:
        return [self.draft(table.data[s.line, : s.visible]) for s in sequences]

    def draft(self, ids: np.ndarray) -> np.ndarray:
        """Visible ids of one sequence -> guessed next ids."""
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            starts = _occurrences(ids, size)
            if len(starts):
                first = int(starts[0]) + size
                guess = ids[first : first + self.tokens].copy()
                ends = np.flatnonzero(np.isin(guess, self.stop_ids))
                return guess[: ends[0]] if len(ends) else guess
        return NO_IDS

    def restart(self) -> None:
        """There is nothing to drop."""

    def held(self) -> int:
        return 0


def _occurrences(ids: np.ndarray, size: int) -> np.ndarray:
    """Where the last `size` ids stood before, other than at the end; ascending starts."""
    last = len(ids) - size
    match = ids[:last] == ids[last]
    for k in range(1, size):
        match = match & (ids[k : last + k] == ids[last + k])
    return np.flatnonzero(match)


@dataclass(frozen=True)
class DraftModel:
    """A smaller model of the same vocabulary guesses `tokens` ids, one after another.

    Each guess is what the request itself would choose from the draft model's scores: with its
    processors, its strategy and, where they are seeded, its draws. `open`: a fresh executor of the
    draft model, with the ability "truncate". Sequences whose prompt is given as embeddings, or
    holds ids beyond the vocabulary, are not drafted for. Source: Leviathan et al. 2023.
    """

    open: Callable[[], Executor]
    tokens: int = 5

    def start(self, vocabulary: int) -> Drafting:
        executor = self.open()
        if executor.vocab_size != vocabulary:
            raise RequestError(
                "the draft model has another vocabulary",
                wanted=f"{vocabulary} ids",
                got=executor.vocab_size,
                do="Choose a draft model with the tokenizer of the model itself",
            )
        return DraftRows(executor, self.tokens)


@dataclass(slots=True)
class DraftRow:
    """The draft model's cache row of one sequence: a memory, which holds `cached` positions.

    It can be cut back to any length from `floor` on, or to 0: see `Executor.abilities`.
    """

    ledger: Ledger
    row: int
    cached: int = 0
    floor: int = 0

    def copy(self) -> DraftRow:
        return DraftRow(self.ledger, self.ledger.fork(self.row), self.cached, self.floor)

    def rewind(self, length: int) -> None:
        """The row holds at most the first `length` ids of the prompt and what follows."""
        if self.cached > length:
            # What cannot be taken back is fed again.
            self.cached = length if length >= self.floor else 0
            self.floor = min(self.floor, self.cached)
            self.ledger.truncate(self.row, self.cached)

    def release(self) -> None:
        self.ledger.free(self.row)


@dataclass(slots=True)
class DraftRows:
    """A draft model at work: its executor and the rows of all sequences that it drafts for."""

    executor: Executor
    tokens: int
    ledger: Ledger = field(default_factory=Ledger)

    def propose(self, sequences: list[Sequence], table: TokenTable) -> list[np.ndarray]:
        """Per sequence `tokens` guesses."""
        known = [s for s in sequences if self._readable(s)]
        table.reserve(self.tokens + max((s.visible for s in known), default=0))
        for sequence in known:
            # A step that was broken off may have left guesses in the row.
            self._row(sequence).rewind(sequence.visible - 1)
        for done in range(self.tokens if known else 0):
            self._choose(known, table, done)
        for sequence in known:
            for value in sequence.memo.values():
                # The row keeps the guesses; what processors remember of them goes.
                if is_memory(value) and not isinstance(value, DraftRow):
                    value.rewind(sequence.visible)
        guesses = {id(s): table.data[s.line, s.visible : s.visible + self.tokens] for s in known}
        return [guesses.get(id(s), NO_IDS).copy() for s in sequences]

    def _readable(self, sequence: Sequence) -> bool:
        """Whether the draft model knows all ids before the generated ones, at their positions."""
        ids = sequence.request.prompt.ids
        if ids is None or sequence.request.shift:
            return False
        return bool((ids < self.executor.vocab_size).all())

    def _choose(self, sequences: list[Sequence], table: TokenTable, done: int) -> None:
        """Every sequence's line holds one guess more, after the `done` that stand there."""
        lengths = np.array([s.visible + done for s in sequences], dtype=np.int64)
        output = self.executor.run(self._work(sequences, table, lengths))
        rows = Rows(table, sequences, lengths)
        scores = output.logits.to(torch.float32)
        for s, token in enumerate(self._picked(rows, scores, done)):
            table.data[sequences[s].line, lengths[s]] = token

    def _picked(self, rows: Rows, scores: torch.Tensor, done: int) -> list[int]:
        """(S,) what each request would choose, strategy by strategy."""
        chosen = np.zeros(len(rows), dtype=np.int64)
        for own in _alike(rows.sequences):
            part = rows.select(own)
            given = apply(part, Scores.of(scores[torch.from_numpy(own)])).rising()
            request = part.sequences[0].request
            if request.draws.whole_rows:  # unseeded draws are the verifier's alone
                chosen[own] = given.whole().values.argmax(dim=-1).cpu().numpy()
                continue
            (tokens,) = request.strategy.pick(_batch(part, done, given.vocabulary), given)
            chosen[own] = tokens.cpu().numpy()
        return chosen.clip(min=0).tolist()

    def _work(self, sequences: list[Sequence], table: TokenTable, lengths: np.ndarray) -> Work:
        """Feeds what each row does not hold yet."""
        rows, starts, tokens = [], [], []
        for sequence, length in zip(sequences, lengths.tolist(), strict=True):
            held = self._row(sequence)
            rows.append(held.row)
            starts.append(held.cached)
            tokens.append(table.data[sequence.line, held.cached : length])
            held.cached = length
            held.floor = 0 if "cut" in self.executor.abilities else length - 1
        verbs, _, _ = self.ledger.drain()
        counts, one = np.array([len(ids) for ids in tokens]), np.ones(len(rows), dtype=np.int64)
        return Work(verbs, np.array(rows), np.array(starts), counts, one, np.concatenate(tokens))

    def _row(self, sequence: Sequence) -> DraftRow:
        key = f"draft row {id(self)}"
        if key not in sequence.memo:
            row = self.ledger.allocate(Prompt(sequence.request.prompt.ids))
            sequence.memo[key] = DraftRow(self.ledger, row)
        held: DraftRow = sequence.memo[key]
        return held

    def restart(self) -> None:
        self.ledger.restart(self.executor.audit())

    def held(self) -> int:
        return len(self.ledger.held)


def _alike(sequences: list[Sequence]) -> list[np.ndarray]:
    """Which sequences have equal strategies and kinds of draws."""
    found: dict[object, list[int]] = {}
    for s, sequence in enumerate(sequences):
        request = sequence.request
        found.setdefault((request.strategy, type(request.draws)), []).append(s)
    return [np.array(own) for own in found.values()]


def _batch(rows: Rows, done: int, vocabulary: int) -> Batch:
    """The sequences as they are after `done` guesses, for a strategy that picks for each alone."""
    after = [later(sequence, done) for sequence in rows.sequences]
    numbers, draws = np.arange(len(after)), after[0].request.draws
    return Batch(
        [], after, numbers, rows.table, numbers, len(after), draws, vocabulary,
        lambda _: Columns(), lambda parents, _: [None] * len(parents),
    )  # fmt: skip


@dataclass(slots=True)
class Drafters:
    """The drafters at work for an engine, by the value that each was started from."""

    at_work: dict[Drafter, Drafting] = field(default_factory=dict)
    vocabulary: int = 0

    def open(self, drafter: Drafter | None, vocabulary: int) -> None:
        """The drafter is at work; RequestError if it cannot draft for such a vocabulary."""
        self.vocabulary = vocabulary
        if drafter is not None and drafter not in self.at_work:
            self.at_work[drafter] = drafter.start(vocabulary)

    def propose(
        self, choosing: list[Group], groups: list[Group], table: TokenTable
    ) -> tuple[dict[int, np.ndarray], list[tuple[Group, Exception]]]:
        """Sequence id -> the ids that may follow it, for groups that choose; and those among them
        whose drafter fails. `groups`: all that are not over."""
        if not self.at_work:
            return {}, []
        using: dict[Drafter, list[Group]] = {}
        for group in choosing:
            if group.request.drafter is not None:
                using.setdefault(group.request.drafter, []).append(group)
        asking = deque(using.items())
        drafts: dict[int, np.ndarray] = {}
        failed: list[tuple[Group, Exception]] = []
        while asking:
            drafter, own = asking.popleft()
            try:
                drafts |= self._proposed(drafter, [s for group in own for s in group.live], table)
            except NOBODYS:
                raise
            except Exception as error:
                self._restart(drafter, groups)
                if len(own) == 1:
                    failed.append((own[0], error))
                else:
                    asking.extend((drafter, [group]) for group in own)
        return drafts, failed

    def restart(self) -> None:
        for drafting in self.at_work.values():
            drafting.restart()

    def held(self) -> int:
        """How many cache rows they hold."""
        return sum(drafting.held() for drafting in self.at_work.values())

    def _proposed(
        self, drafter: Drafter, sequences: list[Sequence], table: TokenTable
    ) -> dict[int, np.ndarray]:
        """Ids after each of the sequences that have room for more than the choice."""
        open_ones = [s for s in sequences if s.finish is None and _room(s) > 0]
        if not open_ones:
            return {}
        proposed = self.at_work[drafter].propose(open_ones, table)
        cut = [self._known(draft[: _room(s)]) for s, draft in zip(open_ones, proposed, strict=True)]
        return {id(s): draft for s, draft in zip(open_ones, cut, strict=True) if len(draft)}

    def _known(self, draft: np.ndarray) -> np.ndarray:
        """The draft up to the first id beyond the vocabulary, as prompts may hold them."""
        beyond = np.flatnonzero(draft >= self.vocabulary)
        return draft[: beyond[0]] if len(beyond) else draft

    def _restart(self, drafter: Drafter, groups: list[Group]) -> None:
        """Makes the drafter and the sequences that use it drop everything."""
        for group in groups:
            if group.request.drafter == drafter:
                for sequence in group.live:
                    sequence.forget()
        self.at_work[drafter].restart()


def _room(sequence: Sequence) -> int:
    """How many tokens may follow a sequence in addition to the one that it chooses now."""
    return sequence.request.max_length - sequence.length - 1
