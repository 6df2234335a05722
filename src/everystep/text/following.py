"""Text of ids as they arrive, by tokenizers of ours and of other libraries."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol, Self

import tokenizers

from everystep.errors import UnsupportedError
from everystep.text.detokenizer import Detokenizer
from everystep.text.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"


class Follower(Protocol):
    """Takes ids in and gives text out, which joined is what `decode` gives for all of them."""

    def push(self, ids: int | Iterable[int]) -> str:
        """Return the text that is final now and was not before."""
        ...

    def finish(self) -> str:
        """Return the text that was held back."""
        ...

    def copy(self) -> Self:
        """Return an independent follower in the same state."""
        ...


class Redecoder:
    """Follows ids by a tokenizer of which `decode` is all that is known.

    Every id has the whole text decoded again, so that a text costs the square of its length. A last
    character that may be half a one is held back. Where `decode` changes text that was given out
    already, which nothing can take back, what comes is the rest from that length on.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._ids: tuple[int, ...] = ()
        self._given = 0

    def copy(self) -> Redecoder:
        """Return an independent follower in the same state."""
        return copy.copy(self)

    def push(self, ids: int | Iterable[int]) -> str:
        """Takes further ids in and returns the text that is final now and was not before."""
        self._ids += (ids,) if isinstance(ids, int) else tuple(ids)
        text = self._text()
        return "" if text.endswith(_UNKNOWN) else self._rest(text)

    def finish(self) -> str:
        """Returns what was held back; the next push starts a new text."""
        rest = self._rest(self._text())
        self._ids, self._given = (), 0
        return rest

    def _text(self) -> str:
        return str(self._tokenizer.decode(list(self._ids), skip_special_tokens=self._skips))

    def _rest(self, text: str) -> str:
        rest = text[self._given :]
        self._given = max(self._given, len(text))
        return rest


def follow(
    tokenizer: Any, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
) -> Follower:
    """Return a follower of one sequence of ids, which keeps the text of some special ones.

    A fast tokenizer of another library is known by its `backend_tokenizer`, any other by its
    `decode`. UnsupportedError for one of ours whose decoder cannot be followed.
    """
    if isinstance(tokenizer, Tokenizer):
        return Detokenizer(tokenizer, skip_special_tokens, kept)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    if isinstance(backend, tokenizers.Tokenizer) and not cleans:
        try:
            return Detokenizer(Tokenizer(backend), skip_special_tokens, kept)
        except UnsupportedError:
            pass
    if kept:
        raise UnsupportedError(
            "this tokenizer cannot show the marks of calls and thoughts as they come",
            wanted="the tokenizer that es.load returned, or a fast one of another library",
            got=type(tokenizer).__name__,
        )
    return Redecoder(tokenizer, skip_special_tokens)
