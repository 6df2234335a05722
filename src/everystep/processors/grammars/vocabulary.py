"""A tokenizer's vocabulary as grammars read it: the bytes of each id, and which are special."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from typing import Any

import tokenizers

from everystep.errors import EverystepError, MissingExtraError, UnsupportedError
from everystep.text.native import native_call
from everystep.text.pieces import Spelling

_NUMBERS = count()


def library() -> Any:
    """Import the library that parses; MissingExtraError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        what = "a call with schema, regex, grammar or choices"
        raise MissingExtraError.of(what, "llguidance", "grammar") from error
    return llguidance


@dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """The `size` ids of a model, spelled by its tokenizer, and one more id that ends a text.

    What really ends a text differs from request to request, so that grammars know none of it; the
    mask allows the further id where a text may end. Ids without a token have no bytes, and no
    grammar allows them. A grammar in the syntax of Lark may name special ids. `number`: which no
    other vocabulary of the process has.
    """

    size: int
    spelled: SpelledTokens = field(repr=False)
    table: Any = field(repr=False)
    number: int = field(default_factory=lambda: next(_NUMBERS), init=False)

    @property
    def end(self) -> int:
        """The further id."""
        return self.size

    @property
    def words(self) -> int:
        """The number of 32-bit words of a mask."""
        return (self.size + 1 + 31) // 32


def vocabulary_of(tokenizer: Any, size: int) -> GrammarVocabulary:
    """Return the first `size` ids of a tokenizer, made once; RequestError or UnsupportedError where
    it does not say what its tokens spell."""
    spelling = Spelling.of(tokenizer)
    if spelling.decoding.joining == "words":
        raise UnsupportedError(
            "a grammar cannot follow this tokenizer, which puts spaces between tokens",
            wanted="tokens that spell bytes",
            got=type(tokenizer).__name__,
            do="Leave the grammar out, or choose a model with another tokenizer",
        )
    named = frozenset(getattr(tokenizer, "all_special_ids", None) or ())
    return _made(spelling, named, size, spelling.backend.get_vocab_size())


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens of a tokenizer, which no text of a grammar holds, with their ids;
    RequestError where its vocabulary cannot be read."""
    backend = Spelling.of(tokenizer).backend
    named = frozenset(getattr(tokenizer, "all_special_ids", None) or ())
    return {backend.id_to_token(id) or "": id for id in _special(backend, named)}


def _special(backend: tokenizers.Tokenizer, named: frozenset[int]) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return named.union(id for id, token in added.items() if token.special)


@lru_cache(maxsize=8)
def _made(spelling: Spelling, named: frozenset[int], size: int, known: int) -> GrammarVocabulary:
    special = _special(spelling.backend, named)
    tokens = [_name(spelling.backend, id) if id in special else spelling(id) for id in range(size)]
    listed = sorted(id for id in special if id < size)
    return _tabled(SpelledTokens(spelling.backend, tokens, listed))


def _tabled(spelled: SpelledTokens) -> GrammarVocabulary:
    made = library()
    table = made.LLTokenizer(made.TokenizerWrapper(spelled))
    return GrammarVocabulary(spelled.eos_token_id, spelled, table)


def prepare_vocabulary(tokenizer: Any, size: int) -> None:
    """Make what the first grammar of a tokenizer needs, where a grammar can follow it at all.

    The libraries keep the interpreter for themselves meanwhile, half a second for 49,000 ids, and
    other threads stand still.
    """
    with suppress(EverystepError):  # who asks for a grammar is told
        _ = vocabulary_of(tokenizer, size).spelled.written


def packed_vocabulary(vocabulary: GrammarVocabulary) -> dict[str, Any]:
    """Return a vocabulary as plain values, from which another process makes one that is equal."""
    spelled = vocabulary.spelled
    tokens = spelled.tokens[:-1]
    return {
        "backend": spelled.written,
        "bytes": b"".join(tokens).decode("latin-1"),
        "lengths": [len(one) for one in tokens],
        "special": spelled.special_token_ids[:-1],
    }


def unpacked_vocabulary(told: dict[str, Any]) -> GrammarVocabulary:
    """Return the vocabulary that was packed."""
    whole, tokens, place = told["bytes"].encode("latin-1"), list[bytes](), 0
    for length in told["lengths"]:
        tokens.append(whole[place : place + length])
        place += length
    backend = tokenizers.Tokenizer.from_str(told["backend"])
    return _tabled(SpelledTokens(backend, tokens, told["special"]))


def _name(backend: tokenizers.Tokenizer, id: int) -> bytes:
    return (backend.id_to_token(id) or "").encode()


class SpelledTokens:
    """A tokenizer as the library asks for it."""

    bos_token_id = None

    def __init__(
        self, backend: tokenizers.Tokenizer, tokens: list[bytes], special: list[int]
    ) -> None:
        self.backend = backend
        self.tokens = [*tokens, b"<the text may end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, self.eos_token_id]

    @cached_property
    def written(self) -> str:
        """The backend as text, which takes long to write."""
        with native_call("the tokenizer cannot be written"):
            return self.backend.to_str()

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is wanted")
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return [id for id in encoded.ids if id < self.eos_token_id]
