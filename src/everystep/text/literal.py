"""Special tokens that somebody only wrote: in what users, tools and documents say, and in the
schemas of tools, they stay text.

Who can write `<|im_end|>` into a message could otherwise end it, and speak for the assistant. The
text of a special token in such a message is marked before the template renders it. Where a marked
chat becomes ids, each special token of the template itself is spelled as a character that nothing
else is, of the same length, and a copy of the tokenizer that knows these, and no special tokens,
splits the whole: everything else is split as ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, cast

import tokenizers

from everystep.errors import RequestError
from everystep.text.batch import BatchEncoding, Columns, Truncation
from everystep.text.call_arguments import columns_of
from everystep.text.native import native_call
from everystep.text.parts import PART, Encoded, encoded
from everystep.text.template import ChatTemplate, RenderedChat, endless, plain, tokens_within
from everystep.text.tool_schemas import tool_schemas

# Characters that Unicode reserves for use inside a program, and for nobody.
MARK = "\ufdd3"
_FIRST, _FILLER = 0xF0000, chr(0x10FFFD)
TRUSTED = ("system", "developer", "assistant", "model")
"""Roles whose messages are the application's or the model's own."""
COMPARED = ("role", "type")
"""Keys whose values a template compares, and joins to nothing that others wrote."""


def pattern_of(special: Iterable[str]) -> re.Pattern[str]:
    """Return an expression that finds these tokens, at each place the longest."""
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Literals:
    """The special tokens of a tokenizer, and how their text is kept text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special = {id: token for id, token in added.items() if token.special}
        normalized = any(token.normalized for token in self._special.values())
        self.normalized = normalized and backend.normalizer is not None
        contents = [token.content for token in self._special.values()]
        self._pattern = pattern_of(contents)
        self._beginnings = {text[:size] for text in contents for size in range(1, len(text))}
        self._longest = max(map(len, contents), default=0)

    def __reduce__(self) -> tuple[type[Literals], tuple[tokenizers.Tokenizer]]:
        """Made again where it is copied: a tokenizer's bytes do not say that specials are text."""
        return Literals, (self._backend,)

    def in_chat(self, chat: Sequence[Any]) -> Sequence[Any]:
        """Return the chat, with a mark in each special token that is written in a message of
        others."""
        return [
            self.marked(one) if isinstance(one, Mapping) and one.get("role") not in TRUSTED else one
            for one in map(plain, chat)
        ]

    def marked(self, value: Any) -> Any:
        """Return the value, with a mark in each special token that is written in its texts."""
        try:
            return self._marked(plain(value))
        except RecursionError:
            raise endless() from None

    def _marked(self, value: Any, *, joined: bool = True) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, joined)
        if isinstance(value, Mapping):
            return {
                self._marked_text(key, False) if isinstance(key, str) else key: self._marked(
                    item, joined=key not in COMPARED
                )
                for key, item in value.items()
            }
        if not isinstance(value, list | tuple):
            return value
        return type(value)(map(self._marked, value))

    def _marked_text(self, given: str, joined: bool) -> str:
        """Return the text with its marks; `joined`: other texts may follow it, and end a token that
        it begins."""
        text = given.replace(MARK, "")
        starts = {found.start() for found in self._written(text)}
        if joined:
            whole = text.rstrip()
            lengths = range(1, min(len(whole), self._longest - 1) + 1)
            starts |= {len(whole) - n for n in lengths if whole[-n:] in self._beginnings}
        if not starts:
            return text
        if text != given:
            what = "A message holds special tokens and U+FDD3, which is reserved"
            raise RequestError(what, do="Take that character out")
        places = [0, *(start + 1 for start in sorted(starts)), len(text)]
        return MARK.join(text[start:end] for start, end in pairwise(places))

    def _written(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the special tokens in a text, piece by piece: a search holds the interpreter's
        lock."""
        start, end = 0, PART
        while start < len(text):
            found = self._pattern.search(text, start, end + self._longest - 1)
            if found is None or found.start() >= end:
                start, end = end, end + PART
            else:
                yield found
                start = found.end()
                end = max(start, end)

    def disguised(self, text: str, encoding: Any) -> bool:
        """Return True if a special token was found in a text that only normalising makes one."""
        places = zip(encoding.ids, encoding.offsets, strict=True) if self.normalized else ()
        return any(
            id in self._special and self._special[id].content not in text[start:end]
            for id, (start, end) in places
        )

    def encode(self, text: str, marks: Sequence[int], *, only_ids: bool) -> Encoded:
        """Encode a chat without its marks; `original` gives its ids."""
        written, pieces, last = set(marks), list[str](), 0
        for found in self._written(text):
            if found.start() not in written:
                pieces += [text[last : found.start()], self._spellings[found[0]]]
                last = found.end()
        spelled = "".join([*pieces, text[last:]])
        copy = self._copy[0]
        return encoded(copy, [spelled], add_special_tokens=False, only_ids=only_ids)[0]

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


class Shown(Protocol):
    """Pictures and the like in chats: they stand in the texts, and come with the ids."""

    def filled(self, chats: Sequence[RenderedChat]) -> list[RenderedChat]:
        """Put what stands for each thing that is shown at its place in the chats."""

    def add_to(self, encoding: BatchEncoding) -> None:
        """Puts what is shown beside the ids."""


def rendered_chats(
    template: ChatTemplate,
    chats: Sequence[Sequence[Any]],
    literals: Literals | None,
    *,
    tools: Any,
    documents: Any,
    **names: Any,
) -> list[RenderedChat]:
    """Return the chats as texts, marked where others wrote special tokens if there are
    `literals`."""
    if literals is not None:
        chats, documents = [literals.in_chat(chat) for chat in chats], literals.marked(documents)
        tools = literals.marked(tool_schemas(tools))
    return [template.render(chat, tools=tools, documents=documents, **names) for chat in chats]


def columns_of_chats(
    rendered: Sequence[RenderedChat],
    backend: tokenizers.Tokenizer,
    literals: Literals | None,
    cut: Truncation | None,
    masks: bool,
) -> Columns:
    """Return the columns of rendered chats; they hold every special token, so that none is
    added."""
    read = [without_marks(chat) for chat in rendered]
    only_ids = not masks and not (literals is not None and literals.normalized)
    encodings, written = list[Encoded](), dict[int, Literals]()
    with native_call("The text cannot be tokenized"):
        as_given = [chat.text for chat, marks in read if literals is None or not marks]
        found = iter(encoded(backend, as_given, add_special_tokens=False, only_ids=only_ids))
        for row, (chat, marks) in enumerate(read):
            encoding = next(found) if literals is None or not marks else None
            if literals is not None and (marks or literals.disguised(chat.text, encoding)):
                written[row] = literals
                encoding = literals.encode(chat.text, marks, only_ids=not masks)
            encodings.append(cast(Encoded, encoding))
    wanted = ("input_ids", "attention_mask", *(["offset_mapping"] if masks else []))
    columns = columns_of(encodings, wanted, cut)
    for row, own in written.items():
        columns["input_ids"][row] = own.original(columns["input_ids"][row])
    if masks:
        columns["assistant_masks"] = [
            tokens_within(row, chat.generations)
            for row, (chat, _) in zip(columns.pop("offset_mapping"), read, strict=True)
        ]
    return columns


def without_marks(chat: RenderedChat) -> tuple[RenderedChat, list[int]]:
    """Return the chat as it reads, and where special tokens begin that are only written there."""
    places, place = list[int](), chat.text.find(MARK)
    while place >= 0:
        places.append(place)
        place = chat.text.find(MARK, place + 1)
    if not places:
        return chat, []
    starts = [place - earlier - 1 for earlier, place in enumerate(places)]
    return chat.replaced([(place, place + 1, "") for place in places]), starts
