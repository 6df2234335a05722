"""The two ends of a generation, prompts and sequences that ended, and events on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from everystep.types.stored import stored
from everystep.types.table import read_only
from everystep.types.work import Past

FinishKind = Literal["stop", "length", "time", "criteria", "cancelled", "error"]


@stored("reason")
@dataclass(frozen=True, slots=True)
class FinishReason:
    """The reason why a sequence ended; `matched` is the token id, string or exception behind it."""

    kind: FinishKind
    matched: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Injected:
    """Embeddings (n, E) that are read at the positions (n,), which rise, in place of their ids.

    `deepstack`: (n, layers, E) what is added to the hidden states there after each of the first
    layers, or None.
    """

    positions: np.ndarray
    embeds: Tensor
    deepstack: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", read_only(self.positions))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The content that the model reads before the first choice.

    `ids`: (T,) int64 or None. `embeds`: (length, E) or None; where both are given the model reads
    the embeddings and everything else sees the ids, of which there may be more or fewer.
    `injected`: embeddings of some positions of a prompt given as ids. `positions`: (n,) or
    (axes, n) position ids of the prompt and, where n is above `length`, of the first generated
    tokens; None for 0, 1, ... `inputs`: what the model declares, by name; see `InputSpec`.
    `whole`: what the forward that feeds the prompt, and no other, is given by name, such as images;
    such a prompt is never fed in pieces. `mask`:
    (length, length) or (heads, length, length) bool: position i sees those j <= i where
    mask[..., i, j], itself always; a generated position sees what the prompt's last position sees
    of the prompt, and every generated position up to itself. `encoder`: (S, E) encoder states for
    cross attention, or None. `past`: the first positions as they were cached before, or None;
    `before` of them have no ids or embeddings here. `length`: how many positions the prompt fills.
    `follows`: the position id of the first token beyond `positions`: `beyond`, or without that one
    more than the greatest of them on any axis. `brings`: whether there is more than ids.
    """

    ids: np.ndarray | None = None
    embeds: Tensor | None = None
    positions: Tensor | None = None
    encoder: Tensor | None = None
    past: Past | None = None
    before: int = 0
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    injected: Injected | None = None
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    beyond: int | None = None
    length: int = field(init=False)
    follows: int = field(init=False)
    brings: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.ids is not None:  # hooks see it
            object.__setattr__(self, "ids", read_only(self.ids))
        given = self.ids if self.embeds is None else self.embeds
        length = self.before + (0 if given is None else len(given))
        own = self.positions
        object.__setattr__(self, "length", length)
        last = length - 1 if own is None or not own.numel() else int(own.max())
        object.__setattr__(self, "follows", last + 1 if self.beyond is None else self.beyond)
        given_more = (self.embeds, own, self.mask, self.injected)
        brings = bool(self.inputs or self.whole) or any(one is not None for one in given_more)
        object.__setattr__(self, "brings", brings)

    @property
    def is_deep(self) -> bool:
        """True if what is injected adds to hidden states too."""
        return self.injected is not None and self.injected.deepstack is not None

    @property
    def hidden(self) -> int:
        """The number of positions beyond the ids; below 0 where there are fewer positions."""
        return self.length - (0 if self.ids is None else len(self.ids))

    @property
    def plain(self) -> bool:
        """True if its ids, at positions 0, 1, ..., are all that there is of it."""
        more = self.brings or self.before or self.past is not None or self.encoder is not None
        return self.ids is not None and not more

    @property
    def start(self) -> int:
        """The first position that is to be fed."""
        return 0 if self.past is None else self.past.length


@stored("finished")
@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A hypothesis that ended: its generated ids, score and reason, free of any row.

    `memo`: the values of its sequence. `serial`: the number that its strategy gave it, or -1.
    """

    tokens: np.ndarray
    score: float
    reason: FinishReason
    lineage: int
    index: int
    memo: Mapping[str, Any]
    serial: int = -1


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


def values_of(memo: Mapping[str, Any]) -> dict[str, Any]:
    """Return the immutable part of a memo."""
    return {key: value for key, value in memo.items() if not is_memory(value)}


def is_memory(value: object) -> bool:
    """Return whether a value is a memory of the prefix, which changes as that grows.

    `copy()` gives an equal one that shares no mutable state; `rewind(length)` cuts it back to the
    first `length` visible ids. It can be dropped at any time and is made again from the ids.
    """
    return hasattr(value, "rewind")
