"""Drafts of a smaller model of the same vocabulary, a second model (`second.py`)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.engine.feed import NO_IDS
from everystep.engine.layout import later
from everystep.engine.second import SecondModel
from everystep.errors import RequestError
from everystep.executors.base import Executor
from everystep.processors.pipeline import apply
from everystep.strategies.base import Batch
from everystep.types import (
    Columns,
    Draft,
    Rows,
    Scores,
    Sequence,
    TokenTable,
    is_memory,
)
from everystep.types.protocols import Schedule
from everystep.types.request import Drafting, WantedDraft

_NO_DRAFT = Draft(NO_IDS)


@dataclass(frozen=True)
class DraftModel:
    """A smaller model of the same vocabulary guesses `tokens` ids, one after another.

    Each guess is what the request itself would choose from the draft model's scores: with its
    processors, its strategy and, where they are seeded, its draws. `open`: a fresh executor of the
    draft model, with the ability "truncate". A draft ends with the first guess that is less likely
    than `threshold`, or one of `stop_ids`. `alternatives` begin with the next best ids. Sequences
    whose prompt has no ids, or ids beyond the vocabulary, are not drafted for. Source: Leviathan et
    al. 2023; transformers' AssistedCandidateGenerator.
    """

    open: Callable[[], Executor]
    tokens: int = 5
    schedule: Schedule = "constant"
    threshold: float = 0.0
    stop_ids: tuple[int, ...] = ()
    alternatives: int = 0

    def start(self, vocabulary: int) -> Drafting:
        model = SecondModel(self.open())
        if model.executor.vocab_size != vocabulary:
            raise RequestError(
                "the draft model has another vocabulary",
                wanted=f"{vocabulary} ids",
                got=model.executor.vocab_size,
                do="Choose a draft model with the tokenizer of the model itself, or pass "
                "tokenizer and assistant_tokenizer",
            )
        return Guesses(model, Until(self.threshold, self.stop_ids))


@dataclass(frozen=True, slots=True)
class Until:
    """The end of a draft: a guess that is less likely than the threshold, or one of the ids."""

    threshold: float
    stop_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Guesses:
    """A draft model at work, and what ends its drafts."""

    model: SecondModel
    until: Until

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        """As many guesses as may be, fewer where one was unlikely."""
        readable = [one for one in asked if self._readable(one.sequence)]
        for sequence, most, _ in readable:
            table.reserve(sequence.visible + most)
        made = Made({id(one.sequence): 0 for one in readable})
        going, done = readable, 0
        while going:
            open_ones = self._choose(going, table, done, made)
            done += 1
            pairs = zip(going, open_ones, strict=True)
            going = [one for one, goes_on in pairs if goes_on and one.most > done]
        forget_guesses([one.sequence for one in readable])
        return [made.draft(one.sequence, table) for one in asked]

    def restart(self) -> None:
        self.model.restart()

    def held(self) -> int:
        return self.model.held()

    def _readable(self, sequence: Sequence) -> bool:
        """Tell whether the draft model knows all ids before the generated ones."""
        ids = sequence.request.prompt.ids
        return ids is not None and bool((ids < self.model.executor.vocab_size).all())

    def _choose(
        self, going: list[WantedDraft], table: TokenTable, done: int, made: Made
    ) -> list[bool]:
        """Every line holds one guess more, after the `done` that stand there; whether the draft
        may go on."""
        sequences = [one.sequence for one in going]
        lengths = np.array([s.visible + done for s in sequences], dtype=np.int64)
        held = [self.model.row(s, s.request.second.drafter) for s in sequences]
        lines = [
            table.data[s.line, row.skips : n]
            for s, row, n in zip(sequences, held, lengths.tolist(), strict=True)
        ]
        rows, ranks = Rows(table, sequences, lengths), [0 if done else one.rank for one in going]
        return guess(rows, self.model.logits(held, lines), done, self.until, made, ranks)


# --- guesses --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """Guesses so far: how many, by the id of the sequence; and what they were drawn from."""

    counts: dict[int, int]
    scores: dict[int, list[Tensor]] = field(default_factory=dict)

    def draft(self, sequence: Sequence, table: TokenTable) -> Draft:
        """The guesses that stand on the sequence's line."""
        count = self.counts.get(id(sequence), 0)
        if not count:
            return _NO_DRAFT
        ids = table.data[sequence.line, sequence.visible : sequence.visible + count].copy()
        scores = self.scores.get(id(sequence))
        return Draft(ids, None if scores is None else torch.stack(scores))


def guess(
    rows: Rows, scores: Tensor, done: int, until: Until, made: Made, ranks: Items[int] = ()
) -> list[bool]:
    """Writes after every row what its request would choose from the scores (R, V), after `done`
    guesses; whether the drafts may go on. `ranks`: see `WantedDraft`."""
    goes_on = np.ones(len(rows), dtype=bool)
    for own in _alike(rows.sequences):
        part = rows.select(own)
        given = apply(part, Scores.of(scores[torch.from_numpy(own)])).rising()
        chosen = _chosen(part, given, done).cpu().clamp(min=0)
        if any(ranks):
            chosen = _other(given, chosen, torch.tensor(ranks)[torch.from_numpy(own)])
        verification = part.sequences[0].request.verification
        if until.threshold > 0 or verification.reads:
            given = given.whole()
            found = given.values.softmax(dim=-1).cpu().gather(1, chosen[:, None])[:, 0]
            goes_on[own] = (found >= until.threshold).numpy()
        goes_on[own] &= ~np.isin(chosen.numpy(), until.stop_ids)
        for r, (sequence, token) in enumerate(zip(part.sequences, chosen.tolist(), strict=True)):
            rows.table.data[sequence.line, part.lengths[r]] = token
            made.counts[id(sequence)] = done + 1
            if verification.reads:
                made.scores.setdefault(id(sequence), []).append(given.values[r])
    return goes_on.tolist()


def _other(given: Scores, chosen: Tensor, ranks: Tensor) -> Tensor:
    """(R,) in order of rank what is chosen, and then the best of the others."""
    values = given.whole().values.cpu().scatter(1, chosen[:, None], torch.inf)
    best = values.topk(int(ranks.max()) + 1).indices
    return best.gather(1, ranks[:, None])[:, 0]


def forget_guesses(sequences: list[Sequence]) -> None:
    """The rows of draft models keep the guesses; what processors remember of them goes."""
    for sequence in sequences:
        for value in sequence.memo.values():
            if is_memory(value) and not hasattr(value, "release"):
                value.rewind(sequence.visible)


def _alike(sequences: list[Sequence]) -> list[np.ndarray]:
    """Sort the sequences into those that choose alike, with equal kinds of draws."""
    found: dict[object, list[int]] = {}
    for s, sequence in enumerate(sequences):
        request = sequence.request
        kind = (request.strategy, type(request.draws), request.verification)
        found.setdefault(kind, []).append(s)
    return [np.array(own) for own in found.values()]


def _chosen(rows: Rows, given: Scores, done: int) -> Tensor:
    """(R,) what the requests of the rows, which choose alike, would choose."""
    request = rows.sequences[0].request
    rejects = request.verification.rejects
    if request.draws.whole_rows and not rejects:  # unseeded draws are the verifier's alone
        return given.whole().values.argmax(dim=-1)
    after = [later(sequence, done) for sequence in rows.sequences]
    numbers = np.arange(len(after))
    # Where drafts are rejected by chance, guesses must not depend on what decides that.
    draws = request.draws.beside("draft") if rejects else request.draws
    batch = Batch(
        [], after, numbers, rows.table, numbers, len(after), draws, given.vocabulary,
        lambda _: Columns(), lambda parents, _: [None] * len(parents),
    )  # fmt: skip
    (tokens,) = request.strategy.pick(batch, given)
    return tokens
