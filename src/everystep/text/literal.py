"""Special tokens that somebody only wrote: in what users, tools and documents say they stay text.

Who can write `<|im_end|>` into a message could otherwise end it, and speak for the assistant. The
text of a special token in such a message is marked before the template renders it. Where a marked
chat becomes ids, each special token of the template itself is spelled as a character that nothing
else is, of the same length, and a copy of the tokenizer that knows these, and no special tokens,
splits the whole: everything else is split as ever.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from everystep.errors import RequestError
from everystep.text.batch import Columns, Truncation
from everystep.text.calls import columns_of
from everystep.text.native import native_call
from everystep.text.template import RenderedChat, endless, tokens_within

# Characters that Unicode reserves for use inside a program, and for nobody.
MARK = "\ufdd3"
_FIRST, _FILLER = 0xF0000, chr(0x10FFFD)
TRUSTED = ("system", "developer", "assistant", "model")
"""Roles whose messages are the application's or the model's own."""


def pattern_of(special: Iterable[str]) -> re.Pattern[str]:
    """What finds each of these tokens in a text, the longest that begins at a place."""
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Literals:
    """The special tokens of a tokenizer, and how their text is kept text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special = {id: token for id, token in added.items() if token.special}
        self._pattern = pattern_of(token.content for token in self._special.values())

    def __reduce__(self) -> tuple[type[Literals], tuple[tokenizers.Tokenizer]]:
        """Made again where it is copied: a tokenizer's bytes do not say that specials are text."""
        return Literals, (self._backend,)

    def in_chat(self, chat: Sequence[Any]) -> Sequence[Any]:
        """The chat, with a mark in each special token that is written in a message of others."""
        return [
            self.marked(one) if isinstance(one, Mapping) and one.get("role") not in TRUSTED else one
            for one in chat
        ]

    def marked(self, value: Any) -> Any:
        """The value, with a mark in each special token that is written in its texts."""
        try:
            return self._marked(value)
        except RecursionError:
            raise endless() from None

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            if not self._pattern.search(value):
                return value
            if MARK in value:
                what = "A message holds special tokens and U+FDD3, which is reserved"
                raise RequestError(what, do="Take that character out")
            return self._pattern.sub(lambda found: f"{found[0][0]}{MARK}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {key: self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item) for item in value]
        return value

    def encode(self, text: str, marks: Sequence[int]) -> tokenizers.Encoding:
        """The encoding of a chat without its marks; `original` gives its ids."""
        written = set(marks)

        def spelled(found: re.Match[str]) -> str:
            return found[0] if found.start() in written else self._spellings[found[0]]

        return self._copy[0].encode(self._pattern.sub(spelled, text), add_special_tokens=False)

    def original(self, ids: Sequence[int]) -> list[int]:
        """Ids of the copy as those of the tokenizer."""
        known = self._copy[1]
        return [known.get(id, id) for id in ids]

    @cached_property
    def _spellings(self) -> dict[str, str]:
        """Text of a special token -> what stands for it in the copy, of the same length."""
        contents = [token.content for token in self._special.values()]
        return {
            text: chr(_FIRST + number) + _FILLER * (len(text) - 1)
            for number, text in enumerate(contents)
        }

    @cached_property
    def _copy(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer to which special tokens are text, and its ids of what stands for them."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        copy.add_tokens(
            [
                tokenizers.AddedToken(
                    self._spellings[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=False,
                )
                for token in self._special.values()
            ]
        )
        pairs = ((self._spellings[token.content], id) for id, token in self._special.items())
        return copy, {int(copy.token_to_id(spelling) or 0): id for spelling, id in pairs}


def columns_of_chats(
    rendered: Sequence[RenderedChat],
    encode: Callable[[list[str]], list[tokenizers.Encoding]],
    literals: Literals,
    cut: Truncation | None,
    *,
    masks: bool,
) -> Columns:
    """The columns of rendered chats; they hold every special token, so `encode` adds none."""
    plain = [without_marks(chat) for chat in rendered]
    encodings = encode([chat.text for chat, _ in plain])
    written = {row: marks for row, (_, marks) in enumerate(plain) if marks}
    for row, marks in written.items():
        with native_call("The text cannot be tokenized"):
            encodings[row] = literals.encode(plain[row][0].text, marks)
    columns = columns_of(encodings, ("input_ids", "attention_mask", "offset_mapping"), cut)
    for row in written:
        columns["input_ids"][row] = literals.original(columns["input_ids"][row])
    offsets = columns.pop("offset_mapping")
    if masks:
        columns["assistant_masks"] = [
            tokens_within(row, chat.generations)
            for row, (chat, _) in zip(offsets, plain, strict=True)
        ]
    return columns


def without_marks(chat: RenderedChat) -> tuple[RenderedChat, list[int]]:
    """The chat as it reads, and where special tokens begin that are only written there."""
    places = [place for place, character in enumerate(chat.text) if character == MARK]
    if not places:
        return chat, []

    def moved(place: int) -> int:
        return place - bisect_left(places, place)

    spans = tuple((moved(start), moved(end)) for start, end in chat.generations)
    starts = [moved(place) - 1 for place in places]
    return RenderedChat(chat.text.replace(MARK, ""), spans), starts
