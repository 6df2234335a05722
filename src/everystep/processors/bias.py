"""Processors that say which tokens may follow: biases, bans, a caller's function, finite scores.

A ban is a bias of -inf. A table of biases is turned into arrays once per width and device; a step
touches only the ids that some word of the table ends in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import BIASES, COUNT, ONE_OR_MORE_IDS, WORDS, Kind, is_number, require
from everystep.devices import on_device
from everystep.errors import RequestError
from everystep.processors.base import Editing, LogitsProcessor, Permitting
from everystep.processors.edits import Edit, places
from everystep.processors.stacking import Argument
from everystep.types import Rows
from everystep.types.given_tensors import flaw_of

Table = tuple[tuple[tuple[int, ...], float], ...]
# (C,) the ids that words end in; (C,) float32 biases of words of one id; and per length of longer
# words, in first order, their ids before the last (W, n), the place of the last one among all last
# ids (W,), and the bias (W,).
_Prepared = tuple[Tensor, Tensor, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]


def _prepare(table: Table, device: torch.device) -> _Prepared:
    ends = list(dict.fromkeys(ids[-1] for ids, _ in table))
    place = {token: i for i, token in enumerate(ends)}
    single = torch.zeros(len(ends), dtype=torch.float32)
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in table:
        by_length.setdefault(len(ids), []).append((ids, bias))
    for ids, bias in by_length.pop(1, []):
        single[place[ids[0]]] = bias
    longer = [
        (
            np.array([ids[:-1] for ids, _ in words], dtype=np.int64),
            np.array([place[ids[-1]] for ids, _ in words], dtype=np.int64),
            np.array([bias for _, bias in words], dtype=np.float32),
        )
        for words in by_length.values()
    ]
    return torch.tensor(ends, dtype=torch.int64, device=device), single.to(device), longer


def check_width(ids: Iterable[int], size: int | None, name: str) -> None:
    """Raise RequestError if there is an id that no score belongs to.

    Do nothing if the size is unknown.
    """
    beyond = [] if size is None else sorted({token for token in ids if token >= size})
    if beyond:
        raise RequestError(
            f"{name} names ids beyond the vocabulary",
            wanted=f"ids below {size}",
            got=beyond,
            do="Use ids of this model's tokenizer",
        )


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class _Biases(Editing):
    """Adds a bias to the last id of every word whose other ids stand at the end of the prefix."""

    _prepared: dict[Any, _Prepared] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def table(self) -> Table:
        """Each word and its bias."""
        raise NotImplementedError

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        size, device = scores.shape[-1], scores.device
        if (size, device) not in self._prepared:
            ids = (token for word, _ in self.table for token in word)
            check_width(ids, size, self.checked[0].name)
            self._prepared[size, device] = _prepare(self.table, device)
        ends, single, longer = self._prepared[size, device]
        if not len(ends):
            return None
        # Biases are summed first, so that there is one rounding, as in transformers.
        total = single.to(scores.dtype).repeat(len(scores), 1)
        for before, last, bias in longer:
            row, word = matching_tails(rows, before)
            if len(row):
                at = tuple(on_device(device, i) for i in (row, last[word]))
                added = on_device(device, bias[word], scores.dtype)
                total.index_put_(at, added, accumulate=True)
        first = torch.arange(0, len(scores) * size, size, device=device)
        index = (first[:, None] + ends).view(-1)
        return Edit(index, scores.view(-1).index_select(0, index) + total.view(-1))


@dataclass(frozen=True)
class SequenceBiasLogitsProcessor(_Biases):
    """Adds a bias to an id where it would complete its sequence of ids; all that apply add up.

    `sequence_bias`: {(id, ...): bias} or [[[id, ...], bias], ...].
    """

    sequence_bias: Any

    checked = (Argument("sequence_bias", BIASES),)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sequence_bias", tuple(self.sequence_bias.items()))

    @property
    def table(self) -> Table:
        return self.sequence_bias


@dataclass(frozen=True)
class NoBadWordsLogitsProcessor(_Biases):
    """Bans every id that would complete one of the words, a word of one end token left out."""

    bad_words_ids: Any
    eos_token_id: Any = None

    checked = (
        Argument("bad_words_ids", WORDS),
        Argument("eos_token_id", ONE_OR_MORE_IDS, optional=True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        words = dict.fromkeys(tuple(map(int, word)) for word in self.bad_words_ids)
        object.__setattr__(self, "bad_words_ids", tuple(words))

    @property
    def table(self) -> Table:
        ends = {(token,) for token in self.eos_token_id or ()}
        return tuple((word, -math.inf) for word in self.bad_words_ids if word not in ends)


@dataclass(frozen=True)
class PrefixConstrainedLogitsProcessor(Permitting):
    """Only tokens that `prefix_allowed_tokens_fn(batch_id, ids)` returns may follow.

    A batch id counts searches of `num_beams` rows, from `first` on. Where everything allowed is
    -inf in all beams of a search already, the allowed tokens get 0. RequestError if nothing is
    allowed. Source: De Cao et al. 2021.
    """

    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]]
    num_beams: int
    first: int = field(default=0, kw_only=True)

    checked = (
        Argument("prefix_allowed_tokens_fn", Kind("a function of (batch_id, ids)", callable)),
    )

    def may_follow(self, rows: Rows, vocabulary: int) -> Tensor:
        found = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
        ids = rows.ids()
        for r, sequence in enumerate(rows.sequences):
            batch_id = self.first + sequence.index // self.num_beams
            found[r, self._tokens(batch_id, ids[r, : rows.lengths[r]].clone(), vocabulary)] = True
        return found

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        allowed = on_device(scores.device, self.may_follow(rows, scores.shape[1]))
        mask = torch.zeros_like(scores).masked_fill_(~allowed, -math.inf)
        return only_allowed(rows, scores, mask, self.num_beams)

    def _tokens(self, batch_id: int, ids: Tensor, size: int) -> Tensor:
        allowed: object = self.prefix_allowed_tokens_fn(batch_id, ids)
        try:
            tokens = torch.as_tensor(allowed if isinstance(allowed, Tensor) else list(allowed))  # type: ignore[call-overload]
        except (TypeError, ValueError, RuntimeError):
            tokens = torch.empty(1)
        if flaw_of(tokens) is not None:
            tokens = torch.empty(1)
        if tokens.dim() != 1 or (len(tokens) and tokens.dtype not in _INTEGERS):
            raise RequestError(
                f"prefix_allowed_tokens_fn returned no list of ids for batch id {batch_id}",
                wanted="a list of integers",
                got=type(allowed).__name__,
                do="Return the ids that may follow, all of them where everything may",
            )
        if not len(tokens):
            raise RequestError(
                f"prefix_allowed_tokens_fn allows nothing for batch id {batch_id}",
                wanted="at least one token",
                got="none",
                do="Let it return the end token where a text is complete",
            )
        if tokens.min() < 0 or tokens.max() >= size:
            raise RequestError(
                "prefix_allowed_tokens_fn allows an id outside the vocabulary",
                wanted=f"0 to {size - 1}",
                got=int(tokens[(tokens < 0) | (tokens >= size)][0]),
                do="Return ids that the model has logits for",
            )
        return tokens.cpu()


def only_allowed(rows: Rows, scores: Tensor, mask: Tensor, num_beams: int) -> Tensor:
    """Return (R, n) scores with a mask of 0 and -inf added.

    Where that leaves nothing in all rows of a search of `num_beams`, return the mask.
    """
    constrained = scores + mask
    hopeless = constrained.amax(dim=-1).isneginf()
    if not bool(hopeless.any()):
        return constrained
    whole = _in_all_beams(rows, hopeless.cpu().numpy(), num_beams)
    return torch.where(on_device(scores.device, whole)[:, None], mask, constrained)


def _in_all_beams(rows: Rows, hopeless: np.ndarray, num_beams: int) -> np.ndarray:
    """Return (R,) whether every row of the same search at the same place is hopeless."""
    keys = [
        (id(sequence.request), sequence.index // num_beams, int(length))
        for sequence, length in zip(rows.sequences, rows.lengths, strict=True)
    ]
    hopeful = {key for key, lost in zip(keys, hopeless, strict=True) if not lost}
    return np.array([key not in hopeful for key in keys])


@dataclass(frozen=True)
class InfNanRemoveLogitsProcessor(LogitsProcessor):
    """nan becomes 0, and infinities the largest and smallest finite numbers."""

    reads_ids = False

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return torch.nan_to_num(scores, nan=0.0)


@dataclass(frozen=True)
class LogitBias(Editing):
    """Adds its bias to every id of the table: ((id, bias), ...).

    RequestError where an id lies beyond the scores. Source: `logit_bias` of the OpenAI API.
    """

    table: tuple[tuple[int, float], ...]

    reads_ids = False

    def __post_init__(self) -> None:
        valid = all(COUNT.accepts(token) and is_number(bias) for token, bias in self.table)
        require(valid, "logit_bias", "pairs of a token id and a number", self.table)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        check_width((token for token, _ in self.table), scores.shape[-1], "logit_bias")
        tokens = np.array([token for token, _ in self.table], dtype=np.int64)
        biases = np.array([bias for _, bias in self.table], dtype=np.float64)
        bias = on_device(scores.device, biases, scores.dtype)
        index = places(scores, np.arange(len(rows))[:, None], tokens)
        return Edit(index, scores.view(-1).index_select(0, index) + bias.repeat(len(rows)))


def matching_tails(rows: Rows, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, word) of every row whose prefix ends in that word; `words` (W, n)."""
    ids, lengths = rows.ids().numpy(), rows.lengths
    size = words.shape[1]
    if ids.shape[1] < size:
        none = np.empty(0, dtype=np.int64)
        return none, none
    # A row that is too short reads other ids than its last, and is left out.
    place = np.maximum(lengths[:, None] - size + np.arange(size), 0)
    tails = ids[np.arange(len(ids))[:, None], place]
    match = (tails[:, None] == words).all(axis=-1) & (lengths >= size)[:, None]
    row, word = np.nonzero(match)
    return row, word
