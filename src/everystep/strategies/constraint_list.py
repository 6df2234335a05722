"""How far a text is with several constraints; name and methods are transformers' until 4.55."""

from __future__ import annotations

from collections.abc import Iterable

from everystep.errors import RequestError, shown
from everystep.strategies.constraints import Constraint


class ConstraintListState:
    """The progress of a text with several constraints, of which one is worked on at a time."""

    def __init__(self, constraints: Iterable[Constraint]) -> None:
        listed = [*constraints] if isinstance(constraints, list | tuple) else []
        if not listed or not all(isinstance(one, Constraint) for one in listed):
            wanted = "a list of at least one Constraint"
            raise RequestError("these are no constraints", wanted=wanted, got=shown(constraints))
        self.constraints = listed
        self.max_seqlen = max(one.seqlen for one in self.constraints)
        self.n_constraints = len(self.constraints)
        self.init_state()

    def init_state(self) -> None:
        """Begin again, with nothing fulfilled."""
        self.complete_constraints: list[Constraint] = []
        self.inprogress_constraint: Constraint | None = None
        self.pending_constraints = [one.copy() for one in self.constraints]
        self.completed = False

    def get_bank(self) -> int:
        """Return how much is done: whole constraints first, then tokens of the one worked on."""
        done = len(self.complete_constraints) * self.max_seqlen
        current = self.inprogress_constraint
        return done if current is None else done + self.max_seqlen - current.remaining()

    def advance(self) -> list[int] | None:
        """Return the tokens that bring it further: of the constraint in work, or of all."""
        current = self.inprogress_constraint
        found: list[int] = []
        for one in self.pending_constraints if current is None else [current]:
            ahead = one.advance()
            found += [ahead] if isinstance(ahead, int) else ahead or []
        return found or None

    def reset(self, token_ids: Iterable[int] | None) -> None:
        """Begin again, and go as far as a text of these ids is."""
        self.init_state()
        for token in () if token_ids is None else token_ids:
            self.add(token)
            if self.completed:
                return

    def add(self, token_id: int) -> tuple[bool, bool]:
        """Read one more token; return whether it fulfilled a constraint, or brought one further.

        One that throws the current constraint back begins no other.
        """
        if self.completed:
            return True, False
        current = self.inprogress_constraint
        if current is None:
            found = (n for n, c in enumerate(self.pending_constraints) if c.does_advance(token_id))
            place = next(found, None)
            if place is None:
                return False, False
            current = self.pending_constraints.pop(place)
        stepped, complete, thrown_back = current.update(token_id)
        self.inprogress_constraint = current
        if thrown_back:
            self.pending_constraints.append(current.copy())
            self.inprogress_constraint = None
        elif complete:
            self.complete_constraints.append(current)
            self.inprogress_constraint = None
            self.completed = not self.pending_constraints
        return complete, stepped

    def copy(self, stateful: bool = True) -> ConstraintListState:
        """Return the same constraints, and how far this one is, or at the beginning."""
        other = ConstraintListState(self.constraints)
        if stateful:
            current = self.inprogress_constraint
            other.complete_constraints = [*self.complete_constraints]
            other.inprogress_constraint = None if current is None else current.copy(stateful=True)
            other.pending_constraints = [one.copy() for one in self.pending_constraints]
            other.completed = self.completed
        return other
