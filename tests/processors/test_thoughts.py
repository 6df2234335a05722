"""A thought ends where its budget is spent, id by id, and nothing else is forced."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from everystep.processors.thoughts import ThoughtBudget, ThoughtPlace
from tests.processors.making import applied, rows_of

CLOSING = ".>"


def byte(token: int) -> bytes:
    """Ids are bytes."""
    return bytes([token])


def budget(tokens: int, **given: Any) -> ThoughtBudget:
    """A budget of thoughts in pointed brackets."""
    values = {"thinks": False, "anywhere": False, **given}
    closing = tuple(CLOSING.encode())
    return ThoughtBudget(tokens, "<", ">", closing, spelling=byte, **values)


def forced(one: ThoughtBudget, text: str) -> str:
    """What is forced after each beginning of the text, a blank for nothing."""
    line = np.frombuffer(text.encode() + b"?", np.uint8).astype(np.int64)
    place = ThoughtPlace(one, 0)
    found = [place.forced(line, length) for length in range(len(line))]
    return "".join(" " if token is None else chr(token) for token in found)


THINKS, ANYWHERE = {"thinks": True}, {"anywhere": True}


@pytest.mark.parametrize(
    ("tokens", "given", "text", "wanted"),
    [
        (3, THINKS, "abc.>xyz.>", "   .>      "),
        (3, THINKS, "ab>xyz", "       "),
        (3, THINKS, "a>bcdef<ghijk", " " * 14),
        (0, THINKS, ".>x", ".>  "),
        (2, THINKS, "ab.", "  .>"),
        (3, {}, "<abc.>d", "    .>  "),
        (3, {}, " \n<abc.>", "      .> "),
        (3, {}, "x<abcdef", " " * 9),
        # The mark that ends a thought is a token of it, and thoughts are counted together.
        (3, ANYWHERE, "x<a>y<b.>z<.>", "       .>  .> "),
        (4, ANYWHERE, "x<a>y<bc.>", "        .> "),
        # The character that the last token began is completed first.
        (1, THINKS, "é.>", "  .> "),
        (3, THINKS, "aaé.>", "    .> "),
        (1, THINKS, "🙂.>", "    .> "),
    ],
)
def test_what_is_forced(tokens: int, given: dict[str, bool], text: str, wanted: str) -> None:
    assert forced(budget(tokens, **given), text) == wanted


@pytest.mark.parametrize("given", [{}, THINKS, ANYWHERE], ids=str)
def test_any_way_to_a_place_leads_to_the_same(given: dict[str, bool]) -> None:
    pick, one = random.Random(0), budget(3, **given)
    for _ in range(20):
        text = "".join(pick.choice("<<>ab.é") for _ in range(30))
        line = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        place = ThoughtPlace(one, 0)
        for _ in range(30):
            length = pick.randrange(len(line) + 1)
            assert place.forced(line, length) == ThoughtPlace(one, 0).forced(line, length)
            assert place.length == length
            if pick.random() < 0.3:
                twin = place.copy()
                twin.rewind(length // 2)
                assert (place.length, twin.length) == (length, length // 2)


def test_scores_keep_what_is_forced_alone() -> None:
    one = budget(2, thinks=True)
    prefixes = [[1, *text.encode()] for text in ("a", "ab", "ab.", "ab.>")]
    scores = torch.randn(4, 256)
    found = applied(rows_of(prefixes, (one,)), scores)
    for r, token in enumerate((None, ord("."), ord(">"), None)):
        wanted = scores[r].clone()
        if token is not None:
            wanted.fill_(-torch.inf)[token] = scores[r, token]
        assert torch.equal(found[r], wanted)
