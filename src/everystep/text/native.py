"""The border to the compiled `tokenizers` library: its failures become TokenizerErrors.

Its panics derive from BaseException, and a text with a lone surrogate fails inside it with a
TypeError; both are the fault of one text or one file and must never end a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers

from everystep.errors import EverystepError, TokenizerError, message

PASSED_ON = (
    EverystepError,
    MemoryError,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    asyncio.CancelledError,
)


@contextmanager
def native_call(what: str, *, error: type[EverystepError] = TokenizerError) -> Iterator[None]:
    """Turns every failure of the library inside the block into `error`, panics included."""
    try:
        yield
    except PASSED_ON:
        raise
    except BaseException as failure:
        # A panic is a BaseException of pyo3; the requests to stop have been let through above.
        cause = f"{type(failure).__name__}: {failure}"
        raise error(message(what, got=cause[:500])) from failure


def id_of(backend: tokenizers.Tokenizer, token: str) -> int | None:
    """Return the id of a token; None where there is none, and for text that UTF-8 cannot
    express."""
    try:
        found: int | None = backend.token_to_id(token)
    except UnicodeEncodeError:
        return None
    return found


def checked_text(text: object, name: str = "text") -> str:
    """Return the text itself, once it is known to be a string that UTF-8 can express."""
    if not isinstance(text, str):
        raise TokenizerError(f"{name} is not text", wanted="a str", got=type(text).__name__)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as failure:
            code = ord(text[failure.start])
            raise TokenizerError(
                f"{name} holds a lone surrogate at character {failure.start}",
                wanted="text that UTF-8 can express",
                got=f"U+{code:04X}",
                do="Replace it, e.g. text.encode('utf-8', 'replace').decode()",
            ) from None
    return text
