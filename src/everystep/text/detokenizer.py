"""Ids to text while they arrive: never half a character, and in the end exactly `decode`.

The promise is a law: the pieces that `push` and `finish` return, joined, are the text that
`tokenizer.decode` gives for all ids at once. So a piece is returned as soon as no later id can
change it. Byte-level tokenizers hold back at most three bytes. With byte fallback (Llama 2),
`decode` replaces a whole run of byte tokens if any of it is invalid, so a run is held until
it ends.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable, Sequence

from everystep.text.pieces import BYTE_TOKEN
from everystep.text.tokenizer import Tokenizer


class Detokenizer:
    """Follows one sequence of ids and gives out its text in final pieces.

    Cost per id does not depend on how many came before. Ids without a token contribute nothing, as
    in `decode`. `kept`: ids whose text is given out though they are special. UnsupportedError if
    the tokenizer's decoder cannot be followed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids - kept if skip_special_tokens else frozenset()
        self._decoding = tokenizer.decoding
        self._begin()

    def _begin(self) -> None:
        # Bytes of a character, or of a run of byte tokens, that has not ended.
        self._held = b""
        self._started = False
        self._to_strip = self._decoding.strip_start[1]

    def copy(self) -> Detokenizer:
        """Return an independent follower in the same state."""
        return copy.copy(self)

    def push(self, ids: int | Iterable[int]) -> str:
        """Takes further ids in and returns the text that is final now and was not before."""
        text = [self._push(id) for id in ([ids] if isinstance(ids, int) else ids)]
        return "".join(text)

    def finish(self) -> str:
        """Returns what was held back, as `decode` spells it; the next push starts a new text."""
        if self._decoding.joining == "fallback":
            text = self._stripped(self._end_of_run())
        else:
            text = self._held.decode("utf-8", "replace")
        self._begin()
        return text

    def _push(self, id: int) -> str:
        token = self._tokenizer.token_of(id)
        if token is None or id in self._skipped:
            return ""
        if self._decoding.joining == "bytes":
            return self._whole_characters(self._decoding.bytes_of(token))
        if self._decoding.joining == "fallback":
            return self._text_or_byte(token)
        return self._word(token)

    def _whole_characters(self, data: bytes) -> str:
        """Byte level: what is given out ends where a character ends."""
        data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def _text_or_byte(self, token: str) -> str:
        """Byte fallback: tokens are text, but runs of <0xNN> are the bytes of characters."""
        # The order of the decoder's steps: replacements come before a token is read as a byte.
        token = self._decoding.text_of(token)
        if byte := BYTE_TOKEN.fullmatch(token):
            self._held += bytes.fromhex(byte[1])
            return ""
        return self._stripped(self._end_of_run() + token)

    def _end_of_run(self) -> str:
        run, self._held = self._held, b""
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

    def _word(self, token: str) -> str:
        """Words: a mark inside tokens stands for a space, or a space stands between tokens."""
        first, self._started = not self._started, True
        if self._decoding.joining == "words":
            return token if first else " " + token
        dropped = first and self._decoding.drop_first_mark
        return token.replace(self._decoding.mark, "" if dropped else " ")


class Trimmer:
    """The text of one sequence without the string it was stopped at.

    What may become one of the strings is held back till it is known. `before`: the end of the
    prompt's text, in which a string may begin. The pieces that `push` and `finish` return, joined,
    do not depend on how the text was divided.
    """

    def __init__(self, strings: Sequence[str], before: str = "") -> None:
        self._strings = tuple(strings)
        self._before = before
        self._held = ""

    def push(self, text: str) -> str:
        """Takes further text and returns what cannot be part of a string any more."""
        text = self._held + text
        held = max((self._overlap(text, string) for string in self._strings), default=0)
        held = min(held, len(text))
        ready, self._held = text[: len(text) - held], text[len(text) - held :]
        self._before = (self._before + ready)[-max(map(len, self._strings), default=1) :]
        return ready

    def finish(self, text: str, matched: object) -> str:
        """Return the last text, without the string that ended it, if one did, and what follows
        that.

        Where special tokens that are not shown are part of the string, what is shown of it goes.
        """
        text, self._held = self._held + text, ""
        if not isinstance(matched, str):
            return text
        # Its end is new, so it begins at most so far before: the prompt may hold all of another.
        before = self._before[max(len(self._before) - len(matched) + 1, 0) :]
        start = (before + text).find(matched)
        if start < 0:
            start = len(before + text) - self._overlap(text, matched)
        return text[: max(start - len(before), 0)]

    def _overlap(self, text: str, string: str) -> int:
        """Count the characters of the string's beginning that the text ends with, if not all."""
        whole = self._before + text
        lengths = range(min(len(string) - 1, len(whole)), 0, -1)
        return next((n for n in lengths if whole.endswith(string[:n])), 0)
