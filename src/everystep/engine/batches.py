"""From the logits of a step to the choices of all groups whose strategies are equal.

A sequence with drafts stands here once per row of scores: as it is, and as it would be after each
draft. So a strategy that lets each sequence choose by itself chooses for all of them at once and
knows nothing of drafts; afterwards each sequence takes its choices for as long as they are the
drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.engine.decided import chosen_by, picked_by
from everystep.engine.feed import Feeds, columns_of
from everystep.engine.layout import Layout, laid_out
from everystep.engine.recorded_scores import candidates_of
from everystep.engine.rejection import judged
from everystep.engine.sequels import Sequels
from everystep.processors.guidance import guided
from everystep.processors.pipeline import allowed_tokens, apply, best_read, decided
from everystep.processors.stages import Stages
from everystep.stops.check import check
from everystep.strategies.base import Batch
from everystep.strategies.single import Picked
from everystep.types import (
    MOST_BEST,
    Children,
    FinishReason,
    Group,
    Request,
    Rows,
    Scores,
    Sequence,
    StepOutput,
    TokenTable,
)
from everystep.types.protocols import Predictions
from everystep.types.request import Candidates, Check, InRounds

History = tuple[Tensor, ...]
"""The scores that a call chose from, (R, V) per step, for criteria that want to read them."""


# --- what is read ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: scale * (log p - log q) + log q, with the companion's q.

    Source: Sanchez et al. 2023; transformers' UnbatchedClassifierFreeGuidanceLogitsProcessor.
    """

    scale: float
    layers: ClassVar[tuple[int, ...]] = ()
    narrows: ClassVar[bool] = False

    def mix(self, given: Predictions) -> Tensor:
        """(R, V) logits of the sequences and of their one companion -> (R, V)."""
        return guided(given.logits, given.companions[0], self.scale)


def best_needed(request: Request, vocabulary: int) -> int:
    """Return how many of the best logits of a row decide everything that the request asks of it; 0
    where the whole row is read."""
    wants, reads = request.wants, request.strategy.reads
    likelihoods = wants.logprobs is not None or wants.prompt_logprobs is not None
    if request.readout is not None or wants.history or likelihoods or request.verification.reads:
        return 0
    if any({"scores", "logits"} & {*hook.reads} for hook in request.hooks):
        return 0
    if not request.processors:
        count = reads.best
    elif reads.best == 1 and decided(request.processors, vocabulary):
        count = MOST_BEST
    elif reads.shortlists and reads.scores == "logits" and not request.draws.whole_rows:
        count = best_read(request.processors, vocabulary)
    else:
        count = 0
    if count and request.watcher is not None:
        count = max(count, min(candidates_of(request), MOST_BEST))
    return count if count <= MOST_BEST else 0


# --- scores and choices ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Groups that choose together: raw logits (R, V) float32, and what processors left of them.

    `layout`: which rows these are; `batch`: the same as sequences. The logits are (0, V) where only
    the best of the rows were reported. `given`: the same as scores; `beside`: (R, V) logits of each
    companion and of another model. `offered`: the scores, or what drafts that are accepted by
    chance leave of them. `early`: (n, R, V) logits of the layers that the readout names.
    `allowed`: (R, V) bool of what a readout that narrows chooses among. `shown`: the
    scores of all steps, for criteria. `sequels`: what hooks say, if there are any. `stages`: the
    scores after each stage, where a request is watched.
    """

    batch: Batch
    layout: Layout
    logits: Tensor
    given: Scores
    beside: list[Tensor]
    scores: Scores
    offered: Scores
    shown: History
    early: Tensor | None = None
    allowed: Tensor | None = None
    sequels: Sequels | None = None
    stages: Stages | None = None

    @property
    def groups(self) -> list[Group]:
        """The groups that choose."""
        return self.batch.groups

    def pick(self, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Reduce the scores to what the strategy wants in its next round."""
        strategy = self.groups[0].request.strategy
        if strategy.rounds > 1:
            self._process(cast(InRounds, strategy), earlier)
        return picked_by(strategy, strategy.pick(self.batch, self.offered, earlier))

    def _process(self, strategy: InRounds, earlier: Picked) -> None:
        """Process the rows that choose in this round, knowing what was chosen before them."""
        rows, chosen = strategy.turn(self.batch, earlier)
        sequences = [self.batch.sequences[r] for r in rows.tolist()]
        lengths = np.array([sequence.visible for sequence in sequences], dtype=np.int64)
        every = self.scores.values
        at = on_device(every.device, rows)
        if any(sequence.request.processors for sequence in sequences):
            request = self.groups[0].request
            narrows = request.readout is not None and request.readout.narrows
            seen = Rows(self.batch.table, sequences, lengths, chosen, narrowed=narrows)
            left = apply(seen, Scores.of(every[at]), owned=True, stages=self.stages)
            if narrows:
                given = self.given, self.beside, self.early, self.allowed
                left, _ = _NarrowedReadout(request, *given).select(at).anew(seen, left, self.stages)
            every[at] = left.whole().values
        if self.sequels is not None:
            for row in rows.tolist():
                self.sequels.force(every, row)

    def select(self, picked: Picked) -> Children:
        """The children of the sequences."""
        strategy = self.groups[0].request.strategy
        chosen = strategy.select(self.batch, picked)
        children = chosen_by(strategy, chosen, len(self.batch.sequences), self.offered.vocabulary)
        rows = children.parent.tolist()
        if self.layout.drafted:
            children, rows = _accepted(self, children)
        return children if self.sequels is None else self.sequels.noted(children, rows)

    def only(self, children: Children) -> tuple[Scored, Children]:
        """The same without the sequences that have no child: drafts that others have outdone."""
        layout, rows = self.layout.only(children.parent.tolist())
        at, batch, early = torch.tensor(rows), self.batch, self.early
        kept = replace(
            self,
            batch=replace(
                batch,
                sequences=layout.follow,
                group_of=batch.group_of[rows],
                slot=batch.slot[rows],
            ),
            layout=layout,
            logits=self.logits[at] if len(self.logits) else self.logits,
            given=self.given.select(at),
            beside=[one[at] for one in self.beside],
            scores=self.scores.select(at),
            offered=self.offered.select(at),
            early=None if early is None else early[:, at],
            allowed=None if self.allowed is None else self.allowed[at],
        )
        return kept, replace(children, parent=np.arange(len(layout.sequences)))

    def of_sequences(self) -> Batch:
        """The S sequences, one row each, whatever their drafts."""
        layout = self.layout
        if not layout.drafted:
            return self.batch
        group_of, slot = np.array(layout.group_of), self.batch.slot[layout.first]
        return replace(self.batch, sequences=layout.sequences, group_of=group_of, slot=slot)


def score(
    groups: list[Group], feeds: Feeds, output: StepOutput, submitted: int, history: History
) -> Scored:
    """Groups with equal strategies -> the scores that these ask for.

    `submitted`: how many groups the engine has received so far; the full rectangle has as many. The
    scores follow the `history` where criteria want to read it.
    """
    request, layout = groups[0].request, laid_out(groups, feeds)
    rows = layout.fed_rows(feeds)
    logits, given = _read(groups, rows, output, feeds)
    beside = [_take(output.logits, one) for one in rows[1:]]
    if feeds.added_to(layout.sources[0]).beside is not None:
        beside.append(_amateurs(layout, feeds))
    early = _early(layout, output, feeds)
    seen = allowed = None
    if any(group.request.processors for group in groups):
        visible = np.array([sequence.visible for sequence in layout.follow], dtype=np.int64)
        seen = Rows(feeds.table, layout.of_rows(layout.sequences), visible)
        if request.readout is not None and request.readout.narrows:
            seen = replace(seen, narrowed=True)
            allowed = allowed_tokens(seen, given.values)
    scores = mixed(request, given, beside, early, allowed)
    stages = None
    watchers = [group.request.watcher for group in groups]
    if any(one is not None and one.stages for one in watchers):
        stages = Stages()
        if scores is not given:
            _note_readout(stages, layout, feeds.table, request, scores)
    if request.strategy.rounds > 1:  # each processes its own rows
        scores = Scores.of(scores.whole().values.clone())
    elif seen is not None:
        scores = apply(seen, scores, owned=scores is not given, stages=stages)
        if seen.narrowed:
            read = _NarrowedReadout(request, given, beside, early, allowed)
            scores, allowed = read.anew(seen, scores, stages)
    sequels = None
    if any(group.request.hooks for group in groups):
        fed = layout.of_rows(layout.sources)
        sequels = Sequels(feeds, output, layout.follow, fed, layout.place, logits, scores)
        scores = sequels.settle()
    shown = _extended(history, scores, layout.drafted) if request.wants.history else ()
    reached = np.array(layout.place) + len(history) + 1 if shown else None
    stops = _stops(layout.follow, feeds.table, shown or None, reached, sequels)
    batch = _batch(groups, layout, feeds, stops, submitted, output.logits.shape[-1])
    offered = _offered(layout, scores, batch, feeds) if layout.drafted else scores
    return Scored(
        *(batch, layout, logits, given, beside, scores, offered, shown, early, allowed, sequels),
        stages=stages,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _NarrowedReadout:
    """The readout of a request that narrows, with what it reads: the same as in `Scored`."""

    request: Request
    given: Scores
    beside: list[Tensor]
    early: Tensor | None
    allowed: Tensor | None

    def select(self, at: Tensor) -> _NarrowedReadout:
        """Return that of some of the rows."""
        early = None if self.early is None else self.early[:, at]
        given, beside = self.given.select(at), [one[at] for one in self.beside]
        allowed = None if self.allowed is None else self.allowed[at]
        return _NarrowedReadout(self.request, given, beside, early, allowed)

    def anew(
        self, rows: Rows, scores: Scores, stages: Stages | None
    ) -> tuple[Scores, Tensor | None]:
        """Return the scores and what may follow, read again where the processors left nothing.

        What is likely is then looked for among what they do not rule out.
        """
        empty = (scores.values == -torch.inf).all(dim=-1).cpu()
        if not empty.any():
            return scores, self.allowed
        at = empty.nonzero()[:, 0]
        part, at = rows.select(at.numpy()), on_device(scores.values.device, at)
        own = self.select(at)
        allowed = apply(part, own.given).whole().values > -torch.inf
        if own.allowed is not None:
            allowed &= own.allowed
        again = mixed(self.request, own.given, own.beside, own.early, allowed)
        if stages is not None:
            stages.begin(part)
            stages.note(part, again, readout_name(self.request))
        values = scores.whole().values.clone()
        every = torch.ones_like(values, dtype=torch.bool) if self.allowed is None else self.allowed
        values[at] = apply(part, again, owned=True, stages=stages).whole().values
        if (values[at] == -torch.inf).all(dim=-1).any():  # a processor may know why
            apply(replace(rows, narrowed=False), Scores.of(values))
        return Scores.of(values), every.index_copy(0, at, allowed)


def _note_readout(
    stages: Stages, layout: Layout, table: TokenTable, request: Request, scores: Scores
) -> None:
    """Note what the readout made of the logits of the rows."""
    visible = np.array([sequence.visible for sequence in layout.follow], dtype=np.int64)
    rows = Rows(table, layout.of_rows(layout.sequences), visible)
    stages.note(rows, scores, readout_name(request))


def readout_name(request: Request) -> str:
    """Return the name of what stands between logits and processors."""
    readout = request.readout
    return "log_softmax" if readout is None else type(readout).__name__.lower()


def _batch(
    groups: list[Group], layout: Layout, feeds: Feeds, stops: Check, submitted: int, vocabulary: int
) -> Batch:
    """The rows as sequences that choose."""
    request, sources = groups[0].request, layout.sources
    if layout.drafted:  # of rows whose drafts are judged by chance only one is left to draw
        slot = layout.owner if request.verification.rejects else list(range(len(layout.follow)))
        slots = slot[-1] + 1
    else:
        width = max([group.request.strategy.width for group in groups])
        pairs = zip(layout.group_of, layout.sequences, strict=True)
        slot, slots = [groups[g].rank * width + s.index for g, s in pairs], width * submitted
    return Batch(
        groups=groups,
        sequences=layout.follow,
        group_of=np.array([layout.group_of[s] for s in layout.owner], dtype=np.int64),
        table=feeds.table,
        slot=np.array(slot, dtype=np.int64),
        slots=slots,
        draws=request.draws,
        vocabulary=vocabulary,
        columns=lambda s: columns_of(sources[s]),
        stops=stops,
    )


def _amateurs(layout: Layout, feeds: Feeds) -> Tensor:
    """(R, V) logits of another model, in the order of the rows."""
    said = [cast(Tensor, feeds.added_to(source).beside) for source in layout.sources]
    return torch.stack([said[s][i] for s, i in zip(layout.owner, layout.place, strict=True)])


def _offered(layout: Layout, scores: Scores, batch: Batch, feeds: Feeds) -> Scores:
    """Return what drafts that are accepted by chance leave of the scores."""
    requests = [sequence.request for sequence in layout.sequences]
    drawn = [feeds.added_to(source).drawn_from for source in layout.sources]
    return judged(scores, batch, [*zip(requests, layout.first, layout.drafts, drawn, strict=True)])


def _extended(history: History, scores: Scores, drafted: bool) -> History:
    # Criteria may write to what they read, and the strategy has yet to choose from the scores.
    new = scores.whole().values.clone()
    return (*history, *(new[:, None] if drafted else (new,)))


def _read(
    groups: list[Group], rows: list[list[int]], output: StepOutput, feeds: Feeds
) -> tuple[Tensor, Scores]:
    """(R, V) raw logits, and the same as scores; or no logits and, of the rows, the best.

    `rows`: of the sequences, then of their companions, (R,) rows of the output.
    """
    if groups[0].best and output.best is not None:
        best, most = output.best, max([group.best for group in groups])
        if any(group.request.watcher is not None for group in groups):
            return _with_rows(best, rows[0], most, output)
        # Slicing a tensor is one of the dearest lines of a small step.
        logits = output.logits[:0] if feeds.wanted else output.logits
        return logits, _best(best, rows[0], most)
    logits = _take(output.logits, rows[0])
    if any(group.request.watcher is not None for group in groups):
        logits = logits.clone()  # a record is written while the next step may fill its buffers
    totals = None if output.totals is None else output.totals[torch.tensor(rows[0])]
    return logits, Scores.of(logits, totals)


def _with_rows(
    best: Scores, rows: list[int], most: int, output: StepOutput
) -> tuple[Tensor, Scores]:
    """(R, V) logits and the `most` best of rows that are watched: what is chosen from is what would
    be chosen from otherwise."""
    whole = best.whole().values if output.best_rows is None else output.best_rows
    listed = _best(replace(best, read=lambda some: whole[some]), rows, most)
    return _take(whole, rows), listed


def _early(layout: Layout, output: StepOutput, feeds: Feeds) -> Tensor | None:
    """(n, R, V) what earlier layers say of R rows, each a place among the last ones of its feed;
    None where the readout names none."""
    readout, found = layout.sources[0].request.readout, []
    if readout is None or not readout.layers:
        return None
    for s, i in zip(layout.owner, layout.place, strict=True):
        feed = feeds.feed_of[id(layout.sources[s])]
        early = cast(Tensor, output.answers[feed].early)
        found.append(early[:, early.shape[1] - 1 - len(layout.drafts[s]) + i])
    return torch.stack(found, dim=1)


def mixed(
    request: Request,
    given: Scores,
    beside: list[Tensor],
    early: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Scores:
    """Return the scores of R rows before processors: log-probabilities or the readout's mixture
    where the request wants them, the given scores themselves otherwise.

    `beside`: (R, V) logits of companions; `early`: (n, R, V) those of earlier layers; `allowed`:
    (R, V) bool of what grammars let follow.
    """
    found = given
    if request.readout is not None:
        found = Scores.of(request.readout.mix(Predictions(given.values, beside, early, allowed)))
    return found.log_probs() if request.strategy.reads.scores == "log_probs" else found


def _best(best: Scores, rows: list[int], most: int) -> Scores:
    """The `most` best of the given rows."""
    if rows == list(range(len(best))) and most >= best.values.shape[1]:
        return best
    return best.select(torch.tensor(rows), most)


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    """(R, V) float32 rows; without a copy where they are a block of all logits."""
    first, count = rows[0], len(rows)
    if rows == list(range(first, first + count)):
        chosen = logits if count == len(logits) else logits[first : first + count]
    else:
        chosen = logits[on_device(logits.device, np.array(rows))]
    return chosen.to(torch.float32)


def _stops(
    sequences: list[Sequence],
    table: TokenTable,
    shown: History | None,
    reached: np.ndarray | None,
    sequels: Sequels | None,
) -> Check:
    def stops(parents: np.ndarray, tokens: np.ndarray) -> list[FinishReason | None]:
        chosen = [sequences[p] for p in parents.tolist()]
        seen = None if reached is None else reached[parents]
        reasons = check(Candidates(table, chosen, tokens, shown, seen))
        return reasons if sequels is None else sequels.ended(parents, tokens, reasons)

    return stops


def _accepted(scored: Scored, children: Children) -> tuple[Children, list[int]]:
    """One child per sequence, or of its alternatives: its choices for as long as they equal its
    drafts, and one more; and the rows of the last ones."""
    holds = None if scored.sequels is None else scored.sequels.holds
    tokens, counts = children.tokens[:, 0].tolist(), children.counts.tolist()
    taken: list[range] = []
    for first, draft in zip(scored.layout.first, scored.layout.drafts, strict=True):
        row = first
        for guess in draft.tolist():
            if children.finish[row] is not None or tokens[row] != guess:
                break
            if holds is not None and not holds[row + 1]:
                break
            if (then := children.finish[row + 1]) and then.kind == "error":
                break  # it is asked again without a draft before it, and its tokens stand
            row += 1
        taken.append(range(first, row + 1))
    parents = _longest(scored.layout.origin, taken)
    taken = [taken[s] for s in parents]
    table = np.zeros((len(taken), max(map(len, taken))), dtype=np.int64)
    for s, rows in enumerate(taken):
        table[s, : len(rows)] = tokens[rows.start : rows.stop]
    last = [rows[-1] for rows in taken]
    accepted = Children(
        np.array(parents),
        table,
        np.array([sum(counts[rows.start : rows.stop]) for rows in taken]),
        children.score[last],
        [children.finish[row] for row in last],
        memo=None if children.memo is None else [children.memo[row] for row in last],
        lingers=children.lingers,
    )
    return accepted, last


def _longest(origin: list[int], taken: list[range]) -> list[int]:
    """Of each sequence and its alternatives the one that goes furthest, the first of several."""
    best: dict[int, int] = {}
    for s, first in enumerate(origin):
        if len(taken[s]) > len(taken[best.setdefault(first, s)]):
            best[first] = s
    return list(best.values())
