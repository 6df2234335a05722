"""The nouns that every layer shares: requests, sequences, work, children, events.

Frozen values say what was asked and what happened; `Sequence`, `Group` and `TokenTable` are the
only mutable state of a generation, and the engine is their only writer. This file knows no model,
no cache layout and no strategy.

A position is an index into what the model reads. Ids are what processors, stops and outputs see.
They differ by a constant per request, the shift:

    visible ids   [ pad prefix | prompt ids | generated ids ]      index i
    positions                  [ prompt     | generated     ]      position p,  i = p + shift
                  shift = pad_prefix                               (prompt given as ids)
                  shift = pad_prefix - prompt length               (prompt given as embeddings only)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

FinishKind = Literal["stop", "length", "time", "criteria", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a sequence ended; `matched` is the token id, string or exception behind it."""

    kind: FinishKind
    matched: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model reads before the first choice.

    `ids`: (T,) int64 or None. `embeds`: (T, E) or None; where both are given the model reads the
    embeddings and everybody else sees the ids. `positions`: (..., T) position ids or None for
    0..T-1. `encoder`: (S, E) encoder states for cross attention, or None.
    """

    ids: np.ndarray | None = None
    embeds: Tensor | None = None
    positions: Tensor | None = None
    encoder: Tensor | None = None

    @property
    def length(self) -> int:
        """How many positions the prompt fills."""
        if self.embeds is not None:
            return int(self.embeds.shape[0])
        return 0 if self.ids is None else len(self.ids)


@dataclass(frozen=True, slots=True)
class Wants:
    """What is kept beside the choices; of logprobs the k best and the token itself, or None."""

    layers: bool = False
    attentions: bool = False
    columns: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and every resolved choice; nothing in it changes while it runs.

    `strategy`, `processors`, `stops`, `draws` and `readout` follow the protocols of their packages.
    `companions` are further prompts whose rows mirror each sequence and appear in no output.
    `linger` keeps finished sequences in the batch, fed with `pad_token`, until all are done. The
    pad prefix is made of `prefix_token`, or of `pad_token` where that is None.
    """

    request_id: str
    prompt: Prompt
    strategy: Any
    draws: Any
    processors: tuple[Any, ...] = ()
    stops: tuple[Any, ...] = ()
    companions: tuple[Prompt, ...] = ()
    readout: Any = None
    wants: Wants = Wants()
    max_length: int = 2**31
    pad_prefix: int = 0
    pad_token: int = 0
    prefix_token: int | None = None
    linger: bool = False

    @property
    def shift(self) -> int:
        """Visible index minus position."""
        hidden = self.prompt.length if self.prompt.ids is None else 0
        return self.pad_prefix - hidden

    @property
    def prompt_visible(self) -> int:
        """How many ids, pad prefix included, stand before the first generated one."""
        return self.prompt.length + self.shift


@dataclass(slots=True, eq=False)
class Companion:
    """The state of one companion row: its prompt, how far it is cached, where it lies."""

    prompt: Prompt
    cached: int = 0
    row: int | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One hypothesis: its line in the token table, and what of it is cached in which row.

    `length` counts positions, with or without ids; `0 <= cached < length` holds between steps.
    The last `provisional` tokens may still be taken back. `memo` is what processors, strategies
    and hooks remember; values have `copy()` and `rewind(n)` or are immutable.
    """

    request: Request
    line: int
    length: int
    cached: int = 0
    row: int | None = None
    score: float = 0.0
    lineage: int = 0
    index: int = 0
    provisional: int = 0
    finish: FinishReason | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    companions: tuple[Companion, ...] = ()

    @property
    def units(self) -> tuple[Sequence | Companion, ...]:
        """Everything of it that has a cache row: itself and its companions."""
        return (self, *self.companions)

    @property
    def visible(self) -> int:
        """How many ids, pad prefix included, others may see."""
        return self.length + self.request.shift

    @property
    def generated(self) -> int:
        """How many tokens were chosen so far."""
        return self.length - self.request.prompt.length

    @property
    def pending(self) -> int:
        """How many positions its next feed must hold, companions included."""
        behind = (companion_length(self, one) - one.cached for one in self.companions)
        return self.length - self.cached + sum(behind)


def companion_length(sequence: Sequence, companion: Companion) -> int:
    """How many positions a companion holds: its own prompt and the sequence's tokens."""
    return companion.prompt.length + sequence.generated


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A hypothesis that ended: its generated ids, score and reason, free of any row."""

    tokens: np.ndarray
    score: float
    reason: FinishReason
    lineage: int
    index: int
    memo: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Group:
    """A request with its live and its done sequences.

    `opened` says that the first choice was made; `settled` that the strategy has declared the
    result final although live sequences linger; `rank` is the order of arrival and, in lockstep,
    the place in the caller's batch; `told` counts tokens told early.
    """

    request: Request
    rank: int
    live: list[Sequence] = field(default_factory=list)
    done: list[Finished] = field(default_factory=list)
    memo: dict[str, Any] = field(default_factory=dict)
    opened: bool = False
    settled: bool = False
    told: int = 0
    error: BaseException | None = None

    @property
    def pending(self) -> int:
        """How many positions must be fed before the group may choose."""
        return sum(sequence.pending for sequence in self.live)

    @property
    def rows(self) -> int:
        """How many cache rows the group needs to make its next choice and go on."""
        per_sequence = 1 + len(self.request.companions)
        width = self.request.strategy.width
        return per_sequence * max(width, len(self.live))

    @property
    def finished(self) -> bool:
        """Whether no sequence has a choice left to make."""
        return self.settled or all(sequence.finish is not None for sequence in self.live)


class Verb(NamedTuple):
    """One change of cache rows: allocate, fork (row from value), truncate (to value) or free."""

    kind: Literal["allocate", "fork", "truncate", "free"]
    row: int
    value: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """All that an executor gets for one step.

    `verbs` happened, in this order, since the last step. Then F feeds, as parallel arrays:
    feed f runs `counts[f]` inputs in row `rows[f]` from position `starts[f]` on and wants the
    logits of its last `logits[f]` positions. `tokens`: (N,) ids of all feeds one after another,
    -1 where `embeds` ((offset into N, (n, E) tensor), ...) gives the input. `positions`: (..., N)
    position ids, or None where they equal the row positions. `encoders` and `columns` hold for
    rows allocated by this work: encoder states per row; rows that keep hidden-state columns.
    """

    verbs: tuple[Verb, ...]
    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    embeds: tuple[tuple[int, Tensor], ...] = ()
    positions: Tensor | None = None
    encoders: Mapping[int, Tensor] = field(default_factory=dict)
    columns: frozenset[int] = frozenset()
    layers: bool = False
    attentions: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a work produced.

    `logits`: (R, V), R = sum of the wanted counts, in feed order, float32 or wider.
    `columns`: row -> (cached positions, E) last hidden states of rows that keep columns.
    `layers`: one (N, E) tensor per layer, embeddings first, or None.
    `attentions`, `cross_attentions`: per feed a tuple of (H, counts, S) tensors, or None.
    """

    logits: Tensor
    columns: Mapping[int, Tensor] = field(default_factory=dict)
    layers: tuple[Tensor, ...] | None = None
    attentions: tuple[tuple[Tensor, ...], ...] | None = None
    cross_attentions: tuple[tuple[Tensor, ...], ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """All that a strategy may say, as C parallel entries over a batch's S sequences.

    `parent`: (C,) index into the batch. `tokens`: (C, n) new ids, of which the first `counts[c]`
    count. `score`: (C,) the child's whole score. `finish`: a reason, or None to live on.
    `provisional`: (C,) how many of its last tokens may be taken back, or None for none.
    `memo`: per child what to put into its memory, or None. `index`: (C,) the children's ranks, or
    None to inherit the parents'. `lingers`: children that end go on where their request lingers.
    `settled`: batch indices of groups whose result is final. A sequence without children is
    dropped; a child may have no tokens and a finish.
    """

    parent: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    score: np.ndarray
    finish: list[FinishReason | None]
    provisional: np.ndarray | None = None
    memo: list[dict[str, Any] | None] | None = None
    index: np.ndarray | None = None
    lingers: bool = False
    settled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One settled token of one sequence; `finish` rides on the last one.

    `token` is -1 for an event that only ends a sequence. `position` counts generated tokens.
    `top_logprobs`: (id, logprob) pairs, best first; it and `logprob` where the request asked.
    """

    request_id: str
    index: int
    token: int
    text: str | None = None
    logprob: float | None = None
    position: int = 0
    finish: FinishReason | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class TokenTable:
    """The visible ids of every sequence, one line each: (lines, capacity) int64. Lines are handed
    out lowest first, so that a lockstep batch is one block of them."""

    def __init__(self, lines: int = 16, capacity: int = 64) -> None:
        self.data = np.zeros((lines, capacity), dtype=np.int64)
        self._free = list(range(lines - 1, -1, -1))

    def open(self, ids: np.ndarray) -> int:
        """A new line that starts with `ids`."""
        line = self._take()
        self.reserve(len(ids))
        self.data[line, : len(ids)] = ids
        return line

    def fork(self, line: int, length: int) -> int:
        """A new line that starts with the first `length` ids of `line`."""
        new = self._take()
        self.data[new, :length] = self.data[line, :length]
        return new

    def close(self, line: int) -> None:
        """The line may be handed out again."""
        self._free.append(line)

    def keep(self, lines: Collection[int]) -> None:
        """Only the given lines are in use."""
        count = self.data.shape[0]
        self._free = [line for line in range(count - 1, -1, -1) if line not in lines]

    def reserve(self, capacity: int) -> None:
        """Every line has room for `capacity` ids."""
        lines, held = self.data.shape
        if capacity > held:
            grown = np.zeros((lines, max(capacity, 2 * held)), dtype=np.int64)
            grown[:, :held] = self.data
            self.data = grown

    @property
    def open_lines(self) -> int:
        """How many lines are in use."""
        return self.data.shape[0] - len(self._free)

    def rectangle(self, lines: np.ndarray, width: int) -> np.ndarray:
        """(R, width) the first ids of the given lines; a view where the lines are one block."""
        first = int(lines[0]) if len(lines) else 0
        if np.array_equal(lines, np.arange(first, first + len(lines))):
            return self.data[first : first + len(lines), :width]
        return self.data[lines, :width]

    def _take(self) -> int:
        if not self._free:
            lines, capacity = self.data.shape
            self.data = np.concatenate([self.data, np.zeros((lines, capacity), np.int64)])
            self._free = list(range(2 * lines - 1, lines - 1, -1))
        return self._free.pop()


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R prefixes, one per row of scores, as processors see them.

    `sequences[r]` owns row r; its first `lengths[r]` visible ids (pad prefix included) are the
    prefix. Drafted ids that a row already follows are part of it.
    """

    table: TokenTable
    sequences: list[Sequence]
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def width(self) -> int:
        """The longest prefix."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def ids(self) -> Tensor:
        """(R, width) int64 on the CPU; a row's ids beyond its length have no meaning."""
        lines = np.fromiter((s.line for s in self.sequences), np.int64, len(self.sequences))
        return torch.from_numpy(self.table.rectangle(lines, self.width))

    def select(self, indices: np.ndarray) -> Rows:
        """The given rows, in the given order."""
        chosen = [self.sequences[i] for i in indices]
        return Rows(self.table, chosen, self.lengths[indices])
