"""Drafts of a model with another tokenizer.

It reads the text of the sequence in its own tokens, in a cache row that is brought up to date by
the ids that both have in common. It guesses tokens that both vocabularies have, or text, which is
then spelled in the model's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from everystep.engine.draft_model import Made, Until, forget_guesses, guess
from everystep.engine.feed import NO_IDS
from everystep.engine.second import SecondModel, SecondRow
from everystep.engine.spelling import SharedTokens, Tokenizers
from everystep.executors.base import Executor
from everystep.types import Draft, Rows, Sequence, TokenTable
from everystep.types.protocols import Schedule
from everystep.types.request import Drafting, WantedDraft
from everystep.types.table import common_length


@dataclass(frozen=True)
class OtherDraftModel:
    """A draft model with another tokenizer; see `DraftModel`.

    `by`: "tokens" for guesses among the tokens that both vocabularies have, made as the request
    would choose (Timor et al. 2025); "text" for its own best tokens, whose text is encoded again
    (transformers' universal assisted decoding).
    """

    open: Callable[[], Executor]
    tokenizers: Tokenizers
    by: Literal["tokens", "text"]
    tokens: int = 5
    schedule: Schedule = "constant"
    threshold: float = 0.0
    stop_ids: tuple[int, ...] = ()
    alternatives: ClassVar[int] = 0

    def start(self, vocabulary: int) -> Drafting:
        model = SecondModel(self.open())
        until = Until(self.threshold, self.stop_ids)
        if self.by == "text":
            return TextGuesses(model, self.tokenizers, until, vocabulary)
        shared = self.tokenizers.shared(vocabulary, model.executor.vocab_size)
        return TokenGuesses(model, self.tokenizers, until, vocabulary, shared)


@dataclass(slots=True)
class SpelledRow:
    """A draft model's row of one sequence, and what it holds: a memory.

    `said`: what the draft model reads for the first `visible` ids of the sequence, which the row
    need not hold yet.
    """

    held: SecondRow
    ids: np.ndarray
    said: np.ndarray
    visible: int = 0

    def copy(self) -> SpelledRow:
        return SpelledRow(self.held.copy(), self.ids, self.said, self.visible)

    def rewind(self, length: int) -> None:
        """Drop what was said if it says more than the first `length` ids; the row is compared when
        it is needed."""
        if self.visible > length:
            self.said, self.visible = NO_IDS, 0

    def release(self) -> None:
        self.held.release()

    def follow(self, line: np.ndarray) -> None:
        """The row holds no more than a part of the line, and all of it after the next forward."""
        self.held.keep(common_length([self.ids, line]))
        self.ids = line


@dataclass(slots=True)
class OtherGuesses:
    """A draft model with another tokenizer at work."""

    model: SecondModel
    tokenizers: Tokenizers
    until: Until
    vocabulary: int

    def restart(self) -> None:
        self.model.restart()

    def held(self) -> int:
        return self.model.held()

    def known(self, asked: list[WantedDraft], table: TokenTable) -> list[tuple[Sequence, int]]:
        """The sequences whose text is known, each with its limit; their rows have all of it."""
        found = []
        for sequence, most, _ in asked:
            known = sequence.request.prompt.ids
            if known is None or (known >= self.vocabulary).any():
                continue
            ids = own_ids(sequence, table)
            row = self.row(sequence)
            row.said = self.tokenizers.respelled(ids, row.said, row.visible)
            row.visible = len(ids)
            if len(row.said):
                found.append((sequence, most))
        return found

    def row(self, sequence: Sequence) -> SpelledRow:
        """Return what the draft model keeps of the sequence."""
        key = f"spelled row {id(self)}"
        if key not in sequence.memo:
            sequence.memo[key] = SpelledRow(self.model.new_row(), NO_IDS, NO_IDS)
        found: SpelledRow = sequence.memo[key]
        return found


@dataclass(slots=True)
class TokenGuesses(OtherGuesses):
    """Guesses among the tokens that both vocabularies have."""

    shared: SharedTokens

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        """As many guesses as may be, fewer where one was unlikely."""
        going = known = self.known(asked, table)
        made = Made({id(sequence): 0 for sequence, _ in known})
        lines = {id(sequence): self.row(sequence).said for sequence, _ in known}
        for sequence, most in known:
            table.reserve(sequence.visible + most)
        done = 0
        while going:
            own = [sequence for sequence, _ in going]
            rows = [self.row(sequence) for sequence in own]
            for sequence, row in zip(own, rows, strict=True):
                row.follow(lines[id(sequence)])
            logits = self.model.logits([row.held for row in rows], [row.ids for row in rows])
            at = Rows(table, own, np.array([sequence.visible + done for sequence in own]))
            open_ones = guess(at, self.shared.scores(logits), done, self.until, made)
            done += 1
            left = []
            for (sequence, most), goes_on in zip(going, open_ones, strict=True):
                token = int(table.data[sequence.line, sequence.visible + done - 1])
                other = self.shared.other_id(token)
                if goes_on and done < most and other is not None:
                    lines[id(sequence)] = np.append(lines[id(sequence)], other)
                    left.append((sequence, most))
            going = left
        forget_guesses([sequence for sequence, _ in known])
        return [made.draft(one.sequence, table) for one in asked]


@dataclass(slots=True)
class TextGuesses(OtherGuesses):
    """Guesses of the draft model in its own tokens, spelled in those of the model."""

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        """The ids of a text of as many tokens as may be, or fewer."""
        going = known = self.known(asked, table)
        guesses: dict[int, list[int]] = {id(sequence): [] for sequence, _ in known}
        while going:
            rows = [self.row(sequence) for sequence, _ in going]
            for (sequence, _), row in zip(going, rows, strict=True):
                more = np.array(guesses[id(sequence)], dtype=np.int64)
                row.follow(np.concatenate([row.said, more]))
            logits = self.model.logits([row.held for row in rows], [row.ids for row in rows])
            highest, chosen = logits.softmax(dim=-1).max(dim=-1)
            left = []
            answers = zip(going, chosen.tolist(), highest.tolist(), strict=True)
            for (sequence, most), token, chance in answers:
                own = guesses[id(sequence)]
                own.append(token)
                if chance >= self.until.threshold and len(own) < most:
                    left.append((sequence, most))
            going = left
        each = [one.sequence for one in asked]
        return [self._spelled(one, table, guesses.get(id(one))) for one in each]

    def _spelled(self, sequence: Sequence, table: TokenTable, guesses: list[int] | None) -> Draft:
        if not guesses:
            return Draft(NO_IDS)
        said, other = self.row(sequence).said, np.array(guesses, dtype=np.int64)
        return Draft(self.tokenizers.understood(own_ids(sequence, table), said, other))


def own_ids(sequence: Sequence, table: TokenTable) -> np.ndarray:
    """The ids of a sequence without its pad prefix."""
    return table.data[sequence.line, sequence.request.pad_prefix : sequence.visible]
