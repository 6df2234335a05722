"""The processor that lets a text follow its grammar: what may not follow becomes -inf.

It stands after the bans and before the samplers, so that these share out what the grammar allows.
Where few tokens may follow, as nearly everywhere between the values of a JSON text, it leaves a
list of them, and the rest of the row is never looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.errors import RequestError
from everystep.processors.base import Narrowing, Overwriting, Permitting, remembers
from everystep.processors.best import is_wide
from everystep.processors.grammars.grammar import Grammar, GrammarPlace, tokens_in
from everystep.processors.stacking import Numbers, column
from everystep.types import Rows, Scores, Sequence

_FEW = 1024  # tokens of one row that are listed
_KEY = "grammar"


@dataclass(frozen=True)
class GrammarMask(Overwriting, Narrowing, Permitting):
    """Only what goes on with a text of the grammar may follow, and `ends` where one is complete.

    `source`: the grammar as text, by which a saved run knows it. Ids before the first generated one
    are not part of the text. A row that can no longer be part of a text, as one after a wrong
    guess, is left as it is. RequestError where no row of a request has a token left.
    """

    grammar: Grammar
    ends: tuple[int, ...]
    source: str = field(init=False, compare=False)

    keeps_lists = True

    def __post_init__(self) -> None:
        source = self.grammar.source
        object.__setattr__(self, "source", f"{source.kind}: {source.text}")

    def place(self, sequence: Sequence, *, keeps: bool = True) -> GrammarPlace:
        """Return the place of the sequence: the one it remembers, or a new one if nothing is
        kept."""
        memo = sequence.memo if keeps else {}
        found: GrammarPlace | None = memo.get(_KEY)
        if found is None or found.grammar is not self.grammar:
            start = sequence.request.prompt_visible
            found = memo[_KEY] = GrammarPlace(self.grammar, start, self.ends)
        return found

    def may_follow(self, rows: Rows, vocabulary: int) -> Tensor:
        return ~_banned(self._masks(rows), vocabulary)

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        masks = self._masks(rows)
        scores.masked_fill_(on_device(scores.device, _banned(masks, scores.shape[1])), -math.inf)
        self._require_some(rows, masks, scores)
        return scores

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """List what may follow, where that is little or where the scores are lists."""
        if scores.tokens is not None:
            return self._of_lists(rows, scores)
        if not is_wide(scores.values):
            return None
        masks = self._masks(rows)
        listed = [None if words is None else tokens_in(words, _FEW) for words in masks]
        known = [tokens for tokens in listed if tokens is not None]
        if len(known) < len(listed):
            return None
        width = max(1, *map(len, known)) if known else 1
        tokens = np.zeros((len(known), width), np.int64)
        values = np.full(tokens.shape, -math.inf, dtype=scores.values.numpy().dtype)
        for r, own in enumerate(known):
            tokens[r, : len(own)], values[r, : len(own)] = own, scores.values.numpy()[r, own]
        found = torch.from_numpy(values)
        if temperature != 1.0:
            found = found / column(temperature, found)
        self._require_some(rows, masks, found)
        return Scores(found, torch.from_numpy(tokens), scores.vocabulary)

    def _of_lists(self, rows: Rows, scores: Scores) -> Scores:
        masks = self._masks(rows)
        banned = np.zeros(scores.values.shape, np.bool_)
        for r, words in enumerate(masks):
            if words is not None:
                own = scores.tokens[r].numpy()  # type: ignore[index]
                banned[r] = (words[own >> 5] >> (own & 31) & 1) == 0
        kept = scores.values.masked_fill(torch.from_numpy(banned), -math.inf)
        if scores.rest is None or scores.read is None:
            self._require_some(rows, masks, kept)
            return replace(scores, values=kept, totals=None)
        read = scores.read

        def left(some: Tensor) -> Tensor:
            return self.overwrite(rows.select(some.numpy()), read(some).clone())

        found = replace(scores, values=kept, totals=None, read=left)
        undecided = torch.nonzero((kept <= scores.rest).all(dim=1)).view(-1)
        if not len(undecided):
            return found
        best, token = left(undecided).max(dim=1, keepdim=True)
        return found.put(undecided, Scores(best, token, scores.vocabulary))

    def _masks(self, rows: Rows) -> list[np.ndarray | None]:
        """(R,) of each row the bits of what may follow, or None."""
        keeps = remembers(rows)
        lines, lengths = rows.table.data, rows.lengths.tolist()
        return [
            self.place(sequence, keeps=keeps).mask(lines[sequence.line], length)
            for sequence, length in zip(rows.sequences, lengths, strict=True)
        ]

    def _require_some(self, rows: Rows, masks: list[np.ndarray | None], scores: Tensor) -> None:
        """RequestError if a request has no row, of those without guesses, in which a token is left.

        In a search some hypotheses may have none: they are not gone on with. Of narrowed scores
        that is no last word.
        """
        if rows.narrowed:
            return
        lost = (scores.amax(dim=-1) == -math.inf).cpu().numpy()
        lost |= np.array([words is None for words in masks])
        if not lost.any():
            return
        hopeful: dict[int, bool] = {}
        for r, sequence in enumerate(rows.sequences):
            if rows.lengths[r] == sequence.visible and sequence.finish is None:
                key = id(sequence.request)
                hopeful[key] = hopeful.get(key, False) or not lost[r]
        if not all(hopeful.values()):
            raise RequestError(
                f"no token is left that {self.grammar.source.kind} allows",
                wanted="a token that neither the grammar nor another setting rules out",
                do="Relax what bans tokens, such as min_new_tokens, bad_words_ids or dola_layers, "
                "or what was given after the prompt",
            )


def _banned(masks: list[np.ndarray | None], vocabulary: int) -> Tensor:
    """Return (R, V) bool of what may not follow, from bits of what may."""
    banned = np.zeros((len(masks), vocabulary), np.bool_)
    for r, words in enumerate(masks):
        if words is not None:
            bits = np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little")
            np.equal(bits, 0, out=banned[r])
    return torch.from_numpy(banned)
