"""A generation in your hands: looked at step by step, spoken to, changed, forked, saved.

A run is one request on an engine that it shares with its forks; the one that is asked for a step
has the turn. A change of ids (send, edit, rewind) makes the group one of another request, which
begins with the ids that stand there now and takes over the rows up to where they differ.

Whatever is done to a run is done between two steps. Other threads wait until a step is over; code
that the step itself calls (a processor, a criterion, a hook) cannot wait, and is refused. A
`cancel` alone is carried out for it when the step is over.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Sequence as Items
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np

from everystep.adapters import without_steering
from everystep.config.kinds import is_integer
from everystep.drivers.generated import Generated
from everystep.drivers.session import Session
from everystep.engine import Beginning, Known
from everystep.engine.decided import results_of
from everystep.engine.explained import Account, Again, Explanation, accounted, explained
from everystep.engine.logprobs import with_given
from everystep.engine.recording import RunRecorder, name_of
from everystep.engine.sight import Sight
from everystep.errors import RequestError, shown
from everystep.files.opening import as_path
from everystep.records import GrowingRecord, Record, read_record
from everystep.requests.door import PromptValues
from everystep.requests.prompts import PromptLike
from everystep.requests.subject import Subject
from everystep.runs.hands import Asked, Hands, Rules, is_one, over, read_ids, require_changeable
from everystep.runs.saved import NO_TRAIL, RunState, Trail, require_possible, write_run
from everystep.runs.steps import Step
from everystep.shown import table
from everystep.strategies import Beam, BestOf, Greedy, Sample
from everystep.streamers import LiveBeam, Wording, beam_event
from everystep.types import Finished, Group, Request, Sequence, Strategy, values_of

MOST_MORE = 1000
"""How many further hypotheses `more` gives at once: each step ranks all that are kept."""

if TYPE_CHECKING:
    from everystep.requests.keywords import PromptOptions


class Run:
    """An iterator of steps, sync and async, over one prompt.

    Ids after the prompt are counted from 0, those that were sent with those that were chosen.
    `max_new_tokens` counts the chosen ones. Several threads may hold a run; each step is over
    before anything else happens.
    """

    def __init__(
        self,
        model: Subject,
        session: Session,
        passed: PromptValues,
        rules: list[tuple[int, Rules]],
        hands: Hands,
        group: Group,
        trail: Trail = NO_TRAIL,
        ahead: Rules | None = None,
    ) -> None:
        self.model, self.tokenizer = model, session.tokenizer
        self._session, self._passed = session, passed
        # From which position on which rules hold; what was known after so many ids.
        self._rules, self._hands, self._group = rules, hands, group
        self._ahead = ahead  # set since the run ended, for when it goes on
        self._given = frozenset(trail.given)
        self._memos = {n: dict(memo) for n, memo in trail.memos.items()}
        self._ready: deque[Step] = deque()
        self._shown = frozenset(trail.shown)  # the hypotheses that `more` has given
        self._number = trail.steps
        self._wording = Wording(self.tokenizer)
        self._reword()

    @classmethod
    def begun(cls, model: Subject, tokenizer: object, prompt: PromptLike, asked: Asked) -> Run:
        """Return a run of the prompt, which has not taken its first step."""
        session = asked.session(model, tokenizer)
        passed = session.read(prompt, 0)
        call = session.prepared(passed, 0)
        rules, hands = Rules.of(asked, call), Hands(model, call)
        group = hands.submit(rules.request(model, 0, "0"))
        return cls(model, session, passed, [(0, rules)], hands, group)

    @classmethod
    def restored(cls, model: Subject, tokenizer: object, state: RunState) -> Run:
        """Return a run that goes on where another one was saved."""
        sessions = [asked.session(model, tokenizer) for asked in state.asked]
        calls = [session.prepared(state.passed, 0) for session in sessions]
        first = Rules.of(state.asked[0], calls[0])
        later = zip(state.asked[1:], calls[1:], strict=True)
        all_rules = [first, *(Rules.of(asked, call, first.first) for asked, call in later)]
        ahead = None if state.ahead is None else all_rules.pop()
        rules = [*zip((start for start, _ in state.rules), all_rules, strict=True)]
        hands = Hands(model, calls[0])
        request = rules[-1][1].request(model, len(state.trail.given), "0")
        group = hands.restore(request, state.group)
        run = cls(model, sessions[-1], state.passed, rules, hands, group, state.trail, ahead)
        require_possible(state, len(run.tokens), alone=is_one(request))
        rules[-1][1].require_room(model, max(state.trail.given, default=-1) + 1)
        if (recorder := run._recorder) is not None:
            texts = [[*run._ids(index)] for index in range(request.strategy.returns)]
            recorder.resumed(run._group.request.request_id, texts, sorted(state.trail.given))
        return run

    def __repr__(self) -> str:
        state = "ended" if over(self._group) else "open"
        return f"Run({len(self.tokens)} tokens, {len(self._given)} of them given, {state})"

    def _repr_html_(self) -> str:
        ids, given = enumerate(self.tokens), self._given
        rows = ((i, id, self._spell([id]), "given" * (i in given)) for i, id in ids)
        return table(("place", "id", "text", ""), rows, repr(self))

    # --- looking ----------------------------------------------------------------------------------

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids after the prompt, of the first sequence; of a search, those that are settled."""
        return self._ids(0)

    def _ids(self, index: int) -> tuple[int, ...]:
        """Return the ids after the prompt of the sequence with this index."""
        group, table = self._group, self._hands.engine.table
        strategy, first = group.request.strategy, group.request.prompt_visible
        if not strategy.streams:
            if group.live and not over(group):
                lead = group.live[0]
                return tuple(table.data[lead.line, first : first + group.reported].tolist())
            return tuple(results_of(group)[index].tokens.tolist()) if group.done else ()
        for one in group.live:
            if one.index == index or strategy.returns == 1:
                end = one.visible - one.provisional
                return tuple(table.data[one.line, first:end].tolist()) if one.line >= 0 else ()
        done = [one for one in group.done if one.index == index]
        return tuple(done[0].tokens.tolist()) if done else ()

    @property
    def given(self) -> tuple[int, ...]:
        """The positions among `tokens` whose ids were sent or edited in."""
        return tuple(sorted(self._given))

    @property
    def alone(self) -> bool:
        """True for a run with one sequence, which can be changed on its way."""
        return is_one(self._group.request)

    @property
    def done(self) -> bool:
        """True when there is no step left to take."""
        return not self._ready and over(self._group)

    def result(self) -> Any:
        """Take all steps that are left, and return a `Generated`, or a list of them where the run
        has several sequences. The ids include those that were sent."""
        self._finish("result")
        with self._hands.lock:
            found = self._session.reply(0, Again(lambda: self)).generated(self._group)
            alone = self._group.error is not None or self._group.request.strategy.returns == 1
        return found[0] if alone and found else found

    def more(self, n: int = 10) -> list[Generated]:
        """Take all steps that are left, and return the `n` best hypotheses not given yet.

        The search goes on from where it stopped, to where one that keeps as many from the start
        would stop: these are the best of what that one finds, less what this run has given; fewer
        where the search finds no more. RequestError unless this is one beam search.
        """
        if not is_integer(n) or not 0 < n <= MOST_MORE:
            wanted = f"a number above 0, at most {MOST_MORE}"
            raise RequestError("so many cannot be given", wanted=wanted, got=shown(n))
        require_search(self._group)
        self._finish("more")
        with self._hands.lock:
            self._hands.require_between("more")
            self._require_held()
            if not self._shown:
                self._shown = frozenset(one.serial for one in ranked(self._group))
            self._widen(len(self._shown) + n)
            fresh = [one for one in ranked(self._group) if one.serial not in self._shown][:n]
            self._shown |= {one.serial for one in fresh}
            return self._session.reply(0).of(self._group, fresh)

    def _require_held(self) -> None:
        """Raise RequestError unless the beams of the search are still there."""
        if not self._group.live:
            raise RequestError("the run was cancelled", do="Open it again")

    def _widen(self, keeps: int) -> None:
        """Go on as a search that keeps so many hypotheses, until that is over."""
        old, hands = self._group, self._hands
        rules = self._changed({"n_best": keeps, "num_return_sequences": 1})
        request = rules.request(self.model, 0, hands.name())
        bank = cast(Beam, request.strategy).widened(old)
        twin = hands.fork(old, request, Known(bank, not bool(bank.open.any())))
        try:
            while not over(twin):
                hands.step(twin)
                hands.catch_up()
                self._require_held()
                if twin.error is not None:
                    raise twin.error
        except BaseException:
            hands.drop(twin)
            raise
        hands.drop(old)
        hands.mail(twin).clear()
        self._group, self._rules = twin, [(0, rules)]
        self._reword()

    @property
    def hypotheses(self) -> list[Generated]:
        """Every hypothesis of a beam search that has ended so far, best first."""
        with self._hands.lock:
            return self._session.reply(0).of(self._group, complete(self._group))

    def inspect(self, known: GrowingRecord | None = None) -> Record:
        """Return the record of all steps so far, of this run and its forks.

        `known`: its file as it was read before, of which only what came since is read. RequestError
        unless the run was opened with record=FILE.
        """
        if (recorder := self._recorder) is None:
            what, do = "this run keeps no record", "Open it with record=FILE"
            raise RequestError(what, wanted="a run with a record", do=do)
        with self._hands.lock:
            recorder.begin(self._group.request.request_id)
            recorder.writer.flush()
            if known is None:
                return read_record(recorder.writer.path)
            known.read()
            return known.record

    @property
    def record_file(self) -> Path | None:
        """The file of its record; None without one."""
        return None if self._recorder is None else self._recorder.writer.path

    @property
    def recorded_as(self) -> str | None:
        """The name of the run in its record; None without a record."""
        recorder, request = self._recorder, self._group.request.request_id
        if recorder is None:
            return None
        recorder.begin(request)
        return recorder.name(request)

    def explain(self, position: int, rivals: int = 5, index: int = 0) -> Explanation:
        """Explain a token: its logit, what each processor changed, the draw, the best `rivals`.

        It is worked out now: the step is taken once more on a fork, from the ids before it, so
        that a run that nobody asks keeps no logits. In a search the position is that of the
        hypothesis which is first now.
        """
        with self._hands.lock:
            self._hands.require_between("explain")
            if not is_integer(rivals) or rivals < 0:
                what = "so many rivals cannot be shown"
                raise RequestError(what, wanted="0 or more", got=shown(rivals))
            position, tokens, sight = self._retaken(position, index)
            given = position in self._given
            return explained(sight, position, tokens[position], self._spell, rivals, given=given)

    def account(self, index: int = 0) -> Account:
        """Tell why a sequence ended, and what each stage did in all its steps, which are taken once
        more for that as by `explain`."""
        with self._hands.lock:
            places = [one for one in range(len(self._ids(index))) if one not in self._given]
            done = over(self._group) and bool(self._group.done)
            reason = results_of(self._group)[index].reason if done else None
            return accounted(reason, (self.step_at(one, index).changes for one in places))

    def index_of(self, tokens: tuple[int, ...]) -> int:
        """Take steps until a sequence has these ids, and return its index; RequestError if none
        comes to them."""
        while not self.done and not (self.alone and len(self.tokens) >= len(tokens)):
            next(self)
        for index in range(self._group.request.strategy.returns):
            ids = self._ids(index)
            if (ids[: len(tokens)] if self.alone else ids) == tokens:
                return index
        raise RequestError(
            "what was generated does not come out again",
            wanted="keywords and objects that say the same when they are used once more",
            do="Open a run with es.open, and ask that one to explain its tokens",
        )

    def step_at(self, position: int, index: int = 0) -> Step:
        """Return the step that chooses the token at a position, taken once more on a fork.

        The position right after the last token is that of the next choice, which is not taken. The
        run stays where it is, and its record has nothing of it.
        """
        with self._hands.lock:
            self._hands.require_between("step_at")
            position, _, sight = self._retaken(position, index, 1)
            return Step(position, (), (), sight)

    def _retaken(
        self, position: int, index: int, after: int = 0
    ) -> tuple[int, tuple[int, ...], Sight]:
        """Return a position, counted from the front, all tokens, and the sight of its step; the
        position may be `after` the last one."""
        returns = self._group.request.strategy.returns
        if not is_integer(index) or not 0 <= index < returns:
            wanted = f"0 to {returns - 1}"
            raise RequestError("there is no such sequence", wanted=wanted, got=shown(index))
        tokens = self._ids(index)
        most = len(tokens) + after
        if not is_integer(position) or not -len(tokens) <= position < most:
            wanted = f"0 to {most - 1}"
            raise RequestError("there is no such position", wanted=wanted, got=shown(position))
        position += len(tokens) if position < 0 else 0
        try:
            with self._hands.explaining():
                return position, tokens, self._seen_again(tokens[:position], index)
        finally:
            self._hands.catch_up()

    def _seen_again(self, tokens: tuple[int, ...], index: int) -> Sight:
        """Take the step that follows these tokens again, on a fork."""
        name = self._hands.name()
        twin = self._hands.fork(
            self._group, replace(self._group.request, request_id=name, watcher=None)
        )
        try:
            self._hands.replace(twin, *self._before(tokens, index, name))
            sight = self._hands.step(twin)
            if twin.error is not None:
                raise twin.error
        finally:
            self._hands.drop(twin)
        return cast(Sight, sight)  # of a choice, since nothing failed

    def _before(self, tokens: Items[int], index: int, name: str) -> tuple[Request, Beginning]:
        """Return the request, with this id, and the beginning of a group that next chooses what
        follows these tokens."""
        rules = [one for start, one in self._rules if start <= len(tokens)][-1]
        given = len([one for one in self._given if one < len(tokens)])
        request = rules.request(self.model, given, name)
        strategy: Strategy = Greedy()
        if request.strategy.reads.scores == "log_probs":
            strategy = Beam(width=1)
        elif isinstance(request.strategy, Sample | BestOf):
            strategy = Sample()
        request = replace(request, strategy=strategy, drafter=None, linger=False, keeps=False)
        request = replace(request, watcher=None)
        every = sequences_of(self._group)
        lineage = next((one.lineage for one in every if one.index == index), 0)
        values = self._values(len(tokens)) if is_one(self._group.request) else {}
        return request, Beginning(np.array(tokens, np.int64), values, lineage)

    # --- stepping ---------------------------------------------------------------------------------

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> Step:
        with self._hands.lock:
            self._fill()
            if not self._ready:
                raise StopIteration
            return self._ready.popleft()

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Step:
        self._hands.require_between("anext")  # which would wait in a thread for this one
        # Whoever stops waiting loses nothing: the step is taken, and comes next.
        while True:
            await asyncio.to_thread(self._fill)
            with suppress(IndexError):  # another reader may have been faster
                return self._ready.popleft()
            if over(self._group):
                raise StopAsyncIteration

    def _finish(self, what: str) -> None:
        """Take all steps that are left, for the method of this name."""
        self._hands.require_between(what)
        for _ in self:
            pass

    def _fill(self) -> None:
        """Take a step to be looked at, unless one waits or none is left."""
        with self._hands.lock:
            self._hands.require_between("next")
            self._hands.catch_up()
            if self._ready:
                return
            if not over(self._group):
                sight = self._hands.step(self._group)
                if is_one(self._group.request):
                    self._memos[len(self.tokens)] = known_of(self._group)
                self._deliver(sight)
                self._hands.catch_up()
            if self._group.error is not None and not self._ready:
                raise self._group.error

    def _deliver(self, sight: Sight | None) -> None:
        """Make a step of what was reported of the run; a failure without tokens is told by its
        error alone."""
        group = self._group
        mail = self._hands.mail(group)
        if group.error is not None and all(event.token < 0 for event in mail):
            mail.clear()
            return
        beams: tuple[LiveBeam, ...] = ()
        after = self._wording.copy()
        events = tuple(map(after, mail))
        if not over(group) and not group.request.strategy.streams:
            beams = beam_event(group, self._hands.engine.table, after).beams
        self._ready.append(Step(self._number, events, beams, sight))
        self._wording, self._number = after, self._number + 1
        mail.clear()

    # --- changing ---------------------------------------------------------------------------------

    def send(self, ids: Items[int] | str) -> None:
        """Add these ids, or those of a text; then the run goes on, also if it had ended.

        Only they are fed. They do not count as chosen. For runs with one sequence.
        """
        own = read_ids(self.model, self.tokenizer, ids)
        with self._hands.lock:
            tokens = self._whole("send")
            self._give(len(tokens), own, [*tokens, *own])

    def edit(self, position: int, ids: Items[int] | str) -> None:
        """Put these ids in the place of as many others, from this position on; what follows stays,
        and is fed again with them. For runs with one sequence."""
        own = read_ids(self.model, self.tokenizer, ids)
        with self._hands.lock:
            tokens = self._whole("edit")
            if not is_integer(position) or not 0 <= position <= len(tokens) - len(own):
                raise RequestError(
                    "there are no such positions to edit",
                    wanted=f"positions 0 to {len(tokens) - 1}",
                    got=f"{len(own)} from {shown(position)} on",
                    do="Use send for ids that are to follow",
                )
            tokens[position : position + len(own)] = own
            self._give(position, own, tokens)

    def _give(self, position: int, own: list[int], tokens: list[int]) -> None:
        """Go on after these tokens, in which those from this position on were given."""
        self._newest.require_room(self.model, len(tokens))
        self._reopen(tokens, {*self._given, *range(position, position + len(own))}, position)

    def rewind(self, n: int = 1) -> None:
        """Take the last `n` ids back and go on from there; the run draws the same again unless
        something is set. For runs with one sequence."""
        with self._hands.lock:
            tokens = self._whole("rewind")
            if type(n) is not int or not 0 <= n <= len(tokens):
                what = "so many ids cannot be taken back"
                raise RequestError(what, wanted=f"0 to {len(tokens)}", got=shown(n))
            kept = len(tokens) - n
            self._reopen(tokens[:kept], {one for one in self._given if one < kept})

    def set(self, **changes: Unpack[PromptOptions]) -> None:
        """Set other values from the next choice on, read and judged as those of `es.open`.

        RequestError for what cannot change: the number of sequences, the cache, what is recorded,
        how the prompt was read. A run that ended at its length goes on if there is room now. For
        runs with one sequence.
        """
        with self._hands.lock:
            tokens = self._whole("set")
            rules = self._changed(changes)
            name = self._group.request.request_id
            request = rules.request(self.model, len(self._given), name)
            require_changeable(self._group.request, request, changes)
            if rules.quantization != self._hands.quantization:
                raise RequestError("the cache cannot change while a run is under way")
            at_length = any(one.reason.kind == "length" for one in self._group.done)
            more = at_length and len(tokens) - len(self._given) < rules.room
            if more or not over(self._group):
                self._reopen(tokens, {*self._given}, rules=rules)
            else:
                self._ahead = rules
            if (recorder := self._recorder) is not None:
                recorder.changed(self._group.request.request_id, len(tokens), changes)

    def _changed(self, changes: PromptOptions) -> Rules:
        """Return the rules in force with other values of some keywords."""
        asked = self._newest.asked.changed(changes)
        call = asked.session(self.model, self.tokenizer).prepared(self._passed, 0)
        without = self._newest.without
        return replace(Rules.of(asked, call, self._rules[0][1].first), without=without)

    def without(self, *names: str) -> Run:
        """Return a fork that goes on without the processors of these names, as `step.changes` has
        them. For runs with one sequence; the fork cannot be saved."""
        with self._hands.lock:
            tokens = self._whole("without")
            known = dict.fromkeys(map(name_of, self._group.request.processors))
            if unknown := [name for name in names if name not in known]:
                raise RequestError(
                    f"the run has no processor {unknown[0]!r}",
                    wanted=", ".join(known) or "a run with processors",
                    do="Take names from step.changes",
                )
            twin = self.fork()
            try:
                left_out = replace(twin._newest, without=names)
                twin._reopen(tokens, {*self._given}, rules=left_out)
                if (recorder := twin._recorder) is not None:
                    said = {"without": [*names]}
                    recorder.changed(twin._group.request.request_id, len(tokens), said)
            except BaseException:
                twin.cancel()
                raise
            return twin

    def fork(self, **changes: Unpack[PromptOptions]) -> Run:
        """Return a run that is as this one, shares its engine and goes on by itself; `changes` are
        set in it. Without another seed both draw the same."""
        with self._hands.lock:
            self._hands.require_between("fork")
            twin = copy.copy(self)
            twin._ready, twin._memos = deque(), dict(self._memos)
            twin._group = self._hands.fork(self._group)
            if (recorder := self._recorder) is not None:
                own = self._group.request, twin._group.request
                recorder.forked(*(one.request_id for one in own))
            try:
                twin._reword()
                if changes:
                    twin.set(**changes)
            except BaseException:
                self._hands.drop(twin._group)
                raise
            return twin

    def cancel(self) -> None:
        """End the run here, with the tokens it has; it holds no row any more.

        Asked for in a step, it is done when the step is over, whose tokens still count.
        """
        with self._hands.lock:
            self._hands.between_steps(self._cancel)

    def _cancel(self) -> None:
        ended = over(self._group)
        self._hands.cancel(self._group)
        if not ended:
            self._deliver(None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    # --- saving -----------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the run into the file, for `es.resume`; it goes on here as if nothing had
        happened."""
        with self._hands.lock:
            self._hands.require_between("save")
            if self._newest.without or any(one.without for _, one in self._rules):
                what = "a run that leaves processors out cannot be saved"
                raise RequestError(what, do="Save the run that it was forked from")
            rules = [(start, one.asked) for start, one in self._rules]
            trail = Trail(self._given, self._memos, self._number, self._shown)
            adapters = without_steering(self._group.request.adapters)
            dumped = self._hands.engine.dump(self._group)
            ahead = None if self._ahead is None else self._ahead.asked
            state = RunState(self._passed, rules, adapters, trail, dumped, ahead)
            write_run(state, self.model, self.tokenizer, as_path(path))

    def _whole(self, what: str) -> list[int]:
        """Return all ids after the prompt; RequestError where `what` cannot be done now, or has no
        one sequence to act on."""
        self._hands.require_between(what)
        strategy = self._group.request.strategy
        if not is_one(self._group.request):
            raise RequestError(
                f"{what} needs a run with one sequence",
                wanted="num_beams=1 and num_return_sequences=1",
                got=f"{type(strategy).__name__} with {strategy.width} sequences",
                do="Fork, cancel and save work with several; or open one run per sequence",
            )
        if self._group.error is not None:
            raise RequestError(f"{what}: the run has failed", got=self._group.error)
        return list(self.tokens)

    def _values(self, kept: int) -> dict[str, object]:
        """Return what was known after the first `kept` ids, or the last step before."""
        return dict(self._memos[max(n for n in self._memos if n <= kept)])

    def _reopen(
        self,
        tokens: list[int],
        given: AbstractSet[int],
        kept: int | None = None,
        rules: Rules | None = None,
    ) -> None:
        """Go on after these tokens, the first `kept` of which are as before."""
        rules = rules or self._newest
        kept = min(len(tokens), len(self.tokens)) if kept is None else kept
        if len(tokens) - len(given) >= rules.room:
            raise RequestError(
                "there is no room for another token",
                wanted=f"fewer than {rules.room} chosen ones",
                got=len(tokens) - len(given),
                do="Call set(max_new_tokens=...) with more first",
            )
        group = self._group
        request = rules.request(self.model, len(given), group.request.request_id)
        values, best = self._values(kept), request.wants.logprobs
        if best is not None:
            values |= with_given(known_of(group), kept, tokens[kept:], best)
        lineage = next((one.lineage for one in sequences_of(group)), 0)
        beginning = Beginning(np.array(tokens, np.int64), values, lineage)
        self._hands.replace(group, request, beginning)
        self._given = frozenset(given)
        self._memos = {n: one for n, one in self._memos.items() if n <= kept}
        self._memos[len(tokens)] = values
        if (recorder := self._recorder) is not None:
            recorder.edited(group.request.request_id, kept, tokens, sorted(given))
        self._follow(rules, len(tokens))
        self._ready.clear()
        self._reword()

    def _follow(self, rules: Rules, start: int) -> None:
        """Go by these rules from this position on."""
        earlier = [one for one in self._rules if one[0] < start]
        if not earlier or earlier[-1][1] is not rules:
            earlier.append((start, rules))
        self._rules, self._ahead = earlier, None

    @property
    def _newest(self) -> Rules:
        """The rules that the next choice goes by."""
        return self._ahead or self._rules[-1][1]

    def _reword(self) -> None:
        """Let the text follow the ids that stand there now."""
        group, name = self._group, self._group.request.request_id
        self._wording = Wording(self.tokenizer)
        self._session.reply(0).spell(self._wording, group.request)
        for index in range(group.request.strategy.returns):
            self._wording.follow(name, index, self._ids(index))

    @property
    def _recorder(self) -> RunRecorder | None:
        watcher = self._group.request.watcher
        return watcher if isinstance(watcher, RunRecorder) else None

    def _spell(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode(ids))


def require_search(group: Group) -> None:
    """Raise RequestError unless the group is one beam search."""
    strategy = group.request.strategy
    if not isinstance(strategy, Beam):
        raise RequestError(
            "only a beam search has further hypotheses",
            wanted="a run with num_beams above 1, in one group",
            got=type(strategy).__name__,
            do="Open it with num_beams=4, say",
        )


def complete(group: Group) -> list[Finished]:
    """Return every hypothesis of a search that has ended by itself, best first."""
    require_search(group)
    found = [one for one in group.done if one.serial >= 0]
    return sorted(found, key=lambda one: -one.score)


def ranked(group: Group) -> list[Finished]:
    """Return the results of a search that ended by themselves, in their order."""
    return [one for one in results_of(group) if one.serial >= 0]


def sequences_of(group: Group) -> list[Sequence | Finished]:
    """Return the sequences of a group, the live ones first."""
    return [*group.live, *group.done]


def known_of(group: Group) -> dict[str, object]:
    """Return what its first sequence remembers that ids cannot tell."""
    return next((values_of(one.memo) for one in sequences_of(group)), {})
