"""From granted groups to a `Work`: every live sequence feeds what is not cached yet.

There is no other rule. A group whose pending positions fit its grant feeds them all, with its
drafts, and wants the logits of its choices; otherwise each of its rows feeds a chunk that leaves
at least the last position for later, and wants nothing of them but, where the request asks, how
likely the prompt is. Sequences that lost their rows feed what they share once (`regroup`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import PromptRows, prompt_rows
from everystep.engine.regroup import debts, owed
from everystep.types import (
    Companion,
    Group,
    Prompt,
    Sequence,
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
    chunks: int = 0

    def draft(self, sequence: Sequence) -> np.ndarray:
        """The ids that the sequence's feed holds beyond its own."""
        return self.drafts.get(id(sequence), _NO_DRAFT)


@dataclass(slots=True)
class WorkBuilder:
    """Collects feeds as parallel lists.

    `wanted`, `wanted_best`: rows of whole logits, and of the best of them, so far.
    """

    table: TokenTable
    ledger: Ledger
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)
    positions: list[Tensor | None] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    fed: int = 0
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
    ) -> None:
        """Feeds `count` positions of a sequence or companion from where its cache ends."""
        if unit.row is None:
            columns = source.request.wants.columns and unit is source
            unit.row = self.ledger.allocate(prompt, columns=columns)
        start = unit.cached
        self.rows.append(unit.row)
        self.starts.append(start)
        self.counts.append(count)
        self.logits.append(logits)
        self.tokens.append(self._inputs(prompt, source, start, count))
        self.positions.append(_positions(prompt, start, count))
        self.best.append(best)
        self.fed += count
        if best:
            self.wanted_best += logits
        else:
            self.wanted += logits
        unit.cached = start + count

    def _inputs(self, prompt: Prompt, source: Sequence, start: int, count: int) -> np.ndarray:
        """Ids of the positions [start, start + count):

        [ prompt: ids, or -1 where embeddings stand | generated: from the token table ]
        """
        generated = source.request.prompt_visible - prompt.length
        line = self.table.data[source.line]
        if start >= prompt.length:
            return line[start + generated : start + count + generated]
        end = start + count
        inside = min(end, prompt.length)
        end = max(end, prompt.length)
        given = slice(start - prompt.before, inside - prompt.before)
        if prompt.embeds is not None:
            self.embeds.append((self.fed, prompt.embeds[given]))
            head = np.full(inside - start, -1, dtype=np.int64)
        else:
            head = prompt.ids[given]  # type: ignore[index]
        return np.concatenate([head, line[prompt.length + generated : end + generated]])

    def work(self, *, layers: bool = False, attentions: bool = False, totals: bool = False) -> Work:
        """The finished work; the ledger's news go with it."""
        news = self.ledger.drain()
        return Work(
            verbs=news.verbs,
            rows=np.array(self.rows, dtype=np.int64),
            starts=np.array(self.starts, dtype=np.int64),
            counts=np.array(self.counts, dtype=np.int64),
            logits=np.array(self.logits, dtype=np.int64),
            tokens=np.concatenate(self.tokens) if self.tokens else _NO_DRAFT,
            embeds=tuple(self.embeds),
            positions=self._all_positions(),
            encoders=news.encoders,
            columns=news.columns,
            pasts=news.pasts,
            layers=layers,
            attentions=attentions,
            best=np.array(self.best, dtype=np.int64) if self.wanted_best else None,
            totals=totals,
        )

    def _all_positions(self) -> Tensor | None:
        given = [p for p in self.positions if p is not None]
        if not given:
            return None
        lead = max((p.shape[:-1] for p in given), key=len)
        parts = [
            torch.arange(start, start + count) if part is None else part
            for part, start, count in zip(self.positions, self.starts, self.counts, strict=True)
        ]
        return torch.cat([part.expand(*lead, part.shape[-1]) for part in parts], dim=-1)


def _positions(prompt: Prompt, start: int, count: int) -> Tensor | None:
    """Position ids of a feed: the given ones inside the prompt, then the last one plus 1, 2, ..."""
    if prompt.positions is None:
        return None
    inside = prompt.positions[..., start : start + count]
    first, end = start - prompt.length, start + count - prompt.length
    after = torch.arange(max(first, 0), max(end, 0))
    beyond = prompt.positions[..., -1:] + 1 + after
    return torch.cat([inside, beyond], dim=-1)


def chooses(grant: Grant, table: TokenTable) -> bool:
    """Whether the group feeds all that it has, and so makes its next choice."""
    return grant.group.pending <= grant.tokens and not grant.owes(table)


def feed(grants: list[Grant], fed: Fed, builder: WorkBuilder) -> Fed:
    """Turns grants into feeds; afterwards every fed unit's `cached` says what it will hold.

    `fed` knows which groups choose, and their drafts.
    """
    choosing = set(fed.ready)
    for grant in grants:
        if grant.group in choosing:
            _feed_whole(grant.group, fed, builder, grant.group.best)
        elif grant.owes(builder.table):
            _feed_shared(grant, fed, builder)
        else:
            _feed_chunk(grant, fed, builder)
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
        builder.add(sequence, sequence.request.prompt, sequence, count, before + wanted, best)
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
