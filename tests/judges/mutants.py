"""Named defects that the laws must catch: each breaks the product in one place, for a while.

A mutant that survives shows that the laws are too lenient. Every replacement names the attribute
that it stands in for, and takes its arguments, so that a function which was renamed or takes more
is noticed at once: a mutant that fails when it is called would pass for one that is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from everystep import draws
from everystep.cache import rows as cache_rows
from everystep.cache.bank import Bank, BankPart
from everystep.cache.states import Mark
from everystep.engine import (
    alternatives,
    apply,
    batches,
    choices,
    drafting,
    engine,
    feed,
    given,
    layout,
    prefixes,
)
from everystep.engine.ledger import Ledger
from everystep.engine.prefixes import Prefixes
from everystep.processors import pipeline
from everystep.processors.stages import Stages
from everystep.testing.strict import Row
from everystep.types import Prompt, Request, Rows, Scores, Sequence
from everystep.types.draw_places import Places

Place = tuple[ModuleType | type, str]
Mutant = Callable[[], AbstractContextManager[None]]

MUTANTS: dict[str, Mutant] = {}
STORE_MUTANTS: dict[str, Mutant] = {}
"""Defects of what rows hold, which the hash model has none of: models of layers find them."""

PREFIX_MUTANTS: dict[str, Mutant] = {}
"""Defects of what requests share, each with a scenario that finds it; some change no token."""


@contextmanager
def replaced(replacement: Any, *places: Place) -> Iterator[None]:
    """Inside, the replacement stands at all of these places."""
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def mutant(name: str, *places: Place, kind: dict[str, Mutant] = MUTANTS) -> Callable[[Any], Any]:
    """Registers a replacement for the given places under a name, if it can be called like them."""

    def register(replacement: Any) -> Any:
        for owner, attribute in places:
            require_alike(replacement, getattr(owner, attribute))
        kind[name] = partial(replaced, replacement, *places)
        return replacement

    return register


def require_alike(replacement: Any, replaced: Any) -> None:
    """Refuses a replacement that does not take every argument of what it replaces."""
    own = signature(replacement)
    given: list[Any] = []
    named: dict[str, Any] = {}
    for one in signature(replaced).parameters.values():
        if one.kind is one.KEYWORD_ONLY:
            named[one.name] = one
        elif one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            given.append(one)
    try:
        own.bind(*given, **named)
    except TypeError as error:
        text = f"{replacement.__qualname__}{own} does not stand in for {replaced.__qualname__}"
        raise TypeError(f"{text}: {error}") from error


# --- rows -----------------------------------------------------------------------------------------


@mutant("aliasing fork", (Ledger, "fork"))
def _fork_shares_the_row(ledger: Ledger, source: int) -> int:
    return source


@mutant("aliasing storage", (Row, "first"))
def _fork_shares_the_arrays(row: Row, length: int) -> Row:
    row.parts = [part[:length] for part in row.parts]
    return row


@mutant("missing truncate", (Ledger, "truncate"))
def _truncate_forgets(ledger: Ledger, row: int, length: int) -> None:
    pass


@mutant("leaked row", (apply, "release"), (engine, "release"))
def _release_keeps_the_row(sequence: Sequence, ledger: Ledger) -> None:
    pass


@mutant("leaked companion", (apply, "drop_rows"))
def _drop_forgets_companions(sequence: Sequence, ledger: Ledger) -> None:
    if sequence.row is not None:
        ledger.free(sequence.row)
    for unit in sequence.units:
        unit.row = None
        unit.cached = 0


@mutant("preemption keeps its count", (apply, "drop_rows"))
def _drop_keeps_the_count(sequence: Sequence, ledger: Ledger) -> None:
    for unit in sequence.units:
        if unit.row is not None:
            ledger.free(unit.row)
        unit.row = None


@mutant("siblings share what differs", (feed, "common_length"))
def _shorter_tail_is_shared(tails: list[np.ndarray]) -> int:
    return min(map(len, tails))


@mutant("rejected drafts kept", (apply, "_agreement"))
def _all_drafts_agree(draft: np.ndarray, tokens: np.ndarray) -> int:
    return len(draft)


# --- feeds ----------------------------------------------------------------------------------------


@mutant("chunk that swallows the last token", (feed, "_feed_chunk"))
def _chunk_leaves_nothing(grant: feed.Grant, feeds: feed.Feeds) -> None:
    left = grant.tokens
    for sequence in grant.group.live:
        for unit, prompt, length in feed.units_of(sequence):
            count = min(left, length - unit.cached)
            if count > 0:
                feeds.add(unit, prompt, sequence, count, 0)
                left -= count


_true_positions = given.Span.positions


@mutant("stale position", (given.Span, "positions"))
def _positions_stand_still(span: given.Span) -> Tensor | None:
    prompt = span.prompt
    if prompt.positions is None or span.inside:
        return _true_positions(span)
    return torch.full((*prompt.positions.shape[:-1], span.count), prompt.follows)


# --- scores and draws -----------------------------------------------------------------------------


@mutant("order-dependent draw", (draws.SeededDraws, "uniform"))
def _draw_by_slot(self: draws.SeededDraws, stream: str, places: Places, n: int = 1) -> Tensor:
    return torch.from_numpy(draws.uniform(places.seed, stream, places.slot, places.position, n))


@mutant("fork without a lineage", (layout, "fork_lineage"))
def _lineage_is_inherited(lineage: int, position: int, rank: int) -> int:
    return lineage


@mutant("normalising after processors", (batches, "apply"))
def _normalise_late(
    rows: Rows, scores: Scores, *, owned: bool = False, stages: Stages | None = None
) -> Scores:
    scores = pipeline.apply(rows, scores, owned=owned, stages=stages)
    if rows.sequences[0].request.strategy.reads.scores == "log_probs":
        scores = Scores.of(scores.whole().values.log_softmax(dim=-1))
    return scores


@mutant("processors of a neighbour", (pipeline, "_apply_mixed"))
def _first_row_speaks_for_all(canvas: pipeline._Canvas) -> None:
    canvas.run_all(canvas.rows.sequences[0].request.processors)


# --- memory ---------------------------------------------------------------------------------------


@mutant("shared memory", (apply, "copied"))
def _memory_is_shared(memo: dict[str, Any]) -> dict[str, Any]:
    return dict(memo)


@mutant("memory not rewound", (apply, "rewind_memory"))
def _memory_stays(sequence: Sequence, visible: int) -> None:
    pass


# --- stores ---------------------------------------------------------------------------------------


@mutant("state store truncated without a mark", (cache_rows, "cut_marks"), kind=STORE_MUTANTS)
def _cut_keeps_the_newest(marks: tuple[Mark, ...], length: int) -> tuple[Mark, ...]:
    return tuple(mark._replace(position=length) for mark in marks[-1:]) if length else ()


_true_settle = Bank.settle


@mutant("window evicts too early", (Bank, "settle"), kind=STORE_MUTANTS)
def _settle_sees_less(bank: Bank, part: BankPart, line: int, start: int) -> BankPart:
    # As if the feed began two positions later.
    return _true_settle(bank, part, line, start + 2)


_true_extended = Bank.extended


@mutant("window forgets what may be taken back", (Bank, "extended"), kind=STORE_MUTANTS)
def _extended_ignores_the_floor(
    bank: Bank, part: BankPart, count: int, floor: int, *, alone: bool
) -> BankPart:
    return _true_extended(bank, part, count, part.length + count, alone=alone)


# --- several drafts -------------------------------------------------------------------------------


@mutant("outdone drafts keep their rows", (choices, "drop_outdone"))
def _outdone_drafts_stay(change: Any, feeds: Any) -> None:
    pass


_true_alternative = alternatives.alternative


@mutant("alternatives draw for themselves", (drafting, "alternative"))
def _alternative_of_another_lineage(sequence: Sequence, feeds: Any) -> Sequence:
    copy = _true_alternative(sequence, feeds)
    copy.lineage += 1
    return copy


@mutant("alternatives share the row", (drafting, "fork_rows"))
def _alternative_without_a_fork(sequence: Sequence, feeds: Any) -> None:
    with mock.patch.object(Ledger, "fork", lambda ledger, source: source):
        alternatives.fork_rows(sequence, feeds)


# --- prefixes -------------------------------------------------------------------------------------

_true_key = prefixes.key_of


@mutant("salt ignored", (prefixes, "key_of"), kind=PREFIX_MUTANTS)
def _key_without_salt(request: Request) -> prefixes.Key:
    return _true_key(request)._replace(salt=None)


@mutant("adapter ignored", (prefixes, "key_of"), kind=PREFIX_MUTANTS)
def _key_without_adapters(request: Request) -> prefixes.Key:
    return _true_key(request)._replace(adapters=())


@mutant("kept row not released", (Prefixes, "_drop"), kind=PREFIX_MUTANTS)
def _drop_keeps_the_row(held: Prefixes, one: prefixes.Kept) -> None:
    held.kept.remove(one)


@mutant("source ignored", (Prefixes, "_source"), kind=PREFIX_MUTANTS)
def _no_source_is_told_from_another(held: Prefixes, states: Any) -> None:
    return None


_true_take = Prefixes._take


@mutant("row kept longer than its truncation", (Prefixes, "_take"), kind=PREFIX_MUTANTS)
def _take_does_not_cut(
    held: Prefixes, lead: Sequence, source: Any, count: int, room: prefixes.Room
) -> None:
    with mock.patch.object(Ledger, "truncate", lambda ledger, row, length: None):
        _true_take(held, lead, source, count, room)


@mutant("inputs ignored", (prefixes, "_digests"), kind=PREFIX_MUTANTS)
def _digests_are_of_ids(prompt: Prompt, declared: Any) -> np.ndarray:
    return np.stack([np.asarray(prompt.ids)] * 3, axis=1)


_true_holders = Prefixes._holders


@mutant("nobody waits", (Prefixes, "_holders"), kind=PREFIX_MUTANTS)
def _nothing_is_coming(held: Prefixes, *given: Any) -> Iterator[tuple[Any, int, int]]:
    return ((holder, found, 0) for holder, found, _ in _true_holders(held, *given))
