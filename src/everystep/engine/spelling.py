"""What two tokenizers have in common: ids through text, and tokens that are spelled alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokenizers:
    """The model's own tokenizer and that of a draft model.

    `own_lookbehind`, `other_lookbehind`: how many ids before what is new are spelled again, since
    what follows a token may change how the text before it is divided. Source: transformers'
    AssistedCandidateGeneratorDifferentTokenizers.
    """

    own: Any
    other: Any
    own_lookbehind: int = 10
    other_lookbehind: int = 10

    def respelled(self, ids: np.ndarray, said: np.ndarray, known: int) -> np.ndarray:
        """Spell these ids for the draft model, where `said` is what it reads for the first `known`
        of them."""
        start = known - self.own_lookbehind
        if start > 0 and len(said):
            again = _encoded(self.other, _decoded(self.own, ids[start:]))
            first = max(len(said) - len(again), 0)
            found = longest_run(said[first:], again)
            if found is not None:
                before, after = found
                spliced = np.concatenate([said[: first + before], again[after:]])
                if self._agree(ids[max(start - self.own_lookbehind, 0) :], spliced, len(again)):
                    return spliced
        return _encoded(self.other, _decoded(self.own, ids), special=True)

    def _agree(self, ids: np.ndarray, said: np.ndarray, more: int) -> bool:
        """Tell whether both end in the same text, going by a few ids more than were spelled
        again."""
        own = _decoded(self.own, ids)
        other = _decoded(self.other, said[max(len(said) - more - self.own_lookbehind, 0) :])
        return own.endswith(other) or other.endswith(own)

    def understood(self, ids: np.ndarray, said: np.ndarray, guesses: np.ndarray) -> np.ndarray:
        """The guesses that follow what was said, as ids that follow the model's own."""
        near = np.concatenate([said[max(len(said) - self.other_lookbehind, 0) :], guesses])
        again = _encoded(self.own, _decoded(self.other, near))
        tail = ids[max(len(ids) - len(again), 0) :]
        found = longest_run(tail, again)
        if found is None:
            return _encoded(self.own, _decoded(self.other, guesses))
        before, after = found
        return again[after + len(tail) - before :]

    def shared(self, vocabulary: int, other_size: int) -> SharedTokens:
        """The tokens of both that are spelled alike."""
        own, other = self.own.get_vocab(), _with_spaces(self.own, self.other)
        pairs = [
            (own[token], one)
            for token, one in other.items()
            if token in own and own[token] < vocabulary and one < other_size
        ]
        table = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        return SharedTokens(vocabulary, table[:, 0], table[:, 1])


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Tokens that two vocabularies have: (n,) `own` ids, which rise, and the `other` ids of each.

    Source: Timor et al. 2025; transformers' AssistantToTargetTranslator.
    """

    vocabulary: int
    own: np.ndarray
    other: np.ndarray

    def scores(self, logits: Tensor) -> Tensor:
        """(R, other vocabulary) -> (R, V), -inf for tokens that are not shared."""
        values = logits.new_full((len(logits), self.vocabulary), -torch.inf)
        values[:, torch.from_numpy(self.own)] = logits[:, torch.from_numpy(self.other)]
        return values

    def other_id(self, token: int) -> int | None:
        """The id of one of the model's own tokens in the other vocabulary."""
        place = int(np.searchsorted(self.own, token))
        found = place < len(self.own) and self.own[place] == token
        return int(self.other[place]) if found else None


def longest_run(one: np.ndarray, other: np.ndarray) -> tuple[int, int] | None:
    """Find where the longest ids in a row that both have end in each; None without any."""
    equal = one[:, None] == other[None, :]
    runs = np.zeros((len(one) + 1, len(other) + 1), dtype=np.int64)
    for i in range(len(one)):
        runs[i + 1, 1:] = np.where(equal[i], runs[i, :-1] + 1, 0)
    if not runs.any():
        return None
    before, after = np.unravel_index(int(runs.argmax()), runs.shape)
    return int(before), int(after)


def _decoded(tokenizer: Any, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _encoded(tokenizer: Any, text: str, *, special: bool = False) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=special), dtype=np.int64)


def _with_spaces(own: Any, other: Any) -> Mapping[str, int]:
    """The other vocabulary, its sign of a leading space replaced by that of the own one."""
    vocabulary: Mapping[str, int] = other.get_vocab()
    signs = [_space(own), _space(other)]
    if not all(signs) or signs[0] == signs[1]:
        return vocabulary
    theirs = signs[1]
    return {
        signs[0] + token[len(theirs) :] if token.startswith(theirs) else token: one
        for token, one in vocabulary.items()
    }


def _space(tokenizer: Any) -> str:
    """Return the tokenizer's spelling of a space before a word; "" if it has none."""
    ids = tokenizer.encode(" ", add_special_tokens=False)
    return str(tokenizer.convert_ids_to_tokens(ids)[0][:1]) if len(ids) else ""
