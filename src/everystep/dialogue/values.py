"""Values in other syntax than JSON, read as they come and written as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from everystep.dialogue.json_scanner import JsonScanner
from everystep.dialogue.reader import MOST_HELD, NONE, Place, Reader

Value = Generator[None, None, tuple[int, str]]
"""A step that returns the place behind a value, and the value as JSON."""
TEXT = frozenset({"string"})
_MOST_NESTED = 64
_WORD = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_KEY = re.compile(r"[^\s:{}\[\],<>\"']*")
_NAMES = {"True": "true", "False": "false", "None": "null"}
_SAME = {"true", "false", "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "/": "/"}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_PAIR = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_LETTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.S)


class ValueReader:
    """Reads calls and values in the syntax of Python, or, with a `quote`, in that of Gemma: objects
    without quotes around keys, and texts between two of these marks."""

    def __init__(self, reader: Reader, quote: str = "") -> None:
        self._reader = reader
        self._quote = quote

    def call(self, place: int) -> Generator[None, None, tuple[int, str, str]]:
        """Return the place behind a call, its name, and its arguments as a JSON object."""
        reader = self._reader
        if self._quote:
            place = yield from reader.mark(place, "call:")
        if place == NONE:
            return NONE, "", ""
        start = yield from reader.blanks(place)
        end = yield from reader.name(start)
        if end == NONE:
            return NONE, "", ""
        name = reader.peek(start, end)
        opening, closing = ("{", "}") if self._quote else ("(", ")")
        place = yield from reader.mark(end, opening)
        if place == NONE:
            return NONE, "", ""
        place, text = yield from self._members(place, closing, ":" if self._quote else "=", 0)
        return place, name, text

    def _end_or_next(
        self, place: int, closing: str, *, first: bool
    ) -> Generator[None, None, tuple[int, int]]:
        """Return the place behind the closing mark, or NONE, and where the next member begins, or
        NONE where neither follows; a comma may stand before the closing mark."""
        end = yield from self._reader.mark(place, closing)
        if end == NONE and not first:
            place = yield from self._reader.mark(place, ",")
            if place != NONE:
                end = yield from self._reader.mark(place, closing)
        return end, place

    def _members(self, place: int, closing: str, between: str, depth: int) -> Value:
        """Return the place behind the members of an object, up to its closing mark."""
        reader, found = self._reader, list[str]()
        while True:
            end, place = yield from self._end_or_next(place, closing, first=not found)
            if end != NONE:
                return end, "{" + ", ".join(found) + "}"
            if place == NONE:
                return NONE, ""
            place, key = yield from self._key(place)
            place = NONE if place == NONE else (yield from reader.mark(place, between))
            if place == NONE:
                return NONE, ""
            place, value = yield from self.value(place, depth + 1)
            if place == NONE:
                return NONE, ""
            found.append(f"{key}: {value}")

    def _key(self, place: int) -> Value:
        """Return the place behind a key, and the key as JSON."""
        reader = self._reader
        place = yield from reader.blanks(place)
        if (yield from self._quotes(place)):
            return (yield from self._text(place))
        while True:
            match = _KEY.match(reader.text, reader.at + place)
            end = (match.end() if match else reader.at + place) - reader.at
            if not self._quote and "=" in reader.peek(place, end):
                end = place + reader.peek(place, end).index("=")
            if reader.at + end < len(reader.text):
                found = reader.peek(place, end)
                return (end, json.dumps(found, ensure_ascii=False)) if found else (NONE, "")
            if not (yield from reader.more(end)):
                return NONE, ""

    def _quotes(self, place: int) -> Generator[None, None, bool]:
        """Return True if a text begins here."""
        if self._quote:
            return (yield from self._reader.literal(place, self._quote)) != NONE
        return (yield from self._reader.letter(place)) in "\"'"

    def value(self, place: int, depth: int = 0) -> Value:
        """Return the place behind a value, and the value as JSON."""
        reader = self._reader
        place = yield from reader.blanks(place)
        if depth > _MOST_NESTED:
            return NONE, ""
        if (yield from self._quotes(place)):
            return (yield from self._text(place))
        letter = yield from reader.letter(place)
        if letter == "{":
            return (yield from self._members(place + 1, "}", ":", depth))
        if letter == "[" or (letter == "(" and not self._quote):
            return (yield from self._items(place + 1, "]" if letter == "[" else ")", depth))
        return (yield from self._word(place))

    def _items(self, place: int, closing: str, depth: int) -> Value:
        found = list[str]()
        while True:
            end, place = yield from self._end_or_next(place, closing, first=not found)
            if end != NONE:
                return end, "[" + ", ".join(found) + "]"
            if place == NONE:
                return NONE, ""
            place, value = yield from self.value(place, depth + 1)
            if place == NONE:
                return NONE, ""
            found.append(value)

    def _word(self, place: int) -> Value:
        """Return the place behind a number or the name of a value."""
        reader = self._reader
        while True:
            match = _WORD.match(reader.text, reader.at + place)
            end = (match.end() if match else reader.at + place) - reader.at
            if end - place > 400:
                return NONE, ""
            if reader.at + end < len(reader.text):
                return _word_as_json(end, reader.peek(place, end))
            if not (yield from reader.more(end)):
                return NONE, ""

    def _text(self, place: int) -> Value:
        """Return the place behind a text, and the text as JSON."""
        reader, quote = self._reader, self._quote
        if quote:
            start = place + len(quote)
            end = yield from self._closing(start, quote)
            found = reader.peek(start, max(end, start))
        else:
            quote, start = (yield from reader.letter(place)), place + 1
            end = yield from self._closing_of_string(start, quote)
            found = _PAIR.sub(_joined, reader.peek(start, max(end, start)))
            found = _LETTER.sub(_unescaped, found)
        if end == NONE:
            return NONE, ""
        return end + len(quote), json.dumps(found, ensure_ascii=False)

    def _closing(self, place: int, quote: str) -> Place:
        """Return the place of the next mark."""
        reader, at = self._reader, place
        while True:
            end = reader.text.find(quote, reader.at + at, reader.limit + len(quote))
            if end >= 0:
                return end - reader.at
            at = max(place, min(len(reader.text) - reader.at, MOST_HELD + 1) - len(quote) + 1)
            if not (yield from reader.more(at + len(quote))):
                return NONE

    def _closing_of_string(self, place: int, quote: str) -> Place:
        """Return the place of the next quotation mark that is not escaped."""
        reader, plain = self._reader, _PLAIN[quote]
        while True:
            match = plain.match(reader.text, reader.at + place, reader.limit)
            place = (match.end() if match else reader.at + place) - reader.at
            if place > MOST_HELD:
                return NONE
            left = len(reader.text) - reader.at - place
            if left > 0 and reader.peek(place, place + 1) == quote:
                return place
            if left > 1:
                place += 2
            elif not (yield from reader.more(place)):
                return NONE


def _joined(match: re.Match[str]) -> str:
    """Return the character that JSON writes as two halves."""
    pair = bytes.fromhex(match[1] + match[2])
    return pair.decode("utf-16-be")


def _unescaped(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits:
        code = int(digits, 16)
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]
    return _ESCAPES.get(match[4], match[4] if match[4] in "\\'\"" else match[0])


def _word_as_json(end: int, word: str) -> tuple[int, str]:
    if word in _NAMES or word in _SAME:
        return end, _NAMES.get(word, word)
    if not _NUMBER.fullmatch(word):
        return NONE, ""
    sign, digits = ("-" if word[0] == "-" else ""), word.lstrip("+-")
    whole, dot, rest = digits.partition(".")
    if dot:  # JSON wants digits on both sides of the point
        rest = rest if rest[:1].isdigit() else "0" + rest
    whole = whole if dot or "e" in whole.lower() else str(whole)
    stripped = whole.lstrip("0")
    whole = stripped if stripped[:1].isdigit() else "0" + stripped
    return end, sign + whole + dot + rest


def as_json(text: str, kinds: frozenset[str] | None = None) -> str:
    """Return a value that stood between tags as JSON: of one of the kinds that its schema allows,
    a text where it cannot be another one."""
    plain = json.dumps(text, ensure_ascii=False)
    word = _NAMES.get(text.strip(), text.strip())
    if len(word) > MOST_HELD or not word or kinds == TEXT:
        return plain
    scanner = JsonScanner()
    end = scanner.feed(word, 0)
    scanner.end()
    if not (scanner.done and scanner.strict) or word[end:].strip():
        word = _of_python(word)
    fits = kinds is None or not kinds.isdisjoint(_kinds_of_word(word)) or "string" not in kinds
    return word if word and fits else plain


def _kinds_of_word(word: str) -> set[str]:
    """Return the types of JSON schema that a value has."""
    if word[:1] in ("{", "[", '"', "n", "t", "f"):
        found = {"{": "object", "[": "array", '"': "string", "n": "null"}
        return {found.get(word[0], "boolean")}
    return {"number"} if re.search(r"[.eE]", word) else {"number", "integer"}


def _of_python(text: str) -> str:
    """Return a list or an object in the syntax of Python as JSON; nothing for anything else."""
    if text[0] not in "[{":
        return ""
    reader = Reader()
    reader.add(text)
    reader.ended = True
    steps = ValueReader(reader).value(0)
    try:
        next(steps)
    except StopIteration as over:
        place, found = over.value
        return str(found) if place == len(text) else ""
    return ""
