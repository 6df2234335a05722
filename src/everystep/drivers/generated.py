"""`Generated`: what became of one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from everystep.errors import shown
from everystep.outputs import TokenLogprobs
from everystep.shown import cut, table
from everystep.types import FinishReason

_HEAD = ("text", "tokens", "ended by", "score", "prompt tokens", "cached")


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation: its text without special tokens, its ids, why it ended, its score.

    `cached_tokens` of the `prompt_tokens` were not fed for it: they came from a `Prefix`, or from a
    row of another prompt that begins alike. `logprobs` of its tokens and `prompt_logprobs` of its
    prompt's where they were asked for. Where the reason is an error, the text and the ids are as
    far as they came.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None

    def __repr__(self) -> str:
        return (
            f"Generated({cut(self.text)!r}, {len(self.tokens)} tokens, {self._ended}, "
            f"score={self.score:.4g}, {self.cached_tokens} of {self.prompt_tokens} prompt tokens "
            "cached)"
        )

    def _repr_html_(self) -> str:
        return table(_HEAD, [self._cells])

    @property
    def _cells(self) -> tuple[object, ...]:
        known = len(self.tokens), self._ended, float(self.score)
        return (self.text, *known, self.prompt_tokens, self.cached_tokens)

    @property
    def _ended(self) -> str:
        matched = self.finish_reason.matched
        beside = "" if matched is None else f" ({cut(shown(matched), 60)})"
        return f"{self.finish_reason.kind}{beside}"


class Results(list[Any]):
    """A list of what several prompts became, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = list(self._rows())
        wide = any(len(cells) > 2 for cells in rows)
        return table(("prompt", *(_HEAD if wide else _HEAD[:1])), rows)

    def _rows(self) -> Iterator[tuple[object, ...]]:
        """The number of its prompt and its cells, for each continuation."""
        for number, one in enumerate(self):
            for result in one if isinstance(one, list) else (one,):
                cells = result._cells if isinstance(result, Generated) else (result,)
                yield (number, *cells)
