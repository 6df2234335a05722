"""Named defects of what an engine remembers, each with the check that must notice it.

They stand beside those of `tests.judges.mutants`, which random mixes kill. These need an
interrupt at one certain place, a generation that is restored, or a look at what a step has asked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from everystep.engine import engine, feed, hooks, second, sequels, snapshot
from everystep.engine.choices import Choices
from everystep.strategies import single
from everystep.types import Children, Extra, Group, Hooked, Sequence, TokenTable
from everystep.types import request as nouns
from everystep.types.draw_places import Places
from everystep.types.request import Batch
from tests.judges.mutants import Mutant
from tests.judges.mutants import mutant as registering

MUTANTS: dict[str, Mutant] = {}
HOOK_MUTANTS: dict[str, Mutant] = {}
mutant = partial(registering, kind=MUTANTS)

_true_continue_each = single.continue_each


@mutant("select that writes", (single, "continue_each"))
def _select_counts_in_the_sequence(batch: Batch, tokens: np.ndarray) -> Children:
    for sequence in batch.sequences:
        sequence.score += 1.0
    return _true_continue_each(batch, tokens)


@mutant("select that writes to its group", (single, "continue_each"))
def _select_counts_in_the_group(batch: Batch, tokens: np.ndarray) -> Children:
    for group in batch.groups:
        group.state = 1 + (group.state or 0)
    return _true_continue_each(batch, tokens)


_true_recover = engine.Engine.recover


@mutant("event lost", (engine.Engine, "recover"))
def _recover_drops_what_was_not_taken(self: engine.Engine) -> None:
    broken = self._broken
    _true_recover(self)
    if broken:
        self._outbox = deque()


_true_selected = Choices._selected


@mutant("apply before all selected", (Choices, "_selected"))
def _selected_puts_in_place(self: Choices, *given: Any) -> None:
    _true_selected(self, *given)
    for change in self.changes:
        change.group.become(change.after)


@mutant("drafter row leaked", (second.SecondRow, "release"))
def _release_keeps_the_drafters_row(row: second.SecondRow) -> None:
    pass


_true_extra = feed.Feeds._extra


@mutant("want that switches a neighbour", (feed.Feeds, "_extra"))
def _everybody_wants_what_one_does(feeds: feed.Feeds, *given: Any, **named: Any) -> Extra | None:
    extra = _true_extra(feeds, *given, **named)
    others = [one.extra for one in feeds.made if one.extra is not None]
    return extra or next(iter(others), None)


_true_resume = snapshot.resume


@mutant("restored draw out of step", (engine, "resume"))
def _restored_siblings_draw_alike(group: Group, saved: dict[str, Any], table: TokenTable) -> None:
    _true_resume(group, saved, table)
    for sequence in group.live:
        sequence.lineage = 0


_true_places = nouns.places_of


@mutant("draws counted from the end of the prompt", (nouns, "places_of"))
def _positions_begin_at_the_prompts_end(
    sequences: list[Sequence], position: np.ndarray, *rest: Any
) -> Places:
    prompts = np.array([s.request.prompt.length for s in sequences], dtype=np.uint64)
    return _true_places(sequences, position - prompts, *rest)


# --- hooks ----------------------------------------------------------------------------------------

hook_mutant = partial(registering, kind=HOOK_MUTANTS)


@hook_mutant("memory of today for yesterday's positions", (Hooked, "at"))
def _the_newest_memory(hooked: Hooked, position: int) -> tuple[Any, ...]:
    return hooked.memories


@hook_mutant("drafts taken whatever they were given", (hooks, "_equal"))
def _whatever_was_given(one: Any, other: Any) -> bool:
    return True


_true_noted = sequels.Sequels.noted


@hook_mutant("memory of the first sibling", (sequels.Sequels, "noted"))
def _the_first_child_speaks_for_all(
    own: sequels.Sequels, children: Children, rows: list[int]
) -> Children:
    noted = _true_noted(own, children, rows)
    memo = [None if one is None else {**one, **(noted.memo or [{}])[0]} for one in noted.memo or []]  # type: ignore[dict-item]
    return replace(noted, memo=memo)


_true_asked = sequels.Sequels._asked


@hook_mutant("forced for ever", (sequels.Sequels, "_asked"))
def _forced_tokens_stay(own: sequels.Sequels, row: int, token: int, state: Hooked) -> Hooked:
    after = _true_asked(own, row, token, state)
    return after if not state.forced else after._replace(forced=state.forced)
