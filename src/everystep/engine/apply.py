"""Children become sequences, and their kinship becomes forks, truncations and frees of rows.

    source row    [ cached before | fed: rest, last token | drafts ]
    child A       keeps the row, truncated to what its own tokens share with what was fed
    child B, C    fork the row first, then truncate likewise
    no child      the row is freed

Nothing that a group holds is written here: the result is what each group will be, and the engine
puts it in place at once. Rows, lines and memories do change, for they can be made again from ids.
Afterwards `cached < length` holds for every live sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from everystep.draws import fork_lineage
from everystep.engine.events import token_events
from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import last_choices
from everystep.errors import InvariantError
from everystep.strategies.base import Batch
from everystep.types import (
    COLUMNS,
    Children,
    Companion,
    Event,
    Finished,
    FinishReason,
    Group,
    Sequence,
    TokenTable,
    is_memory,
    values_of,
)


@dataclass(slots=True)
class Change:
    """The next state of one group, with the events to report and the lines that it gives up."""

    group: Group
    after: Group
    events: list[Event] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)


class Child(NamedTuple):
    """One of `Children`: `parent` is an index into the batch; `goes_on`: it stays in the batch."""

    parent: int
    tokens: list[int]
    score: float
    finish: FinishReason | None
    provisional: int
    memo: dict[str, Any] | None
    rank: int
    serial: int
    goes_on: bool


def changes(
    batch: Batch, children: Children, drafts: list[np.ndarray], table: TokenTable, ledger: Ledger
) -> list[Change]:
    """Return what the groups of the batch become with these children.

    `drafts`: (S,) ids that were fed beyond the sequences' own tokens. A group with a child that
    ends in an error fails as a whole.
    """
    found = [Change(group, group.without_live()) for group in batch.groups]
    group_of, sequences = batch.group_of.tolist(), batch.sequences
    born = _children(sequences, children)
    failed = {group_of[c.parent]: c.finish for c in born if c.finish and c.finish.kind == "error"}
    if failed:
        born = [child for child in born if group_of[child.parent] not in failed]
    heirs: dict[int, Child] = {}
    for child in born:
        parent, change = sequences[child.parent], found[group_of[child.parent]]
        if child.goes_on:
            heirs.setdefault(parent.line, child)
        if child.finish is not None and parent.finish is None:
            change.after.done.append(_finished(table, parent, child))
        change.events += _events(table, parent, child)
    going = {group_of[child.parent] for child in born if child.goes_on}
    # First of all, so that no group ever needs more rows than it declared.
    for g, source in zip(group_of, sequences, strict=True):
        closed = found[g].closed
        if source.line not in heirs and g not in failed and source.line not in closed:
            if g not in going and not closed:
                ledger.keep(source)
            release(source, ledger)
            closed.append(source.line)
    staying = [child for child in born if child.goes_on]
    forks = _fork_all(sequences, staying, heirs, table, ledger)
    for child, sequence in zip(staying, forks, strict=True):
        _extend(sequence, drafts[child.parent], child, table, ledger)
        found[group_of[child.parent]].after.live.append(sequence)
    for g, group in enumerate(batch.groups):
        if g in failed:
            found[g] = abandoned(group, failed[g], table, ledger)
        else:
            _conclude(found[g].after, children, g)
    return found


def _conclude(after: Group, children: Children, g: int) -> None:
    """Note what the strategy says of the group as a whole."""
    after.opened = True
    after.settled = after.settled or g in children.settled
    if children.states is not None:
        after.state = children.states[g]
    if children.held is not None and after.done:
        held = children.held[g]
        after.done = [done for done in after.done if done.serial < 0 or done.serial in held]


def _children(sequences: list[Sequence], children: Children) -> list[Child]:
    """One by one, in plain numbers."""
    parents, counts = children.parent.tolist(), children.counts.tolist()
    provisional, index, serial = children.provisional, children.index, children.serial
    lingers = [children.lingers and sequences[parent].request.linger for parent in parents]
    return list(
        map(
            Child,
            parents,
            [row[:n] for row, n in zip(children.tokens.tolist(), counts, strict=True)],
            children.score.tolist(),
            children.finish,
            [0] * len(parents) if provisional is None else provisional.tolist(),
            children.memo or [None] * len(parents),
            [sequences[parent].index for parent in parents] if index is None else index.tolist(),
            [-1] * len(parents) if serial is None else serial.tolist(),
            [end is None or stays for end, stays in zip(children.finish, lingers, strict=True)],
        )
    )


def _events(table: TokenTable, parent: Sequence, child: Child) -> list[Event]:
    """The tokens of a streaming sequence that its child settles; the last ones of them may still be
    taken back."""
    request, strategy = parent.request, parent.request.strategy
    if not strategy.streams or child.rank >= strategy.returns or parent.finish is not None:
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
    return token_events(request.request_id, child.rank, tokens, first, child.finish, known)


def _fork_all(
    sequences: list[Sequence],
    children: list[Child],
    heirs: dict[int, Child],
    table: TokenTable,
    ledger: Ledger,
) -> list[Sequence]:
    """For every child a new sequence that is as its parent was: on its line and row, or on others.

    All forks come before any truncation: a later child may keep more of the row than an earlier.
    A sibling of an opening group that inherits the source's line simply continues it.
    """
    found: list[Sequence] = []
    ranks: dict[int, int] = {}
    for child in children:
        parent = sequences[child.parent]
        rank = ranks[child.parent] = ranks.get(child.parent, -1) + 1
        if heirs[parent.line] is child:
            found.append(sprout(parent, parent.line, parent.lineage, dict(parent.memo)))
            continue
        lineage = parent.lineage
        if rank:
            lineage = fork_lineage(lineage, parent.length + 1, rank)
        fork = sprout(parent, table.fork(parent.line, parent.visible), lineage)
        fork.companions = tuple(
            Companion(one.prompt, one.cached, one.row) for one in parent.companions
        )
        for unit in fork.units:
            unit.row = None if unit.row is None else ledger.fork(unit.row)
        found.append(fork)
    return found


def sprout(
    parent: Sequence, line: int, lineage: int, memo: dict[str, Any] | None = None
) -> Sequence:
    """A sequence like `parent` on the given line, with the memo or a copy of the parent's."""
    return Sequence(
        parent.request,
        line,
        parent.length,
        parent.cached,
        parent.row,
        parent.score,
        lineage,
        parent.index,
        parent.provisional,
        parent.finish,
        copied(parent.memo) if memo is None else memo,
        parent.companions,
    )


def copied(memo: dict[str, Any]) -> dict[str, Any]:
    """An equal memo that shares no mutable state."""
    return {key: value.copy() if is_memory(value) else value for key, value in memo.items()}


def _extend(
    sequence: Sequence, draft: np.ndarray, child: Child, table: TokenTable, ledger: Ledger
) -> None:
    """Turns the sequence into the child: its rows keep those of the fed positions that still
    apply."""
    start = sequence.visible
    table.write(sequence.line, start, child.tokens)
    agreed = _agreement(draft, child.tokens) if len(draft) else 0
    kept = sequence.length + agreed
    if sequence.memo:
        rewind_memory(sequence, start + agreed)
    sequence.length += len(child.tokens)
    excess = sequence.cached - min(kept, sequence.length - 1)
    if excess > 0:
        for unit in sequence.units:
            if unit.row is not None:
                unit.cached -= excess
                ledger.truncate(unit.row, unit.cached)
    sequence.score, sequence.finish = child.score, child.finish
    sequence.provisional, sequence.index = child.provisional, child.rank
    if child.memo is not None:
        sequence.memo.update(child.memo)
    if not 0 <= sequence.cached < sequence.length:
        raise InvariantError(
            "a sequence is cached beyond its tokens",
            wanted="cached < length",
            got=(sequence.cached, sequence.length),
            do="Report this as a defect",
        )


def rewind_memory(sequence: Sequence, visible: int) -> None:
    """Cuts what the sequence remembers back to its first `visible` ids."""
    for value in sequence.memo.values():
        if is_memory(value):
            value.rewind(visible)


def _agreement(draft: np.ndarray, tokens: list[int]) -> int:
    """Count the first tokens that equal the draft."""
    shorter = min(len(draft), len(tokens))
    wrong = np.flatnonzero(draft[:shorter] != tokens[:shorter])
    return int(wrong[0]) if len(wrong) else shorter


def _finished(table: TokenTable, parent: Sequence, child: Child) -> Finished:
    first = parent.request.prompt_visible
    head = table.data[parent.line, first : parent.visible]
    tokens = np.concatenate([head, np.array(child.tokens, dtype=np.int64)])
    memo = {**values_of(parent.memo), **(child.memo or {})}
    assert child.finish is not None, "only what ends is finished"
    lineage, rank, serial = parent.lineage, child.rank, child.serial
    return Finished(tokens, child.score, child.finish, lineage, rank, memo, serial)


# --- endings --------------------------------------------------------------------------------------


def release(sequence: Sequence, ledger: Ledger) -> None:
    """Frees the sequence's row, and every memory that holds one."""
    drop_rows(sequence, ledger)
    for key in [key for key, value in sequence.memo.items() if hasattr(value, "release")]:
        sequence.memo.pop(key).release()


def forget(sequence: Sequence) -> None:
    """Drops the memories of a caller's code and the rows that they held; hidden states stay."""
    columns = sequence.memo.get(COLUMNS)
    for value in sequence.memo.values():
        if hasattr(value, "release"):
            value.release()
    sequence.forget()
    if columns is not None:
        sequence.memo[COLUMNS] = columns


def drop_rows(sequence: Sequence, ledger: Ledger) -> None:
    """Frees the rows of the sequence and its companions; all but what came cached is fed again."""
    for unit in sequence.units:
        if unit.row is not None:
            ledger.free(unit.row)
        unit.lose_row()


def abandoned(group: Group, reason: FinishReason, table: TokenTable, ledger: Ledger) -> Change:
    """Every live sequence ends here, with its settled tokens, and holds nothing any more."""
    change, strategy = Change(group, group.without_live()), group.request.strategy
    over = group.settled and group.request.keeps  # its result stands
    for sequence in group.live:
        if sequence.finish is None and not over:
            if strategy.streams and sequence.index < strategy.returns:
                name, count = group.request.request_id, sequence.generated - sequence.provisional
                change.events += token_events(name, sequence.index, [], count, reason)
            change.after.done.append(_cut_short(sequence, reason, table))
        if reason.kind != "error" and not change.closed:
            ledger.keep(sequence)
        release(sequence, ledger)
        if sequence.line >= 0:
            change.closed.append(sequence.line)
    return change


def _cut_short(sequence: Sequence, reason: FinishReason, table: TokenTable) -> Finished:
    # Before it has a line, it has no tokens.
    settled = slice(sequence.request.prompt_visible, sequence.visible - sequence.provisional)
    tokens, memo = table.data[sequence.line, settled].copy(), values_of(sequence.memo)
    return Finished(tokens, sequence.score, reason, sequence.lineage, sequence.index, memo)
