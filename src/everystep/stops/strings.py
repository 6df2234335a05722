"""The stop that reads text: a string that the newest token completes, wherever tokens divide it.

Only the tail that can hold a string is decoded. A string may begin in the prompt, but its last
character must come with the newest token; what that token adds behind it does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from everystep.errors import RequestError, message
from everystep.stops.base import Candidates
from everystep.types import FinishReason

# A tail may start inside a character or lose a space; so many more ids keep that off the string.
_CONTEXT = 4


@dataclass(frozen=True)
class StopStrings:
    """Ends where one of the strings is complete; the text is not trimmed.

    `decode`: ids -> their text, special tokens included. Source: StopStringCriteria.
    """

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            text = message(
                "stop_strings is not valid",
                wanted="strings that are not empty",
                got=repr(self.strings),
                do="Leave empty strings out",
            )
            raise RequestError(text)

    def __call__(self, candidates: Candidates) -> np.ndarray:
        found = [self._completed(candidates, c) is not None for c in range(len(candidates))]
        return np.array(found, dtype=bool)

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        return FinishReason("stop", self._completed(candidates, index))

    def _completed(self, candidates: Candidates, index: int) -> str | None:
        """The string that the newest token of a candidate completes first, if any."""
        tail, text = self._tail(candidates, index)
        if not any(string in text for string in self.strings):
            return None
        settled = _shared(text, self.decode(tail[:-1]))
        ends = {string: _end_beyond(text, string, settled) for string in self.strings}
        completed = [string for string in self.strings if ends[string] is not None]
        return min(completed, key=lambda string: ends[string] or 0, default=None)

    def _tail(self, candidates: Candidates, index: int) -> tuple[list[int], str]:
        """The last ids, enough of them to hold any string, and their text."""
        longest = max(len(string.encode()) for string in self.strings)
        count = longest + _CONTEXT  # ids are bytes at worst
        while True:
            ids = candidates.tail(index, count)
            text = self.decode(ids)
            # Ids without text, such as special ones, make the tail too short.
            if len(ids) < count or len(text) >= longest + _CONTEXT:
                return ids, text
            count *= 2


def _end_beyond(text: str, string: str, settled: int) -> int | None:
    """Where the first occurrence ends that reaches beyond the settled characters, or None."""
    start = text.find(string, max(settled - len(string) + 1, 0))
    return None if start < 0 else start + len(string)


def _shared(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
