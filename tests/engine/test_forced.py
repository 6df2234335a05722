"""Drafts of what a grammar forces are as long as they are asked to be, and no longer."""

from __future__ import annotations

import pytest

from everystep.engine.forced import ForcedTokens
from everystep.types import TokenTable
from everystep.types.request import WantedDraft
from tests.processors.making import a_sequence
from tests.processors.test_grammars import SIZE, mask_of

B, C = 3, 4


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 9])
def test_forced_ids_are_as_many_as_are_asked_for(most: int) -> None:
    mask, table = mask_of("regex", "b{6}(c|a)"), TokenTable()
    sequence = a_sequence(table, [C, B], (mask,))
    drafting = ForcedTokens().start(SIZE)
    first, second = drafting.propose(
        [WantedDraft(sequence, most), WantedDraft(sequence, most, rank=1)], table
    )
    # One stands already, and the last may be chosen together with what follows it.
    assert first.ids.tolist() == [B] * min(most, 4) and second.ids.tolist() == []


def test_where_nothing_is_forced_nothing_is_drafted_without_another_drafter() -> None:
    mask, table = mask_of("regex", "(b|c)b{3}"), TokenTable()
    free, bound = (a_sequence(table, ids, (mask,)) for ids in ([C], [C, B]))
    drafting = ForcedTokens().start(SIZE)
    found = drafting.propose([WantedDraft(free, 4), WantedDraft(bound, 2)], table)
    assert [one.ids.tolist() for one in found] == [[], [B, B]]
