"""Lists of the best from an executor give what the whole rows would have given, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.draws import SeededDraws
from everystep.processors.pipeline import apply, best_read
from everystep.types import Prompt, Request, Rows, Scores, Sequence, TokenTable
from tests.processors.test_shortlists import KINDS, ROWS, at_position, drawn, rows_of

WIDTH = 8192
MEAN, NEVER = es.TypicalLogitsWarper(0.8), es.TopPLogitsWarper(0.9, filter_value=-1.0)
TOLD: tuple[tuple[Any, ...], ...] = (
    (es.TopKLogitsWarper(50),),
    (es.TopKLogitsWarper(63, min_tokens_to_keep=2),),
    (es.TemperatureLogitsWarper(0.7), es.TopKLogitsWarper(50), es.TopPLogitsWarper(0.95)),
    (es.TemperatureLogitsWarper(0.01), es.TopKLogitsWarper(1)),
    (es.TemperatureLogitsWarper(1.7), es.TemperatureLogitsWarper(0.3), es.TopKLogitsWarper(9)),
    (es.TopKLogitsWarper(30), es.MinPLogitsWarper(0.05), es.TemperatureLogitsWarper(1.3)),
    (es.TopKLogitsWarper(40), MEAN, es.EtaLogitsWarper(0.01), es.LogitNormalization()),
    (es.TopKLogitsWarper(20), es.TopKLogitsWarper(5), es.TopHLogitsWarper(0.5)),
    (
        es.TemperatureLogitsWarper((0.5, 1.0, 2.0, 100.0, 0.01)),
        es.TopKLogitsWarper((1, 2, 50, 3, 9)),
        es.TopPLogitsWarper((0.1, 0.5, 0.9, 0.0, 1.0)),
    ),
)
WHOLE: tuple[tuple[Any, ...], ...] = (
    (),
    (es.TemperatureLogitsWarper(0.7),),
    (es.TopPLogitsWarper(0.9), es.TopKLogitsWarper(5)),
    (es.RepetitionPenaltyLogitsProcessor(1.1), es.TopKLogitsWarper(50)),
    (es.TopKLogitsWarper(50, filter_value=-1.0),),
    (es.TopKLogitsWarper(50), NEVER),
    (es.TopKLogitsWarper(50), lambda ids, scores: scores),
    (es.TopKLogitsWarper(65),),
)


def listed(scores: Tensor, counts: Tensor, read: list[int] | None = None) -> Scores:
    """What an executor reports of (R, V) scores: of each row its own number of the best."""
    values, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
    most = int(counts.max())
    values, tokens = values[:, :most], tokens[:, :most]
    rest = values.gather(1, counts[:, None] - 1)
    values = values.masked_fill(torch.arange(most) >= counts[:, None], -math.inf)

    def whole(rows: Tensor) -> Tensor:
        if read is not None:
            read.extend(rows.tolist())
        return scores[rows]

    return Scores(values, tokens, scores.shape[1], rest, read=whole)


def from_lists(rows: Rows, scores: Tensor, read: list[int] | None = None) -> Scores:
    """What the rows' processors leave of the best that each asks for; which rows are read whole."""
    processors = (sequence.request.processors for sequence in rows.sequences)
    counts = torch.tensor([best_read(own, scores.shape[1]) for own in processors])
    assert (counts > 0).all()
    return apply(rows, listed(scores, counts, read))


def whole(rows: Rows, scores: Tensor) -> Scores:
    """What they leave of whole rows."""
    return apply(rows, Scores.of(scores))


def assert_same(ours: Scores, theirs: Scores) -> None:
    assert ours.listed and theirs.listed
    assert ours.tokens is not None and theirs.tokens is not None
    width = min(ours.values.shape[1], theirs.values.shape[1])
    for wide in (ours, theirs):
        assert (wide.values[:, width:] == -math.inf).all()
    kept = theirs.values[:, :width] != -math.inf
    assert torch.equal(ours.tokens[:, :width][kept], theirs.tokens[:, :width][kept])
    assert torch.equal(ours.values[:, :width], theirs.values[:, :width])


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"flat", "ties", "none", "nan", "huge"}))
@pytest.mark.parametrize("chain", range(len(TOLD)))
def test_the_lists_are_those_of_whole_rows(chain: int, kind: str) -> None:
    scores = drawn(kind, WIDTH)
    rows, read = rows_of(TOLD[chain]), list[int]()
    assert_same(from_lists(rows, scores, read), whole(rows, scores))
    assert not read


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("chain", range(len(TOLD)))
def test_ties_are_all_there(chain: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(ROWS, WIDTH, generator=generator) * 2 ** (seed % 8)).round()
    rows = rows_of(TOLD[chain])
    ours, theirs = from_lists(rows, scores), whole(rows, scores)
    if theirs.listed:
        assert_same(ours, theirs)
    else:
        assert torch.equal(ours.whole().values, theirs.values)


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_row_is_read_where_a_tie_goes_on_beyond_its_list(beyond: int) -> None:
    scores = torch.arange(WIDTH, 0, -1.0).repeat(ROWS, 1)
    scores[2, 4 : 5 + beyond] = scores[2, 3]
    rows, read = rows_of((es.TopKLogitsWarper(4 + 1 - beyond),)), list[int]()
    assert_same(from_lists(rows, scores, read), whole(rows, scores))
    assert read == [2] * beyond


def test_a_tie_that_dividing_makes_is_one() -> None:
    scores = torch.arange(WIDTH, 0, -1.0).repeat(ROWS, 1)
    scores[0, 3], scores[0, 4] = 3.0e38, 2.9e38
    scores[0, :3] = 3.1e38
    heat, read = es.TemperatureLogitsWarper(0.5), list[int]()  # both become infinite
    rows = rows_of((heat, es.TopKLogitsWarper(4)))
    assert_same(from_lists(rows, scores, read), whole(rows, scores))
    assert read == [0]


@pytest.mark.parametrize("kind", ["none", "nan"])
def test_rows_without_a_distribution_have_none(kind: str) -> None:
    scores = drawn(kind, WIDTH)
    short = from_lists(rows_of(TOLD[2]), scores)
    tokens = SeededDraws(0).choose(short, at_position(3))
    assert tokens[0] == -1 and (tokens[1:] >= 0).all()


@pytest.mark.parametrize("chain", range(len(WHOLE)))
def test_other_processors_see_whole_rows(chain: int) -> None:
    count = best_read(WHOLE[chain], WIDTH)
    assert count == 0 or count > 64  # more than is ever reported


@pytest.mark.parametrize(("width", "count"), [(4096, 0), (6465, 51), (6400, 0), (49_152, 51)])
def test_narrow_rows_are_read_whole(width: int, count: int) -> None:
    assert best_read((es.TopKLogitsWarper(50),), width) == count


@pytest.mark.parametrize("seed", range(60))
def test_rows_of_different_requests_are_as_alone(seed: int) -> None:
    """Different tuples of processors: shared, stacked, in another order."""
    rng = np.random.default_rng(seed)
    table, sequences = TokenTable(ROWS, 4), []
    for r in range(ROWS):
        chain = some_chain(rng)
        request = Request(str(r), Prompt(ids=np.array([1])), None, SeededDraws(0), processors=chain)
        sequences.append(Sequence(request, table.open(np.array([1, 2])), 2, index=r))
    rows = Rows(table, sequences, np.full(ROWS, 2))
    scores = drawn("spread", WIDTH)
    mixed, theirs = from_lists(rows, scores).whole(), whole(rows, scores).whole()
    for r in range(ROWS):
        alone = whole(rows.select(np.array([r])), scores[r : r + 1]).whole()
        assert torch.equal(mixed.values[r : r + 1], alone.values)
        assert torch.equal(theirs.values[r : r + 1], alone.values)


def some_chain(rng: np.random.Generator) -> tuple[Any, ...]:
    """What samples after top-k, at times in an order of its own."""
    heat = [es.TemperatureLogitsWarper(rng.choice([0.5, 1.5]).item())] * int(rng.random() < 0.7)
    behind = [
        warper
        for warper in (es.TopPLogitsWarper(rng.uniform(0.3, 1)), es.MinPLogitsWarper(0.02))
        if rng.random() < 0.5
    ]
    top_k = es.TopKLogitsWarper(int(rng.integers(1, 64)))
    if rng.random() < 0.2:
        return (top_k, *behind[::-1], *heat)
    return (*heat, top_k, *behind)
