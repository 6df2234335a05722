"""Samplers and penalties beyond transformers', each against a plain loop over its formula."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.draws import SeededDraws, uniform
from everystep.errors import RequestError
from everystep.processors.bias import LogitBias
from everystep.processors.repetition import Dry, OccurrencePenalty
from everystep.processors.samplers import DynamicTemperature, Mirostat, TopNSigma, Xtc
from everystep.types import Rows
from tests.processors.making import (
    FINITE_MAXIMUM,
    VOCABULARY,
    applied,
    rectangle,
    rows_of,
    some_scores,
)

NEVER = -math.inf


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6, equal_nan=False)


def kept(scores: Tensor) -> list[set[int]]:
    """Per row, the ids that can still be drawn."""
    return [set(torch.nonzero(row > NEVER)[:, 0].tolist()) for row in scores]


# --- penalties ------------------------------------------------------------------------------------


def test_a_bias_is_added_to_its_ids() -> None:
    scores = some_scores(3)
    expected = scores.clone()
    expected[:, 4] += 2.5
    expected[:, 9] -= 1.0
    assert torch.equal(LogitBias(((4, 2.5), (9, -1.0)))(torch.tensor([[1]] * 3), scores), expected)


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match=r"logit_bias names ids beyond the vocabulary"):
        LogitBias(((VOCABULARY, 1.0),))(torch.tensor([[1]]), some_scores(1))


@pytest.mark.parametrize("presence", [0.0, 0.7, -1.5])
@pytest.mark.parametrize("frequency", [0.0, 0.4, -2.0])
def test_generated_ids_pay_for_presence_and_frequency(presence: float, frequency: float) -> None:
    prefixes, scores = rectangle(3, 12), some_scores(3)
    expected = scores.clone()
    for row, ids in enumerate(prefixes):
        for token, count in Counter(ids[5:]).items():
            expected[row, token] -= frequency * count + presence
    ours = OccurrencePenalty(presence, frequency)
    close(ours(rows_of(prefixes, prompt=5), scores), expected)


def test_the_prompt_does_not_pay_in_the_engine_but_by_hand_every_id_does() -> None:
    scores = torch.zeros(1, VOCABULARY)
    ours = OccurrencePenalty(1.0, 0.5)
    assert ours(rows_of([[3, 3, 4]], prompt=2), scores)[0, :5].tolist() == [0, 0, 0, 0, -1.5]
    assert ours(torch.tensor([[3, 3, 4]]), scores)[0, :5].tolist() == [0, 0, 0, -2.0, -1.5]


def test_what_is_taken_back_is_paid_back() -> None:
    sequence_rows = rows_of([[1, 5, 5, 6]])
    ours, scores = OccurrencePenalty(0.0, 1.0), torch.zeros(1, VOCABULARY)
    sequence = sequence_rows.sequences[0]
    ours(sequence_rows, scores)
    shorter = Rows(sequence_rows.table, [sequence], np.array([2]))
    assert ours(shorter, scores)[0, 5:7].tolist() == [-1, 0]
    copied = {key: value.copy() for key, value in sequence.memo.items()}
    other = replace(sequence, memo=copied)
    ours(sequence_rows, scores)
    assert ours(Rows(sequence_rows.table, [other], np.array([2])), scores)[0, 5:7].tolist() == [
        -1,
        0,
    ]


# --- DRY ------------------------------------------------------------------------------------------


def dry_textbook(ids: list[int], scores: Tensor, ours: Dry) -> Tensor:
    """For every earlier place: how many ids before it match the end, and what that costs."""
    result, longest = scores.clone(), Counter[int]()
    for place in range(1, len(ids)):
        match = 0
        while match < place and ids[place - 1 - match] == ids[-1 - match]:
            if ids[-1 - match] in ours.breakers:
                break
            match += 1
        if ids[place] not in ours.breakers:
            longest[ids[place]] = max(longest[ids[place]], match)
    for token, match in longest.items():
        if match >= ours.allowed_length:
            result[token] -= ours.multiplier * ours.base ** (match - ours.allowed_length)
    return result


@pytest.mark.parametrize("seed", range(30))
def test_dry_is_its_textbook(seed: int) -> None:
    pick = np.random.default_rng(seed)
    ids = pick.integers(0, pick.integers(2, 5), pick.integers(1, 30)).tolist()
    ours = Dry(0.8, float(pick.choice([1.0, 1.75])), int(pick.integers(1, 4)), (3,) * (seed % 2))
    scores = some_scores(1)
    close(ours(torch.tensor([ids]), scores), dry_textbook(ids, scores[0], ours)[None])


def test_dry_reads_ragged_rows_and_no_padding() -> None:
    rows = rows_of([[7, 7, 1, 2, 1, 2, 1], [3, 4, 3]], pads=[2, 0])
    scores, ours = torch.zeros(2, VOCABULARY), Dry(1.0, 2.0, 1)
    alone = [
        dry_textbook([1, 2, 1, 2, 1], scores[0], ours),
        dry_textbook([3, 4, 3], scores[0], ours),
    ]
    close(ours(rows, scores), torch.stack(alone))


def test_dry_stays_finite_however_long_the_repetition() -> None:
    lost = Dry(5.0, 4.0, 2)(torch.full((1, 3000), 6), torch.zeros(1, VOCABULARY))
    assert lost.isfinite().all()
    assert lost[0, 6] < -1e30


# --- samplers of one row --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FINITE_MAXIMUM[:2] + FINITE_MAXIMUM[3:])
@pytest.mark.parametrize("n", [0.5, 1.0, 3.0])
def test_top_n_sigma_keeps_what_is_within_n_deviations(n: float, kind: str) -> None:
    scores = some_scores(4, kind)
    expected = []
    for row in scores.tolist():
        finite = [x for x in row if math.isfinite(x)]
        mean = sum(finite) / len(finite)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))
        expected.append({i for i, x in enumerate(row) if x >= max(row) - n * sigma - 1e-6})
    assert kept(TopNSigma(n)(torch.zeros(4, 1, dtype=torch.int64), scores)) == expected


@pytest.mark.parametrize("kind", ["plain", "ties", "banned", "single"])
@pytest.mark.parametrize(("spread", "exponent"), [(0.5, 1.0), (0.9, 2.0), (0.0, 1.0)])
def test_dynamic_temperature_follows_the_entropy(spread: float, exponent: float, kind: str) -> None:
    scores = some_scores(4, kind)
    expected = scores.clone()
    for r, row in enumerate(scores.double()):
        p = [x for x in row.softmax(-1).tolist() if x > 0]
        number = int(row.isfinite().sum())
        if number > 1:
            share = -sum(x * math.log(x) for x in p) / math.log(number)
            expected[r] /= 1.0 - spread + 2 * spread * share**exponent
    ours = DynamicTemperature(1.0, spread, exponent)
    torch.testing.assert_close(ours(torch.zeros(4, 1).long(), scores), expected, rtol=1e-4, atol=0)


def xtc_textbook(p: list[float], threshold: float) -> set[int]:
    likely = [i for i, x in enumerate(p) if x >= threshold]
    least = min((p[i] for i in likely), default=0.0)
    return {i for i in likely if p[i] > least}


@pytest.mark.parametrize("kind", ["plain", "ties", "banned", "single"])
@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.6])
def test_xtc_removes_all_likely_tokens_but_the_least_of_them(threshold: float, kind: str) -> None:
    scores = some_scores(6, kind)
    removed = [xtc_textbook(row.softmax(-1).tolist(), threshold) for row in scores]
    before = kept(scores)
    ours = kept(Xtc(1.0, threshold)(torch.zeros(6, 1).long(), scores))
    assert ours == [all_ - gone for all_, gone in zip(before, removed, strict=True)]
    assert torch.equal(Xtc(0.0, threshold)(torch.zeros(6, 1).long(), scores), scores)


def test_xtc_leaves_enough_for_beams() -> None:
    scores = torch.full((1, VOCABULARY), NEVER)
    scores[0, :3] = torch.tensor([3.0, 2.0, 1.0])
    assert kept(Xtc(1.0, 0.01, 1)(torch.tensor([[0]]), scores)) == [{2}]
    assert kept(Xtc(1.0, 0.01, 2)(torch.tensor([[0]]), scores)) == [{0, 1, 2}]


def seeded(ids: list[list[int]], seed: int, lineages: list[int]) -> Rows:
    rows = rows_of(ids)
    for sequence, lineage in zip(rows.sequences, lineages, strict=True):
        sequence.request = replace(sequence.request, draws=SeededDraws(seed))
        sequence.lineage = lineage
    return rows


def test_xtc_strikes_by_seed_sequence_and_position() -> None:
    ids, lineages = [[1] * n for n in (1, 2, 3, 4, 5, 6)], [9, 8, 7, 6, 5, 4]
    rows, scores = seeded(ids, 3, lineages), torch.zeros(6, VOCABULARY)
    scores[:, 0] = 3.0
    struck = [0 not in ids for ids in kept(Xtc(0.5, 0.001)(rows, scores))]
    numbers = uniform(np.full(6, 3), "xtc", np.array(lineages), np.arange(1, 7))[:, 0]
    assert struck == (numbers < 0.5).tolist()
    backwards = Xtc(0.5, 0.001)(rows.select(np.arange(6)[::-1]), scores)
    assert [0 not in ids for ids in kept(backwards)] == struck[::-1]


def test_xtc_without_a_seed_takes_the_next_numbers_of_the_global_generator() -> None:
    scores = torch.zeros(50, VOCABULARY)
    scores[:, 0] = 3.0
    torch.manual_seed(4)
    struck = [0 not in ids for ids in kept(Xtc(0.3, 0.001)(torch.ones(50, 1).long(), scores))]
    torch.manual_seed(4)
    assert struck == (torch.rand(50, 1, dtype=torch.float64)[:, 0] < 0.3).tolist()


# --- mirostat -------------------------------------------------------------------------------------


def mirostat_textbook(
    scores: list[Tensor], chosen: list[int], tau: float, eta: float
) -> list[set[int]]:
    limit, allowed = 2 * tau, []
    for row, token in zip(scores, chosen, strict=True):
        surprise = -(row.double().log_softmax(-1) / math.log(2))
        keep = surprise <= limit
        keep[row.argmax()] = True
        told = -(row.double().masked_fill(~keep, NEVER).log_softmax(-1) / math.log(2))
        allowed.append(set(torch.nonzero(keep)[:, 0].tolist()))
        if keep[token]:
            limit -= eta * (float(told[token]) - tau)
    return allowed


def by_and_by(rows: Rows, first: int, count: int) -> list[Rows]:
    """The same sequence, seen at one length after another."""
    return [Rows(rows.table, rows.sequences, np.array([first + n])) for n in range(count)]


@pytest.mark.parametrize(("tau", "eta"), [(1.0, 0.1), (3.0, 1.0), (0.2, 0.5)])
def test_mirostat_is_its_textbook(tau: float, eta: float) -> None:
    scores = [some_scores(1) for _ in range(20)]
    chosen = torch.randint(0, VOCABULARY, (20,)).tolist()
    steps = by_and_by(rows_of([[1, *chosen]]), 1, 20)
    ours = [kept(Mirostat(tau, eta)(r, s))[0] for r, s in zip(steps, scores, strict=True)]
    assert ours == mirostat_textbook([s[0] for s in scores], chosen, tau, eta)


def test_mirostat_sees_drafts_as_if_they_had_come_one_by_one() -> None:
    scores, ids = some_scores(8), [1, 2, 3, 4, 5, 6, 7, 8]
    one_by_one = rows_of([ids])
    slow = torch.cat(
        [Mirostat(1.5, 0.7)(r, scores[[i]]) for i, r in enumerate(by_and_by(one_by_one, 1, 8))]
    )
    drafted = rows_of([ids])
    at_once = Rows(drafted.table, drafted.sequences * 8, np.arange(1, 9))
    assert torch.equal(Mirostat(1.5, 0.7)(at_once, scores), slow)


def test_mirostat_forgets_what_came_after_the_place_it_goes_back_to() -> None:
    scores, ours = some_scores(6), Mirostat(1.5, 0.7)
    table_rows = rows_of([[1, 2, 3, 4, 5, 6]])
    sequence = table_rows.sequences[0]
    sequence.length = 2
    ours(Rows(table_rows.table, [sequence] * 6, np.arange(1, 7)), scores)
    memory = sequence.memo["mirostat"]
    assert [one.length for one in memory] == [1, 2, 3, 4, 5, 6]
    other = rows_of([[1, 2, 3, 9]])
    other.sequences[0].memo["mirostat"] = memory
    again = ours(Rows(other.table, other.sequences, np.array([4])), scores[[3]])
    assert [one.length for one in other.sequences[0].memo["mirostat"]] == [3, 4]
    assert sequence.memo["mirostat"] is memory
    plain = rows_of([[1, 2, 3, 9]])
    wanted = [ours(r, scores[[i]]) for i, r in enumerate(by_and_by(plain, 1, 4))]
    assert torch.equal(again, wanted[3])


# --- in the engine --------------------------------------------------------------------------------

MANY = [
    OccurrencePenalty(0.5, 0.2),
    OccurrencePenalty(1.5, 0.0),
    Dry(0.8, 1.75, 1),
    LogitBias(((3, 1.0),)),
    TopNSigma(1.0),
    TopNSigma(2.0),
    DynamicTemperature(1.0, 0.5),
    Xtc(0.5, 0.05),
    Xtc(0.9, 0.01),
    Mirostat(1.0),
    Mirostat(2.0, 0.5),
]


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_different_requests_are_as_if_alone(seed: int) -> None:
    pick = np.random.default_rng(seed)
    ids = [pick.integers(0, 5, pick.integers(2, 9)).tolist() for _ in range(len(MANY))]
    lineages = pick.integers(0, 99, len(MANY)).tolist()
    together = seeded(ids, seed, lineages)
    for sequence, one in zip(together.sequences, MANY, strict=True):
        sequence.request = replace(sequence.request, processors=(one,))
    scores, given = some_scores(len(MANY)), None
    given = scores.clone()
    ours = applied(together, scores)
    assert torch.equal(scores, given)
    for r, one in enumerate(MANY):
        alone = seeded([ids[r]], seed, [lineages[r]])
        assert torch.equal(one(alone, scores[[r]])[0], ours[r])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: OccurrencePenalty(2.5), "presence_penalty"),
        (lambda: OccurrencePenalty(0.0, -3), "frequency_penalty"),
        (lambda: Dry(-1.0), "dry_multiplier"),
        (lambda: Dry(1.0, 0.5), "dry_base"),
        (lambda: Dry(1.0, 1.5, 0), "dry_allowed_length"),
        (lambda: Dry(1.0, 1.5, 2, (-4,)), "dry_sequence_breakers"),
        (lambda: LogitBias(((-1, 2.0),)), "logit_bias"),
        (lambda: TopNSigma(0.0), "top_n_sigma"),
        (lambda: DynamicTemperature(1.0, -0.5), "dynatemp_range"),
        (lambda: DynamicTemperature(1.0, 0.5, 0.0), "dynatemp_exponent"),
        (lambda: Xtc(1.5), "xtc_probability"),
        (lambda: Xtc(0.5, -0.1), "xtc_threshold"),
        (lambda: Mirostat(0.0), "mirostat_tau"),
        (lambda: Mirostat(5.0, 1.5), "mirostat_eta"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: object, name: str) -> None:
    assert callable(make)
    with pytest.raises(RequestError, match=f"{name} is not valid; wanted"):
        make()


def test_a_numbers_tensor_is_one_per_row() -> None:
    scores = some_scores(3)
    ids = torch.zeros(3, 1).long()
    several = TopNSigma(torch.tensor([0.5, 1.0, 2.0]))(ids, scores)
    alone = [TopNSigma(n)(ids[:1], scores[[r]])[0] for r, n in enumerate((0.5, 1.0, 2.0))]
    assert torch.equal(several, torch.stack(alone))
