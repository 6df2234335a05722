"""Whether every row, line and cached position has exactly one holder."""

from __future__ import annotations

from typing import cast

from everystep.engine.engine import Engine
from everystep.errors import InvariantError


def audit(engine: Engine) -> None:
    """Raises InvariantError if a row, line or cached position is leaked, shared or wrong.

    Passes all outstanding verbs to the executor first.
    """
    engine.recover()
    engine.flush()
    live = [sequence for group in engine.scheduler.groups for sequence in group.live]
    lines = [sequence.line for sequence in live if sequence.line >= 0]
    held: dict[int, int] = {}
    for unit in [unit for sequence in live for unit in sequence.units if unit.row is not None]:
        _require(unit.row not in held, "a row is shared", unit.row)
        held[cast(int, unit.row)] = unit.cached
    for kept in engine.prefixes.kept:
        _require(kept.row not in held, "a kept row is shared", kept.row)
        held[kept.row] = len(kept.content)
    _require(len(lines) == len(set(lines)), "a line of the token table is shared", lines)
    _require(len(lines) == engine.table.open_lines, "a line of the token table is leaked", lines)
    _require(set(held) == engine.ledger.held, "the ledger and the holders differ", held)
    memories = [value for s in live for value in s.memo.values() if hasattr(value, "release")]
    own = engine.guests.held()
    _require(own == len(memories), "a guest's row is leaked or shared", own)
    stored = engine.executor.audit()
    _require(stored == held, "the executor's rows and the holders differ", stored)


def _require(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise InvariantError(what, got=got, do="Report this as a defect")
