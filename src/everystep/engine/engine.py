"""The engine: one step that knows neither strategies nor phases.

plan -> feed -> forward -> readout -> score -> select -> apply -> publish

The scheduler plans, `feed` builds the work, the executor runs it, `batches` scores it, strategies
select, `apply` says what groups become. Nothing here asks which strategy it serves, or whether a
feed is a prompt or one token.

A step has two halves. In the first nothing changes that could not be made again from ids: cache
rows, lines of free ids, memories of prefixes. What groups become, and what is to be reported, is
written into a `Commit`; setting it is the moment at which the step happens. The second half puts it
in place and can be repeated. So an interrupt leaves the state before the step or after it, and the
next call first brings rows and memories up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import cast

import numpy as np
import torch

from everystep.engine.apply import Change, abandoned, drop_rows, release
from everystep.engine.batches import History
from everystep.engine.choices import NOBODYS, Choices, failed
from everystep.engine.drafting import Drafters
from everystep.engine.events import last_events, settled_events
from everystep.engine.feed import Fed, Grant, WorkBuilder, chooses, feed, lacks_columns, note_hidden
from everystep.engine.given import require_fitting
from everystep.engine.ledger import Ledger
from everystep.engine.readout import best_needed
from everystep.engine.records import Counts, StepRecord
from everystep.engine.regroup import regroup
from everystep.engine.schedule import Scheduler
from everystep.engine.snapshot import read, sequences, written
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
    Work,
)

Observer = Callable[[StepRecord], None]


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
        self.drafters = Drafters()
        # Observers get whole rows.
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
        group = self._checked(request, self._submitted)
        prompt = request.prompt
        companions = tuple(Companion(one) for one in request.companions)
        group.live = [Sequence(request, -1, prompt.length, prompt.start, companions=companions)]
        self._submitted += 1
        self.scheduler.submit(group)
        return group

    def _checked(self, request: Request, rank: int) -> Group:
        """A group for a request that the executor and the drafter can serve."""
        self._require_abilities(request)
        require_fitting(request, self.executor.inputs)
        self.drafters.open(request.drafter, self.executor.vocab_size)
        best = best_needed(request, self.executor.vocab_size) if self._reports_best else 0
        return Group(request, rank, best=best)

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

    def dump(self, group: Group) -> bytes:
        """What the group knows, for `restore`; it goes on here as if nothing had happened.

        RequestError where it holds what cannot be written.
        """
        self.recover()
        return written(group, self.table.data)

    def restore(self, request: Request, data: bytes) -> Group:
        """A group that goes on where another one with such a request was dumped.

        Its tokens, scores, draws and further events are those that the other one has. RequestError
        if it was another request, FormatError if the bytes are damaged.
        """
        saved = read(data, request)
        self.recover()
        group = self._checked(request, saved.rank)
        group.live, group.done = sequences(saved, request), list(saved.done)
        group.state, group.prompt_known = saved.state, saved.prompt_known
        group.opened, group.settled, group.reported = saved.opened, saved.settled, saved.reported
        self._broken = True  # until every line that is opened is held
        for sequence, one in zip(group.live, saved.live, strict=True):
            sequence.line = self.table.open(np.concatenate([_visible(request), one.tokens]))
        self._submitted = max(self._submitted, saved.rank + 1)
        self.scheduler.submit(group)
        self._broken = False
        return group

    def flush(self) -> None:
        """Passes every outstanding fork, truncation and free to the executor."""
        if self.ledger.verbs:
            self.executor.run(self._builder().work())

    def recover(self) -> None:
        """Restores the state before or after the last step, in which every row is known or
        dropped."""
        if self._broken:
            self._put_in_place()
            live = [sequence for group in self.scheduler.groups for sequence in group.live]
            for sequence in live:
                sequence.forget()
                for unit in sequence.units:
                    unit.lose_row()
            self.drafters.restart()
            self.ledger.restart(self.executor.audit())
            self.table.keep({sequence.line for sequence in live})
            self._broken = False

    # --- the first half ---------------------------------------------------------------------------

    def _step(self) -> None:
        grants = self._let_in(self.scheduler.plan(self.preempt))
        ready = [grant.group for grant in grants if chooses(grant, self.table)]
        drafts, broken = self.drafters.propose(ready, self.scheduler.groups, self.table)
        if broken:
            self._end([one for group, error in broken for one in self._failed([group], error)])
            return
        fed = Fed(ready, drafts)
        work = self._feed(grants, fed)
        output = self._run(work, grants, fed.ready)
        if output is None:
            return
        self._count(fed)
        note_hidden(fed, output)
        choices = Choices(
            self.table, self.ledger, self.counts, self._submitted, bool(self.observers),
            fed, work, output, self._history,
        )  # fmt: skip
        choices.make()
        self._end(choices.changes, choices)

    def _let_in(self, grants: list[Grant]) -> list[Grant]:
        """The grants whose sequences have lines; only one while the group that broke a forward is
        sought."""
        suspects = [grant for grant in grants if grant.group in self._suspects]
        grants = suspects[:1] or grants
        for grant in grants:
            for sequence in grant.group.live:
                if sequence.line < 0:
                    sequence.line = self.table.open(_visible(sequence.request))
                if lacks_columns(sequence):
                    drop_rows(sequence, self.ledger)
            if grant.shares:
                regroup(grant.group, self.table, self.ledger)
        return grants

    def _feed(self, grants: list[Grant], fed: Fed) -> Work:
        """All that the step feeds; `fed` says which groups choose, and their drafts."""
        builder = self._builder()
        feed(grants, fed, builder)
        requests = [grant.group.request for grant in grants]
        totals = any(request.strategy.reads.scores == "log_probs" for request in requests)
        return builder.work(totals=totals)

    def _builder(self) -> WorkBuilder:
        return WorkBuilder(self.table, self.ledger, self.executor.inputs)

    def _run(self, work: Work, grants: list[Grant], ready: list[Group]) -> StepOutput | None:
        """What the executor answers. If it fails, the group that broke it is found by feeding one
        at a time, each until it has chosen."""
        self.counts.forwards += 1
        self.counts.fed += len(work.tokens)
        try:
            output = self.executor.run(work)
        except NOBODYS:
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

    def _failed(self, groups: list[Group], error: Exception) -> list[Change]:
        """What becomes of groups that this error ends."""
        return failed(groups, error, *self._stores)

    @property
    def _stores(self) -> tuple[TokenTable, Ledger]:
        return self.table, self.ledger

    # --- the second half --------------------------------------------------------------------------

    def _end(self, found: list[Change], step: Choices | None = None) -> None:
        """Carries out the changes, and what follows from them."""
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
        """Ends the group: its rows are freed, and the rest of its result is reported."""
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
        """Puts in place what a step has committed; calling it again changes nothing."""
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
        """All events that wait to be reported; they count as reported from now on."""
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
