"""Text without the string it was stopped at; what may become that string is held back till then."""

from __future__ import annotations

from collections.abc import Sequence


class Trimmer:
    """Follows the text of one sequence, which may end with one of the strings.

    `before`: the end of the prompt's text, in which a string may begin. The pieces that `push` and
    `finish` return, joined, do not depend on how the text was divided.
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
        """The last text, without the string that ended it, if one did, and what follows that.

        Where special tokens that are not shown are part of the string, what is shown of it goes.
        """
        text, self._held = self._held + text, ""
        if not isinstance(matched, str):
            return text
        start = (self._before + text).find(matched)
        if start < 0:
            start = len(self._before + text) - self._overlap(text, matched)
        return text[: max(start - len(self._before), 0)]

    def _overlap(self, text: str, string: str) -> int:
        """How many characters of the string's beginning the text ends with, if not all."""
        whole = self._before + text
        lengths = range(min(len(string) - 1, len(whole)), 0, -1)
        return next((n for n in lengths if whole.endswith(string[:n])), 0)
