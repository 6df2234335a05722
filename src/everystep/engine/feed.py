"""From granted groups to a `Work`: every live sequence feeds what is not cached yet.

There is no other rule. A group whose pending positions fit its grant feeds them all, with its
drafts, and wants the logits of its choices; otherwise each of its rows feeds a chunk that leaves
at least the last position for later, and wants nothing of them but, where the request asks, how
likely the prompt is.

What sequences share that lost their rows, to a preemption or a broken step, is fed once:

    first     [ prompt | tokens that all share | own tokens ]   is fed up to the end of the shared
    others    [ prompt | tokens that all share | own tokens ]   fork its row there, and go on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import numpy as np
from torch import Tensor

from everystep.engine.given import Span, overlaid
from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import prompt_rows
from everystep.errors import InvariantError
from everystep.types import (
    COLUMNS,
    Columns,
    Companion,
    Extra,
    Given,
    Group,
    Hooked,
    InputSpec,
    Prompt,
    Sequence,
    StepOutput,
    TokenTable,
    Work,
)
from everystep.types.table import common_length

NO_IDS = np.empty(0, dtype=np.int64)
Missing = list[tuple[Sequence | Companion, Prompt, Sequence, int]]
"""Sequences and companions, their prompts, whose they are, and how many positions they lack."""


class Grant(NamedTuple):
    """A group that may feed up to `tokens` positions in this step.

    `shares`: whether sequences that lost their rows first feed what they share, in a step of its
    own.
    """

    group: Group
    tokens: int
    shares: bool = True

    def owes(self, table: TokenTable) -> bool:
        """Tell whether this step feeds what sequences share, and nothing else of the group."""
        return self.shares and len(self.group.live) > 1 and owed(self.group, table) > 0

    def chooses(self, table: TokenTable) -> bool:
        """Tell whether the group feeds all that it has, and so makes its next choice."""
        return self.group.pending <= self.tokens and not self.owes(table)


class Feed(NamedTuple):
    """Positions of one row that go through the model in this step, and what is wanted of them."""

    row: int
    start: int
    positions: int
    logits: int
    best: int
    tokens: np.ndarray
    extra: Extra | None


@dataclass(slots=True, eq=False)
class Added:
    """The additions of guests to the feed of one sequence.

    `draft`: ids (n,) that follow its own; `drawn_from`: the scores (n, V) that they were drawn
    from, if they were. `alternatives`: copies of the sequence with other drafts. `given`: inputs of
    its positions. `agrees(place, state)`: whether the position after so many drafted tokens was
    given what hooks in this state give. `beside`: (1 + n, V) what another model says of the rows of
    its choice.
    """

    draft: np.ndarray = field(default_factory=lambda: NO_IDS)
    drawn_from: Tensor | None = None
    alternatives: list[Sequence] = field(default_factory=list)
    given: tuple[Given, ...] = ()
    agrees: Callable[[int, Hooked], bool] | None = None
    beside: Tensor | None = None


_NOTHING: Final = Added()
_NONE: Final = ((),) * len(Feed._fields)


@dataclass(slots=True)
class Feeds:
    """All feeds of a step, and where what they ask for comes out.

    `declared`: the inputs that prompts may give, by name; see `Executor.inputs`. `added`: by the id
    of a sequence, what guests add to its feed; `made`: the feeds so far. `ready`: the groups that
    will choose; `sharing`: those that feed what their sequences share. `wanted`, `wanted_best`:
    rows of whole logits, and of the best of them, so far. `first_row[id(unit)]`: the first of
    either that belongs to a choice of a sequence or companion; `feed_of[id(unit)]`: the index of
    its feed. `prompt_rows`: of a group, the first of the rows that say how likely these prompt
    positions are. `hidden`: a sequence that reads its hidden states, the feed that they come with,
    and the position of the first.
    """

    table: TokenTable
    ledger: Ledger
    declared: Mapping[str, InputSpec]
    added: dict[int, Added] = field(default_factory=dict)
    made: list[Feed] = field(default_factory=list)
    ready: list[Group] = field(default_factory=list)
    sharing: list[Group] = field(default_factory=list)
    wanted: int = 0
    wanted_best: int = 0
    first_row: dict[int, int] = field(default_factory=dict)
    feed_of: dict[int, int] = field(default_factory=dict)
    prompt_rows: list[tuple[Group, int, range]] = field(default_factory=list)
    hidden: list[tuple[Sequence, int, int]] = field(default_factory=list)

    def adding(self, sequence: Sequence) -> Added:
        """Return what is added to the feed of the sequence, for a guest to write to."""
        return self.added.setdefault(id(sequence), Added())

    def added_to(self, sequence: Sequence) -> Added:
        """Return what is added to the feed of the sequence, which may be nothing."""
        return self.added.get(id(sequence), _NOTHING)

    @property
    def drafted(self) -> int:
        """The number of drafted ids."""
        return sum([len(one.draft) for one in self.added.values()]) if self.added else 0

    @property
    def chunks(self) -> int:
        """The number of feeds that no choice follows."""
        return len(self.made) - len(self.feed_of)

    def add(
        self,
        unit: Sequence | Companion,
        prompt: Prompt,
        source: Sequence,
        count: int,
        logits: int,
        best: int = 0,
        *,
        chooses: bool = False,
    ) -> None:
        """Feeds `count` positions of a sequence or companion from where its cache ends.

        Where a sequence `chooses`, the layers and weights that its request wants are asked for.
        """
        if unit.row is None:
            unit.row = self.ledger.allocate(prompt)
        start, feed = unit.cached, len(self.made)
        given = self.added_to(source).given if self.added and unit is source else ()
        reads = unit is source and source.request.strategy.reads.hidden
        if reads and start + count > columns_of(source).length:
            self.hidden.append((source, feed, start))
        else:
            reads = False
        extra = self._extra(prompt, source, start, count, given, hidden=reads, chooses=chooses)
        tokens = _hidden(self._ids(prompt, source, start, count), given)
        self.made.append(Feed(unit.row, start, count, logits, best, tokens, extra))
        if best:
            self.wanted_best += logits
        else:
            self.wanted += logits
        unit.cached = start + count

    def _ids(self, prompt: Prompt, source: Sequence, start: int, count: int) -> np.ndarray:
        """Ids of the positions [start, start + count):

        [ prompt: ids, or -1 where embeddings stand | generated: from the token table ]
        """
        generated = source.request.prompt_visible - prompt.length
        line = self.table.data[source.line]
        if start >= prompt.length:
            return line[start + generated : start + count + generated]
        inside, end = min(start + count, prompt.length), max(start + count, prompt.length)
        if prompt.embeds is not None:
            head = np.full(inside - start, -1, dtype=np.int64)
        else:
            head = prompt.ids[start - prompt.before : inside - prompt.before]  # type: ignore[index]
            if prompt.injected is not None:
                places = prompt.injected.positions
                head = np.where(np.isin(np.arange(start, inside), places), -1, head)
        return np.concatenate([head, line[prompt.length + generated : end + generated]])

    def _extra(
        self,
        prompt: Prompt,
        source: Sequence,
        start: int,
        count: int,
        given: tuple[Given, ...],
        *,
        hidden: bool,
        chooses: bool,
    ) -> Extra | None:
        """Return what a feed brings and wants beyond ids and logits; None for a plain one."""
        request = source.request
        wants = request.wants
        layers, attentions = (chooses and wants.layers), (chooses and wants.attentions)
        early = request.readout.layers if chooses and request.readout is not None else ()
        if chooses and request.hooks:
            hidden |= any("hidden" in hook.reads for hook in request.hooks)
        wanted = (hidden, layers, attentions)
        if not (prompt.brings or request.adapters or any(wanted) or early or given):
            return None
        span = Span(prompt, start, count)
        inputs, positions, mask = span.inputs(self.declared), span.positions(), span.mask()
        if given:
            inputs = overlaid(inputs, given)
        own, whole = request.adapters, span.whole()
        return Extra(inputs, positions, mask, own, *wanted, whole, early, request.resolved)

    def ask_prompt(self, group: Group, sequence: Sequence, count: int) -> int:
        """Ask for the rows that say how likely the prompt is, and count them; they stand before
        those of a choice."""
        positions = prompt_rows(group, sequence.cached, count)
        if positions:
            self.prompt_rows.append((group, self.wanted, positions))
        return len(positions)

    def work(self) -> Work:
        """The finished work, with the changes of rows that the ledger has noted."""
        verbs, encoders, pasts = self.ledger.drain()
        columns = zip(*self.made, strict=True) if self.made else _NONE
        rows, starts, counts, logits, best, tokens, extras = columns
        return Work(
            verbs=verbs,
            rows=np.array(rows, dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
            counts=np.array(counts, dtype=np.int64),
            logits=np.array(logits, dtype=np.int64),
            tokens=np.concatenate(tokens) if tokens else NO_IDS,
            extras={f: extra for f, extra in enumerate(extras) if extra is not None},
            encoders=encoders,
            pasts=pasts,
            best=np.array(best, dtype=np.int64) if self.wanted_best else None,
            totals="log_probs" in [one.request.strategy.reads.scores for one in self.ready],
            whole=any(one.best and one.request.watcher is not None for one in self.ready),
        )


# --- hidden states --------------------------------------------------------------------------------


def columns_of(sequence: Sequence) -> Columns:
    """Return the hidden states that the sequence remembers, which are those of its own tokens."""
    columns: Columns | None = sequence.memo.get(COLUMNS)
    if columns is None:
        columns = sequence.memo[COLUMNS] = Columns(sequence.request.shift)
    elif columns.length > sequence.length:
        columns.rewind(sequence.visible)
    return columns


def note_hidden(feeds: Feeds, output: StepOutput) -> None:
    """Sequences whose strategy reads hidden states remember those of this step.

    What was known before stays, so that a sequence that is fed again sees the same bits.
    """
    for sequence, feed, start in feeds.hidden:
        columns = columns_of(sequence)
        if columns.length < start:
            raise InvariantError(
                "hidden states are missing", wanted=f"from {columns.length} on", got=start
            )
        hidden = cast(Tensor, output.answers[feed].hidden)
        columns.append(hidden[columns.length - start :])


# --- what is fed ----------------------------------------------------------------------------------


def feed(grants: list[Grant], feeds: Feeds) -> None:
    """Turns grants into feeds; afterwards every fed unit's `cached` says what it will hold."""
    ready = set(feeds.ready)
    for grant in grants:
        if grant.group in ready:
            _feed_whole(grant.group, feeds)
        else:
            _feed_chunk(grant, feeds)


def fed(group: Group, feeds: Feeds) -> list[Sequence]:
    """Return the sequences of a group, each followed by its alternatives."""
    if not feeds.added:
        return group.live
    return [one for s in group.live for one in (s, *feeds.added_to(s).alternatives)]


def units_of(sequence: Sequence) -> list[tuple[Sequence | Companion, Prompt, int]]:
    """A sequence and its companions, each with its prompt and its length."""
    prompt, length = sequence.request.prompt, sequence.length
    own = length - prompt.length
    found: list[tuple[Sequence | Companion, Prompt, int]] = [(sequence, prompt, length)]
    for one in sequence.companions:
        found.append((one, one.prompt, one.prompt.length + own))
    return found


def _feed_whole(group: Group, feeds: Feeds) -> None:
    best, request = group.best, group.request
    asks = request.wants.prompt_logprobs is not None
    for sequence in fed(group, feeds):
        draft = write_draft(sequence, feeds)
        for unit, prompt, length in units_of(sequence):
            count = length - unit.cached + len(draft)
            before = feeds.ask_prompt(group, sequence, count) if asks and unit is sequence else 0
            feeds.first_row[id(unit)] = feeds.wanted_best if best else feeds.wanted + before
            feeds.feed_of[id(unit)] = len(feeds.made)
            wanted = before + 1 + len(draft)
            feeds.add(unit, prompt, sequence, count, wanted, best, chooses=unit is sequence)


def write_draft(sequence: Sequence, feeds: Feeds) -> np.ndarray:
    """Return the draft of a sequence, which now stands on its line, after its own ids."""
    if not feeds.added:
        return NO_IDS
    draft = feeds.added_to(sequence).draft
    if len(draft):
        end = sequence.visible + len(draft)
        feeds.table.reserve(end)
        feeds.table.data[sequence.line, sequence.visible : end] = draft
    return draft


def chunk_of(grant: Grant, table: TokenTable) -> Missing:
    """List the units that a group feeds where it does not choose, with how many positions of
    each."""
    group, left = grant.group, grant.tokens
    if grant.owes(table):
        missing = debts(group, table)
    else:
        missing = [
            (unit, prompt, sequence, length - unit.cached - 1)
            for sequence in group.live
            for unit, prompt, length in units_of(sequence)
        ]
    found: Missing = []
    for unit, prompt, source, most in missing:
        count = min(left, most)
        if count > 0:
            found.append((unit, prompt, source, count))
            left -= count
    return found


def _feed_chunk(grant: Grant, feeds: Feeds) -> None:
    chunk = chunk_of(grant, feeds.table)
    if grant.owes(feeds.table):
        feeds.sharing.append(grant.group)
    for unit, prompt, source, count in chunk:
        wanted = feeds.ask_prompt(grant.group, source, count) if unit is source else 0
        feeds.add(unit, prompt, source, count, wanted)


def _hidden(ids: np.ndarray, given: tuple[Given, ...]) -> np.ndarray:
    """The ids of a feed, with -1 where embeddings are given in their place."""
    for name, start, values in given:
        if name == "embeds":
            ids = ids.copy()
            ids[start : start + len(values)] = -1
    return ids


# --- what sequences share -------------------------------------------------------------------------


def scattered(group: Group) -> bool:
    """Tell whether any of several sequences has lost its row."""
    live = group.live
    return len(live) > 1 and None in [sequence.row for sequence in live]


def owed(group: Group, table: TokenTable) -> int:
    """Count the positions that the first sequence feeds before the others can fork its rows.

    0 where all have rows, and where there is nothing to share.
    """
    return sum(lacks for *_, lacks in debts(group, table)) if scattered(group) else 0


def debts(group: Group, table: TokenTable) -> Missing:
    """List what the first sequence and its companions lack of what all sequences share."""
    lead, request = group.live[0], group.request
    # Each keeps at least one position of its own.
    tails = [table.data[s.line, request.prompt_visible : s.visible - 1] for s in group.live]
    own = lead.generated - common_length(tails)
    return [
        (unit, prompt, lead, length - own - unit.cached) for unit, prompt, length in units_of(lead)
    ]


def regroup(group: Group, table: TokenTable, ledger: Ledger) -> None:
    """Sequences without rows are forks of the first, if it holds all that they share."""
    if not scattered(group) or owed(group, table):
        return
    lead, *others = group.live
    for other in others:
        for unit, source in zip(other.units, lead.units, strict=True):
            if unit.row is None and source.row is not None:
                unit.row, unit.cached = ledger.fork(source.row), source.cached
        _share_columns(lead, other)


def _share_columns(lead: Sequence, other: Sequence) -> None:
    """The other knows the hidden states of what both share, if the first knows them."""
    known: Columns | None = lead.memo.get(COLUMNS)
    own: Columns | None = other.memo.get(COLUMNS)
    if known is not None and (own is None or own.length < other.cached):
        other.memo[COLUMNS] = shared = known.copy()
        shared.rewind(other.cached + other.request.shift)
