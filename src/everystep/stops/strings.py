"""The stop that reads text: a string that the newest token completes, wherever tokens divide it.

Strings are compared as bytes. Where in a token a string may end, and what must precede the token
then, is worked out when the token is first seen; most tokens end no string and cost one look-up,
and no step costs more for a longer text. A string may begin in the prompt, but its last byte must
come with the newest token; what that token adds after it does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from everystep.errors import RequestError, shown
from everystep.text.native import checked_text
from everystep.types import FinishReason
from everystep.types.request import Candidates

Ending = tuple[str, bytes]
"""A string that may end within a token, and what of it must stand before that token."""


@dataclass(frozen=True)
class StopStrings:
    """Ends where one of the strings is complete; the text is not trimmed.

    `spelling`: id -> its bytes, special tokens included. Source: StopStringCriteria.
    """

    strings: tuple[str, ...]
    spelling: Callable[[int], bytes]
    _endings: dict[int, tuple[Ending, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _spelled: tuple[tuple[str, bytes], ...] = field(init=False, compare=False, repr=False)
    _last_bytes: frozenset[int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            raise RequestError(
                "stop_strings is not valid",
                wanted="strings that are not empty",
                got=shown(self.strings),
                do="Leave empty strings out",
            )
        spelled = tuple(
            (string, checked_text(string, "stop_strings").encode()) for string in self.strings
        )
        object.__setattr__(self, "_spelled", spelled)
        object.__setattr__(self, "_last_bytes", frozenset(whole[-1] for _, whole in spelled))

    def __call__(self, candidates: Candidates) -> np.ndarray:
        ends = np.zeros(len(candidates), dtype=bool)
        for c, token in enumerate(candidates.last.tolist()):
            if self._endings_in(token):
                ends[c] = self._completed(candidates, c) is not None
        return ends

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        return FinishReason("stop", self._completed(candidates, index))

    def _completed(self, candidates: Candidates, index: int) -> str | None:
        """Return the string that the newest token of a candidate completes first, if any."""
        for string, before in self._endings_in(int(candidates.last[index])):
            if not before or self._precedes(before, candidates, index):
                return string
        return None

    def _endings_in(self, token: int) -> tuple[Ending, ...]:
        known = self._endings.get(token)
        if known is None:
            piece = self.spelling(token)
            # Most pieces hold no byte that a string ends with.
            never = self._last_bytes.isdisjoint(piece)
            known = self._endings[token] = () if never else tuple(_endings(piece, self._spelled))
        return known

    def _precedes(self, before: bytes, candidates: Candidates, index: int) -> bool:
        """Return whether the text ends with `before` where the newest token starts."""
        count = len(before) + 1  # ids are bytes at worst, unless they have none
        while True:
            ids = candidates.tail(index, count)
            text = b"".join(map(self.spelling, ids[:-1]))
            if len(ids) < count or len(text) >= len(before):
                return text.endswith(before)
            count *= 2


def _endings(piece: bytes, strings: tuple[tuple[str, bytes], ...]) -> Iterator[Ending]:
    """Yield the strings that may end in a token's, each with its bytes before the token.

    The first end comes first, then the order given.
    """
    begin = piece[:1]
    spelled = [one for one in strings if begin in one[1] or one[1] in piece]
    if not spelled:
        return
    for end in range(1, len(piece) + 1):
        for string, whole in spelled:
            inside = piece[:end]
            if end < len(whole) and whole.endswith(inside):
                yield string, whole[:-end]
            elif end >= len(whole) and inside.endswith(whole):
                yield string, b""
