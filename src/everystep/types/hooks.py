"""What a hook sees of a sequence at its three moments, and what it may answer.

A hook is asked about a hypothesis: a prompt and the tokens after it. What it answers has to follow
from what it sees here, because the same hypothesis may be asked about again: after a preemption,
without a cache, in a search, or where a draft is verified.

At each moment `request` is what the hook was given to, see `HookedRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError
from everystep.types.ends import Prompt
from everystep.types.stored import Chain, stored

Embed = Callable[[Tensor], Tensor]
"""Ids (n,) -> the embeddings (n, E) that the model reads in their place."""


class _Unchanged:
    """Says that a memory stays as it is."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED = _Unchanged()


@dataclass(frozen=True, slots=True, eq=False)
class Next:
    """The wishes of a hook after a token.

    `memory`: the hook's memory from here on, an immutable value; it can be saved where it is made
    of numbers, text, tuples and arrays. `force`: the ids of the next tokens, instead of those that
    were to be forced so far; None leaves them. `stop`: whether the sequence ends with this token;
    anything but True and False is what its `FinishReason` says that it matched.
    """

    memory: Any = UNCHANGED
    force: Sequence[int] | None = None
    stop: Any = False


@stored("hooked")
class Hooked(NamedTuple):
    """The knowledge that hooks have of a sequence.

    `marks`: (position, memories) pairs: the memories, one per hook, that hold from this position
    on. `length`: how many positions they speak of, those of the prompt and of chosen tokens.
    `forced`: the ids of the next tokens. `stop`: what ends the sequence with its last token, or
    None.
    """

    marks: Annotated[Chain, tuple[int, tuple[Any, ...]]]
    length: int
    forced: tuple[int, ...] = ()
    stop: Any = None

    @property
    def memories(self) -> tuple[Any, ...]:
        """The memories after the last token."""
        memories: tuple[Any, ...] = self.marks.last[1]
        return memories

    def at(self, position: int) -> tuple[Any, ...]:
        """Return the memories that held when the token of this position had been chosen."""
        chain: Chain = self.marks
        while chain.earlier is not None and chain.last[0] > position:
            chain = chain.earlier
        memories: tuple[Any, ...] = chain.last[1]
        return memories


class HookedRequest(Protocol):
    """The facts that a hook knows of its request."""

    @property
    def request_id(self) -> str:
        """Its name: in `generate` the number of the row or prompt."""

    @property
    def prompt(self) -> Prompt:
        """Ids or embeddings, and what came with them."""

    @property
    def prompt_visible(self) -> int:
        """The number of ids, pad prefix included, before the first generated one."""

    @property
    def max_length(self) -> int:
        """The number of positions that the prompt and its continuation can have."""


@dataclass(slots=True, eq=False)
class PromptMoment:
    """A prompt before any of it is fed."""

    request: HookedRequest
    embed: Embed


@dataclass(slots=True, eq=False)
class BeforeStep:
    """Positions that a sequence is about to feed: those of its prompt, or that of one chosen token.

    They are `count` positions from `start` on. `memory`: the hook's own, as it was when the token
    of the last of them had been chosen. `given`: what earlier hooks of the request give for them.
    The prompt's positions are asked about together, however they are fed; each later one by itself.
    """

    request: HookedRequest
    start: int
    count: int
    memory: Any
    given: Mapping[str, Tensor]
    embed: Embed
    line: np.ndarray

    @property
    def positions(self) -> range:
        """The positions that are fed."""
        return range(self.start, self.start + self.count)

    @property
    def generated(self) -> np.ndarray:
        """(n,) the tokens chosen so far, the fed one last; none where the prompt is fed."""
        first = self.request.prompt_visible
        count = self.start + self.count - self.request.prompt.length
        return self.line[first : first + count].copy()

    @property
    def ids(self) -> np.ndarray | None:
        """(count,) ids that are fed; None for a prompt given as embeddings only."""
        prompt = self.request.prompt
        if self.start >= prompt.length:
            return self.generated[-1:]
        if prompt.ids is None:
            return None
        found: np.ndarray = prompt.ids[self.start - prompt.before :].copy()
        return found

    @property
    def embeds(self) -> Tensor:
        """(count, E) what the model would read: from the ids, the prompt, or an earlier hook; a
        copy, which may be changed."""
        prompt = self.request.prompt
        if "embeds" in self.given:
            return self.given["embeds"].clone()
        if self.start < prompt.length and prompt.embeds is not None:
            return prompt.embeds[self.start - prompt.before :].clone()
        ids, inside = torch.tensor(self.ids), prompt.injected
        if inside is None or self.start >= prompt.length:
            return self.embed(ids)
        here = (inside.positions >= self.start) & (inside.positions < self.start + self.count)
        places = torch.from_numpy(inside.positions[here] - self.start)
        # The id at such a place may be beyond the vocabulary.
        found = self.embed(ids.index_fill(0, places, 0)).clone()
        found[places.to(found.device)] = inside.embeds[torch.from_numpy(here)].to(found)
        return found


@dataclass(slots=True, eq=False)
class AfterStep:
    """A token that a sequence goes on with, or may go on with, as its strategy sees it.

    `position`: where it stands. `memory`: the hook's own, before it. `reading`: what a hook may
    read of the row that the token was chosen from, by name.
    """

    request: HookedRequest
    token: int
    position: int
    memory: Any
    reads: Sequence[str]
    reading: Callable[[str], Tensor]
    line: np.ndarray

    @property
    def generated(self) -> np.ndarray:
        """(n,) the tokens chosen so far, this one last."""
        first = self.request.prompt_visible
        count = self.position - self.request.prompt.length
        return np.append(self.line[first : first + count], self.token)

    @property
    def scores(self) -> Tensor:
        """(V,) what the token was chosen by, after processors; a copy."""
        return self._read("scores")

    @property
    def logits(self) -> Tensor:
        """(V,) what the model gave, before processors; a copy."""
        return self._read("logits")

    @property
    def hidden(self) -> Tensor:
        """(E,) the last hidden state that the token was chosen from, normalised; a copy."""
        return self._read("hidden")

    def _read(self, name: str) -> Tensor:
        if name not in self.reads:
            raise RequestError(
                f"a hook looks at {name} and does not say so",
                wanted=f"reads = ({name!r},) in its class",
                got=f"reads = {tuple(self.reads)!r}",
                do="Name in reads what after_step looks at",
            )
        return self.reading(name).clone()


class Hook(Protocol):
    """An object that looks at every step of a request and adds to it, under any strategy.

    Derive from it and override what is needed. All that a hook knows of a sequence is its memory,
    an immutable value; each method has to follow from what it is given, for it may be asked again.
    What it raises ends its request alone.

    `gives`: the names that `before_step` may give: "embeds", or inputs that the model declares.
    `reads`: what `after_step` looks at, of "scores", "logits" and "hidden".
    """

    gives: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def on_prompt(self, moment: PromptMoment) -> Any:
        """Return the memory that a sequence begins with."""
        return None

    def before_step(self, step: BeforeStep) -> Mapping[str, Tensor] | None:
        """Return what the model reads at the positions of the step beside ids, by name, or instead.

        "embeds" and inputs per token: (count, ...), an entry per position; other inputs: one entry
        (...), for all of them. It takes the place of what the prompt gives.
        """
        return None

    def after_step(self, step: AfterStep) -> Next | None:
        """Return what follows from a token; None for nothing.

        It is asked about every token that the strategy may go on with, in a search also about some
        that are not taken.
        """
        return None
