"""Two tokenizers: ids through text, and tokens that are spelled alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everystep.engine import Tokenizers
from everystep.engine.spelling import longest_run
from everystep.testing.tokenizer import tiny_tokenizer

LONG, SHORT = tiny_tokenizer(320), tiny_tokenizer(270)
BOTH = Tokenizers(LONG, SHORT, own_lookbehind=4, other_lookbehind=4)
TEXT = "the tool was in the ring and it is of the king that sings"


def ids(tokenizer: object, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[attr-defined]


def test_the_tokenizers_differ() -> None:
    assert len(ids(LONG, TEXT)) < len(ids(SHORT, TEXT))


@pytest.mark.parametrize("lookbehind", [1, 4, 30])
def test_what_is_told_bit_by_bit_is_the_whole_text(lookbehind: int) -> None:
    both = Tokenizers(LONG, SHORT, own_lookbehind=lookbehind)
    own, said, known = ids(LONG, TEXT), np.empty(0, np.int64), 0
    for end in range(6, len(own) + 1, 2):
        said = both.respelled(own[:end], said, known)
        known = end
        assert SHORT.decode(said.tolist()) == LONG.decode(own[:end].tolist())


def test_guesses_are_understood_where_words_were_begun() -> None:
    own = ids(LONG, "the tool was in th")
    said = ids(SHORT, "the tool was in th")
    guesses = ids(SHORT, "e ring")
    found = BOTH.understood(own, said, guesses)
    assert LONG.decode([*own.tolist(), *found.tolist()]).startswith("the tool was in th")
    plain = BOTH.understood(ids(LONG, "the tool"), ids(SHORT, "the tool"), ids(SHORT, " was in"))
    assert plain.tolist() == ids(LONG, " was in").tolist()


def test_shared_tokens_are_those_spelled_alike() -> None:
    shared = BOTH.shared(320, 270)
    own, other = LONG.get_vocab(), SHORT.get_vocab()
    assert len(shared.own) == len(own.keys() & other.keys()) > 260
    logits = torch.arange(270.0)[None]
    scores = shared.scores(logits)
    for token, one in own.items():
        expected = float(other[token]) if token in other else -torch.inf
        assert scores[0, one] == expected
        assert shared.other_id(one) == other.get(token)


def test_the_longest_run_is_found() -> None:
    one, other = np.array([9, 1, 2, 3, 7]), np.array([1, 2, 5, 1, 2, 3, 8])
    assert longest_run(one, other) == (4, 6)
    assert longest_run(one, np.array([4, 4])) is None
    assert longest_run(one, np.empty(0, np.int64)) is None
