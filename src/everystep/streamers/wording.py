"""Puts text into events: one follower per sequence, as text becomes final."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from everystep.text import Follower, Trimmer, follow
from everystep.types import Event, Group, TokenTable


class Wording:
    """Follows every sequence of a stream and says what text each event adds.

    `tokenizer`: ours or that of another library; without one events keep no text. A request that
    `trim` names loses its stop string.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._trims: dict[str, tuple[tuple[str, ...], str]] = {}
        self._kept: dict[str, frozenset[int]] = {}
        self._followers: dict[tuple[str, int], tuple[Follower, Trimmer | None]] = {}

    def copy(self) -> Wording:
        """Return an independent follower in the same state."""
        other = Wording(self._tokenizer)
        other._trims, other._kept = self._trims, self._kept
        for key, (follower, trimmer) in self._followers.items():
            other._followers[key] = follower.copy(), copy.copy(trimmer)
        return other

    def trim(self, request_id: str, strings: tuple[str, ...], before: str) -> None:
        """Keep back the string that ends a request from its text; `before`: the prompt's end."""
        self._trims[request_id] = strings, before

    def keep(self, request_id: str, kept: frozenset[int]) -> None:
        """Show these special ids in the text of a request."""
        if kept:
            self._kept[request_id] = kept

    def __call__(self, event: Event) -> Event:
        """Return the event with the text that is final now and was not before."""
        if self._tokenizer is None:
            return event
        follower, trimmer = self._following(self._tokenizer, event.request_id, event.index)
        piece = follower.push(event.token) if event.token >= 0 else ""
        if event.finish is None:
            return replace(event, text=piece if trimmer is None else trimmer.push(piece))
        piece += follower.finish()
        del self._followers[event.request_id, event.index]
        if trimmer is not None:
            piece = trimmer.finish(piece, event.finish.matched)
        return replace(event, text=piece)

    def follow(self, request_id: str, index: int, tokens: Sequence[int]) -> None:
        """Note that these tokens stand there already: what comes next is spelled after them."""
        if self._tokenizer is not None and tokens:
            follower, trimmer = self._following(self._tokenizer, request_id, index)
            piece = follower.push(tokens)
            if trimmer is not None:
                trimmer.push(piece)

    def ahead(self, request_id: str, index: int, tokens: list[int]) -> str | None:
        """Return the text that further tokens would add, if they were the last."""
        if self._tokenizer is None:
            return None
        follower = self._following(self._tokenizer, request_id, index)[0].copy()
        return follower.push(tokens) + follower.finish()

    def _following(
        self, tokenizer: Any, request_id: str, index: int
    ) -> tuple[Follower, Trimmer | None]:
        key = (request_id, index)
        if key not in self._followers:
            trim = self._trims.get(request_id)
            follower = follow(tokenizer, kept=self._kept.get(request_id, frozenset()))
            self._followers[key] = follower, Trimmer(*trim) if trim else None
        return self._followers[key]


@dataclass(frozen=True, slots=True)
class LiveBeam:
    """A beam at work: its ids and text after what is settled, and the sum of its scores."""

    tokens: tuple[int, ...]
    text: str | None
    score: float


@dataclass(frozen=True, slots=True)
class BeamEvent:
    """The live beams of one request after a step, best first; the next step may change them.

    `position` counts the generated tokens that are settled, and so in every beam.
    """

    request_id: str
    position: int
    beams: tuple[LiveBeam, ...]


def beam_event(group: Group, table: TokenTable, wording: Wording) -> BeamEvent:
    """Return what the live beams of a group hold now."""
    request = group.request
    first = request.prompt_visible + group.reported
    live = []
    for sequence in sorted(group.live, key=lambda s: -s.score):
        tokens = table.data[sequence.line, first : sequence.visible].tolist()
        text = wording.ahead(request.request_id, 0, tokens)
        live.append(LiveBeam(tuple(tokens), text, sequence.score))
    return BeamEvent(request.request_id, group.reported, tuple(live))
