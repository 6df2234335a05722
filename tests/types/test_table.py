"""The table of visible ids: lines are opened, forked and closed, and none overwrites another."""

from __future__ import annotations

import numpy as np
import pytest

from everystep.types import TokenTable


def held(table: TokenTable, line: int, count: int) -> list[int]:
    found: list[int] = table.data[line, :count].tolist()
    return found


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_lines_are_handed_out_lowest_first() -> None:
    table = TokenTable(lines=4)
    assert [table.open(ids(i)) for i in range(4)] == [0, 1, 2, 3]
    assert table.open_lines == 4


def test_a_line_begins_with_its_ids() -> None:
    table = TokenTable()
    line = table.open(ids(5, 6, 7))
    assert held(table, line, 3) == [5, 6, 7]
    table.write(line, 3, [8, 9])
    assert held(table, line, 5) == [5, 6, 7, 8, 9]


def test_a_line_may_begin_empty() -> None:
    table = TokenTable()
    line = table.open(ids())
    table.write(line, 0, [4])
    assert held(table, line, 1) == [4]


def test_a_fork_is_a_copy() -> None:
    table = TokenTable()
    parent = table.open(ids(1, 2, 3))
    child = table.fork(parent, 2)
    table.write(child, 2, [9])
    table.write(parent, 0, [7])
    assert held(table, parent, 3) == [7, 2, 3]
    assert held(table, child, 3) == [1, 2, 9]


def test_a_closed_line_is_handed_out_again() -> None:
    table = TokenTable(lines=2)
    first, second = table.open(ids(1)), table.open(ids(2))
    table.close(first)
    assert table.open_lines == 1
    assert table.open(ids(3)) == first
    assert held(table, second, 1) == [2]


@pytest.mark.parametrize("forked", [False, True])
def test_more_lines_than_there_are_leave_the_others_as_they_are(forked: bool) -> None:
    table = TokenTable(lines=2, capacity=3)
    lines = [table.open(ids(10, 11, 12))]
    for i in range(1, 9):
        lines.append(table.fork(lines[0], 3) if forked else table.open(ids(10, 11, 12)))
        table.write(lines[i], 0, [i])
    assert sorted(lines) == list(range(9))
    assert table.open_lines == 9
    assert held(table, lines[0], 3) == [10, 11, 12]
    assert all(held(table, lines[i], 3) == [i, 11, 12] for i in range(1, 9))


def test_longer_lines_than_there_is_room_for_leave_the_others_as_they_are() -> None:
    table = TokenTable(lines=2, capacity=2)
    short, long = table.open(ids(1, 2)), table.open(np.arange(50))
    assert held(table, short, 2) == [1, 2]
    assert held(table, long, 50) == list(range(50))
    table.write(short, 2, list(range(100, 200)))
    assert held(table, short, 102) == [1, 2, *range(100, 200)]


def test_room_is_reserved_for_every_line() -> None:
    table = TokenTable(lines=2, capacity=4)
    line = table.open(ids(1, 2, 3, 4))
    table.reserve(4)
    assert table.data.shape == (2, 4)
    table.reserve(5)
    assert table.data.shape[1] >= 5
    assert held(table, line, 4) == [1, 2, 3, 4]


def test_growing_by_one_is_not_copying_each_time() -> None:
    table = TokenTable(capacity=4)
    line, sizes = table.open(ids(0)), set()
    for i in range(1, 1_000):
        table.write(line, i, [i])
        sizes.add(table.data.shape[1])
    assert held(table, line, 1_000) == list(range(1_000))
    assert len(sizes) < 12


def test_only_the_lines_that_are_kept_stay_open() -> None:
    table = TokenTable(lines=4)
    for i in range(4):
        table.open(ids(i))
    table.keep({1, 3})
    assert table.open_lines == 2
    assert {table.open(ids(7)), table.open(ids(8))} == {0, 2}
    assert held(table, 1, 1) == [1] and held(table, 3, 1) == [3]


@pytest.mark.parametrize("lines", [[0, 1, 2], [1, 2], [2, 0], [1, 1], [3], []])
def test_a_rectangle_has_the_lines_in_their_order(lines: list[int]) -> None:
    table = TokenTable(lines=4)
    for i in range(4):
        table.open(ids(10 * i, 10 * i + 1, 10 * i + 2))
    found = table.rectangle(np.array(lines, dtype=np.int64), 2)
    assert found.shape == (len(lines), 2)
    assert found.tolist() == [[10 * i, 10 * i + 1] for i in lines]


def test_a_rectangle_of_one_block_costs_no_copy() -> None:
    table = TokenTable(lines=4)
    for i in range(4):
        table.open(ids(i))
    assert np.shares_memory(table.rectangle(np.array([1, 2]), 1), table.data)
    assert not np.shares_memory(table.rectangle(np.array([2, 1]), 1), table.data)
