"""Long texts as ids, while other threads go on: only calls that leave the interpreter to them.

Most calls of the `tokenizers` library hold the interpreter's lock until they return, `encode` for
seconds; `encode_batch` does not. What it returns is made into Python's objects with the lock held,
again for long if a text is long. So a long text is encoded in parts wherever each part gets the ids
that it has in the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

from everystep.text.pretokenizers import RULES

PART = 1 << 16
"""Characters of a part at least: some milliseconds of work."""
_LETTER = "[A-Za-zÀ-ÖØ-öø-ÿΑ-ΡΣ-ωА-яא-תぁ-ゖァ-ヺ一-鿿가-힣]"
# Between a character and a space with a letter, and between a single line feed and a letter.
_CUT = re.compile(rf"[\w!-~](?= {_LETTER})|(?<=[\w!-~、-】！-～])\n(?={_LETTER})")
_NFC = {"type": "NFC"}


class Encoded(Protocol):
    """A text as ids, with what belongs to each."""

    @property
    def ids(self) -> list[int]:
        """The ids."""
        ...

    @property
    def sequence_ids(self) -> list[int | None]:
        """The number of the text that an id is from; None of an id that was added."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Joined:
    """The ids of a text that was encoded in parts, `before` and `after` of them added."""

    ids: list[int]
    before: int = 0
    after: int = 0

    @property
    def sequence_ids(self) -> list[int | None]:
        """0 for each id of the text, None for the others."""
        own: list[int | None] = [0] * (len(self.ids) - self.before - self.after)
        return [*[None] * self.before, *own, *[None] * self.after]

    def __len__(self) -> int:
        return len(self.ids)


def encoded(
    backend: tokenizers.Tokenizer,
    texts: Sequence[Any],
    *,
    add_special_tokens: bool,
    only_ids: bool,
) -> list[Encoded]:
    """Encode texts and pairs of texts; `only_ids`: without the places of tokens and the like."""
    if not only_ids:
        return list(backend.encode_batch(list(texts), add_special_tokens=add_special_tokens))
    if not any(map(_is_long, texts)) or not _splits_at_cuts(backend):
        return list(_batch(backend, list(texts), add_special_tokens))
    return [_one(backend, text, add_special_tokens) for text in texts]


def _is_long(text: Any) -> bool:
    return isinstance(text, str) and len(text) > 2 * PART


def _one(backend: tokenizers.Tokenizer, text: Any, add_special_tokens: bool) -> Encoded:
    found = _joined(backend, text, add_special_tokens) if _is_long(text) else None
    return _batch(backend, [text], add_special_tokens)[0] if found is None else found


def _batch(
    backend: tokenizers.Tokenizer, texts: list[Any], add_special_tokens: bool
) -> list[tokenizers.Encoding]:
    return backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def _joined(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> Joined | None:
    """Encode a text in parts; None where what is added does not stand around it."""
    around = _around(backend) if add_special_tokens else ([], [])
    if around is None:
        return None
    before, after = around
    ids = [*before]
    for part in parts_of(text):
        ids += _batch(backend, [part], False)[0].ids
    ids += after
    return Joined(ids, len(before), len(after))


def parts_of(text: str) -> Iterator[str]:
    """Cut a text at places of `_CUT`, into parts of `PART` characters or a few more."""
    start = end = 0
    while end < len(text):
        end += PART
        # A text without such a place is not searched in one go.
        found = _CUT.search(text, end, end + PART)
        if found is not None:
            yield text[start : found.end()]
            start = end = found.end()
    yield text[start:]


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids that are added before and after a text; None if that is not all that is
    added."""
    plain, whole = (_batch(backend, ["a"], added)[0] for added in (False, True))
    own = [place for place, text in enumerate(whole.sequence_ids) if text is not None]
    if not own or whole.ids[own[0] : own[-1] + 1] != plain.ids:
        return None
    return whole.ids[: own[0]], whole.ids[own[-1] + 1 :]


def _splits_at_cuts(backend: tokenizers.Tokenizer) -> bool:
    """Return True where a text always falls into two at the places of `_CUT`.

    With the rules of `RULES` it does: in none of their words does a space with a letter follow
    another character, or a letter a line feed, and no expression looks back. Nothing may be changed
    or found across such a place, either.
    """
    normalizer = _state(backend.normalizer)
    if normalizer not in (None, _NFC) or _state(backend.pre_tokenizer) not in _known_rules():
        return False
    return not any(
        token.lstrip or token.rstrip or token.single_word or " " in token.content
        for token in backend.get_added_tokens_decoder().values()
    )


def _known_rules() -> list[Any]:
    return [_state(rule.split()) for rule in RULES]


def _state(component: Any) -> Any:
    """Return a component of a tokenizer as JSON, without what only moves the places of tokens."""
    if component is None:
        return None
    try:
        return json.loads(component.__getstate__(), object_hook=_without_places)
    except Exception:  # one that is written in Python has no such state
        return {}


def _without_places(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "trim_offsets"}
