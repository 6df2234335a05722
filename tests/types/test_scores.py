"""Scores: lists stand for their rows, however they are selected, put together and changed."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from everystep.types import Scores

ROWS, VOCABULARY = 6, 23


def rows_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, VOCABULARY, generator=generator) * 3).round()


def listed(rows: Tensor, most: int, *, rest: bool = True) -> tuple[Scores, Tensor]:
    """The best of each row, and the rows: what is not listed is read, or is -inf."""
    values, tokens = torch.sort(rows, dim=-1, descending=True, stable=True)
    values, tokens = values[:, :most], tokens[:, :most]
    if not rest:
        kept = torch.full_like(rows, -math.inf).scatter(1, tokens, values)
        return Scores(values, tokens, VOCABULARY), kept
    totals = torch.logsumexp(rows, dim=-1)
    whole = Scores(values, tokens, VOCABULARY, values[:, -1:], totals, rows.__getitem__)
    return whole, rows


def assert_stands_for(scores: Scores, rows: Tensor) -> None:
    """The lists and what may be read after them are the rows."""
    assert torch.equal(scores.whole().values, rows)
    if scores.tokens is None:
        return
    there = scores.values != -math.inf
    assert torch.equal(rows.gather(1, scores.tokens)[there], scores.values[there])
    unlisted = rows.clone()
    for row, tokens, held in zip(unlisted, scores.tokens, there, strict=True):
        row[tokens[held]] = -math.inf
    rest = -math.inf if scores.rest is None else scores.rest
    assert bool((unlisted <= rest).all())


@pytest.mark.parametrize("seed", range(40))
def test_lists_stand_for_their_rows_whatever_is_done_to_them(seed: int) -> None:
    pick = random.Random(seed)
    scores, rows = listed(rows_of(seed), pick.randint(1, 8), rest=pick.random() < 0.7)
    for _ in range(6):
        move = pick.choice(["select", "put", "changed", "rising", "whole row"])
        some = torch.tensor(pick.sample(range(ROWS), pick.randint(1, ROWS)))
        if move == "select":
            order = torch.tensor(pick.choices(range(ROWS), k=ROWS))
            scores, rows = scores.select(order), rows[order]
        elif move == "put":
            part, own = listed(
                rows_of(pick.randrange(99)), pick.randint(1, 8), rest=pick.random() < 0.5
            )
            scores, rows = (
                scores.put(some, part.select(some)),
                rows.clone().index_copy(0, some, own[some]),
            )
        elif move == "changed":
            shift = torch.arange(float(ROWS))[:, None]
            scores = scores.changed(lambda values, which, shift=shift: values / 2 - shift[which])
            rows = rows / 2 - shift
        elif move == "rising":
            scores = scores.rising()
            assert scores.tokens is not None
            held = scores.tokens.masked_fill(scores.values == -math.inf, VOCABULARY)
            assert bool((held.sort(dim=1).values == held).all()) or bool((held == VOCABULARY).any())
        else:
            assert torch.equal(scores.select(some).whole().values, rows[some])
        assert_stands_for(scores, rows)


@pytest.mark.parametrize("seed", range(5))
def test_log_probabilities_of_lists_are_those_of_whole_rows(seed: int) -> None:
    lists, rows = listed(rows_of(seed), 4)
    whole = Scores.of(rows, lists.totals).log_probs()
    assert_stands_for(lists.log_probs(), whole.values)
    torch.testing.assert_close(whole.values, Scores.of(rows).log_probs().values)


def test_of_lists_with_a_length_the_first_places_are_selected() -> None:
    lists, rows = listed(rows_of(1), 8)
    short = lists.select(torch.tensor([3, 1]), 2)
    assert short.values.shape == (2, 2)
    assert_stands_for(short, rows[[3, 1]])
