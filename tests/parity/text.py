"""A tiny tokenizer of exactly as many tokens as a model has, the same one in either side's form.

Its text is made of the letters a to p, because transformers takes only stop strings that the
vocabulary can spell. Three special tokens are spelled with other characters. Which id is which
piece depends on the size alone.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from everystep.text import Settings, Tokenizer

LETTERS = "abcdefghijklmnop"
SPECIAL = {"bos_token": "<1>", "eos_token": "<2>", "pad_token": "<3>"}


@cache
def _written(size: int) -> str:
    """The tokenizer as tokenizer.json holds it."""
    rng = random.Random(f"pieces {size}")
    pieces, merges = list(LETTERS), []
    while len(pieces) < size - len(SPECIAL):
        left, right = rng.choice(pieces), rng.choice(pieces)
        if len(left + right) <= 4 and left + right not in pieces:
            pieces.append(left + right)
            merges.append((left, right))
    tokens = [*rng.sample(pieces, len(pieces)), *SPECIAL.values()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL.values()]
    backend.add_special_tokens(special)
    return str(backend.to_str())


@cache
def own_tokenizer(size: int) -> Tokenizer:
    """This library's."""
    backend = tokenizers.Tokenizer.from_str(_written(size))
    return Tokenizer(backend, Settings(special=SPECIAL))


@cache
def their_tokenizer(size: int) -> Any:
    """transformers'."""
    backend = tokenizers.Tokenizer.from_str(_written(size))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side="left", **SPECIAL
    )


@cache
def spellings(size: int) -> tuple[str, ...]:
    """The pieces that text is made of, in the order of their ids."""
    known = own_tokenizer(size).get_vocab()
    return tuple(sorted(known.keys() - SPECIAL.values(), key=known.__getitem__))
