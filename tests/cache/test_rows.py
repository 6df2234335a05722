"""Rows hold what was written into them, whatever is forked, cut, frozen, moved and freed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everystep.cache.bank import FIRST_FREEZE, LATER_FREEZE, MAX_CHAIN
from everystep.cache.context import CacheContext
from everystep.cache.fixed_plan import lay_out
from everystep.cache.rows import RowCache
from everystep.errors import InvariantError
from everystep.nn.network import Cross, Full
from everystep.types import Verb, Work

LAYERS = 2
FULL = Full(2, 3, 3)
LONG = FIRST_FREEZE


class Driver:
    """A cache, and beside it a plain list of what every row should hold."""

    def __init__(self) -> None:
        self.cache = RowCache([[FULL]] * LAYERS, torch.float64, torch.device("cpu"))
        self.expected: dict[int, list[int]] = {}
        self._written = 0

    def do(self, *verbs: tuple[object, ...], feed: dict[int, int] | None = None) -> None:
        """Applies verbs, then writes so many new positions into each fed row."""
        made = [Verb(*verb) for verb in verbs]  # type: ignore[arg-type]
        for verb in made:
            self._note(verb)
        feed = feed or {}
        starts = [len(self.expected[row]) for row in feed]
        work = work_of(made, list(feed), starts, list(feed.values()))
        self.cache.apply(work)
        if feed:
            self._write(work)

    def _note(self, verb: Verb) -> None:
        if verb.kind == "allocate":
            self.expected[verb.row] = []
        elif verb.kind == "fork":
            self.expected[verb.row] = list(self.expected[verb.value])
        elif verb.kind == "truncate":
            del self.expected[verb.row][verb.value :]
        else:
            del self.expected[verb.row]

    def _write(self, work: Work) -> None:
        plan = CacheContext.of(self.cache, work).plan
        numbers = np.arange(self._written, self._written + len(work.tokens))
        self._written += len(numbers)
        for row, part in zip(
            work.rows.tolist(), np.split(numbers, np.cumsum(work.counts)[:-1]), strict=True
        ):
            self.expected[row] += part.tolist()
        packed = numbers if plan.order is None else numbers[plan.order]
        (bank,), (writes,) = self.cache.banks, plan.writes
        for layer in range(LAYERS):
            bank.tails.layer(layer)[:, writes.lines, :, writes.places] = values(packed)

    def check(self) -> None:
        """Every row holds what it should, and tails fill the first lines."""
        assert self.cache.lengths() == {row: len(held) for row, held in self.expected.items()}
        lines = [self.cache[number].line for number in self.expected]
        assert sorted(lines) == list(range(len(lines)))
        for number, held in self.expected.items():
            assert self.held(number) == held

    def held(self, number: int) -> list[int]:
        """The numbers that were written into a row."""
        row, (bank,) = self.cache[number], self.cache.banks
        (part,) = row.parts
        parts = [bank.shelf.read(link.segment.line, link.length) for link in part.chain]
        parts.append(bank.tails.read(row.line, part.tail))
        stored = torch.cat(parts, dim=3)
        written = stored[0, 0, 0, :, 0].long()
        assert torch.equal(stored, values(written).permute(1, 2, 0, 3).expand_as(stored))
        return written.tolist()


def values(numbers: np.ndarray | Tensor) -> Tensor:
    """(n, 2, K, D) keys and values that tell positions apart."""
    wide = torch.as_tensor(numbers, dtype=torch.float64)[:, None, None, None]
    return wide.expand(-1, 2, FULL.heads, FULL.key_dim)


def work_of(verbs: list[Verb], rows: list[int], starts: list[int], counts: list[int]) -> Work:
    arrays = [np.array(one, dtype=np.int64) for one in (rows, starts, counts)]
    tokens = np.zeros(sum(counts), dtype=np.int64)
    return Work(tuple(verbs), *arrays, np.zeros(len(rows), dtype=np.int64), tokens)


def opened(length: int) -> Driver:
    """Row 0 with so many positions."""
    driver = Driver()
    driver.do(("allocate", 0), feed={0: length})
    return driver


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_any_history_of_verbs(seed: int) -> None:
    driver, rng = Driver(), np.random.default_rng(seed)
    for _ in range(12):
        verbs: list[tuple[object, ...]] = []
        rows = {row: len(held) for row, held in driver.expected.items()}
        for _ in range(rng.integers(0, 5)):
            verbs.append(_random_verb(rows, rng))
        fed = [row for row in rows if rng.random() < 0.6]
        driver.do(*verbs, feed={row: int(rng.choice([1, 1, 3, 20, 140])) for row in fed})
        driver.check()
    driver.do(*(("free", row) for row in list(driver.expected)[1:]))
    if driver.expected:
        (last,) = driver.expected
        driver.do(("truncate", last, 0))
    assert driver.cache.shared == 0


def _random_verb(rows: dict[int, int], rng: np.random.Generator) -> tuple[object, ...]:
    """A verb that is possible now; `rows` is kept up to date."""
    new = min(set(range(100)) - set(rows))
    kind = rng.choice(["allocate", "fork", "fork", "truncate", "free"]) if rows else "allocate"
    if kind == "allocate":
        rows[new] = 0
        return ("allocate", new)
    row = int(rng.choice(list(rows)))
    if kind == "fork":
        rows[new] = rows[row]
        return ("fork", new, row)
    if kind == "truncate":
        rows[row] = int(rng.integers(0, rows[row] + 1))
        return ("truncate", row, rows[row])
    del rows[row]
    return ("free", row)


def test_siblings_of_a_long_prompt_cost_nothing() -> None:
    driver = opened(LONG)
    driver.do(*(("fork", row, 0) for row in range(1, 8)), feed=dict.fromkeys(range(8), 1))
    counts = driver.cache.counts
    assert (counts.forks, counts.freezes, counts.tail_copies, counts.moves) == (7, 1, 0, 0)
    driver.check()


def test_a_short_tail_is_copied() -> None:
    driver = opened(LONG - 1)
    driver.do(("fork", 1, 0), feed={0: 1, 1: 1})
    counts = driver.cache.counts
    assert (counts.freezes, counts.tail_copies) == (0, 1)
    driver.check()


def test_the_fork_of_a_row_that_dies_takes_its_line() -> None:
    driver = opened(LONG - 1)
    driver.do(("fork", 1, 0), ("fork", 2, 0), ("free", 0), feed={1: 1, 2: 1})
    counts = driver.cache.counts
    assert (counts.forks, counts.tail_copies, counts.moves) == (2, 1, 0)
    driver.check()


def test_a_fork_fills_the_gap_of_another_row() -> None:
    driver = opened(5)
    driver.do(("allocate", 1), ("allocate", 2), feed={1: 3, 2: 4})
    driver.do(("free", 1), ("fork", 3, 2), feed={3: 1})
    assert driver.cache.counts.moves == 0
    driver.check()


def test_at_most_one_move_per_freed_row() -> None:
    driver = Driver()
    driver.do(*(("allocate", row) for row in range(6)), feed=dict.fromkeys(range(6), 3))
    driver.do(("free", 0), ("free", 2))
    assert driver.cache.counts.moves == 2
    driver.check()
    driver.do(("free", 5), ("free", 4))
    assert driver.cache.counts.moves <= 4
    driver.check()


def test_rows_at_the_end_go_without_a_move() -> None:
    driver = Driver()
    driver.do(*(("allocate", row) for row in range(4)), feed=dict.fromkeys(range(4), 3))
    driver.do(("free", 3), ("free", 2))
    assert driver.cache.counts.moves == 0


def test_chains_have_an_end() -> None:
    driver = opened(LONG)
    for child in range(1, MAX_CHAIN + 3):
        driver.do(("fork", child, 0), feed={0: LATER_FREEZE})
    assert driver.cache.counts.freezes == MAX_CHAIN
    driver.check()


def test_truncation_into_a_segment_keeps_it_for_the_others() -> None:
    driver = opened(LONG + 4)
    driver.do(("fork", 1, 0), ("truncate", 1, 7), feed={0: 1, 1: 2})
    driver.check()
    assert len(driver.held(1)) == 9
    assert driver.cache.shared == 1


def test_a_segment_lives_as_long_as_a_row_refers_to_it() -> None:
    driver = opened(LONG)
    driver.do(("fork", 1, 0), ("fork", 2, 1))
    driver.do(("free", 0), ("free", 1), ("allocate", 3))
    assert driver.cache.shared == 1
    driver.do(("free", 2))
    assert driver.cache.shared == 0


def test_memory_is_allocated_by_doubling() -> None:
    driver = opened(1)
    for _ in range(300):
        driver.do(feed={0: 1})
    assert driver.cache.counts.allocations <= 5


def test_a_line_is_wiped_before_it_is_used_again() -> None:
    # What a softmax masks is still multiplied: a stranger's infinity would become NaN.
    driver = opened(9)
    (bank,) = driver.cache.banks
    bank.tails.layer(0).fill_(float("inf"))
    driver.do(("allocate", 1), feed={1: 1})
    driver.do(("free", 0), ("allocate", 2), feed={2: 1})
    line = driver.cache[2].line
    assert bool(bank.tails.read(line, 9)[0].isfinite()[:, :, 1:9].all())


def test_encoder_states_are_projected_once_per_tensor() -> None:
    calls = []

    def project(encoder: Tensor) -> Tensor:
        calls.append(encoder)
        return torch.zeros(2, 2, 2, len(encoder), 3, dtype=torch.float64)

    cache = RowCache([[FULL, Cross(2, 3, 3)]] * LAYERS, torch.float64, torch.device("cpu"), project)
    states, other = torch.ones(5, 4), torch.ones(6, 4)
    cache.allocate(0, states)
    cache.allocate(1, states)
    cache.allocate(2, other)
    cache.fork(3, 0)
    assert len(calls) == 2
    assert cache.shared == 2
    for row in (0, 1, 3):
        cache.free(row)
    assert cache.shared == 1


@pytest.mark.parametrize(
    "verb",
    [("allocate", 0), ("fork", 0, 0), ("fork", 2, 1), ("truncate", 0, 6), ("free", 1)],
    ids=str,
)
def test_impossible_verbs_are_found(verb: tuple[object, ...]) -> None:
    cache = opened(5).cache
    with pytest.raises(InvariantError):
        cache.apply(work_of([Verb(*verb)], [], [], []))  # type: ignore[arg-type]


def test_a_feed_at_the_wrong_place_is_found() -> None:
    with pytest.raises(InvariantError, match="wrong place"):
        CacheContext.of(opened(5).cache, work_of([], [0], [4], [1]))


def test_a_sheet_has_the_numbers_of_each_row_in_its_line() -> None:
    """Of a step that feeds one position to each row; rows are numbered otherwise than lines."""
    driver = Driver()
    driver.do(("allocate", 4), ("allocate", 2), ("allocate", 3), feed={4: 3, 2: 5, 3: 1})
    work = replace(work_of([], [3, 4], [1, 3], [1, 1]), tokens=np.array([70, 90]))
    shape, sheet = lay_out(driver.cache, work, np.array([11, 13]))
    at = [driver.cache[row].line for row in (3, 4)]
    order, tokens, positions, places = sheet[: 4 * shape.lines].reshape(4, shape.lines)
    assert order[:2].tolist() == at and shape.axes == 1
    assert tokens[at].tolist() == [70, 90]
    assert positions[at].tolist() == [1, 3] and places[at].tolist() == [11, 13]
    assert driver.cache.lengths() == {4: 4, 2: 5, 3: 2}
