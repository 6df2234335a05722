"""Apply: children become sequences, and their kinship becomes forks, truncations and frees.

    source row    [ cached before | fed: rest, last token | drafts ]
    child A       keeps the row, truncated to what its own tokens share with what was fed
    child B, C    fork the row first, then truncate likewise
    no child      the row is freed

After it `cached < length` holds for every live sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from everystep.draws import fork_lineage
from everystep.engine.batches import sprout
from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import Likelihood, last_choices
from everystep.errors import InvariantError, message
from everystep.strategies.base import Batch
from everystep.types import (
    Children,
    Companion,
    Event,
    Finished,
    FinishReason,
    Group,
    Sequence,
    TokenTable,
)


def apply(batch: Batch, children: Children, table: TokenTable, ledger: Ledger) -> list[Event]:
    """The groups of the batch hold the children; returns what consumers may see of it."""
    events: list[Event] = []
    live: list[list[Sequence]] = [[] for _ in batch.groups]
    group_of = batch.group_of.tolist()
    born = _children(batch, children)
    heirs: dict[int, Child] = {}
    for child in born:
        if child.goes_on:
            heirs.setdefault(batch.sequences[child.parent].line, child)
        parent = batch.sequences[child.parent]
        if child.finish is not None and parent.finish is None:
            batch.groups[group_of[child.parent]].done.append(_finished(table, parent, child))
        events += _events(table, parent, child)
    # First of all, so that no group ever needs more rows than it declared.
    for line, source in {s.line: s for s in batch.sequences}.items():
        if line not in heirs:
            release(source, table, ledger)
    staying = [child for child in born if child.goes_on]
    sequences = _fork_all(batch, staying, heirs, table, ledger)
    for child, sequence in zip(staying, sequences, strict=True):
        _extend(sequence, batch.drafts[child.parent], child, table, ledger)
        live[group_of[child.parent]].append(sequence)
    for g, group in enumerate(batch.groups):
        group.opened = True
        group.live = live[g]
        group.settled = group.settled or g in children.settled
        if group.done:
            group.done = group.request.strategy.keep(group)
    return events


class Child(NamedTuple):
    """One of `Children`: `parent` is an index into the batch; `goes_on` says that it stays."""

    parent: int
    tokens: list[int]
    score: float
    finish: FinishReason | None
    provisional: int
    memo: dict[str, Any] | None
    rank: int
    goes_on: bool


def _children(batch: Batch, children: Children) -> list[Child]:
    """One by one, in plain numbers."""
    parents = children.parent.tolist()
    none = [0] * len(parents)
    sequences = [batch.sequences[parent] for parent in parents]
    rows = zip(children.tokens.tolist(), children.counts.tolist(), strict=True)
    provisional, index, lingers = children.provisional, children.index, children.lingers
    return list(
        map(
            Child,
            parents,
            [tokens[:count] for tokens, count in rows],
            children.score.tolist(),
            children.finish,
            none if provisional is None else provisional.tolist(),
            children.memo or [None] * len(parents),
            [s.index for s in sequences] if index is None else index.tolist(),
            [
                reason is None or (lingers and sequence.request.linger)
                for reason, sequence in zip(children.finish, sequences, strict=True)
            ],
        )
    )


def _fork_all(
    batch: Batch,
    children: list[Child],
    heirs: dict[int, Child],
    table: TokenTable,
    ledger: Ledger,
) -> list[Sequence]:
    """For every child the sequence that it simply continues, its parent's, or a new one.

    All forks come before any truncation: a later child may keep more of the row than an earlier.
    A sibling of an opening group that inherits the source's line is itself its continuation.
    """
    found: list[Sequence] = []
    ranks: dict[int, int] = {}
    for child in children:
        parent = batch.sequences[child.parent]
        rank = ranks[id(parent)] = ranks.get(id(parent), -1) + 1
        if heirs[parent.line] is child:
            found.append(parent)
            continue
        lineage = parent.lineage
        if rank:
            lineage = fork_lineage(lineage, parent.generated + 1, rank)
        fork = sprout(parent, table.fork(parent.line, parent.visible), lineage, parent.index)
        fork.row = None if parent.row is None else ledger.fork(parent.row)
        fork.companions = tuple(_fork_companion(one, ledger) for one in parent.companions)
        found.append(fork)
    return found


def _fork_companion(companion: Companion, ledger: Ledger) -> Companion:
    row = None if companion.row is None else ledger.fork(companion.row)
    return Companion(companion.prompt, companion.cached, row)


def _extend(
    sequence: Sequence, draft: np.ndarray, child: Child, table: TokenTable, ledger: Ledger
) -> None:
    """The sequence is the child: its rows hold what is still true of what was fed."""
    start, count = sequence.visible, len(child.tokens)
    table.write(sequence.line, start, child.tokens)
    agreed = _agreement(draft, child.tokens)
    kept = sequence.length + agreed
    rewind_memory(sequence, start + agreed)
    sequence.length += count
    excess = sequence.cached - min(kept, sequence.length - 1)
    if excess > 0:
        for unit in sequence.units:
            _trim(unit, excess, ledger)
    sequence.score = child.score
    sequence.finish = child.finish
    sequence.provisional = child.provisional
    sequence.index = child.rank
    if child.memo is not None:
        sequence.memo.update(child.memo)
    if not 0 <= sequence.cached < sequence.length:
        raise InvariantError(
            message(
                "a sequence is cached beyond its tokens",
                wanted="cached < length",
                got=(sequence.cached, sequence.length),
                do="Report this as a defect",
            )
        )


def rewind_memory(sequence: Sequence, visible: int) -> None:
    """What the sequence remembers speaks of its first `visible` ids only."""
    for value in sequence.memo.values():
        rewind = getattr(value, "rewind", None)
        if callable(rewind):
            rewind(visible)


def lasting(memo: Mapping[str, Any]) -> dict[str, Any]:
    """What of a memory is no cache of a prefix that goes on."""
    return {key: value for key, value in memo.items() if not hasattr(value, "copy")}


def _trim(unit: Sequence | Companion, excess: int, ledger: Ledger) -> None:
    if unit.row is not None:
        unit.cached -= excess
        ledger.truncate(unit.row, unit.cached)


def _agreement(draft: np.ndarray, tokens: list[int]) -> int:
    """How many of the first tokens equal the draft."""
    shorter = min(len(draft), len(tokens))
    if shorter == 0:
        return 0
    wrong = np.flatnonzero(draft[:shorter] != tokens[:shorter])
    return int(wrong[0]) if len(wrong) else shorter


def _finished(table: TokenTable, parent: Sequence, child: Child) -> Finished:
    first = parent.request.prompt_visible
    head = table.data[parent.line, first : parent.visible]
    tokens = np.concatenate([head, np.array(child.tokens, dtype=np.int64)])
    memo = {**lasting(parent.memo), **(child.memo or {})}
    assert child.finish is not None, "only what ends is finished"
    return Finished(tokens, child.score, child.finish, parent.lineage, child.rank, memo)


def _events(table: TokenTable, parent: Sequence, child: Child) -> list[Event]:
    """The tokens of a streaming sequence that this child settles."""
    request, index = parent.request, child.rank
    strategy = request.strategy
    if not strategy.streams or index >= strategy.returns or parent.finish is not None:
        return []
    tokens, first = child.tokens, parent.generated - parent.provisional
    if parent.provisional:
        tail = table.data[parent.line, parent.visible - parent.provisional : parent.visible]
        tokens = [*tail.tolist(), *tokens]
    if child.provisional:
        tokens = tokens[: len(tokens) - child.provisional]
    known = None
    if request.wants.logprobs is not None:
        memo = {**parent.memo, **(child.memo or {})}
        known = last_choices(memo, len(tokens) + child.provisional)
    return token_events(request.request_id, index, tokens, first, child.finish, known)


def token_events(
    request_id: str,
    index: int,
    tokens: list[int],
    first: int,
    finish: FinishReason | None,
    known: list[Likelihood] | None = None,
) -> list[Event]:
    """One event per token, the reason on the last; one without a token if there is none.

    `known`: how likely the tokens were; empty or None where nobody asked.
    """
    if not tokens:
        return (
            [] if finish is None else [Event(request_id, index, -1, position=first, finish=finish)]
        )
    last = len(tokens) - 1
    events = [
        Event(request_id, index, token, position=first + i, finish=finish if i == last else None)
        for i, token in enumerate(tokens)
    ]
    return [_with_logprob(*pair) for pair in zip(events, known, strict=False)] if known else events


def _with_logprob(event: Event, known: Likelihood) -> Event:
    top = zip(known.top_tokens.tolist(), known.top_logprobs.tolist(), strict=True)
    return replace(event, logprob=known.logprob, top_logprobs=tuple(top))


def release(sequence: Sequence, table: TokenTable, ledger: Ledger) -> None:
    """The sequence holds no row and no line."""
    drop_rows(sequence, ledger)
    table.close(sequence.line)


def drop_rows(sequence: Sequence, ledger: Ledger) -> None:
    """The sequence and its companions hold no row; everything not cached before is fed again."""
    for unit in sequence.units:
        if unit.row is not None:
            ledger.free(unit.row)
        unit.lose_row()


def abandon(group: Group, reason: FinishReason, table: TokenTable, ledger: Ledger) -> list[Event]:
    """Every live sequence ends here, with its settled tokens, and is released."""
    request, strategy = group.request, group.request.strategy
    events: list[Event] = []
    for sequence in group.live:
        if sequence.finish is None:
            if strategy.streams and sequence.index < strategy.returns:
                settled = sequence.generated - sequence.provisional
                events += token_events(request.request_id, sequence.index, [], settled, reason)
            first = sequence.request.prompt_visible
            tokens = table.data[sequence.line, first : sequence.visible - sequence.provisional]
            group.done.append(
                Finished(
                    tokens.copy(),
                    sequence.score,
                    reason,
                    sequence.lineage,
                    sequence.index,
                    lasting(sequence.memo),
                )
            )
        release(sequence, table, ledger)
    group.live = []
    return events
