"""JSON as it comes: where a value ends, and whether it is one, however it is divided."""

from __future__ import annotations

import re
from enum import Enum

MOST_NESTED = 256
_PLAIN = re.compile(r'[^"\\]*')
_CONTROL = re.compile(r"[\x00-\x1f]")
_BLANK = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_LETTER = re.compile(r"[-+.0-9A-Za-z]")
_WORDS = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_LONGEST_WORD = 400


class _At(Enum):
    """The place that a scanner has reached."""

    VALUE = 0
    FIRST_ITEM = 1
    FIRST_KEY = 2
    KEY = 3
    COLON = 4
    NEXT = 5
    STRING = 6
    ESCAPE = 7
    WORD = 8
    DONE = 9
    BROKEN = 10


class JsonScanner:
    """Follows one JSON value; `strict` is False once it holds what JSON forbids inside of strings.

    Nesting beyond 256 levels, and words beyond 400 letters, are no JSON here, so that what it keeps
    is bounded.
    """

    __slots__ = ("_at", "_digits", "_in_key", "_open", "_word", "strict")

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._open: list[str] = []
        self._in_key = False
        self._digits = 0  # of \uXXXX that are still to come
        self._word = ""
        self.strict = True

    @property
    def done(self) -> bool:
        """True once the value has ended."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """True once this can no longer become a value."""
        return self._at is _At.BROKEN

    def feed(self, text: str, at: int, end: int | None = None) -> int:
        """Read on in a text from a place, up to `end`, and return the place behind what belongs to
        the value."""
        end = len(text) if end is None else min(end, len(text))
        while at < end and not self.done and not self.broken:
            if self._at is _At.STRING:
                at = self._string(text, at, end)
            elif self._at is _At.ESCAPE:
                self._escape(text[at])
                at += 1
            elif self._at is _At.WORD:
                at = self._rest_of_word(text, at, end)
            else:
                blank = _BLANK.match(text, at, end)
                at = self._structure(text, at if blank is None else blank.end(), end)
        return at

    def end(self) -> None:
        """Let the value end with the text, as a number may."""
        if self._at is _At.WORD:
            self._end_word()

    def _string(self, text: str, at: int, end: int) -> int:
        plain = _PLAIN.match(text, at, end)
        after = at if plain is None else plain.end()
        if self.strict and _CONTROL.search(text, at, after):
            self.strict = False
        if after == end:
            return after
        if text[after] == "\\":
            self._at = _At.ESCAPE
        elif self._in_key:
            self._at, self._in_key = _At.COLON, False
        else:
            self._value_over()
        return after + 1

    def _escape(self, letter: str) -> None:
        if self._digits:
            self.strict = self.strict and letter in _HEXADECIMAL
            self._digits -= 1
        elif letter == "u":
            self._digits = 4
        else:
            self.strict = self.strict and letter in '"\\/bfnrt'
        if not self._digits:
            self._at = _At.STRING

    def _rest_of_word(self, text: str, at: int, end: int) -> int:
        word = _WORD.match(text, at, end)
        after = at if word is None else word.end()
        self._word += text[at:after]
        if len(self._word) > _LONGEST_WORD:
            self._at = _At.BROKEN
        elif after < end:
            self._end_word()
        return after

    def _end_word(self) -> None:
        known = _WORDS.fullmatch(self._word) is not None
        self._word = ""
        if known:
            self._value_over()
        else:
            self._at = _At.BROKEN

    def _structure(self, text: str, at: int, end: int) -> int:
        """Read one letter that is part of no string and no word."""
        if at == end:
            return at
        letter, place = text[at], self._at
        if letter == '"' and place in (_At.VALUE, _At.FIRST_ITEM, _At.FIRST_KEY, _At.KEY):
            self._in_key = place in (_At.FIRST_KEY, _At.KEY)
            self._at = _At.STRING
        elif letter in "{[" and place in (_At.VALUE, _At.FIRST_ITEM):
            self._open.append(letter)
            self._at = _At.FIRST_KEY if letter == "{" else _At.FIRST_ITEM
            if len(self._open) > MOST_NESTED:
                self._at = _At.BROKEN
        elif letter in "}]" and self._closes(letter, place):
            self._open.pop()
            self._value_over()
        elif letter == ":" and place is _At.COLON:
            self._at = _At.VALUE
        elif letter == "," and place is _At.NEXT:
            self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
        elif _LETTER.match(letter) and place in (_At.VALUE, _At.FIRST_ITEM):
            self._at = _At.WORD
            return at
        else:
            self._at = _At.BROKEN
            return at
        return at + 1

    def _closes(self, letter: str, place: _At) -> bool:
        opened, first = ("{", _At.FIRST_KEY) if letter == "}" else ("[", _At.FIRST_ITEM)
        return bool(self._open) and self._open[-1] == opened and place in (_At.NEXT, first)

    def _value_over(self) -> None:
        self._at = _At.NEXT if self._open else _At.DONE
