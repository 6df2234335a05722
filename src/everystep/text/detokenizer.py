"""Ids to text while they arrive: never half a character, and in the end exactly `decode`.

The promise is a law: the pieces that `push` and `finish` return, joined, are the text that
`tokenizer.decode` gives for all ids at once. So a piece is returned as soon as no later id can
change it. Byte-level tokenizers hold back at most three bytes. With byte fallback (Llama 2),
`decode` replaces a whole run of byte tokens if any of it is invalid, so a run is held until
it ends. This file knows nothing of generation; one object follows one sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from everystep.text.pieces import BYTE_TOKEN, Decoding
from everystep.text.tokenizer import Tokenizer


class Joiner(Protocol):
    """Turns tokens, one at a time, into text that is final."""

    def push(self, token: str) -> str: ...
    def finish(self) -> str: ...
    def copy(self) -> Joiner: ...


class Detokenizer:
    """Follows one sequence of ids and gives out its text in final pieces.

    Cost per id does not depend on how many came before. `copy()` makes an independent follower
    for a fork. Ids without a token contribute nothing, as in `decode`. UnsupportedError if the
    tokenizer's decoder cannot be followed.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids if skip_special_tokens else frozenset()
        self._joiner = _joiner(tokenizer.decoding)

    def push(self, ids: int | Iterable[int]) -> str:
        """Takes further ids in and returns the text that is final now and was not before."""
        text = [self._push(id) for id in ([ids] if isinstance(ids, int) else ids)]
        return "".join(text)

    def finish(self) -> str:
        """Returns what was held back, as `decode` spells it; the next push starts a new text."""
        text = self._joiner.finish()
        self._joiner = _joiner(self._tokenizer.decoding)
        return text

    def copy(self) -> Detokenizer:
        """An independent follower in the same state."""
        other = Detokenizer.__new__(Detokenizer)
        other._tokenizer = self._tokenizer
        other._skipped = self._skipped
        other._joiner = self._joiner.copy()
        return other

    def _push(self, id: int) -> str:
        token = self._tokenizer.token_of(id)
        if token is None or id in self._skipped:
            return ""
        return self._joiner.push(token)


def _joiner(decoding: Decoding) -> Joiner:
    if decoding.joining == "bytes":
        return ByteJoiner(decoding)
    if decoding.joining == "fallback":
        return FallbackJoiner(decoding)
    return WordJoiner(decoding)


class ByteJoiner:
    """Byte level: every token is bytes; what is given out ends where a character ends."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        return self._utf8.decode(self._decoding.bytes_of(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def copy(self) -> ByteJoiner:
        other = ByteJoiner(self._decoding)
        other._utf8.setstate(self._utf8.getstate())
        return other


class FallbackJoiner:
    """Byte fallback: tokens are text, but runs of <0xNN> are the bytes of unknown characters."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._run = bytearray()
        self._to_strip = decoding.strip_start[1]

    def push(self, token: str) -> str:
        # The order of the decoder's steps: replacements come before a token is read as a byte.
        token = self._decoding.text_of(token)
        if byte := BYTE_TOKEN.fullmatch(token):
            self._run.append(int(byte[1], 16))
            return ""
        return self._stripped(self._end_of_run() + token)

    def finish(self) -> str:
        return self._stripped(self._end_of_run())

    def copy(self) -> FallbackJoiner:
        other = FallbackJoiner(self._decoding)
        other._run = self._run.copy()
        other._to_strip = self._to_strip
        return other

    def _end_of_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        content = self._decoding.strip_start[0]
        while self._to_strip and text.startswith(content):
            text = text[len(content) :]
            self._to_strip -= 1
        if text:
            self._to_strip = 0
        return text


class WordJoiner:
    """Words: a mark inside tokens stands for a space, or a space stands between tokens."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._started = False

    def push(self, token: str) -> str:
        first, self._started = not self._started, True
        if self._decoding.joining == "words":
            return token if first else " " + token
        dropped = first and self._decoding.drop_first_mark
        return token.replace(self._decoding.mark, "" if dropped else " ")

    def finish(self) -> str:
        return ""

    def copy(self) -> WordJoiner:
        other = WordJoiner(self._decoding)
        other._started = self._started
        return other
