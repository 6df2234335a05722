"""The engine: one step that knows neither strategies nor phases.

plan -> feed -> forward -> readout -> score -> select -> apply -> publish

The scheduler plans, `feed` builds the work, the executor runs it, `batches` scores it, strategies
select, `apply` says what groups become. Nothing here asks which strategy it serves, or whether a
feed is a prompt or one token.

A step has two halves. In the first nothing changes that could not be made again from ids: cache
rows, lines of free ids, memories of prefixes. What groups become, and what is to be reported, is
written into a `Commit`; setting it is the moment at which the step happens. The second half puts it
in place and can be repeated. So an interrupt leaves the state before the step or after it, and
whoever comes next first brings rows and memories up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import cast

import numpy as np
import torch
from torch import Tensor

from everystep.engine.apply import (
    Change,
    abandoned,
    changes,
    forget,
    last_events,
    release,
    settled_events,
)
from everystep.engine.batches import History, Picked, Scored, score
from everystep.engine.feed import Fed, Grant, WorkBuilder, chooses, feed, note_hidden
from everystep.engine.given import require_fitting
from everystep.engine.ledger import Ledger
from everystep.engine.logprobs import note_choices, with_prompt
from everystep.engine.readout import best_needed
from everystep.engine.records import Capture, StepRecord
from everystep.engine.regroup import regroup
from everystep.engine.schedule import Scheduler
from everystep.errors import InvariantError, UnsupportedError, message
from everystep.executors.base import Executor, Exporting
from everystep.executors.process import set_threads_here
from everystep.executors.process import set_threads_here
from everystep.types import (
    Children,
    Companion,
    Event,
    FinishReason,
    Group,
    Request,
    Sequence,
    StepOutput,
    TokenTable,
    Work,
)
from everystep.types.protocols import Drafter, Drafting

Observer = Callable[[StepRecord], None]
# A request's own code may raise anything else, which ends that request alone.
_NOBODYS = (MemoryError, InvariantError)


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


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step changes, all of it: to put it in place twice is the same as once.

    `over`: groups whose last event is among the `events`, which are all that wait to be taken.
    """

    changes: list[Change]
    over: list[Group]
    events: deque[Event]
    history: History
    records: deque[StepRecord]


@dataclass(slots=True)
class Step:
    """What the first half of a step has found out so far."""

    fed: Fed
    work: Work
    output: StepOutput
    changes: list[Change] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    history: History = ()


class Engine:
    """Runs requests on one executor, under one scheduler, until nothing is pending.

    `early`: groups that decide late report what is settled as soon as it is, and not at their end.
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
        self.drafting: dict[Drafter, Drafting] = {}
        # Observers are shown whole rows.
        self._reports_best = "best" in executor.abilities and not self.observers
        self._submitted = 0
        self._history: History = ()
        self._suspects: list[Group] = []
        self._commit: Commit | None = None
        self._outbox: deque[Event] = deque()
        self._records: deque[StepRecord] = deque()
        self._broken = False

    @property
    def pending(self) -> bool:
        """Whether any request is not over, or anything is still to be reported."""
        return bool(self.scheduler.groups or self._outbox or self._commit)

    def submit(self, request: Request) -> Group:
        """The request waits for its first step; refused if the executor lacks what it needs."""
        self._require_abilities(request)
        require_fitting(request, self.executor.inputs)
        drafter = request.drafter
        if drafter is not None and drafter not in self.drafting:
            self.drafting[drafter] = drafter.start(self.executor.vocab_size)
        best = best_needed(request, self.executor.vocab_size) if self._reports_best else 0
        group = Group(request, self._submitted, best=best)
        prompt = request.prompt
        companions = tuple(Companion(one) for one in request.companions)
        group.live = [Sequence(request, -1, prompt.length, prompt.start, companions=companions)]
        self._submitted += 1
        self.scheduler.submit(group)
        return group

    def step(self) -> list[Event]:
        """One forward for everything that the scheduler lets in; returns what became known.

        After an error or an interrupt, calling it again goes on as if nothing had happened: what
        was lost is fed again, and what was not returned yet is returned first.
        """
        self.recover()
        if not self._outbox:
            threads = torch.get_num_threads()
            self._broken = True
            try:
                set_threads_here(self.executor.host_threads or threads)
                self._step()
            finally:
                set_threads_here(threads)
            self._broken = False
        return self._taken()

    def cancel(self, group: Group, reason: FinishReason | None = None) -> list[Event]:
        """The group ends now, with the tokens it has; nothing if it is over already."""
        self.recover()
        if group in self.scheduler.groups:
            self._broken = True
            self._end([abandoned(group, reason or FinishReason("cancelled"), *self._stores)])
            self._broken = False
        return self._taken()

    def preempt(self, group: Group) -> None:
        """The group gives up its rows and will feed everything again."""
        held = any(sequence.row is not None for sequence in group.live)
        self.counts.preemptions += held
        self.counts.preemptions_in_decode += held and group.opened
        for sequence in group.live:
            release(sequence, self.ledger)

    def flush(self) -> None:
        """The executor has heard of every fork, truncation and free."""
        if self.ledger.verbs:
            self.executor.run(self._builder().work())

    def recover(self) -> None:
        """The state is that before or after the last step, and every row is known, or let go."""
        if self._broken:
            self._put_in_place()
            live = [sequence for group in self.scheduler.groups for sequence in group.live]
            for sequence in live:
                sequence.forget()
                for unit in sequence.units:
                    unit.lose_row()
            for drafting in self.drafting.values():
                drafting.restart()
            self.ledger.restart(self.executor.audit())
            self.table.keep({sequence.line for sequence in live})
            self._broken = False

    # --- the first half ---------------------------------------------------------------------------

    def _step(self) -> None:
        grants = self._let_in(self.scheduler.plan(self.preempt))
        ready = [grant.group for grant in grants if chooses(grant, self.table)]
        drafts, failed = self._draft(ready)
        if failed:
            self._end(failed)
            return
        kinds, fed, work = self._feed(grants, Fed(ready, drafts))
        output = self._run(work, grants, fed.ready)
        if output is None:
            return
        self._count(fed)
        note_hidden(fed, output)
        step = Step(fed, work, output, history=self._history)
        self._choose(kinds, step)
        self._note_prompts(step)
        self._end(step.changes, step)

    def _let_in(self, grants: list[Grant]) -> list[Grant]:
        """The grants whose sequences have lines; one alone while somebody broke a forward."""
        suspects = [grant for grant in grants if grant.group in self._suspects]
        grants = suspects[:1] or grants
        for grant in grants:
            for sequence in grant.group.live:
                if sequence.line < 0:
                    sequence.line = self.table.open(_visible(sequence.request))
            if grant.shares:
                regroup(grant.group, self.table, self.ledger)
        return grants

    def _feed(self, grants: list[Grant], fed: Fed) -> tuple[list[list[Group]], Fed, Work]:
        """The groups that will choose in this step, kind by kind, and what the step feeds."""
        builder = self._builder()
        feed(grants, fed, builder)
        requests = [grant.group.request for grant in grants]
        totals = any(request.strategy.reads.scores == "log_probs" for request in requests)
        work = builder.work(totals=totals)
        return _kinds(fed.ready), fed, work

    def _builder(self) -> WorkBuilder:
        return WorkBuilder(self.table, self.ledger, self.executor.inputs)

    def _draft(self, groups: list[Group]) -> tuple[dict[int, np.ndarray], list[Change]]:
        """The drafts of groups that choose, and what becomes of those whose drafter fails."""
        drafters: dict[Drafter, list[Group]] = {}
        for group in groups:
            if group.request.drafter is not None:
                drafters.setdefault(group.request.drafter, []).append(group)
        drafts: dict[int, np.ndarray] = {}
        failed: list[Change] = []
        asking = deque(drafters.items())
        while asking:
            drafter, own = asking.popleft()
            try:
                drafts |= self._proposed(drafter, [s for group in own for s in group.live])
            except _NOBODYS:
                raise
            except Exception as error:
                self._restart(drafter)
                if len(own) == 1:
                    failed += self._failed(own, error)
                else:
                    asking.extend((drafter, [group]) for group in own)
        return drafts, failed

    def _restart(self, drafter: Drafter) -> None:
        """The drafter holds nothing, and no sequence remembers otherwise."""
        for group in self.scheduler.groups:
            if group.request.drafter == drafter:
                for sequence in group.live:
                    sequence.forget()
        if drafter in self.drafting:
            self.drafting[drafter].restart()

    def _proposed(self, drafter: Drafter, sequences: list[Sequence]) -> dict[int, np.ndarray]:
        """The drafter's ids after each of the sequences that have room for one beside the choice."""
        open_ones = [s for s in sequences if s.finish is None and _room(s) > 0]
        if not open_ones:
            return {}
        proposed = self.drafting[drafter].propose(open_ones, self.table)
        pairs = zip(open_ones, proposed, strict=True)
        return {id(s): draft[: _room(s)] for s, draft in pairs if len(draft)}

    def _run(self, work: Work, grants: list[Grant], ready: list[Group]) -> StepOutput | None:
        """What the executor answers. If it fails, who broke it is found by feeding one at a time,
        each until it has chosen."""
        self.counts.forwards += 1
        self.counts.fed += len(work.tokens)
        try:
            output = self.executor.run(work)
        except _NOBODYS:
            raise
        except Exception as error:
            groups = [grant.group for grant in grants]
            self.recover()
            self._broken = True
            self._suspects = groups if len(groups) > 1 else self._without(groups)
            if len(groups) == 1:
                self._end(self._failed(groups, error))
            return None
        if self._suspects:
            self._suspects = self._without(ready)
        return output

    def _without(self, groups: list[Group]) -> list[Group]:
        return [group for group in self._suspects if group not in groups]

    def _count(self, fed: Fed) -> None:
        self.counts.steps += 1
        self.counts.chunks += fed.chunks
        self.counts.drafted += sum(len(draft) for draft in fed.drafts.values())

    def _choose(self, kinds: list[list[Group]], step: Step) -> None:
        """What every group that chooses becomes; one transfer serves all of them."""
        scored = [one for groups in kinds for one in self._scored(groups, step)]
        picked = [one.pick() for one in scored]
        self.counts.syncs += bool(picked)
        for one, arrived in zip(scored, _together(picked), strict=True):
            self._selected(one, arrived, step)

    def _scored(self, groups: list[Group], step: Step) -> list[Scored]:
        """The scores of groups with equal strategies; if that fails, of each for itself."""
        try:
            return [self._score(groups, step)]
        except _NOBODYS:
            raise
        except Exception as error:
            for sequence in (s for group in groups for s in group.live):
                forget(sequence)
            if len(groups) == 1:
                step.changes += self._failed(groups, error)
                return []
            return [one for group in groups for one in self._scored([group], step)]

    def _score(self, groups: list[Group], step: Step) -> Scored:
        return score(
            groups, step.fed, step.output, self.table, self._submitted, self._history
        )

    def _selected(self, scored: Scored, first: tuple[np.ndarray, ...], step: Step) -> None:
        """What becomes of groups that chose together; if that fails, of each for itself."""
        try:
            children = scored.select(self._rounds(scored, first))
        except _NOBODYS:
            raise
        except Exception as error:
            if len(scored.groups) == 1:
                step.changes += self._failed(scored.groups, error)
                return
            for one in (one for group in scored.groups for one in self._scored([group], step)):
                self._selected(one, _together([one.pick()])[0], step)
            return
        longer = children.counts > 1
        self.counts.long_children += int(longer.sum())
        self.counts.accepted += int((children.counts[longer] - 1).sum())
        if scored.shown:
            step.history = scored.shown[: len(self._history) + int(children.counts.max())]
        if self.observers:
            step.records.append(_record(scored, children, step))
        children, noted = note_choices(scored.sequences, scored.first, children, scored.logits)
        self.counts.syncs += noted
        step.changes += changes(scored.of_sequences(), children, scored.drafts, *self._stores)

    def _rounds(self, scored: Scored, first: tuple[np.ndarray, ...]) -> Picked:
        """What every round of the strategy picks; each after the first sees those before it."""
        picked: Picked = (first,)
        while len(picked) < scored.groups[0].request.strategy.rounds:
            picked = (*picked, _together([scored.pick(picked)])[0])
        return picked

    def _note_prompts(self, step: Step) -> None:
        """How likely prompts are, where that was asked."""
        for asked in step.fed.prompt_rows:
            change = next((one for one in step.changes if one.group is asked.group), None)
            if change is None:
                change = Change(asked.group, asked.group.without_live())
                change.after.live = asked.group.live
                step.changes.append(change)
            change.after.prompt_known = with_prompt(
                change.after.prompt_known, asked, step.output.logits
            )

    def _failed(self, groups: list[Group], error: Exception) -> list[Change]:
        """What becomes of groups that this error ends."""
        return [abandoned(group, FinishReason("error", error), *self._stores) for group in groups]

    @property
    def _stores(self) -> tuple[TokenTable, Ledger]:
        return self.table, self.ledger

    # --- the second half --------------------------------------------------------------------------

    def _end(self, found: list[Change], step: Step | None = None) -> None:
        """The changes happen, and what follows from them."""
        after = {id(change.group): change.after for change in found}
        alive = any(not after.get(id(g), g).finished for g in self.scheduler.groups)
        over: list[Group] = []
        for change in found:
            if not change.after.finished:
                if self.early and not change.group.request.strategy.streams and change.after.opened:
                    change.events += settled_events(change.after, self.table)
            elif not (change.group.request.linger and change.after.live and alive):
                self._close(change)
                over.append(change.group)
        events = [event for change in found for event in change.events]
        history = self._history if step is None else step.history
        records = () if step is None else step.records
        self._commit = Commit(
            found,
            over,
            deque([*self._outbox, *events]),
            history,
            deque([*self._records, *records]),
        )
        self._put_in_place()
        for change in found:
            for line in change.closed:
                self.table.close(line)
        if not self.scheduler.groups:
            self.flush()
        while self._records:
            for observer in self.observers:
                observer(self._records[0])
            self._records.popleft()

    def _close(self, change: Change) -> None:
        """The group is over: its rows are let go, and the rest of its result is reported."""
        after, live = change.after, change.after.live
        if after.request.wants.cache and live:
            self.flush()
            rows = [s.row for s in sorted(live, key=lambda s: s.index) if s.row is not None]
            after.pasts = tuple(map(cast(Exporting, self.executor).export, rows))
        for sequence in live:
            release(sequence, self.ledger)
            change.closed.append(sequence.line)
        after.live = []
        change.events += last_events(after)

    def _put_in_place(self) -> None:
        """What a step has committed is so, however often this is called."""
        commit = self._commit
        if commit is None:
            return
        for change in commit.changes:
            change.group.become(change.after)
        for group in commit.over:
            self.scheduler.remove(group)
        self._history = commit.history
        self._records = commit.records
        self._outbox = commit.events
        self._commit = None

    def _taken(self) -> list[Event]:
        """All that waits to be reported; from now on it is."""
        return list(map(deque.popleft, repeat(self._outbox, len(self._outbox))))

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


def _visible(request: Request) -> np.ndarray:
    """The ids that stand before the first generated one."""
    ids = request.prompt.ids
    token = request.pad_token if request.prefix_token is None else request.prefix_token
    pad = np.full(request.pad_prefix, token, dtype=np.int64)
    return pad if ids is None else np.concatenate([pad, ids])


def _room(sequence: Sequence) -> int:
    """How many tokens may follow a sequence beside the one that it chooses now."""
    return sequence.request.max_length - sequence.length - 1


def _kinds(groups: list[Group]) -> list[list[Group]]:
    """Groups that choose together: equal in strategy, source of draws and readout."""
    kinds: dict[object, list[Group]] = {}
    for group in groups:
        request = group.request
        # Shortlists may be of different lengths.
        best = group.best > 0 if request.strategy.reads.shortlists else group.best
        key = (request.strategy, type(request.draws), request.readout, best)
        kinds.setdefault(key, []).append(group)
    return list(kinds.values())


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


def _record(scored: Scored, children: Children, step: Step) -> StepRecord:
    batch = scored.of_sequences()
    captures = _captures(scored.sequences, scored.groups, step.fed, step.output, step.work)
    return StepRecord(
        tuple(scored.groups),
        tuple(scored.sequences),
        batch.group_of,
        scored.owner,
        scored.logits,
        scored.scores.whole().values,
        children,
        captures,
    )


def _captures(
    sequences: list[Sequence], groups: list[Group], fed: Fed, output: StepOutput, work: Work
) -> dict[int, Capture]:
    """Batch index -> what the sequence's feed returned, for requests that want it."""
    captures: dict[int, Capture] = {}
    source_of = {s.line: s for group in groups for s in group.live}
    for s, sequence in enumerate(sequences):
        f = fed.feed_of[id(source_of[sequence.line])]
        answer = output.answers.get(f)
        if answer is not None and (answer.layers or answer.attentions):
            captures[s] = Capture(int(work.starts[f]), int(work.counts[f]), answer)
    return captures
