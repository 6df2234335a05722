"""What each id contributes to a text, for the decoders that text models use.

A `tokenizers` decoder sees a whole list of tokens. The ones in use here can be split into what
one token contributes and a small rule for joining: byte level (GPT-2 and most newer models),
byte fallback (Llama 2, Mistral, Gemma), a mark for spaces, or words joined by a space. Any
other decoder is refused by name, because streaming it could not promise the decoded text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from everystep.errors import EverystepError, RequestError, UnsupportedError

Joining = Literal["bytes", "fallback", "mark", "words"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary.

    Source: `bytes_to_unicode` of GPT-2: printable Latin-1 bytes stand for themselves, the other
    68 take the characters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


# Every character of the alphabet as the one of its byte, and the other Latin-1 ones as none at all.
_AS_LATIN_1 = {
    **dict.fromkeys(range(256), 0xFFFF),
    **{ord(character): byte for byte, character in byte_alphabet().items()},
}


@dataclass(frozen=True)
class Decoding:
    """A rule that makes text of tokens: joining, replacements in a token, what the start loses."""

    joining: Joining
    replacements: tuple[tuple[str, str], ...] = ()
    strip_start: tuple[str, int] = ("", 0)
    mark: str = ""
    drop_first_mark: bool = False

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Decoding:
        """Return the rule of a tokenizer's decoder; UnsupportedError names one that cannot
        stream."""
        if backend.decoder is None:
            return cls("words")
        state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        replaced = list(itertools.takewhile(_replaces_text, steps))
        pairs = tuple((step["pattern"]["String"], step["content"]) for step in replaced)
        match steps[len(replaced) :]:
            case [{"type": "ByteLevel"}] if not pairs:
                return cls("bytes")
            case [{"type": "Metaspace", "replacement": mark, **others}] if not pairs:
                first = others.get("prepend_scheme", "always") != "never"
                return cls("mark", mark=mark, drop_first_mark=first)
            # In this order only, since each step acts on what the one before it made.
            case [{"type": "ByteFallback"}, {"type": "Fuse"}]:
                return cls("fallback", pairs)
            case [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": content, "start": start, "stop": 0},
            ]:
                return cls("fallback", pairs, (content, start))
        raise UnsupportedError(
            "The tokenizer's decoder cannot be followed token by token",
            wanted="ByteLevel, Metaspace, or Replace > ByteFallback > Fuse > Strip",
            got=" > ".join(step["type"] for step in steps),
            do="Decode the finished sequence with tokenizer.decode instead",
        )

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes that a token of a byte-level vocabulary stands for."""
        try:
            return token.translate(_AS_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8")  # an added token that was never spelled in the alphabet

    def text_of(self, token: str) -> str:
        """Return a token's text after the replacements, for the joinings that work on text."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def spelled(self, token: str) -> bytes:
        """Return the bytes that a token adds to a text that has begun."""
        if self.joining == "bytes":
            return self.bytes_of(token)
        if self.joining == "fallback":
            text = self.text_of(token)
            byte = BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.encode()
        if self.joining == "mark":
            return token.replace(self.mark, " ").encode()
        return f" {token}".encode()


def _replaces_text(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Replace" and "String" in step["pattern"]


@dataclass(frozen=True)
class Spelling:
    """Id -> bytes inside a text, by one vocabulary: the alphabet in which stop strings are found.

    Bytes, not characters: a character may be divided over tokens, and then no token's text holds
    it. Two are equal if they read the same vocabulary. Source: the matching modes of
    transformers' StopStringCriteria.
    """

    backend: tokenizers.Tokenizer
    decoding: Decoding

    @classmethod
    def of(cls, tokenizer: Any) -> Spelling:
        """Return that of a tokenizer of ours, of transformers' fast ones, or of `tokenizers`.

        RequestError for anything else; UnsupportedError for a decoder that cannot be followed.
        """
        named = (getattr(tokenizer, name, None) for name in ("backend", "backend_tokenizer"))
        for backend in (*named, tokenizer):
            if isinstance(backend, tokenizers.Tokenizer):
                return cls(backend, Decoding.of(backend))
        raise RequestError(
            "stop strings need a tokenizer whose vocabulary can be read",
            wanted="the tokenizer that es.load returned, or a fast one of another library",
            got=type(tokenizer).__name__,
            do="Pass tokenizer=tokenizer",
        )

    def __call__(self, id: int) -> bytes:
        """Return the bytes of one id; none for an id without a token."""
        token = self.backend.id_to_token(id) if id >= 0 else None
        return b"" if token is None else self.decoding.spelled(token)


def bytes_by_id(tokenizer: Any) -> Callable[[int], bytes]:
    """Return what gives the bytes of an id; of its text alone, where the vocabulary cannot be
    read."""
    try:
        return Spelling.of(tokenizer)
    except EverystepError:
        return lambda id: str(tokenizer.decode([id])).encode(errors="backslashreplace")
