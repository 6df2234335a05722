"""Apply: children become sequences, and their kinship becomes forks, truncations and frees.

    source row    [ cached before | fed: rest, last token | drafts ]
    child A       keeps the row, truncated to what its own tokens share with what was fed
    child B, C    fork the row first, then truncate likewise
    no child      the row is freed

After it `cached < length` holds for every live sequence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from everystep.draws import fork_lineage
from everystep.engine.batches import copy_memory, sprout
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
    going = [_goes_on(batch, children, c) for c in range(len(children.parent))]
    sources = {s.line: s for s in batch.sequences}
    heirs: dict[int, int] = {}
    for c, parent in enumerate(children.parent):
        if going[c]:
            heirs.setdefault(batch.sequences[parent].line, c)
    for c, reason in enumerate(children.finish):
        parent = batch.sequences[children.parent[c]]
        if reason is not None and parent.finish is None:
            group = batch.groups[batch.group_of[children.parent[c]]]
            group.done.append(_finished(table, parent, children, c, reason))
        events += _events(table, parent, children, c)
    for line, source in sources.items():
        if (
            line not in heirs
        ):  # first of all, so that no group ever needs more rows than it declared
            release(source, table, ledger)
    born = _fork_all(batch, children, going, heirs, table, ledger)
    for c, parent_index in enumerate(children.parent):
        if going[c]:
            parent = batch.sequences[parent_index]
            child = born.get(c, parent)
            _extend(child, parent, batch.drafts[parent_index], children, c, table, ledger)
            live[batch.group_of[parent_index]].append(child)
    for g, group in enumerate(batch.groups):
        group.opened = True
        group.live = live[g]
        group.settled = group.settled or g in children.settled
        group.done = group.request.strategy.keep(group)
    return events


def _goes_on(batch: Batch, children: Children, c: int) -> bool:
    lingers = children.lingers and batch.sequences[children.parent[c]].request.linger
    return children.finish[c] is None or lingers


def _fork_all(
    batch: Batch,
    children: Children,
    going: list[bool],
    heirs: dict[int, int],
    table: TokenTable,
    ledger: Ledger,
) -> dict[int, Sequence]:
    """Child -> its new sequence, for every child that does not simply continue its parent's.

    All forks come before any truncation: a later child may keep more of the row than an earlier.
    A sibling of an opening group that inherits the source's line is itself its continuation.
    """
    born: dict[int, Sequence] = {}
    ranks: dict[int, int] = {}
    for c, parent_index in enumerate(children.parent):
        if not going[c]:
            continue
        parent = batch.sequences[parent_index]
        rank = ranks.get(id(parent), 0)
        ranks[id(parent)] = rank + 1
        if heirs[parent.line] == c:
            continue
        lineage = parent.lineage
        if rank:
            lineage = fork_lineage(lineage, parent.generated + 1, rank)
        child = sprout(parent, table.fork(parent.line, parent.visible), lineage, parent.index)
        child.row = None if parent.row is None else ledger.fork(parent.row)
        child.companions = tuple(_fork_companion(one, ledger) for one in parent.companions)
        born[c] = child
    return born


def _fork_companion(companion: Companion, ledger: Ledger) -> Companion:
    row = None if companion.row is None else ledger.fork(companion.row)
    return Companion(companion.prompt, companion.cached, row)


def _extend(
    child: Sequence,
    parent: Sequence,
    draft: np.ndarray,
    children: Children,
    c: int,
    table: TokenTable,
    ledger: Ledger,
) -> None:
    """The child holds its new tokens; its rows hold what is still true of what was fed."""
    count = int(children.counts[c])
    tokens = children.tokens[c, :count]
    start = child.visible
    table.reserve(start + count)
    table.data[child.line, start : start + count] = tokens
    agreed = _agreement(draft, tokens)
    kept = child.length + agreed
    rewind_memory(child, start + agreed)
    child.length += count
    excess = child.cached - min(kept, child.length - 1)
    _trim(child, excess, ledger)
    for companion in child.companions:
        _trim(companion, excess, ledger)
    child.score = float(children.score[c])
    child.finish = children.finish[c]
    child.provisional = 0 if children.provisional is None else int(children.provisional[c])
    if children.index is not None:
        child.index = int(children.index[c])
    if children.memo is not None and children.memo[c] is not None:
        child.memo.update(children.memo[c])  # type: ignore[arg-type]
    if not 0 <= child.cached < child.length:
        raise InvariantError(
            message(
                "a sequence is cached beyond its tokens",
                wanted="cached < length",
                got=(child.cached, child.length),
                do="Report this as a defect",
            )
        )


def rewind_memory(sequence: Sequence, visible: int) -> None:
    """What the sequence remembers speaks of its first `visible` ids only."""
    for value in sequence.memo.values():
        rewind = getattr(value, "rewind", None)
        if callable(rewind):
            rewind(visible)


def _trim(unit: Sequence | Companion, excess: int, ledger: Ledger) -> None:
    if excess > 0 and unit.row is not None:
        unit.cached -= excess
        ledger.truncate(unit.row, unit.cached)


def _agreement(draft: np.ndarray, tokens: np.ndarray) -> int:
    """How many of the first tokens equal the draft."""
    shorter = min(len(draft), len(tokens))
    if shorter == 0:
        return 0
    wrong = np.flatnonzero(draft[:shorter] != tokens[:shorter])
    return int(wrong[0]) if len(wrong) else shorter


def _finished(
    table: TokenTable, parent: Sequence, children: Children, c: int, reason: FinishReason
) -> Finished:
    first = parent.request.prompt_visible
    head = table.data[parent.line, first : parent.visible]
    tokens = np.concatenate([head, children.tokens[c, : children.counts[c]]])
    memo = {key: copy_memory(value) for key, value in parent.memo.items()}
    if children.memo is not None and children.memo[c] is not None:
        memo.update(children.memo[c])  # type: ignore[arg-type]
    index = parent.index if children.index is None else int(children.index[c])
    score = float(children.score[c])
    return Finished(tokens, score, reason, parent.lineage, index, memo)


def _events(table: TokenTable, parent: Sequence, children: Children, c: int) -> list[Event]:
    """The tokens of a streaming sequence that this child settles."""
    strategy = parent.request.strategy
    index = parent.index if children.index is None else int(children.index[c])
    if not strategy.streams or index >= strategy.returns or parent.finish is not None:
        return []
    new = children.tokens[c, : children.counts[c]]
    provisional = 0 if children.provisional is None else int(children.provisional[c])
    tail = table.data[parent.line, parent.visible - parent.provisional : parent.visible]
    tokens = [*tail.tolist(), *new.tolist()]
    tokens = tokens[: len(tokens) - provisional]
    first = parent.generated - parent.provisional
    known = None
    if parent.request.wants.logprobs is not None:
        own = children.memo[c] if children.memo else None
        known = last_choices({**parent.memo, **(own or {})}, len(tokens) + provisional)
    request_id = parent.request.request_id
    return token_events(request_id, index, tokens, first, children.finish[c], known)


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
                    dict(sequence.memo),
                )
            )
        release(sequence, table, ledger)
    group.live = []
    return events
