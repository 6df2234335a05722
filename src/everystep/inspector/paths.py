"""The ways of a run through its steps: who continued whom, with which choice, and who ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from everystep.records import RecordedRow, RecordedRun, RecordedStep


@dataclass(slots=True, eq=False)
class Node:
    """A token of a hypothesis: `row`: the choice that led to it, where it was recorded.

    `step`: the index of its step among those with choices. `end`: the reason, if it ended here.
    """

    parent: Node | None
    id: int
    row: RecordedRow | None
    step: int
    score: float | None = None
    end: str | None = None
    children: list[Node] = field(default_factory=list)

    def way(self) -> list[Node]:
        """Return the tokens from the prompt to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


@dataclass(slots=True, eq=False)
class Paths:
    """All hypotheses of a run: `root` stands for the prompt; `live`: those that go on, by index;
    `ended`: those that ended, in the order of their ends."""

    root: Node
    live: dict[int, Node]
    ended: list[Node]

    @classmethod
    def of(cls, run: RecordedRun) -> Paths:
        """Follow the children of every step."""
        root = Node(None, -1, None, -1)
        found = cls(root, {}, [])
        for number, step in enumerate(choosing(run)):
            rows: dict[int, list[RecordedRow]] = {}
            for row in step.rows:
                rows.setdefault(row.of, []).append(row)
            after: dict[int, Node] = {}
            for child in step.children:
                node = found.live.get(child.parent, root)
                own = rows.get(child.parent, [])
                for place, id in enumerate(child.ids):
                    seen = own[place] if place < len(own) else None
                    twin = Node(node, id, seen, number)
                    node.children.append(twin)
                    node = twin
                if node is not root:
                    node.score, node.end = child.score, child.end
                if child.end is None:
                    after[child.index] = node
                else:
                    found.ended.append(node)
            found.live = after
        return found

    def leading_to(self, ids: list[int]) -> list[Node] | None:
        """Return the way of the hypothesis with these ids; None where there is none."""
        for node in [*reversed(self.ended), *self.live.values()]:
            way = node.way()
            if [one.id for one in way] == ids:
                return way
        return None


def choosing(run: RecordedRun) -> list[RecordedStep]:
    """Return the steps of a run in which something was chosen."""
    return [step for step in run.steps if step.rows]


def rows_along(run: RecordedRun, index: int = 0) -> list[RecordedRow | None]:
    """Return the choice of every token of a sequence; None where it was given, or is not there."""
    ids = run.tokens.get(index, [])
    if not ids:  # a record may say that as many sequences ended as somebody likes
        return []
    if not run.given and run.parent is None:
        way = Paths.of(run).leading_to(ids)
        if way is not None:
            return [node.row for node in way]
    rows = run.rows(index)
    return [None if at in run.given else rows.get(at) for at in range(len(ids))]


def newest(run: RecordedRun, first: int) -> dict[int, tuple[int, int, int]]:
    """Return the last choice at each place of sequence 0 from `first` on, where the last steps made
    it: the index of its step, the same among steps with choices, and its row there."""
    made, found = run.choices, []
    for at in range(len(run.steps) - 1, -1, -1):
        rows = run.steps[at].rows
        made -= bool(rows)
        own = {row.at: (at, made, j) for j, row in enumerate(rows) if row.of == 0}
        found.append(own)
        if own and min(own) <= first:
            break
    return {at: place for own in reversed(found) for at, place in own.items()}
