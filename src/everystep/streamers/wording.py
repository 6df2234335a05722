"""Puts text into events: one follower per sequence, as text becomes final."""

from __future__ import annotations

from dataclasses import replace

from everystep.text import Detokenizer, Tokenizer
from everystep.types import Event


class Wording:
    """Follows every sequence of a stream and says what text each event adds.

    Without a tokenizer events keep no text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._followers: dict[tuple[str, int], Detokenizer] = {}

    def __call__(self, event: Event) -> Event:
        """The event with the text that is final now and was not before."""
        if self._tokenizer is None:
            return event
        follower = self._follower(self._tokenizer, event.request_id, event.index)
        piece = follower.push(event.token) if event.token >= 0 else ""
        if event.finish is not None:
            piece += follower.finish()
        return replace(event, text=piece)

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
