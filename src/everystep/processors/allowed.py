"""Generation along a set of token sequences: a trie in arrays, and the processor that follows it.

Nodes are numbered level by level, and those of a level by (parent, token), so that edge e leads to
node e + 1 and all edges stand sorted in one array: a step of any number of rows is one search in
it, and what may follow a node is one slice of another. The node after the last one is where
everything leads that is in no sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import plain
from everystep.devices import on_device, on_host
from everystep.errors import RequestError, shown
from everystep.processors.base import Narrowing, Permitting, remembers
from everystep.processors.bias import only_allowed
from everystep.processors.stacking import Numbers
from everystep.types import Rows, Scores

_MOST = 1024  # tokens of one row; longer lists are worth no more than whole rows
_NONE = np.iinfo(np.int64).max


class AllowedSequences:
    """A set of token sequences, compiled once, for `allowed_sequences=` of any number of calls.

    `sequences`: lists of ids, or texts, which a tokenizer encodes without special tokens. Each
    stands for an answer as a whole: where one ends, and nowhere else, the answer may end. One that
    ends with an end token ends there. RequestError for an empty set, an empty sequence, or what is
    no sequence. Sources: De Cao et al. 2021, "Autoregressive Entity Retrieval"; here the trie is
    arrays.
    """

    def __init__(self, sequences: Iterable[Any], tokenizer: Any = None) -> None:
        if not isinstance(sequences, Iterable) or getattr(sequences, "ndim", 1) == 0:
            wanted = "a list of texts or of lists of ids"
            raise RequestError("there are no sequences", wanted=wanted, got=shown(sequences))
        flat, lengths = _flat(_as_ids([*sequences], tokenizer))
        self._size = int(flat.max()) + 1
        self.longest = int(lengths.max())
        starts, node = np.cumsum(lengths) - lengths, np.zeros(len(lengths), np.int64)
        alive, count, levels = np.arange(len(lengths)), 1, []
        for depth in range(self.longest):
            alive = alive[lengths[alive] > depth]
            keys = node[alive] * self._size + flat[starts[alive] + depth]
            found, place = np.unique(keys, return_inverse=True)
            node[alive] = count + place
            count += len(found)
            levels.append(found)
        self._keys = np.concatenate(levels)  # (edges,) parent * size + token
        self._tokens = self._keys % self._size
        parents = self._keys // self._size
        self._first = np.searchsorted(parents, np.arange(count + 2))  # (nodes + 2,) of their edges
        self._ends = np.zeros(count + 1, bool)  # where a sequence ends, and outside
        self._ends[node] = self._ends[count] = True
        self.outside = count
        held = self._keys.tobytes() + self._ends.tobytes()
        self.digest = hashlib.sha256(held).hexdigest()[:16]  # equal for equal sets

    def __repr__(self) -> str:
        return f"AllowedSequences({int(self._ends.sum()) - 1} sequences)"

    @property
    def largest(self) -> int:
        """The greatest id."""
        return self._size - 1

    def goes_on_after(self, ends: Sequence[int]) -> bool:
        """Return whether a sequence goes on after one of these tokens."""
        edges = np.flatnonzero(np.isin(self._tokens, ends))
        return bool((self._first[edges + 2] > self._first[edges + 1]).any())

    def step(self, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Step from (R,) nodes over the tokens that follow to (R,) nodes."""
        keys = nodes * self._size + tokens
        edge = np.searchsorted(self._keys, keys)
        known = (tokens < self._size) & (edge < len(self._keys))
        known &= self._keys[np.minimum(edge, len(self._keys) - 1)] == keys
        return np.where(known, edge + 1, self.outside)

    def counts(self, nodes: np.ndarray) -> np.ndarray:
        """Return (R,) how many tokens may follow each node, beside the end."""
        counts: np.ndarray = self._first[nodes + 1] - self._first[nodes]
        return counts

    def listed(self, nodes: np.ndarray, ends: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return (R, n) the tokens that may follow each node, in rising order, and which places
        hold one.

        Where a sequence ends, these are the `ends` too.
        """
        counts = self.counts(nodes)
        places = np.arange(int(counts.max(initial=0)))
        inside = places < counts[:, None]
        edges = np.minimum(self._first[nodes][:, None] + places, len(self._keys) - 1)
        tokens = np.where(inside, self._tokens[edges], _NONE)
        final = np.where(self._ends[nodes][:, None], np.array(ends, np.int64), _NONE)
        for column in final.T:  # an end token may be one that a sequence holds
            known = (tokens == column[:, None]).any(axis=1)
            tokens = np.concatenate([tokens, np.where(known, _NONE, column)[:, None]], axis=1)
        if self._ends[nodes].any():
            tokens.sort(axis=1)
        held = tokens != _NONE
        width = max(int(held.sum(axis=1).max(initial=0)), 1)
        return np.where(held, tokens, 0)[:, :width], held[:, :width]


class TrieWalk:
    """A memory: the node after each of the ids of a sequence, from the first generated one on."""

    __slots__ = ("nodes", "start")

    def __init__(self, start: int, nodes: list[int]) -> None:
        self.start, self.nodes = start, nodes

    def copy(self) -> TrieWalk:
        """Return one that knows the same."""
        return TrieWalk(self.start, self.nodes.copy())

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` visible ids."""
        del self.nodes[max(length - self.start, 0) + 1 :]


@dataclass(frozen=True)
class AllowedSequencesLogitsProcessor(Narrowing, Permitting):
    """Only tokens that go on with an allowed sequence may follow, and where one ends an end token.

    A sequence that others led out of the set, by forced ids, can only end. Where everything allowed
    is -inf in all `num_beams` of a search already, the allowed tokens get 0, as with
    `prefix_allowed_tokens_fn`.
    """

    allowed: AllowedSequences
    eos_token_id: tuple[int, ...]
    num_beams: int = 1
    digest: str = field(init=False)

    keeps_lists = False  # what is allowed may stand outside of a list

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.allowed.digest)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """Return the allowed tokens as lists, where these are short and the rows on the host."""
        if scores.tokens is not None or temperature != 1.0 or not on_host(scores.values):
            return None
        nodes = self._nodes(rows)
        if int(self.allowed.counts(nodes).max(initial=0)) > _MOST:
            return None
        tokens, held = self.allowed.listed(nodes, self.eos_token_id)
        ids = torch.from_numpy(tokens)
        mask = torch.zeros(ids.shape, dtype=scores.values.dtype)
        mask.masked_fill_(torch.from_numpy(~held), -math.inf)
        values = only_allowed(rows, scores.values.gather(1, ids), mask, self.num_beams)
        return Scores(values, ids, scores.vocabulary)

    def may_follow(self, rows: Rows, vocabulary: int) -> Tensor:
        tokens, held = self.allowed.listed(self._nodes(rows), self.eos_token_id)
        row, place = np.nonzero(held)
        found = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
        found[torch.from_numpy(row), torch.from_numpy(tokens[row, place])] = True
        return found

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """Process (R, V) -> (R, V)."""
        allowed = on_device(scores.device, self.may_follow(rows, scores.shape[1]))
        mask = torch.zeros_like(scores).masked_fill_(~allowed, -math.inf)
        return only_allowed(rows, scores, mask, self.num_beams)

    def _nodes(self, rows: Rows) -> np.ndarray:
        """Return (R,) where each row stands in the trie."""
        walks = [self._walk(rows, r) for r in range(len(rows))]
        wanted = [int(n) - walk.start for n, walk in zip(rows.lengths, walks, strict=True)]
        data = rows.table.data
        while late := [r for r, walk in enumerate(walks) if len(walk.nodes) <= wanted[r]]:
            # Rows of one sequence, as drafts make them, share its walk.
            late = list({id(walks[r]): r for r in late}.values())
            before = np.array([walks[r].nodes[-1] for r in late])
            place = [walks[r].start + len(walks[r].nodes) - 1 for r in late]
            tokens = data[[rows.sequences[r].line for r in late], place]
            for r, node in zip(late, self.allowed.step(before, tokens).tolist(), strict=True):
                walks[r].nodes.append(node)
        return np.array([walk.nodes[n] for walk, n in zip(walks, wanted, strict=True)])

    def _walk(self, rows: Rows, r: int) -> TrieWalk:
        """Return what is remembered of the sequence of row r, or of ids that are given by hand."""
        sequence, key = rows.sequences[r], f"walk {self.digest}"
        start = sequence.request.prompt_visible
        if not remembers(rows):
            return TrieWalk(0, [0])
        walk: TrieWalk = sequence.memo.setdefault(key, TrieWalk(start, [0]))
        return walk


def _as_ids(sequences: list[Any], tokenizer: Any) -> list[Any]:
    """Return every sequence as ids."""
    if not sequences:
        raise RequestError(
            "allowed_sequences is empty", wanted="at least one sequence", got="none",
            do="Leave it out to allow everything",
        )  # fmt: skip
    texts = [one for one in sequences if isinstance(one, str)]
    if not texts:
        return [plain(one) for one in sequences]
    if tokenizer is None or len(texts) < len(sequences):
        raise RequestError(
            "allowed_sequences holds texts, which need a tokenizer"
            if tokenizer is None
            else "allowed_sequences mixes texts and ids",
            wanted="lists of ids, or texts and a tokenizer",
            got=shown(texts[0]),
            do="Pass tokenizer=tokenizer" if tokenizer is None else "Pass one kind alone",
        )
    if callable(tokenizer):
        return list(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [tokenizer.encode(text) for text in texts]


def _flat(sequences: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids one after another, and how many each sequence has."""
    wrong = next((one for one in sequences if not isinstance(one, list | tuple) or not one), None)
    if wrong is None:
        kinds = set(map(type, chain.from_iterable(sequences)))
        ids = [one for kind in kinds if not issubclass(kind, int | np.integer) or kind is bool
               for one in [kind.__name__]]  # fmt: skip
        wrong = ids[0] if ids else None
    if wrong is None:
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        flat = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
        if flat.min() >= 0:
            return flat, lengths
        wrong = int(flat.min())
    raise RequestError(
        "allowed_sequences holds something that is no sequence of ids",
        wanted="lists of at least one id each, or texts",
        got=shown(wrong),
        do="Pass lists of ids, as tokenizer(text, add_special_tokens=False).input_ids gives them",
    )
