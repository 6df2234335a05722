"""A text that is still coming, and the steps in which a reader moves through it.

Each step is a generator that yields where it needs more text. Places count from what was taken
last, so that they hold when text is added or dropped. A step returns `NONE` where the text goes on
otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence

from everystep.dialogue.json_scanner import JsonScanner

NONE = -1
MOST_HELD = 65_536
"""Characters that may be held back before it is known what they are."""
_MOST_NAME = 256
_BLANKS = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[^\s<>\"'(){}\[\],=]*")

Place = Generator[None, None, int]


class Reader:
    """A text and the place that was reached in it. `ended`: nothing will be added. `short`: the
    last step failed because the text ended, and not because something else stands there."""

    __slots__ = ("at", "ended", "short", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.short = False

    def add(self, text: str) -> None:
        """Put text behind what is here, and drop what was taken."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, length: int) -> str:
        """Return so many characters, which are behind us then."""
        found = self.text[self.at : self.at + max(length, 0)]
        self.at += len(found)
        return found

    def peek(self, start: int, end: int) -> str:
        """Return what stands between two places."""
        return self.text[self.at + start : self.at + end]

    def starts(self, text: str) -> bool:
        """Return True if this text stands next."""
        return self.text.startswith(text, self.at)

    @property
    def limit(self) -> int:
        """The place in the text up to which a step may look."""
        return self.at + MOST_HELD + 1

    def more(self, place: int) -> Generator[None, None, bool]:
        """Ask for more text; False where none comes, or where too much is held by a place."""
        if self.ended or place > MOST_HELD:
            self.short = self.ended
            return False
        yield
        return True

    def letter(self, place: int) -> Generator[None, None, str]:
        """Return the character at a place, a space where the text ends."""
        while self.at + place >= len(self.text):
            if not (yield from self.more(place)):
                return " "
        return self.text[self.at + place]

    def blanks(self, place: int, most: int = MOST_HELD) -> Place:
        """Return the place behind blanks, `most` of them."""
        start = place
        while True:
            match = _BLANKS.match(self.text, self.at + place)
            place = (match.end() if match else self.at + place) - self.at
            if place - start >= most:
                return start + most
            if self.at + place < len(self.text) or not (yield from self.more(place)):
                return place

    def literal(self, place: int, text: str) -> Place:
        """Return the place behind a text."""
        while True:
            have = self.peek(place, place + len(text))
            if have == text:
                self.short = False
                return place + len(text)
            if not text.startswith(have):
                self.short = False
                return NONE
            if not (yield from self.more(place)):
                return NONE

    def starts_at(self, place: int, text: str) -> Generator[None, None, bool]:
        """Return True if a text stands at a place."""
        return (yield from self.literal(place, text)) != NONE

    def mark(self, place: int, text: str) -> Place:
        """Return the place behind the words of a text, each perhaps after blanks; the same place
        where it has no words."""
        self.short = False
        for word in text.split():
            place = yield from self.blanks(place)
            place = yield from self.literal(place, word)
            if place == NONE:
                return NONE
        return place

    def name(self, place: int, stop: str = "") -> Place:
        """Return the place behind a name, which ends before `stop` or what no name has."""
        while True:
            match = _NAME.match(self.text, self.at + place)
            end = (match.end() if match else self.at + place) - self.at
            cut = self.peek(place, end).find(stop) if stop else NONE
            end = place + cut if cut != NONE else end
            if end - place > _MOST_NAME:
                return NONE
            if self.at + end < len(self.text):
                return end if end > place else NONE
            if not (yield from self.more(place)):
                return NONE

    def string(self, place: int) -> Generator[None, None, tuple[int, str]]:
        """Return the place behind a JSON string, and what it says."""
        place = yield from self.blanks(place)
        if (yield from self.letter(place)) != '"':
            return NONE, ""
        scanner, start = JsonScanner(), place
        while not scanner.done:
            place = scanner.feed(self.text, self.at + place, self.limit) - self.at
            if scanner.broken or (not scanner.done and not (yield from self.more(place))):
                return NONE, ""
        try:
            return place, str(json.loads(self.peek(start, place), strict=False))
        except ValueError:
            return NONE, ""

    def tail(self, marks: Sequence[str], blanks: int, before: str = " \t\r\n") -> int:
        """Return how many characters at the end may become one of the marks, with so many blanks
        before it."""
        left = len(self.text) - self.at
        longest = 0
        for mark in marks:
            for size in range(min(len(mark) - 1, left), longest, -1):
                if self.text.endswith(mark[:size]):
                    longest = size
                    break
        end = len(self.text) - longest
        start = end
        while start > self.at and end - start < blanks and self.text[start - 1] in before:
            start -= 1
        return len(self.text) - start

    def until_any(self, marks: Sequence[str]) -> Generator[None, None, str | None]:
        """Take the text before the first of some marks, as it comes; None where one stands next, or
        where the text is over."""
        mark = re.compile("|".join(map(re.escape, marks)))
        while True:
            match = mark.search(self.text, self.at)
            end = len(self.text) if match is None else match.start()
            kept = 0 if match is not None or self.ended else self.tail(marks, 0)
            found = self.take(end - kept - self.at)
            if found:
                return found
            if match is not None or self.ended:
                return None
            yield
