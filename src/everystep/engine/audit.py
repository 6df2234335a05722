"""The audit: every row and line belongs to exactly one live sequence, and nothing else exists."""

from __future__ import annotations

from everystep.engine.engine import Engine
from everystep.errors import InvariantError, message


def audit(engine: Engine) -> None:
    """Raises InvariantError if a row, line or cached position is leaked, shared or wrong.

    Passes all outstanding verbs to the executor first.
    """
    engine.recover()
    engine.flush()
    held: dict[int, int] = {}
    lines: list[int] = []
    for group in engine.scheduler.groups:
        for sequence in group.live:
            if sequence.line >= 0:
                lines.append(sequence.line)
            for unit in sequence.units:
                if unit.row is not None:
                    _require(unit.row not in held, "a row is shared", unit.row)
                    held[unit.row] = unit.cached
    _require(len(lines) == len(set(lines)), "a line of the token table is shared", lines)
    _require(len(lines) == engine.table.open_lines, "a line of the token table is leaked", lines)
    _require(set(held) == engine.ledger.held, "the ledger and the sequences differ", held)
    drafted = engine.drafters.held()
    memories = [
        memory
        for group in engine.scheduler.groups
        for sequence in group.live
        for memory in sequence.memo.values()
        if hasattr(memory, "release")
    ]
    _require(drafted == len(memories), "a drafter's row is leaked or shared", drafted)
    stored = engine.executor.audit()
    _require(stored == held, "the executor's rows and the sequences differ", stored)


def _require(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise InvariantError(message(what, got=got, do="Report this as a defect"))
