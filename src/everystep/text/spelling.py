"""What each id contributes to a text, as bytes: the alphabet in which stop strings are looked for.

Bytes, not characters: a character may be divided over tokens, and then no token's text holds it.
What only the start of a text loses (a stripped space) is not taken away here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tokenizers

from everystep.errors import RequestError, message
from everystep.text.pieces import Decoding


@dataclass(frozen=True)
class Spelling:
    """Id -> bytes, by one vocabulary; two are equal if they read the same one.

    Source: the matching modes of the reference's StopStringCriteria.
    """

    backend: tokenizers.Tokenizer
    decoding: Decoding

    @classmethod
    def of(cls, tokenizer: Any) -> Spelling:
        """That of a tokenizer of ours, of the reference's fast ones, or of `tokenizers`.

        RequestError for anything else; UnsupportedError for a decoder that cannot be followed.
        """
        named = (getattr(tokenizer, name, None) for name in ("backend", "backend_tokenizer"))
        found = (one for one in (*named, tokenizer) if isinstance(one, tokenizers.Tokenizer))
        backend = next(found, None)
        if backend is None:
            raise RequestError(
                message(
                    "stop strings need a tokenizer whose vocabulary can be read",
                    wanted="the tokenizer that es.load returned, or a fast one of another library",
                    got=type(tokenizer).__name__,
                    do="Pass tokenizer=tokenizer",
                )
            )
        return cls(backend, Decoding.of(backend))

    def __call__(self, id: int) -> bytes:
        """The bytes of one id inside a text; none for an id without a token."""
        token = self.backend.id_to_token(id) if id >= 0 else None
        return b"" if token is None else self.decoding.spelled(token)
