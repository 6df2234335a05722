"""From granted groups to a `Work`: every live sequence feeds what is not cached yet.

There is no other rule. A group whose pending positions fit its grant feeds them all, with its
drafts, and wants the logits of its choices; otherwise each of its rows feeds a chunk that leaves
at least the last position for later, and wants nothing of them but, where the request asks, how
likely the prompt is. Sequences that lost their rows feed what they share once (`regroup`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from everystep.engine.given import Span
from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import PromptRows, prompt_rows
from everystep.engine.regroup import debts, owed
from everystep.errors import InvariantError, message
from everystep.types import (
    COLUMNS,
    Columns,
    Companion,
    Extra,
    Group,
    InputSpec,
    Prompt,
    Sequence,
    StepOutput,
    TokenTable,
    Work,
    companion_length,
)

_NO_DRAFT = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Grant:
    """A group that may feed up to `tokens` positions in this step.

    `shares`: whether sequences that lost their rows first feed what they share, in a step of its
    own.
    """

    group: Group
    tokens: int
    shares: bool = True

    def owes(self, table: TokenTable) -> bool:
        """Whether this step feeds what sequences share, and nothing else of the group."""
        return self.shares and owed(self.group, table) > 0


class Reading(NamedTuple):
    """A sequence that reads its hidden states, which come with `feed`, from position `start` on."""

    sequence: Sequence
    feed: int
    start: int


@dataclass(slots=True)
class Fed:
    """What a step feeds: the groups that will choose, their drafts, and where logits come out.

    `first_row[id(unit)]`: the first row of logits, or of the best of them, of a sequence or
    companion. `feed_of[id(unit)]`: the index of its feed. `prompt_rows`: further rows, which say
    how likely prompts are.
    """

    ready: list[Group] = field(default_factory=list)
    drafts: dict[int, np.ndarray] = field(default_factory=dict)
    first_row: dict[int, int] = field(default_factory=dict)
    feed_of: dict[int, int] = field(default_factory=dict)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    hidden: list[Reading] = field(default_factory=list)
    chunks: int = 0

    def draft(self, sequence: Sequence) -> np.ndarray:
        """The ids that the sequence's feed holds beyond its own."""
        return self.drafts.get(id(sequence), _NO_DRAFT)


@dataclass(slots=True)
class WorkBuilder:
    """Collects feeds as parallel lists.

    `declared`: the inputs that prompts may give, by name; see `Executor.inputs`. `wanted`,
    `wanted_best`: rows of whole logits, and of the best of them, so far.
    """

    table: TokenTable
    ledger: Ledger
    declared: Mapping[str, InputSpec]
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    extras: dict[int, Extra] = field(default_factory=dict)
    hidden: list[Reading] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    wanted: int = 0
    wanted_best: int = 0

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
        start = unit.cached
        extra = self._extra(prompt, source, start, count, own=unit is source, chooses=chooses)
        if extra is not None:
            if extra.hidden:
                self.hidden.append(Reading(source, len(self.rows), start))
            self.extras[len(self.rows)] = extra
        self.rows.append(unit.row)
        self.starts.append(start)
        self.counts.append(count)
        self.logits.append(logits)
        self.tokens.append(self._ids(prompt, source, start, count))
        self.best.append(best)
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
        return np.concatenate([head, line[prompt.length + generated : end + generated]])

    def _extra(
        self, prompt: Prompt, source: Sequence, start: int, count: int, *, own: bool, chooses: bool
    ) -> Extra | None:
        """What a feed brings and wants beyond ids and logits; None for a plain one."""
        request = source.request
        wants = request.wants
        layers, attentions = (chooses and wants.layers), (chooses and wants.attentions)
        reads = own and request.strategy.reads.hidden
        hidden = reads and start + count > columns_of(source).length
        if not (prompt.brings or request.adapters or hidden or layers or attentions):
            return None
        span = Span(prompt, start, count)
        inputs, positions, mask = span.inputs(self.declared), span.positions(), span.mask()
        return Extra(inputs, positions, mask, request.adapters, hidden, layers, attentions)

    def work(self, *, totals: bool = False) -> Work:
        """The finished work, with the changes of rows that the ledger has noted."""
        news = self.ledger.drain()
        return Work(
            verbs=news.verbs,
            rows=np.array(self.rows, dtype=np.int64),
            starts=np.array(self.starts, dtype=np.int64),
            counts=np.array(self.counts, dtype=np.int64),
            logits=np.array(self.logits, dtype=np.int64),
            tokens=np.concatenate(self.tokens) if self.tokens else _NO_DRAFT,
            extras=self.extras,
            encoders=news.encoders,
            pasts=news.pasts,
            best=np.array(self.best, dtype=np.int64) if self.wanted_best else None,
            totals=totals,
        )


def columns_of(sequence: Sequence) -> Columns:
    """What the sequence remembers of its hidden states, which are those of its own tokens."""
    columns: Columns | None = sequence.memo.get(COLUMNS)
    if columns is None:
        columns = sequence.memo[COLUMNS] = Columns(sequence.request.shift)
    elif columns.length > sequence.length:
        columns.rewind(sequence.visible)
    return columns


def lacks_columns(sequence: Sequence) -> bool:
    """Whether its strategy reads hidden states of positions that are cached, and it dropped them:
    then these positions are fed again."""
    if not sequence.request.strategy.reads.hidden:
        return False
    return columns_of(sequence).length < sequence.cached


def note_hidden(fed: Fed, output: StepOutput) -> None:
    """Sequences whose strategy reads hidden states remember those of this step.

    What was known before stays, so that a sequence that is fed again sees the same bits.
    """
    for sequence, feed, start in fed.hidden:
        columns = columns_of(sequence)
        if columns.length < start:
            raise InvariantError(
                message("hidden states are missing", wanted=f"from {columns.length} on", got=start)
            )
        hidden = cast(Tensor, output.answers[feed].hidden)
        columns.append(hidden[columns.length - start :])


def chooses(grant: Grant, table: TokenTable) -> bool:
    """Whether the group feeds all that it has, and so makes its next choice."""
    return grant.group.pending <= grant.tokens and not grant.owes(table)


def feed(grants: list[Grant], fed: Fed, builder: WorkBuilder) -> Fed:
    """Turns grants into feeds; afterwards every fed unit's `cached` says what it will hold.

    `fed` says which groups choose, and their drafts.
    """
    choosing = set(fed.ready)
    for grant in grants:
        if grant.group in choosing:
            _feed_whole(grant.group, fed, builder, grant.group.best)
        elif grant.owes(builder.table):
            _feed_shared(grant, fed, builder)
        else:
            _feed_chunk(grant, fed, builder)
    fed.hidden = builder.hidden
    return fed


def _feed_whole(group: Group, fed: Fed, builder: WorkBuilder, best: int) -> None:
    for sequence in group.live:
        draft = fed.draft(sequence)
        wanted = 1 + len(draft)
        visible = sequence.visible
        if len(draft):
            builder.table.reserve(visible + len(draft))
            builder.table.data[sequence.line, visible : visible + len(draft)] = draft
        count = sequence.length - sequence.cached + len(draft)
        before = _rows_of_prompt(group, sequence, count, fed, builder)
        fed.first_row[id(sequence)] = builder.wanted_best if best else builder.wanted + before
        fed.feed_of[id(sequence)] = len(builder.rows)
        prompt, rows = sequence.request.prompt, before + wanted
        builder.add(sequence, prompt, sequence, count, rows, best, chooses=True)
        for companion in sequence.companions:
            behind = companion_length(sequence, companion) - companion.cached
            fed.first_row[id(companion)] = builder.wanted
            fed.feed_of[id(companion)] = len(builder.rows)
            builder.add(companion, companion.prompt, sequence, behind + len(draft), wanted)


def _feed_chunk(grant: Grant, fed: Fed, builder: WorkBuilder) -> None:
    left = grant.tokens
    for sequence in grant.group.live:
        count = min(left, sequence.length - sequence.cached - 1)
        if count > 0:
            fed.feed_of[id(sequence)] = len(builder.rows)
            wanted = _rows_of_prompt(grant.group, sequence, count, fed, builder)
            builder.add(sequence, sequence.request.prompt, sequence, count, wanted)
            left -= count
            fed.chunks += 1
        for companion in sequence.companions:
            behind = companion_length(sequence, companion) - companion.cached
            count = min(left, behind - 1)
            if count > 0:
                builder.add(companion, companion.prompt, sequence, count, 0)
                left -= count
                fed.chunks += 1


def _feed_shared(grant: Grant, fed: Fed, builder: WorkBuilder) -> None:
    left, lead = grant.tokens, grant.group.live[0]
    for unit, prompt, behind in debts(grant.group, builder.table):
        count = min(left, behind)
        if count > 0:
            builder.add(unit, prompt, lead, count, 0)
            left -= count
            fed.chunks += 1


def _rows_of_prompt(
    group: Group, sequence: Sequence, count: int, fed: Fed, builder: WorkBuilder
) -> int:
    """How many rows before those of the choice say how likely the prompt is."""
    asked = prompt_rows(group, sequence.cached, count, builder.wanted)
    if asked is None:
        return 0
    fed.prompt_rows.append(asked)
    return asked.last - asked.first
