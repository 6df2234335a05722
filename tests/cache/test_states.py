"""Recurrent states are kept where a row may be cut back to, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from everystep.cache.states import Mark, cut_marks, kept_steps, restored
from everystep.errors import InvariantError


@pytest.mark.parametrize(
    ("count", "wanted", "kept"),
    [(1, 1, [1]), (5, 1, [4, 5]), (5, 0, [5]), (5, 3, [2, 3, 4, 5]), (5, 5, [1, 2, 3, 4, 5])],
)
def test_a_feed_keeps_what_its_logits_may_be_taken_back_to(
    count: int, wanted: int, kept: list[int]
) -> None:
    assert list(kept_steps(count, wanted)) == kept


def test_marks_are_cut_to_one_of_them() -> None:
    marks = tuple(restored(position, [[torch.ones(2)]]) for position in (3, 5, 8))
    for count, length in enumerate((3, 5, 8), start=1):
        assert cut_marks(marks, length) == marks[:count]
    assert cut_marks(marks, 0) == ()
    for length in (1, 4, 6, 9):
        with pytest.raises(InvariantError, match="where none was kept"):
            cut_marks(marks, length)


def test_a_mark_is_taken_out_of_the_record_that_it_shares() -> None:
    record = [(torch.arange(6.0).view(3, 2),), (torch.arange(3.0).view(3, 1),)]
    mark = Mark(7, record, 1)
    alone = mark.apart()
    assert (alone.position, alone.entry) == (7, 0)
    assert [x.tolist() for one in alone.record for x in one] == [[[2.0, 3.0]], [[1.0]]]
    record[0][0].zero_()
    assert alone.states[0][0].tolist() == [2.0, 3.0]
    assert alone.apart() is alone  # a copy would hold the same a second time
