"""Constraints, lists of them, and beams that fulfil them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, RequestError
from everystep.testing.models import tiny_llama

IDS = torch.tensor([[5, 9, 23]])


class Twice(es.Constraint):
    """A token stands twice in a row: a class of a caller's own."""

    def __init__(self, token: int, honest: bool = True) -> None:
        self.token, self.honest, self.seqlen, self.read = token, honest, 2, 0
        super().__init__()

    def advance(self) -> int | None:
        return None if self.completed else self.token

    def does_advance(self, token_id: int) -> bool:
        return not self.completed and token_id == self.token

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        stepped = self.does_advance(token_id)
        self.read = self.read + 1 if stepped else 0
        self.completed = self.read == 2
        return stepped, self.completed, not stepped

    def reset(self) -> None:
        self.read, self.completed = 0, False

    def remaining(self) -> int:
        return 2 - self.read if self.honest else 1

    def copy(self, stateful: bool = False) -> Twice:
        other = object.__new__(Twice)
        other.__dict__.update(self.__dict__)
        if not stateful:
            other.reset()
        return other


def test_a_phrase_is_read_token_by_token() -> None:
    phrase = es.PhrasalConstraint([4, 5, 6])
    assert (phrase.seqlen, phrase.advance(), phrase.remaining()) == (3, 4, 3)
    assert phrase.update(4) == (True, False, False)
    ahead, fresh = phrase.copy(stateful=True), phrase.copy()
    assert (ahead.advance(), fresh.advance()) == (5, 4)
    assert phrase.update(9) == (False, False, True) and phrase.advance() == 4
    assert [ahead.update(token)[1] for token in (5, 6)] == [False, True]
    assert ahead.completed and ahead.remaining() == 0 and ahead.advance() is None
    assert not ahead.does_advance(6)


def test_one_of_several_words_is_enough() -> None:
    words = es.DisjunctiveConstraint([[1, 2], [1, 3, 4], [7]])
    assert words.advance() == [1, 7] and words.seqlen == 3
    words.update(1)
    branch = words.copy(stateful=True)
    assert words.advance() == [2, 3]
    assert words.update(2) == (True, True, False) and words.remaining() == 0
    assert branch.update(3) == (True, False, False), "copies share nothing"
    assert branch.advance() == [4] and branch.remaining() == 1


@pytest.mark.parametrize(
    "words", [[[1], [1, 2]], [[1, 2], [1]], [[3], [3]], [], [[]], [[-1]], [1, 2], [["a"]]]
)
def test_words_that_cannot_be(words: Any) -> None:
    with pytest.raises(RequestError):
        es.DisjunctiveConstraint(words)


def test_a_list_works_on_one_at_a_time() -> None:
    state = es.ConstraintListState([es.PhrasalConstraint([1, 2]), es.PhrasalConstraint([3])])
    assert state.advance() == [1, 3] and state.get_bank() == 0
    assert state.add(9) == (False, False), "it begins nothing"
    assert state.add(1) == (False, True)
    assert state.advance() == [2] and state.get_bank() == 1
    before = state.copy()
    assert state.add(3) == (False, False), "it throws the phrase back, and begins nothing"
    assert state.get_bank() == 0 and state.advance() == [3, 1]
    assert [before.add(token)[0] for token in (2, 3)] == [True, True]
    assert before.completed and before.get_bank() == 4
    assert before.add(1) == (True, False), "it is fulfilled, and brought no further"
    state.reset([9, 3, 1, 1, 2])
    assert not state.completed, "the second 1 throws the phrase back"
    state.reset([9, 3, 1, 2, 8])
    assert state.completed and state.copy().completed and not state.copy(stateful=False).completed


def test_a_class_of_ones_own_is_tested_when_it_is_made() -> None:
    assert Twice(4).remaining() == 2
    with pytest.raises(RequestError, match="Twice contradicts itself"):
        Twice(4, honest=False)


@pytest.mark.parametrize(
    "asked",
    [
        {"force_words_ids": [[31, 7]]},
        {"force_words_ids": [[[40, 41], [33]], [12, 13]]},
        {"constraints": [Twice(17)]},
        {"constraints": [es.PhrasalConstraint([8, 6])], "force_words_ids": [[29]]},
    ],
)
@pytest.mark.parametrize("prompts", [1, 2])
def test_what_must_occur_occurs(asked: dict[str, Any], prompts: int) -> None:
    model = tiny_llama()
    given = {"max_new_tokens": 9, "num_beams": 5, "eos_token_id": None, **asked}
    ids = IDS.repeat(prompts, 1)
    rows = model.generate(ids, **given)[:, 3:].tolist()
    words = [*asked.get("force_words_ids", ())]
    words += [[17, 17]] if isinstance((asked.get("constraints") or [0])[0], Twice) else []
    for row in rows:
        said = f",{','.join(map(str, row))},"
        for word in words:
            several = word if isinstance(word[0], list) else [word]
            assert any(f",{','.join(map(str, one))}," in said for one in several), (row, word)
    plain = model.generate(ids, max_new_tokens=9, num_beams=5, eos_token_id=None)
    assert rows != plain[:, 3:].tolist()


def test_too_little_room_gives_the_best_there_is() -> None:
    given = {"max_new_tokens": 2, "num_beams": 3, "num_return_sequences": 3, "eos_token_id": None}
    rows = tiny_llama().generate(IDS, force_words_ids=[[31, 7, 9]], **given)
    assert rows.shape == (3, 5)


def test_ids_of_ones_own_class_beyond_the_vocabulary() -> None:
    with pytest.raises(EverystepError, match="a token that is none"):
        tiny_llama().generate(IDS, num_beams=2, max_new_tokens=4, constraints=[Twice(480)])
