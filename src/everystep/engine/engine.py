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
from itertools import repeat
from typing import cast

import torch

from everystep.engine.alternatives import drop_alternatives
from everystep.engine.amateurs import Amateurs, Contrast
from everystep.engine.apply import Change, abandoned, drop_rows, release
from everystep.engine.batches import History, best_needed
from everystep.engine.choices import Choices, Commit, failed
from everystep.engine.counts import Counts
from everystep.engine.drafting import Drafters
from everystep.engine.events import last_events, settled_events
from everystep.engine.feed import Feeds, Grant, columns_of, feed, note_hidden, regroup
from everystep.engine.given import require_fitting
from everystep.engine.guests import Clock, GuestKind, Guests, Host
from everystep.engine.hooks import Hooking, require_known_gifts
from everystep.engine.ledger import Ledger
from everystep.engine.prefixes import Prefixes, Room
from everystep.engine.reopen import Beginning, Known, forked, reopened
from everystep.engine.schedule import Scheduler
from everystep.engine.snapshot import read, resume, written
from everystep.engine.watching import StepRecord, Watch, WatchedStep, told
from everystep.errors import NOBODYS, UnsupportedError
from everystep.executors.base import Executor, Exporting
from everystep.executors.process import set_threads_here
from everystep.stops.ends import moment
from everystep.types import (
    Companion,
    Event,
    FinishReason,
    Group,
    Request,
    Sequence,
    StepOutput,
    TokenTable,
)
from everystep.types.request import Watcher

Observer = Callable[[StepRecord], None]
# Ids are drafted first: what reads feeds and gives for them beside reads and gives for drafts too.
GUESTS = (
    GuestKind(lambda request: request.drafter is not None, Drafters.of),
    GuestKind(lambda request: isinstance(request.readout, Contrast), Amateurs),
    GuestKind(lambda request: bool(request.hooks), Hooking),
)


class Engine:
    """Runs requests on one executor, under one scheduler, until nothing is pending.

    `early`: groups that decide late report what is settled as soon as it is, and not at their end.
    `clock`: the seconds that deadlines are moments of.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        observers: Iterable[Observer] = (),
        *,
        early: bool = True,
        clock: Clock = moment,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.observers = tuple(observers)
        self.early = early
        self.table = TokenTable()
        self.ledger = Ledger()
        self.counts = Counts()
        self.guests = Guests(Host(executor, self.counts, clock), GUESTS)
        self._cuts = "cut" in executor.abilities
        self.prefixes = Prefixes(
            scheduler.reuse, self.table, self.ledger, executor.inputs, cuts=self._cuts
        )
        self.ledger.keep = self.prefixes.keep
        # Observers get whole rows.
        self._reports_best = "best" in executor.abilities and not self.observers
        self._submitted = 0
        self._history: History = ()
        self._suspects: list[Group] = []
        self._entering: list[tuple[Group, int]] = []  # that of a call, and how many there were
        self._commit: Commit | None = None
        self._outbox: deque[Event] = deque()
        self._records: deque[StepRecord] = deque()
        self._told: deque[WatchedStep] = deque()
        self._watched_steps = 0
        self._broken = False

    @property
    def pending(self) -> bool:
        """True if a request is not over, or anything is still to be reported."""
        return bool(self.scheduler.groups or self._outbox or self._commit)

    @property
    def gained_seconds(self) -> float:
        """The seconds that drafts have saved, going by what steps and drafts were measured to
        cost."""
        drafters = self.guests.find(Drafters)
        return 0.0 if drafters is None else drafters.lengths.costs.gained_seconds

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
        require_known_gifts(request, self.executor.inputs)
        missing = request.needs - self.executor.abilities
        if missing:
            raise UnsupportedError(
                f"{type(self.executor).__name__} cannot do what the request needs",
                wanted=", ".join(sorted(missing)),
                got=", ".join(sorted(self.executor.abilities)) or "none",
                do="Choose another executor, or leave out the option that needs it",
            )
        require_fitting(request, self.executor.inputs)
        self.guests.open(request)
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
            ended = reason or FinishReason("cancelled")
            self._end([abandoned(group, ended, self.table, self.ledger)])
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
        """Write down what the group knows, for `restore`; it goes on here as if nothing had
        happened.

        RequestError where it holds what cannot be written.
        """
        self.recover()
        return written(group, self.table.data)

    def restore(self, request: Request, data: bytes) -> Group:
        """A group that goes on where another one with such a request was dumped.

        Its tokens, scores, draws and further events are those that the other one has. Its rank is
        the same unless a group here has that. RequestError if it was another request, FormatError
        if the bytes are damaged.
        """
        saved = read(data, request, self.executor.vocab_size)
        self.recover()
        taken = saved["rank"] in [group.rank for group in self.scheduler.groups]
        group = self._checked(request, self._submitted if taken else saved["rank"])
        self._entering.append((group, self._submitted))
        resume(group, saved, self.table)
        return self._entered(group)

    def fork(self, group: Group, request: Request, known: Known | None = None) -> Group:
        """A group like this one, with forks of its rows; `request`: the same under another id, or
        one with another strategy that can go on with what is `known` then."""
        self.recover()
        twin = self._checked(request, self._submitted)
        self._entering.append((twin, self._submitted))
        twin.become(forked(group, twin, self.table, self.ledger, known))
        return self._entered(twin)

    def replace(self, group: Group, request: Request, past: Beginning) -> None:
        """The group is one of this request from now on, whose only sequence begins with the ids of
        `past` after the prompt; what the rows of both share is not fed again."""
        self.recover()
        after = self._checked(request, group.rank)
        self._broken = True
        if group not in self.scheduler.groups:
            self._entering.append((group, self._submitted))
            self.scheduler.submit(group)
        self._end([reopened(group, after, past, self.table, self.ledger, cuts=self._cuts)])
        self._broken = False

    def _entered(self, group: Group) -> Group:
        """The group, which waits for its next step from the moment at which it is returned."""
        self._submitted = max(self._submitted, group.rank + 1)
        self.scheduler.submit(group)
        return self._entering.pop()[0]

    def flush(self) -> None:
        """Passes every outstanding fork, truncation and free to the executor."""
        if self.ledger.verbs:
            self.executor.run(self._feeds().work())

    def recover(self) -> None:
        """Restores the state before or after the last step, in which every row is known or
        dropped; a group whose call did not return has not come in."""
        if self._broken or self._entering:
            self._put_in_place()
            for group, before in self._entering:
                self.scheduler.remove(group)
                self._submitted = before
            live = [sequence for group in self.scheduler.groups for sequence in group.live]
            for sequence in live:
                sequence.forget()
                for unit in sequence.units:
                    unit.lose_row()
            self.guests.restart()
            self.prefixes.forget()
            self.ledger.restart(self.executor.audit())
            self.table.keep({sequence.line for sequence in live})
            self._broken = False
            self._entering.clear()

    # --- the first half ---------------------------------------------------------------------------

    def _step(self) -> None:
        late = self._late()
        if late:
            overdue = FinishReason("time")
            self._end([abandoned(group, overdue, self.table, self.ledger) for group in late])
            return
        grants = self._let_in(self.scheduler.plan(self.preempt, self._join))
        watch = Watch.of(grants)
        self.prefixes.shrink(self.scheduler.room)
        feeds = self._feeds()
        feeds.ready = [grant.group for grant in grants if grant.chooses(self.table)]
        broken = self.guests.before(grants, feeds, self.scheduler.groups)
        if broken:
            drop_alternatives(feeds.ready, feeds)
            ended = [failed([group], error, self.table, self.ledger) for group, error in broken]
            self._end([change for changes in ended for change in changes])
            return
        if watch is not None:
            watch.mark("draft")
        feed(grants, feeds)
        output = self._run(feeds, [grant.group for grant in grants])
        if output is None:
            return
        if watch is not None:
            watch.forwarded()
        note_hidden(feeds, output)
        for group in feeds.sharing:
            regroup(group, self.table, self.ledger)
        choices = Choices(
            feeds, output, self.counts, self._submitted, bool(self.observers), self._history
        )
        choices.make()
        if watch is not None:
            watch.mark("choose")
        self._end(choices.changes, choices, watch)
        self.guests.after(feeds)

    def _late(self) -> list[Group]:
        """Return the groups whose deadline has passed, waiting ones too; the clock is read once."""
        groups = [one for one in self.scheduler.groups if one.request.deadline is not None]
        if not groups:
            return groups
        now = self.guests.host.clock()
        return [
            group
            for group in groups
            if not group.finished and now >= cast(float, group.request.deadline)
        ]

    def _join(self, group: Group, running: list[Group], room: Room) -> bool:
        """Let the group share rows of others, and tell whether it may feed now."""
        found = self.prefixes.join(group, running, room)
        if found:
            self.counts.forked += found - group.request.prompt.start
            if not group.opened:
                group.forked = found
        return found is not None

    def _let_in(self, grants: list[Grant]) -> list[Grant]:
        """The grants whose sequences have lines; only one while the group that broke a forward is
        sought."""
        if self._suspects:
            groups = self.scheduler.groups
            self._suspects = [one for one in self._suspects if one in groups]
            grants = [one for one in grants if one.group in self._suspects][:1] or grants
        for group, _, shares in grants:
            hidden = group.request.strategy.reads.hidden
            for sequence in group.live:
                if sequence.line < 0:
                    sequence.line = self.table.open(group.request.visible_prompt())
                if hidden and columns_of(sequence).length < sequence.cached:
                    # It dropped hidden states of cached positions, which are fed again.
                    drop_rows(sequence, self.ledger)
            if shares and len(group.live) > 1:
                regroup(group, self.table, self.ledger)
        return grants

    def _feeds(self) -> Feeds:
        return Feeds(self.table, self.ledger, self.executor.inputs)

    def _run(self, feeds: Feeds, groups: list[Group]) -> StepOutput | None:
        """Run the feeds; None where the executor fails.

        The group that broke it is then found by feeding one at a time, each until it has chosen.
        """
        work = feeds.work()
        self.counts.forwards += 1
        self.counts.fed += len(work.tokens)
        try:
            output = self.executor.run(work)
        except NOBODYS:
            raise
        except Exception as error:
            self.recover()
            self._broken = True
            if len(groups) > 1:
                # Those of an earlier forward stay: the scheduler may not have let them in since.
                self._suspects = [*self._suspects, *groups]
            else:
                self._suspects = [one for one in self._suspects if one not in groups]
                self._end(failed(groups, error, self.table, self.ledger))
            return None
        if self._suspects:
            self._suspects = [one for one in self._suspects if one not in feeds.ready]
        self.counts.steps += 1
        self.counts.chunks += feeds.chunks
        self.counts.drafted += feeds.drafted
        return output

    # --- the second half --------------------------------------------------------------------------

    def _end(
        self, found: list[Change], step: Choices | None = None, watch: Watch | None = None
    ) -> None:
        """Carries out the changes, and what follows from them."""
        alive = False
        if any(change.group.request.linger for change in found):
            becoming = {id(change.group): change.after for change in found}
            alive = any(not becoming.get(id(g), g).finished for g in self.scheduler.groups)
        over: list[Group] = []
        for change in found:
            after, request = change.after, change.group.request
            if not after.finished:
                if self.early and after.opened and not request.strategy.streams:
                    change.events += settled_events(after, self.table)
            elif not (request.linger and after.live and (alive or request.keeps)):
                self._close(change)
                over.append(change.group)
            elif request.keeps and not change.group.finished:
                change.events += last_events(after)
        events = [event for change in found for event in change.events]
        self._commit = Commit(
            found,
            over,
            deque([*self._outbox, *events]),
            step.history if step else self._history,
            deque([*self._records, *(step.records if step else ())]),
            self._watchers_told(found, step, watch),
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
        while self._told:
            cast(Watcher, self._told[0].request.watcher)(self._told[0])
            self._told.popleft()

    def _watchers_told(
        self, found: list[Change], step: Choices | None, watch: Watch | None
    ) -> deque[WatchedStep]:
        """All that watchers are to be told, with what they were not told yet."""
        if watch is None and all(change.group.request.watcher is None for change in found):
            return self._told
        self._watched_steps += 1
        records = step.records if step else ()
        return deque([*self._told, *told(self._watched_steps, found, records, watch)])

    def _close(self, change: Change) -> None:
        """Ends the group: its rows are freed, and the rest of its result is reported."""
        after, live = change.after, change.after.live
        if after.request.wants.cache and live:
            self.flush()
            rows = [s.row for s in sorted(live, key=lambda s: s.index) if s.row is not None]
            after.pasts = tuple(map(cast(Exporting, self.executor).export, rows))
        if live:
            self.ledger.keep(live[0])
        for sequence in live:
            release(sequence, self.ledger)
            change.closed.append(sequence.line)
        after.live = []
        if not (after.request.keeps and change.group.finished):  # else they were reported then
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
        self._told = commit.told
        self._outbox = commit.events
        self._entering.clear()
        self._commit = None

    def _taken(self) -> list[Event]:
        """All events that wait to be reported; they count as reported from now on."""
        return list(map(deque.popleft, repeat(self._outbox, len(self._outbox))))
