"""What is remembered of a prefix equals what its ids say, whatever happens to the sequence."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from everystep.engine.apply import copied, rewind_memory
from everystep.processors.base import LogitsProcessor, bare_rows
from everystep.processors.remembered import NGrams, Occurrences
from everystep.processors.repetition import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.types import Rows, Sequence, TokenTable
from tests.processors.making import VOCABULARY, a_sequence, same, some_scores

REMEMBERING = [
    RepetitionPenaltyLogitsProcessor(1.7),
    RepetitionPenaltyLogitsProcessor(0.6, 3),
    RepetitionPenaltyLogitsProcessor(1.3, 0),
    *[NoRepeatNGramLogitsProcessor(n) for n in (1, 2, 3, 5)],
]


class Line:
    """One sequence as the engine treats it: it grows, sees drafts, is forked and rewound."""

    def __init__(self, table: TokenTable, sequence: Sequence) -> None:
        self.table, self.sequence = table, sequence

    def grow(self, ids: list[int]) -> None:
        start = self.sequence.visible
        self.table.reserve(start + len(ids))
        self.table.data[self.sequence.line, start : start + len(ids)] = ids
        self.sequence.length += len(ids)

    def shrink(self, count: int) -> None:
        self.sequence.length -= count
        rewind_memory(self.sequence, self.sequence.visible)

    def fork(self) -> Line:
        old = self.sequence
        line = self.table.fork(old.line, old.visible)
        memo = copied(old.memo)
        return Line(self.table, Sequence(old.request, line, old.length, index=old.index, memo=memo))


def check(lines: list[Line], ours: LogitsProcessor) -> None:
    """Rows of all lines give what each one's plain ids give by hand."""
    lengths = np.array([line.sequence.visible for line in lines])
    rows = Rows(lines[0].table, [line.sequence for line in lines], lengths)
    scores = some_scores(len(lines))
    result = ours(rows, scores)
    for r, (line, length) in enumerate(zip(lines, lengths, strict=True)):
        ids = torch.from_numpy(line.table.data[line.sequence.line, :length].copy())[None]
        by_hand = ours
        if getattr(ours, "prompt_ignore_length", 0) is None:
            pad = line.sequence.request.pad_prefix
            by_hand = RepetitionPenaltyLogitsProcessor(ours.penalty, pad)  # type: ignore[attr-defined]
        assert same(result[r : r + 1], by_hand(ids, scores[r : r + 1]))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ours", REMEMBERING, ids=str)
def test_what_is_remembered_is_what_stands(ours: LogitsProcessor, seed: int) -> None:
    pick = random.Random(seed)
    table = TokenTable()
    lines = [
        Line(table, a_sequence(table, [pick.randrange(5) for _ in range(4)], pad=pad, prompt=4))
        for pad in (0, 2)
    ]
    for _ in range(40):
        line = pick.choice(lines)
        move = pick.random()
        if move < 0.6:
            line.grow([pick.randrange(5) for _ in range(pick.choice([1, 1, 1, 4]))])
        elif move < 0.8:
            line.shrink(pick.randrange(min(4, line.sequence.generated + 1)))
        elif len(lines) < 5:
            lines.append(line.fork())
        check(lines, ours)


@pytest.mark.parametrize("ours", REMEMBERING, ids=str)
def test_drafts_are_remembered_and_taken_back(ours: LogitsProcessor) -> None:
    table = TokenTable()
    line = Line(table, a_sequence(table, [1, 2, 1, 2, 3], prompt=5))
    check([line], ours)
    line.grow([1, 2, 4])
    drafted = Rows(table, [line.sequence] * 4, np.array([5, 6, 7, 8]))
    scores = some_scores(4)
    result = ours(drafted, scores)
    for r, length in enumerate((5, 6, 7, 8)):
        ids = torch.from_numpy(table.data[line.sequence.line, :length].copy())[None]
        assert same(result[r : r + 1], ours(ids, scores[r : r + 1]))
    line.shrink(2)
    line.grow([3])
    check([line], ours)


def test_a_fork_shares_nothing_that_changes() -> None:
    first = Occurrences()
    first.extend([1, 2, 1])
    second = first.copy()
    second.extend([1, 3])
    assert (first.tokens.tolist(), first.counts.tolist()) == ([1, 2], [2, 1])
    assert (second.tokens.tolist(), second.counts.tolist()) == ([1, 2, 3], [3, 1, 1])
    grams = NGrams(2)
    grams.extend([1, 2, 1])
    other = grams.copy()
    other.extend([3, 1])
    assert (grams.next(), other.next()) == ((2,), (2, 3))


@pytest.mark.parametrize("step", [-1, -3, -60])
def test_counts_follow_every_rewind(step: int) -> None:
    line = np.array([random.Random(0).randrange(90) for _ in range(400)])
    memory = Occurrences(2)
    for length in range(400, 1, step):
        memory.read(line, length)
        kept = Counter(line[2:length].tolist())
        assert dict(zip(memory.tokens.tolist(), memory.counts.tolist(), strict=True)) == kept


def test_any_number_of_ids_may_be_new() -> None:
    line, memory = np.arange(1_000), Occurrences()
    for length in range(1, len(line) + 1):
        memory.read(line, length)
        assert memory.tokens.size == length
    assert (memory.counts == 1).all() and memory.tokens.tolist() == line.tolist()
    assert memory.below(700).tolist() == line[:700].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_n_gram_is_known_wherever_it_stands(size: int) -> None:
    line, memory = np.random.default_rng(size).integers(0, 30, 700), NGrams(size)
    known: dict[tuple[int, ...], list[int]] = {}
    for length in range(1, len(line) + 1):
        memory.read(line, length)
        if length >= size:
            *head, last = line[length - size : length].tolist()
            following = known.setdefault(tuple(head), [])
            following += [] if last in following else [last]
    assert {head: list(memory.following(head)) for head in known} == known


@pytest.mark.parametrize("memory", [Occurrences(), NGrams(3)], ids=["ids", "3-grams"])
def test_a_fork_costs_what_is_new_and_not_what_is_long(memory: Occurrences | NGrams) -> None:
    sizes = []
    for _ in range(2):
        memory.extend(list(range(20_000)))
        sizes.append(changing(memory.copy()))
    assert max(sizes) < 1_500


def changing(memory: object) -> int:
    """How many entries a memory holds that it does not share."""
    names = {name for kind in type(memory).__mro__ for name in getattr(kind, "__slots__", ())}
    held = (getattr(memory, name) for name in names)
    return sum(len(one) for one in held if isinstance(one, list | dict))


def test_ids_given_by_hand_are_not_remembered() -> None:
    rows = bare_rows(torch.zeros(2, 3, dtype=torch.int64))
    for ours in REMEMBERING:
        ours(rows, torch.zeros(2, VOCABULARY))
    assert all(not sequence.memo for sequence in rows.sequences)
