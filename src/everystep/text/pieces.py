"""From ids to the bytes or text that each contributes, for the decoders that text models use.

A `tokenizers` decoder sees a whole list of tokens. The ones in use here can be split into what
one token contributes and a small rule for joining: byte level (GPT-2 and most newer models),
byte fallback (Llama 2, Mistral, Gemma), a mark for spaces, or words joined by a space. Any
other decoder is refused by name, because streaming it could not promise the decoded text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from everystep.errors import UnsupportedError, message

Joining = Literal["bytes", "fallback", "mark", "words"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: `bytes_to_unicode` of GPT-2: printable Latin-1 bytes stand for themselves, the other
    68 take the characters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + rank) for rank, byte in enumerate(others)})
    return dict(sorted(table.items()))


# Every character of the alphabet as the one of its byte, and the other Latin-1 ones as none at all.
_AS_LATIN_1 = {
    **dict.fromkeys(range(256), 0xFFFF),
    **{ord(character): byte for byte, character in byte_alphabet().items()},
}


@dataclass(frozen=True)
class Decoding:
    """How tokens become text: the joining, what is replaced in a token, what the start loses."""

    joining: Joining
    replacements: tuple[tuple[str, str], ...] = ()
    strip_start: tuple[str, int] = ("", 0)
    mark: str = ""
    drop_first_mark: bool = False

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Decoding:
        """The rule of a tokenizer's decoder; UnsupportedError names one that cannot stream."""
        if backend.decoder is None:
            return cls("words")
        state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        rule = _rule(steps)
        if rule is None:
            raise _unsupported(" > ".join(step["type"] for step in steps))
        return rule

    def bytes_of(self, token: str) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for."""
        try:
            return token.translate(_AS_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8")  # an added token that was never spelled in the alphabet

    def text_of(self, token: str) -> str:
        """A token's text after the replacements, for the joinings that work on text."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def spelled(self, token: str) -> bytes:
        """The bytes that a token adds to a text that has begun."""
        if self.joining == "bytes":
            return self.bytes_of(token)
        if self.joining == "fallback":
            text = self.text_of(token)
            byte = BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.encode()
        if self.joining == "mark":
            return token.replace(self.mark, " ").encode()
        return f" {token}".encode()


def _rule(steps: Sequence[Mapping[str, Any]]) -> Decoding | None:
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding("bytes")
    if kinds == ["Metaspace"]:
        first = steps[0].get("prepend_scheme", "always") != "never"
        return Decoding("mark", mark=steps[0]["replacement"], drop_first_mark=first)
    return _fallback_rule(list(steps))


def _fallback_rule(steps: list[Mapping[str, Any]]) -> Decoding | None:
    """Replace*, ByteFallback, Fuse, Strip?: in this order only, since each acts on the last's."""
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    if [step["type"] for step in steps[:2]] != ["ByteFallback", "Fuse"]:
        return None
    rest = steps[2:]
    if not rest:
        return Decoding("fallback", tuple(replacements))
    if len(rest) == 1 and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        strip = (rest[0]["content"], rest[0]["start"])
        return Decoding("fallback", tuple(replacements), strip)
    return None


def _unsupported(kinds: str) -> UnsupportedError:
    return UnsupportedError(
        message(
            "The tokenizer's decoder cannot be followed token by token",
            wanted="ByteLevel, Metaspace, or Replace > ByteFallback > Fuse > Strip",
            got=kinds,
            do="Decode the finished sequence with tokenizer.decode instead",
        )
    )
