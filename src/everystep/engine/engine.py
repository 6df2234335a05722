"""The engine: one step that knows neither strategies nor phases.

plan -> feed -> forward -> readout -> score -> select -> apply -> publish

The scheduler plans, `feed` builds the work, the executor runs it, `batches` scores it, strategies
select, `apply` moves rows. Nothing here asks which strategy it serves, or whether a feed is a
prompt or one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from everystep.engine.apply import (
    abandon,
    apply,
    drop_rows,
    release,
    rewind_memory,
    token_events,
)
from everystep.engine.batches import Scored, score
from everystep.engine.feed import Fed, Grant, WorkBuilder, chooses, feed, feed_again
from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import last_choices, note_choices, note_prompt
from everystep.engine.readout import enough
from everystep.engine.records import Capture, History, StepRecord
from everystep.engine.regroup import regroup
from everystep.engine.schedule import Scheduler
from everystep.engine.settled import settled_events
from everystep.errors import UnsupportedError, message
from everystep.executors.base import Executor, Exporting
from everystep.executors.process import set_threads_here
from everystep.types import (
    Companion,
    Event,
    FinishReason,
    Group,
    Request,
    Sequence,
    StepOutput,
    TokenTable,
    UndecidedError,
    Work,
)

Observer = Callable[[StepRecord], None]


@dataclass(slots=True)
class Counts:
    """What the engine has done so far; deterministic, so that tests can hold it to account."""

    steps: int = 0
    forwards: int = 0
    fed: int = 0
    chunks: int = 0
    syncs: int = 0
    preemptions: int = 0
    preemptions_in_decode: int = 0
    long_children: int = 0
    drafted: int = 0
    accepted: int = 0


class Engine:
    """Runs requests on one executor, under one scheduler, until nothing is pending.

    `early`: groups that decide late tell what is settled as soon as it is, and not at their end.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        observers: Iterable[Observer] = (),
        *,
        early: bool = True,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.observers = tuple(observers)
        self.early = early
        self.table = TokenTable()
        self.ledger = Ledger()
        self.counts = Counts()
        # Observers are shown whole rows.
        self._tells_best = {"best", "truncate"} <= executor.abilities and not self.observers
        self._submitted = 0
        self._history = History()

    @property
    def pending(self) -> bool:
        """Whether any request is not over."""
        return bool(self.scheduler.groups)

    def submit(self, request: Request) -> Group:
        """The request waits for its first step; refused if the executor lacks what it needs."""
        self._require_abilities(request)
        best = enough(request, self.executor.vocab_size) if self._tells_best else 0
        group = Group(request, self._submitted, best=best)
        group.live = [self._first_sequence(request)]
        try:
            self.scheduler.submit(group)
        except Exception:
            self.table.close(group.live[0].line)
            raise
        self._submitted += 1
        return group

    def step(self) -> list[Event]:
        """One forward for everything that the scheduler lets in; returns what became known.

        After an error or an interrupt inside, no sequence holds a row: requests that go on feed
        everything again, and those that are cancelled leave nothing behind.
        """
        threads = torch.get_num_threads()
        try:
            set_threads_here(self.executor.host_threads or threads)
            return self._step()
        except BaseException:
            self._let_go()
            raise
        finally:
            set_threads_here(threads)

    def _step(self) -> list[Event]:
        grants = self.scheduler.plan(self.preempt)
        kinds, fed, work = self._feed(grants)
        output = self._run(work)
        self._count(fed)
        for asked in fed.prompt_rows:
            note_prompt(asked, output.logits)
        scored = [self._score(groups, fed, output) for groups in kinds]
        events: list[Event] = []
        for one, picked in zip(scored, self._pick(scored), strict=True):
            events += self._choose(one, picked, fed, output, work)
        return events + self._retire(fed.ready)

    def _score(self, groups: list[Group], fed: Fed, output: StepOutput) -> Scored:
        given = self.table, self._submitted, self._history
        try:
            return score(groups, fed, output, *given)
        except UndecidedError:
            builder = self._builder()
            again = feed_again(groups, fed, builder)
            return score(groups, again, self._run(builder.work()), *given, whole=True)

    def _kinds(self, groups: list[Group]) -> list[list[Group]]:
        """Groups that select together: equal in kind of strategy, source of draws and readout."""
        kinds: dict[object, list[Group]] = {}
        for group in groups:
            request = group.request
            # Shortlists may be of different lengths.
            best = group.best > 0 if request.strategy.shortlists else group.best
            key = (request.strategy.kind, type(request.draws), request.readout, best)
            kinds.setdefault(key, []).append(group)
        return list(kinds.values())

    def _let_go(self) -> None:
        """Frees what a broken step may have left: rows by the executor's own account."""
        live = [sequence for group in self.scheduler.groups for sequence in group.live]
        for sequence in live:
            rewind_memory(sequence, sequence.visible)
            for unit in sequence.units:
                unit.lose_row()
        self.ledger.restart(self.executor.audit())
        self.table.keep({sequence.line for sequence in live})

    def cancel(self, group: Group, reason: FinishReason | None = None) -> list[Event]:
        """The group ends now, with the tokens it has."""
        reason = reason or FinishReason("cancelled")
        events = abandon(group, reason, self.table, self.ledger)
        return events + self._remove(group)

    def preempt(self, group: Group) -> None:
        """The group gives up its rows and will feed everything again."""
        held = any(sequence.row is not None for sequence in group.live)
        self.counts.preemptions += held
        self.counts.preemptions_in_decode += held and group.opened
        for sequence in group.live:
            drop_rows(sequence, self.ledger)

    def flush(self) -> None:
        """The executor has heard of every fork, truncation and free."""
        if self.ledger.verbs:
            self.executor.run(self._builder().work())

    def _require_abilities(self, request: Request) -> None:
        missing = request.needs - self.executor.abilities
        if missing:
            raise UnsupportedError(
                message(
                    f"{type(self.executor).__name__} cannot do what the request needs",
                    wanted=", ".join(sorted(missing)),
                    got=", ".join(sorted(self.executor.abilities)) or "none",
                    do="Choose another executor, or leave out the option that needs it",
                )
            )

    def _first_sequence(self, request: Request) -> Sequence:
        prompt = request.prompt
        token = request.pad_token if request.prefix_token is None else request.prefix_token
        pad = np.full(request.pad_prefix, token, dtype=np.int64)
        ids = pad if prompt.ids is None else np.concatenate([pad, prompt.ids])
        companions = tuple(Companion(one) for one in request.companions)
        line = self.table.open(ids)
        return Sequence(request, line, prompt.length, prompt.start, companions=companions)

    def _feed(self, grants: list[Grant]) -> tuple[list[list[Group]], Fed, Work]:
        """The groups that will choose in this step, kind by kind, and what the step feeds."""
        for grant in grants:
            if grant.shares:
                regroup(grant.group, self.table, self.ledger)
        builder = self._builder()
        ready = [grant.group for grant in grants if chooses(grant, self.table)]
        kinds = self._kinds(ready)
        fed = feed(grants, Fed(ready, self._propose(kinds)), builder)
        requests = [grant.group.request for grant in grants]
        work = builder.work(
            layers=any(request.wants.layers for request in requests),
            attentions=any(request.wants.attentions for request in requests),
            totals=any(request.strategy.scores == "log_probs" for request in requests),
        )
        return kinds, fed, work

    def _builder(self) -> WorkBuilder:
        return WorkBuilder(self.table, self.ledger)

    def _propose(self, kinds: list[list[Group]]) -> dict[int, np.ndarray]:
        """Drafts for the groups that will choose in this step, all of one kind at once."""
        drafts: dict[int, np.ndarray] = {}
        for groups in kinds:
            sequences = [sequence for group in groups for sequence in group.live]
            proposed = groups[0].request.strategy.propose(sequences, self.table)
            for sequence, draft in zip(sequences, proposed or (), strict=False):
                if len(draft):
                    drafts[id(sequence)] = draft
        return drafts

    def _run(self, work: Work) -> StepOutput:
        self.counts.forwards += 1
        self.counts.fed += len(work.tokens)
        return self.executor.run(work)

    def _count(self, fed: Fed) -> None:
        self.counts.steps += 1
        self.counts.chunks += fed.chunks
        self.counts.drafted += sum(len(draft) for draft in fed.drafts.values())

    def _pick(self, scored: list[Scored]) -> list[tuple[np.ndarray, ...]]:
        """What every strategy needs on the host, in one transfer; the best scores are there."""
        picked = [one.pick() for one in scored if one.best is None]
        self.counts.syncs += bool(picked)
        arrived = iter(_together(picked))
        return [next(arrived) if one.best is None else one.pick_best(one.best) for one in scored]

    def _choose(
        self,
        one: Scored,
        picked: tuple[np.ndarray, ...],
        fed: Fed,
        output: StepOutput,
        work: Work,
    ) -> list[Event]:
        batch = one.batch
        children = batch.groups[0].request.strategy.select(batch, picked)
        if batch.groups[0].request.wants.history:
            self._history.settled += int(children.counts.max())
        longer = children.counts > 1
        self.counts.long_children += int(longer.sum())
        self.counts.accepted += int((children.counts[longer] - 1).sum())
        if self.observers:
            captures = _captures(batch.sequences, batch.groups, fed, output, work)
            record = StepRecord(
                tuple(batch.groups),
                tuple(batch.sequences),
                batch.group_of,
                batch.row_sequence,
                one.logits,
                one.scores,
                children,
                captures,
            )
            for observer in self.observers:
                observer(record)
        children, noted = note_choices(batch, children, one.logits)
        self.counts.syncs += noted
        events = apply(batch, children, self.table, self.ledger)
        return events + self._settled(batch.groups)

    def _settled(self, groups: list[Group]) -> list[Event]:
        """What groups that decide late can tell already."""
        if not self.early or groups[0].request.strategy.streams:
            return []
        return [event for group in groups for event in settled_events(group, self.table)]

    def _retire(self, chose: list[Group]) -> list[Event]:
        """Ends the groups that are over; lingering ones only when nobody goes on."""
        over = [group for group in chose if group.finished]
        if not over:
            return []
        alive = any(not group.finished for group in self.scheduler.groups)
        events: list[Event] = []
        for group in over:
            if not (group.request.linger and group.live and alive):
                self._keep_pasts(group)
                for sequence in group.live:
                    release(sequence, self.table, self.ledger)
                group.live = []
                events += self._remove(group)
        return events

    def _keep_pasts(self, group: Group) -> None:
        """What the rows of a group hold is put aside before they go, where that is wanted."""
        if group.request.wants.cache:
            self.flush()
            live = sorted(group.live, key=lambda sequence: sequence.index)
            rows = [sequence.row for sequence in live if sequence.row is not None]
            executor = cast(Exporting, self.executor)
            group.pasts = tuple(executor.export(row) for row in rows)

    def _remove(self, group: Group) -> list[Event]:
        """The group is over: what of its result was not told yet is told."""
        self.scheduler.remove(group)
        if not self.pending:
            self.flush()
        strategy = group.request.strategy
        if strategy.streams:
            return []
        events: list[Event] = []
        for index, done in enumerate(strategy.finish(group)):
            tokens, told = done.tokens.tolist(), group.told
            known = last_choices(done.memo, len(tokens))[told:]
            name = group.request.request_id
            events += token_events(name, index, tokens[told:], told, done.reason, known)
        return events


def _together(picked: list[tuple[Tensor, ...]]) -> list[tuple[np.ndarray, ...]]:
    """The same tensors on the host: from an accelerator they travel as one block of bytes."""
    flat = [tensor for tensors in picked for tensor in tensors]
    if not flat or flat[0].device.type == "cpu":
        return [tuple(tensor.cpu().numpy() for tensor in tensors) for tensors in picked]
    block = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in flat]).cpu()
    host, start = [], 0
    for tensor in flat:
        end = start + tensor.numel() * tensor.element_size()
        # a copy aligns the bytes for the wider type
        host.append(block[start:end].clone().view(tensor.dtype).reshape(tensor.shape).numpy())
        start = end
    arrived = iter(host)
    return [tuple(next(arrived) for _ in tensors) for tensors in picked]


def _captures(
    sequences: list[Sequence], groups: list[Group], fed: Fed, output: StepOutput, work: Work
) -> dict[int, Capture]:
    """Batch index -> what the sequence's feed returned, for requests that want it."""
    captures: dict[int, Capture] = {}
    if output.layers is None and output.attentions is None:
        return captures
    ends = np.cumsum(work.counts)
    source_of = {s.line: s for group in groups for s in group.live}
    for s, sequence in enumerate(sequences):
        f = fed.feed_of[id(source_of[sequence.line])]
        start, end = int(ends[f] - work.counts[f]), int(ends[f])
        layers, attentions = output.layers, output.attentions
        cross = output.cross_attentions
        captures[s] = Capture(
            int(work.starts[f]),
            int(work.counts[f]),
            None if layers is None else tuple(layer[start:end] for layer in layers),
            None if attentions is None else attentions[f],
            None if cross is None else cross[f],
        )
    return captures
