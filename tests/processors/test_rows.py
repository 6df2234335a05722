"""Rows of different length and requests of different parameters: each row as if it were alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.errors import RequestError
from everystep.processors.base import UserProcessor
from everystep.processors.bias import PrefixConstrainedLogitsProcessor, SequenceBiasLogitsProcessor
from everystep.processors.order import CANONICAL
from everystep.processors.repetition import RepetitionPenaltyLogitsProcessor
from everystep.processors.warpers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from everystep.types import Rows, TokenTable
from everystep.types.protocols import Processor
from tests.processors.making import (
    VOCABULARY,
    a_sequence,
    applied,
    rectangle,
    rows_of,
    same,
    some_scores,
)
from tests.processors.test_parity import CASES, WITHOUT_INFINITY


def _fits_any_row(ours: Processor) -> bool:
    """Neither asks for a batch id nor holds something for each row of another rectangle."""
    several = [getattr(ours, one.name) for one in ours.per_row]
    prompts = getattr(ours, "encoder_input_ids", [()])
    return not (
        isinstance(ours, PrefixConstrainedLogitsProcessor)
        or any(isinstance(value, tuple) for value in several)
        or len(prompts) > 1
    )


ALL = [(name, ours) for name, ours, _ in [*CASES, *WITHOUT_INFINITY] if _fits_any_row(ours)]


def shift_last(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, 0] += input_ids[:, -1]
    return scores


def one_by_one(rows: Rows, scores: Tensor, tuples: list[tuple[Processor, ...]]) -> Tensor:
    """The textbook: every row alone, every processor of its request in order."""
    results = []
    for r, processors in enumerate(tuples):
        alone, result = rows.select(np.array([r])), scores[r : r + 1]
        for processor in processors:
            result = processor(alone, result)
        results.append(result)
    return torch.cat(results)


def mixed(tuples: list[tuple[Processor, ...]]) -> Rows:
    table, sequences = TokenTable(), []
    for r, processors in enumerate(tuples):
        sequences.append(a_sequence(table, rectangle(1, 3 + r % 5)[0], processors, pad=r % 3))
    return Rows(table, sequences, np.array([3 + r % 5 for r in range(len(tuples))]))


@pytest.mark.parametrize("ours", [case[1] for case in ALL], ids=[case[0] for case in ALL])
def test_ragged_rows_are_as_if_alone(ours: Processor) -> None:
    rows = rows_of([rectangle(1, n)[0] for n in (12, 1, 7, 11)], pads=[2, 0, 3, 0])
    scores = some_scores(4)
    assert torch.equal(ours(rows, scores), one_by_one(rows, scores, [(ours,)] * 4))


@pytest.mark.parametrize("seed", range(40))
def test_mixed_requests_are_as_if_alone(seed: int) -> None:
    pick = random.Random(seed)
    by_class: dict[type, list[Processor]] = {}
    for _, processor in ALL:
        by_class.setdefault(type(processor), []).append(processor)
    by_class[UserProcessor] = [
        UserProcessor(shift_last),
        UserProcessor(lambda ids, scores: -scores),
    ]
    tuples = [
        tuple(pick.choice(by_class[kind]) for kind in CANONICAL
              if kind in by_class and pick.random() < 0.3)
        for _ in range(9)
    ]  # fmt: skip
    tuples[1] = tuples[0]
    rows, scores = mixed(tuples), some_scores(9)
    given = scores.clone()
    assert same(applied(rows, scores), one_by_one(rows, scores, tuples))
    assert torch.equal(scores, given)


def test_an_order_of_ones_own_is_kept() -> None:
    tuples = [
        (TopPLogitsWarper(0.5), TemperatureLogitsWarper(0.3)),
        (TemperatureLogitsWarper(0.3), TopPLogitsWarper(0.5)),
        (TopKLogitsWarper(3),),
    ]
    rows, scores = mixed(tuples), some_scores(3)
    assert same(applied(rows, scores), one_by_one(rows, scores, tuples))


def test_different_parameters_of_a_class_run_as_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = TemperatureLogitsWarper.process
    monkeypatch.setattr(
        TemperatureLogitsWarper,
        "__call__",
        lambda s, r, x: seen.append(len(x)) or original(s, r, x),
    )
    applied(mixed([(TemperatureLogitsWarper(t),) for t in (0.5, 0.7, 2.0)]), some_scores(3))
    assert seen == [3]


@pytest.mark.parametrize(
    "kind",
    [
        TemperatureLogitsWarper,
        TopPLogitsWarper,
        MinPLogitsWarper,
        TypicalLogitsWarper,
        EpsilonLogitsWarper,
        EtaLogitsWarper,
    ],
)
def test_stacked_parameters_are_as_exact_as_numbers(kind: type) -> None:
    tuples = [(kind(value),) for value in (0.1, 0.3, 0.7)]
    rows, scores = mixed(tuples), some_scores(3).double()
    assert torch.equal(applied(rows, scores), one_by_one(rows, scores, tuples))


def test_a_row_that_is_shorter_than_a_word_does_not_end_in_it() -> None:
    rows, scores = rows_of([[5], [5, 5, 5]]), torch.zeros(2, VOCABULARY)
    result = SequenceBiasLogitsProcessor({(5, 5, 1): 2.0})(rows, scores)
    assert result[:, 1].tolist() == [0.0, 2.0]


def test_equal_processors_of_different_requests_run_as_one_call() -> None:
    seen = []

    def spy(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(len(scores))
        return scores

    applied(rows_of([[1], [2], [3]], (UserProcessor(spy),)), some_scores(3))
    rows = mixed([(UserProcessor(spy), TopKLogitsWarper(2)), (UserProcessor(spy),)])
    rows.lengths[:] = 3
    applied(rows, some_scores(2))
    assert seen == [3, 2]


def test_rows_without_processors_are_untouched() -> None:
    rows, scores = mixed([(), (TemperatureLogitsWarper(0.5),), ()]), some_scores(3)
    result = applied(rows, scores)
    assert torch.equal(result[[0, 2]], scores[[0, 2]])


def test_drafted_rows_of_one_sequence_see_their_own_prefixes() -> None:
    table = TokenTable()
    sequence = a_sequence(table, [1, 2, 3, 4, 5], (RepetitionPenaltyLogitsProcessor(2.0),))
    rows = Rows(table, [sequence] * 3, np.array([3, 4, 5]))
    changed = applied(rows, torch.ones(3, VOCABULARY)) < 1
    assert changed.sum(dim=1).tolist() == [3, 4, 5]


def test_a_users_processor_gets_a_rectangle_where_lengths_agree() -> None:
    shapes = []

    def spy(input_ids: Tensor, scores: Tensor) -> Tensor:
        shapes.append(tuple(input_ids.shape))
        return scores

    UserProcessor(spy)(rows_of([[1, 2], [3, 4]]), some_scores(2))
    UserProcessor(spy)(rows_of([[1, 2], [3]]), some_scores(2))
    assert shapes == [(2, 2), (1, 2), (1, 1)]


def test_a_users_processor_may_change_what_it_gets_in_place() -> None:
    rows, scores = rows_of([[1, 2], [3, 4]]), torch.zeros(2, VOCABULARY)

    def careless(input_ids: Tensor, given: Tensor) -> Tensor:
        input_ids.zero_()
        return given.add_(1)

    assert UserProcessor(careless)(rows, scores).eq(1).all()
    assert scores.eq(0).all()
    assert rows.ids().tolist() == [[1, 2], [3, 4]]


def test_a_users_processor_must_return_scores() -> None:
    with pytest.raises(
        RequestError, match=r"wanted a tensor of floats of shape \(1, 37\); got NoneType"
    ):
        UserProcessor(lambda ids, scores: None)(rows_of([[1]]), some_scores(1))


def test_batch_ids_count_sampled_siblings_and_not_beams() -> None:
    seen = []

    def spy(batch_id: int, ids: Tensor) -> list[int]:
        seen.append(batch_id)
        return [0]

    rows = rows_of([[1]] * 3)
    PrefixConstrainedLogitsProcessor(spy, 1, first=4)(rows, some_scores(3))
    PrefixConstrainedLogitsProcessor(spy, 3, first=1)(rows, some_scores(3))
    assert seen == [4, 5, 6, 1, 1, 1]


def test_a_constraint_that_allows_nothing_is_an_error() -> None:
    with pytest.raises(RequestError, match="allows nothing for batch id 0"):
        PrefixConstrainedLogitsProcessor(lambda batch_id, ids: [], 1)(
            rows_of([[1]]), some_scores(1)
        )
