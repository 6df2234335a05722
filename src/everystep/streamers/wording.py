"""Puts text into events: one follower per sequence, as text becomes final."""

from __future__ import annotations

import copy
from dataclasses import replace

from everystep.text import Detokenizer, Tokenizer, Trimmer
from everystep.types import Event


class Wording:
    """Follows every sequence of a stream and says what text each event adds.

    Without a tokenizer events keep no text. A request that `trim` names loses its stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._followers: dict[tuple[str, int], Detokenizer] = {}
        self._trims: dict[str, tuple[tuple[str, ...], str]] = {}
        self._trimmers: dict[tuple[str, int], Trimmer] = {}

    def copy(self) -> Wording:
        """An independent follower in the same state."""
        other = Wording(self._tokenizer)
        other._trims = self._trims
        other._followers = {key: one.copy() for key, one in self._followers.items()}
        other._trimmers = {key: copy.copy(one) for key, one in self._trimmers.items()}
        return other

    def trim(self, request_id: str, strings: tuple[str, ...], before: str) -> None:
        """The text of a request will lack the string that ends it; `before`: the prompt's end."""
        self._trims[request_id] = strings, before

    def __call__(self, event: Event) -> Event:
        """The event with the text that is final now and was not before."""
        if self._tokenizer is None:
            return event
        key = (event.request_id, event.index)
        follower = self._follower(self._tokenizer, *key)
        piece = follower.push(event.token) if event.token >= 0 else ""
        if event.finish is not None:
            piece += follower.finish()
        if event.request_id in self._trims:
            piece = self._trimmed(event, piece)
        if event.finish is not None:
            self._followers.pop(key, None)
            self._trimmers.pop(key, None)
        return replace(event, text=piece)

    def _trimmed(self, event: Event, piece: str) -> str:
        key = (event.request_id, event.index)
        if key not in self._trimmers:
            self._trimmers[key] = Trimmer(*self._trims[event.request_id])
        trimmer = self._trimmers[key]
        if event.finish is None:
            return trimmer.push(piece)
        return trimmer.finish(piece, event.finish.matched)

    def ahead(self, request_id: str, index: int, tokens: list[int]) -> str | None:
        """The text that further tokens would add, if they were the last."""
        if self._tokenizer is None:
            return None
        follower = self._follower(self._tokenizer, request_id, index).copy()
        return follower.push(tokens) + follower.finish()

    def _follower(self, tokenizer: Tokenizer, request_id: str, index: int) -> Detokenizer:
        key = (request_id, index)
        if key not in self._followers:
            self._followers[key] = Detokenizer(tokenizer)
        return self._followers[key]
