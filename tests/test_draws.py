"""Draws: what they are keyed by, how they are distributed, and that they are transformers'."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.draws import (
    SeededDraws,
    SharedDraws,
    fork_lineage,
    set_seed,
    uniform,
)
from everystep.errors import RequestError
from everystep.types import Prompt, Request, Scores, Sequence
from everystep.types.draw_places import Places
from everystep.types.request import places_of

STREAMS = ("choice", "accept", "residual", "draft", "xtc")
# Five standard deviations: a fair draw fails once in more than a million runs, and the seeds are
# fixed, so that it fails always or never.
FAR = 5.0


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def places(rows: int, *, seed: int = 3, slots: int | None = None, position: int = 0) -> Places:
    """Rows of one seed, each with a lineage of its own."""
    return Places(
        np.full(rows, seed, np.uint64),
        np.arange(rows, dtype=np.uint64),
        np.full(rows, position, np.uint64),
        np.arange(rows),
        slots or rows,
    )


def at(where: Places, rows: list[int]) -> Places:
    """Some of the rows, in another order; the rectangle of the call stays as it is."""
    return Places(
        where.seed[rows], where.lineage[rows], where.position[rows], where.slot[rows], where.slots
    )


def random_scores(rows: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, size, generator=generator)


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_every_part_of_the_key_matters(index: int) -> None:
    keys: list[Any] = [7, "choice", 11, 13]
    changed = list(keys)
    changed[index] = "accept" if index == 1 else keys[index] + 1
    one, other = (uniform(words(k[0]), k[1], words(k[2]), words(k[3]), 4) for k in (keys, changed))
    assert not np.isin(one, other).any()


def test_parts_of_the_key_are_not_added_up() -> None:
    """Keys whose parts have equal sums, or change places, have numbers of their own."""
    many = [(s, n, p) for s in range(12) for n in range(12) for p in range(12)]
    columns = [words(*column) for column in zip(*many, strict=True)]
    found = [uniform(columns[0], name, columns[1], columns[2], 2) for name in STREAMS]
    numbers = np.concatenate(found).ravel()
    assert len(np.unique(numbers)) == len(numbers) == len(STREAMS) * 12**3 * 2


def test_the_same_key_gives_the_same_number_in_any_company() -> None:
    rng = np.random.default_rng(0)
    seeds, lineages, positions = rng.integers(0, 2**64, (3, 50), dtype=np.uint64)
    together = uniform(seeds, "choice", lineages, positions, 3)
    order = rng.permutation(50)
    again = uniform(seeds[order], "choice", lineages[order], positions[order], 3)
    assert np.array_equal(again, together[order])
    for row in range(50):
        own = slice(row, row + 1)
        alone = uniform(seeds[own], "choice", lineages[own], positions[own], 1)
        assert alone[0, 0] == together[row, 0]


def test_extreme_keys_are_keys_like_others() -> None:
    ends = words(0, 2**64 - 1)
    numbers = uniform(*(ends[[0, 0, 1, 1]], "choice", ends[[0, 1, 0, 1]], ends[[0, 1, 1, 0]]), 2)
    assert len(np.unique(numbers)) == 8
    assert np.all((numbers > 0) & (numbers < 1))


def test_lineages_of_forks_are_new() -> None:
    parents = [0, 1, 2, 2**63, 2**64 - 1]
    found = {
        fork_lineage(parent, position, rank)
        for parent in parents
        for position in range(40)
        for rank in range(1, 40)
    }
    assert len(found) == len(parents) * 40 * 39
    assert not found & set(parents)
    assert all(0 <= lineage < 2**64 for lineage in found)
    assert fork_lineage(1, 2, 3) == fork_lineage(1, 2, 3)


def test_places_come_from_requests_and_sequences() -> None:
    prompt = Prompt(ids=np.array([1]))
    seeds = (5, 2**70 + 9, -1)
    sequences = [
        Sequence(Request(str(seed), prompt, None, SeededDraws(seed)), 0, 1, lineage=2**64 - 1 - i)
        for i, seed in enumerate(seeds)
    ]
    found = places_of(sequences, np.array([4, 0, 9]), np.array([2, 0, 1]), 3)
    assert found.seed.tolist() == [5, 9, 2**64 - 1]
    assert found.lineage.tolist() == [2**64 - 1, 2**64 - 2, 2**64 - 3]
    assert found.position.tolist() == [4, 0, 9]


# --- distribution ---------------------------------------------------------------------------------


def test_numbers_are_uniform() -> None:
    """Over lineages and over positions, in every tenth, and from one to the next."""
    count = 20_000
    fixed, running = np.full(count, 5, np.uint64), np.arange(count, dtype=np.uint64)
    for lineage, position in ((fixed, running), (running, fixed)):
        numbers = uniform(fixed, "choice", lineage, position)[:, 0]
        tenths = np.bincount((numbers * 10).astype(int), minlength=10)
        assert np.abs(tenths - count / 10).max() < FAR * math.sqrt(count * 0.09)
        centred = numbers - 0.5
        correlation = float((centred[1:] * centred[:-1]).mean() * 12)
        assert abs(correlation) < FAR / math.sqrt(count)


def shares(tokens: Tensor, size: int) -> Tensor:
    return torch.bincount(tokens, minlength=size).double() / len(tokens)


@pytest.mark.parametrize("size", [9, 5_000])
def test_seeded_choices_follow_the_softmax(size: int) -> None:
    """A few rows beyond the small vocabularies, whose weights are summed in blocks."""
    rows = 20_000 if size < 100 else 2_000
    scores = torch.full((1, size), -math.inf)
    scores[0, torch.arange(9) * (size // 9)] = random_scores(1, 9)[0]
    tokens = SeededDraws(3).choose(Scores.of(scores.expand(rows, size)), places(rows))
    wanted = scores[0].softmax(-1).double()
    spread = (wanted * (1 - wanted) / rows).sqrt()
    assert bool(((shares(tokens, size) - wanted).abs() <= FAR * spread).all())


def test_draws_without_replacement_follow_the_successive_choices() -> None:
    """The first index has the probabilities, the second those of the rest."""
    rows, given = 20_000, torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    found = SeededDraws(3).choose_without_replacement(given.expand(rows, 4), places(rows), 2)
    pairs = Counter(map(tuple, found.tolist()))
    for (one, other), count in pairs.items():
        assert one != other
        wanted = float(given[0, one] * given[0, other] / (1 - given[0, one]))
        spread = math.sqrt(wanted * (1 - wanted) / rows)
        assert abs(count / rows - wanted) < FAR * spread
    assert len(pairs) == 12


# --- seeded choices -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50, 5_000])
def test_a_seeded_choice_does_not_know_its_batch(size: int) -> None:
    scores, where = random_scores(12, size), places(12, position=4)
    together = SeededDraws(3).choose(Scores.of(scores), where)
    order = [7, 2, 11, 0]
    assert torch.equal(
        SeededDraws(3).choose(Scores.of(scores[order]), at(where, order)), together[order]
    )
    for row in range(12):
        alone = SeededDraws(99).choose(Scores.of(scores[row : row + 1]), at(where, [row]))
        assert alone[0] == together[row], "the seed is that of the place"


@pytest.mark.parametrize(("size", "count"), [(40, 8), (5_000, 8), (200, 60), (2_000, 64)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_seeded_draws_without_replacement_are_gumbel_top_k(
    size: int, count: int, spread: float
) -> None:
    """Also where most tokens are passed over without a logarithm."""
    given, where = (spread * random_scores(20, size)).softmax(-1), places(20)
    noise = SeededDraws(3).uniform("choice", where, size)
    keys = given.double().log() - (-noise.log()).log()
    wanted, possible = keys.topk(count), (given > 0).sum(dim=-1, keepdim=True)
    found = SeededDraws(3).choose_without_replacement(given, where, count)
    same = (found == wanted.indices) | (torch.arange(count) >= possible)
    assert bool(same.all())


def test_seeded_draws_without_replacement_do_not_know_their_batch() -> None:
    given, where = random_scores(6, 40).softmax(-1), places(6)
    together = SeededDraws(3).choose_without_replacement(given, where, 5)
    for row in range(6):
        alone = SeededDraws(3).choose_without_replacement(given[[row]], at(where, [row]), 5)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("draws", [SeededDraws(3), SharedDraws()])
def test_a_list_gives_what_whole_rows_give(draws: Any) -> None:
    rows, vocabulary = 40, 30
    tokens = torch.stack([torch.randperm(vocabulary)[:6].sort().values for _ in range(rows)])
    short = Scores(random_scores(rows, 6), tokens, vocabulary)
    found = []
    for scores in (short, short.whole()):
        torch.manual_seed(0)
        found.append(draws.choose(scores, places(rows)))
    assert torch.equal(*found)


@pytest.mark.parametrize("draws", [SeededDraws(3), SharedDraws()])
@pytest.mark.parametrize("size", [20, 5_000])
def test_only_what_has_a_probability_is_drawn(draws: Any, size: int) -> None:
    scores = torch.full((200, size), -math.inf)
    possible = torch.tensor([0, size // 2, size - 1])
    scores[:, possible] = random_scores(200, 3)
    found = draws.choose(Scores.of(scores), places(200))
    assert set(found.tolist()) == set(possible.tolist())


@pytest.mark.parametrize("draws", [SeededDraws(3), SharedDraws()])
@pytest.mark.parametrize("size", [20, 5_000])
def test_a_row_without_a_distribution_gives_no_token(draws: Any, size: int) -> None:
    scores = random_scores(3, size)
    scores[1, 4] = math.nan
    found = draws.choose(Scores.of(scores), places(3))
    assert found[1] == -1 and found[0] >= 0 and found[2] >= 0
    drawn = draws.choose_without_replacement(scores.softmax(-1), places(3), 2)
    assert drawn[1].tolist() == [-1, -1] and bool((drawn[[0, 2]] >= 0).all())
    scores[1] = -math.inf
    assert draws.choose(Scores.of(scores), places(3))[1] == -1


# --- transformers' draws ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shared_choices_are_those_of_multinomial(dtype: torch.dtype) -> None:
    scores = random_scores(30, 50).to(dtype)
    torch.manual_seed(5)
    wanted = [torch.multinomial(scores.softmax(-1), 1)[:, 0] for _ in range(3)]
    torch.manual_seed(5)
    found = [SharedDraws().choose(Scores.of(scores), places(30)) for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_shared_draws_without_replacement_are_those_of_multinomial() -> None:
    given = random_scores(8, 50).softmax(-1)
    torch.manual_seed(5)
    wanted = torch.multinomial(given, 6)
    torch.manual_seed(5)
    assert torch.equal(SharedDraws().choose_without_replacement(given, places(8), 6), wanted)


def test_rows_that_left_keep_their_share_of_the_noise() -> None:
    """What goes on draws what it would beside all rows of the call, in whatever order."""
    scores, where, left = random_scores(9, 50), places(9), [6, 0, 3]
    torch.manual_seed(5)
    wanted = torch.multinomial(scores.softmax(-1), 1)[:, 0]
    torch.manual_seed(5)
    assert torch.equal(SharedDraws().choose(Scores.of(scores[left]), at(where, left)), wanted[left])
    torch.manual_seed(5)
    numbers = torch.rand(9, 2, dtype=torch.float64)
    torch.manual_seed(5)
    assert torch.equal(SharedDraws().uniform("xtc", at(where, left), 2), numbers[left])


# --- seeds ----------------------------------------------------------------------------------------


def test_set_seed_starts_every_generator_anew() -> None:
    def drawn() -> tuple[float, float, float]:
        set_seed(17)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        assert drawn() == drawn()
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None, "7"])
def test_an_impossible_seed_is_refused(seed: Any) -> None:
    with pytest.raises(RequestError, match="seed is impossible"):
        set_seed(seed)
