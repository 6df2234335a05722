"""A generation in your hands: looked at step by step, spoken to, changed, forked, saved.

A run is one request on an engine that it shares with its forks; who is asked for a step has the
turn. What changes ids (send, edit, rewind) makes the group one of another request, which begins
with the ids that stand there now and takes over the rows up to where they differ.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack, cast

import numpy as np

from everystep.config.kinds import is_integer
from everystep.drivers.generated import Generated
from everystep.drivers.session import Session
from everystep.engine import Beginning, Known
from everystep.engine.decided import results_of
from everystep.engine.logprobs import with_given
from everystep.errors import RequestError, shown
from everystep.files.opening import as_path
from everystep.requests.keywords import PromptOptions
from everystep.requests.subject import Subject
from everystep.runs.hands import Hands, Rules, is_one, over, read_ids, require_changeable
from everystep.runs.saved import RunState, write_run
from everystep.runs.steps import Explanation, Step, explained
from everystep.shown import table
from everystep.strategies import Beam, BestOf, Greedy, Sample
from everystep.streamers import LiveBeam, Wording, beam_event
from everystep.types import Finished, Group, Request, values_of


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
        passed: Mapping[str, Any],
        rules: list[tuple[int, Rules]],
        hands: Hands,
        group: Group,
    ) -> None:
        self.model, self.tokenizer = model, session.tokenizer
        self._session, self._passed = session, passed
        # From which position on which rules hold; what was known after so many ids.
        self._rules, self._hands, self._group = rules, hands, group
        self._given: frozenset[int] = frozenset()
        self._memos: dict[int, dict[str, Any]] = {0: {}}
        self._ready: deque[Step] = deque()
        self._shown: frozenset[int] = frozenset()  # the hypotheses that `more` has given
        self._number = 0
        self._wording = Wording(self.tokenizer)
        self._reword()

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
    def done(self) -> bool:
        """Whether there is no step left to take."""
        return not self._ready and over(self._group)

    def result(self) -> Any:
        """What the run has come to, after taking all steps that are left: a `Generated`, or a list
        of them where it has several sequences. The ids include those that were sent."""
        for _ in self:
            pass
        with self._hands.lock:
            found = self._session.reply(0).generated(self._group)
        return found[0] if len(found) == 1 else found

    def more(self, n: int = 10) -> list[Generated]:
        """The `n` best hypotheses that were not given yet, after taking all steps that are left.

        The search goes on from where it stopped, to where one that keeps as many from the start
        would stop: these are the best of what that one finds, less what this run has given; fewer
        where the search finds no more. RequestError unless this is one beam search.
        """
        return more_of(self, n)

    @property
    def hypotheses(self) -> list[Generated]:
        """Every hypothesis of a beam search that has ended so far, best first."""
        with self._hands.lock:
            return self._session.reply(0).of(self._group, complete(self._group))

    def explain(self, position: int, rivals: int = 5, index: int = 0) -> Explanation:
        """Why this token: its logit, what each processor changed, the draw, the best `rivals`.

        It is worked out now: the step is taken once more on a fork, from the ids before it, so
        that a run that nobody asks keeps no logits. In a search the position is that of the
        hypothesis which is first now.
        """
        with self._hands.lock:
            tokens = self._ids(index)
            if not is_integer(position) or not -len(tokens) <= position < len(tokens):
                wanted = f"0 to {len(tokens) - 1}"
                raise RequestError("there is no such position", wanted=wanted, got=shown(position))
            position %= len(tokens)
            twin = self._hands.fork(self._group)
            name = twin.request.request_id
            try:
                self._hands.replace(twin, *self._before(tokens[:position], index, name))
                sight: Any = self._hands.step(twin)
                if twin.error is not None:
                    raise twin.error
            finally:
                self._hands.drop(twin)
            given = position in self._given
            return explained(sight, position, tokens[position], self._spell, rivals, given=given)

    def _before(self, tokens: Sequence[int], index: int, name: str) -> tuple[Request, Beginning]:
        """The request with this id, and the beginning, of a group that next chooses what follows
        these tokens."""
        rules = [one for start, one in self._rules if start <= len(tokens)][-1]
        given = len([one for one in self._given if one < len(tokens)])
        request = rules.request(self.model, given, name)
        draws = isinstance(request.strategy, Sample | BestOf)
        strategy: Any = Sample() if draws else Greedy()
        if request.strategy.reads.scores == "log_probs":
            strategy = Beam(width=1)
        request = replace(request, strategy=strategy, drafter=None, linger=False, keeps=False)
        every: list[Any] = [*self._group.live, *self._group.done]
        lineage = next((one.lineage for one in every if one.index == index), 0)
        values = self._values(len(tokens)) if is_one(self._group.request) else {}
        return request, Beginning(np.array(tokens, np.int64), values, lineage)

    # --- stepping ---------------------------------------------------------------------------------

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> Step:
        self._fill()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Step:
        # Who stops waiting loses nothing: the step is taken, and comes next.
        await asyncio.to_thread(self._fill)
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    def _fill(self) -> None:
        """There is a step to be looked at, if there is one left."""
        with self._hands.lock:
            if self._ready or over(self._group):
                if self._group.error is not None and not self._ready:
                    raise self._group.error
                return
            sight = self._hands.step(self._group)
            if is_one(self._group.request):
                self._memos[len(self.tokens)] = known_of(self._group)
            self._deliver(sight)
            if self._group.error is not None:
                raise self._group.error

    def _deliver(self, sight: Any) -> None:
        """What was reported of the run becomes a step."""
        group = self._group
        mail = self._hands.mail(group)
        beams: tuple[LiveBeam, ...] = ()
        after = self._wording.copy()
        events = tuple(map(after, mail))
        if not over(group) and not group.request.strategy.streams:
            beams = beam_event(group, self._hands.engine.table, after).beams
        self._ready.append(Step(self._number, events, beams, sight))
        self._wording, self._number = after, self._number + 1
        mail.clear()

    # --- changing ---------------------------------------------------------------------------------

    def send(self, ids: Sequence[int] | str) -> None:
        """These ids, or those of a text, follow; then the run goes on, also if it had ended.

        Only they are fed. They do not count as chosen. For runs with one sequence.
        """
        own = read_ids(self.model, self.tokenizer, ids)
        with self._hands.lock:
            tokens = self._whole("send")
            self._reopen(
                [*tokens, *own], {*self._given, *range(len(tokens), len(tokens) + len(own))}
            )

    def edit(self, position: int, ids: Sequence[int] | str) -> None:
        """From this position on these ids stand in the place of as many others; what follows stays,
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
            self._reopen(tokens, {*self._given, *range(position, position + len(own))}, position)

    def rewind(self, n: int = 1) -> None:
        """The last `n` ids are taken back, and the run goes on from there; it draws the same again
        unless something is set. For runs with one sequence."""
        with self._hands.lock:
            tokens = self._whole("rewind")
            if type(n) is not int or not 0 <= n <= len(tokens):
                what = "so many ids cannot be taken back"
                raise RequestError(what, wanted=f"0 to {len(tokens)}", got=shown(n))
            kept = len(tokens) - n
            self._reopen(tokens[:kept], {one for one in self._given if one < kept})

    def set(self, **changes: Unpack[PromptOptions]) -> None:
        """Other values hold from the next choice on, read and judged as those of `es.open`.

        RequestError for what cannot change: the number of sequences, the cache, what is recorded,
        how the prompt was read. A run that ended at its length goes on if there is room now. For
        runs with one sequence.
        """
        with self._hands.lock:
            tokens = self._whole("set")
            asked = self._rules[-1][1].asked.changed(changes)
            session = asked.session(self.model, self.tokenizer)
            call = session.prepared(self._passed, 0)
            rules = Rules.of(asked, call, self._rules[0][1].first)
            name = self._group.request.request_id
            request = rules.request(self.model, len(self._given), name)
            require_changeable(self._group.request, request, changes)
            if call.quantization != self._hands.quantization:
                raise RequestError("the cache cannot change while a run is under way")
            at_length = any(one.reason.kind == "length" for one in self._group.done)
            more = at_length and len(tokens) - len(self._given) < rules.room
            if more or not over(self._group):
                self._reopen(tokens, {*self._given}, rules=rules)
            else:
                self._rules = [
                    *(one for one in self._rules if one[0] < len(tokens)),
                    (len(tokens), rules),
                ]

    def fork(self, **changes: Unpack[PromptOptions]) -> Run:
        """A run that is as this one, shares its engine and goes on by itself; `changes` are set in
        it. Without another seed both draw the same."""
        with self._hands.lock:
            twin = copy.copy(self)
            twin._ready, twin._memos = deque(), dict(self._memos)
            twin._group = self._hands.fork(self._group)
            try:
                twin._reword()
                if changes:
                    twin.set(**changes)
            except BaseException:
                self._hands.drop(twin._group)
                raise
            return twin

    def cancel(self) -> None:
        """The run ends here, with the tokens it has, and holds no row any more."""
        with self._hands.lock:
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
        """The run is in the file, for `es.resume`; it goes on here as if nothing had happened."""
        with self._hands.lock:
            rules = [(start, one.asked) for start, one in self._rules]
            kept = (self._given, self._memos, self._number, self._shown)
            state = RunState(self._passed, rules, *kept, self._hands.engine.dump(self._group))
            write_run(state, self.model, self.tokenizer, as_path(path))

    def _whole(self, what: str) -> list[int]:
        """All ids after the prompt; RequestError where `what` has no one sequence to act on."""
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

    def _values(self, kept: int) -> dict[str, Any]:
        """What was known after the first `kept` ids, or the last step before."""
        return dict(self._memos[max(n for n in self._memos if n <= kept)])

    def _reopen(
        self,
        tokens: list[int],
        given: AbstractSet[int],
        kept: int | None = None,
        rules: Rules | None = None,
    ) -> None:
        """The run goes on after these tokens, the first `kept` of which are as before."""
        rules = rules or self._rules[-1][1]
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
        lineage = getattr(first_of(group), "lineage", 0)
        beginning = Beginning(np.array(tokens, np.int64), values, lineage)
        self._hands.replace(group, request, beginning)
        self._given = frozenset(given)
        self._memos = {n: one for n, one in self._memos.items() if n <= kept}
        self._memos[len(tokens)] = values
        self._follow(rules, len(tokens))
        self._ready.clear()
        self._reword()

    def _follow(self, rules: Rules, start: int) -> None:
        """These rules hold from this position on."""
        earlier = [one for one in self._rules if one[0] < start]
        if not earlier or earlier[-1][1] is not rules:
            earlier.append((start, rules))
        self._rules = earlier

    def _reword(self) -> None:
        """Text follows the ids that stand there now."""
        group, name = self._group, self._group.request.request_id
        self._wording = Wording(self.tokenizer)
        if (trim := self._session.reply(0).trim(group.request)) is not None:
            self._wording.trim(name, *trim)
        for index in range(group.request.strategy.returns):
            self._wording.follow(name, index, self._ids(index))

    def _spell(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode(ids))


def complete(group: Group) -> list[Finished]:
    """Every hypothesis of a search that has ended by itself, best first."""
    _require_search(group)
    found = [one for one in group.done if one.serial >= 0]
    return sorted(found, key=lambda one: -one.score)


def more_of(run: Run, n: int) -> list[Generated]:
    """What `Run.more` says."""
    if not is_integer(n) or n < 1:
        raise RequestError("so many cannot be given", wanted="a number above 0", got=shown(n))
    _require_search(run._group)
    for _ in run:
        pass
    with run._hands.lock:
        group = run._group
        if not group.live:
            raise RequestError("the run was cancelled", do="Open it again")
        if not run._shown:
            run._shown = _serials(group)
        _widen(run, len(run._shown) + n)
        group = run._group
        fresh = [one for one in _ranked(group) if one.serial not in run._shown][:n]
        run._shown |= {one.serial for one in fresh}
        return run._session.reply(0).of(group, fresh)


def _widen(run: Run, keeps: int) -> None:
    """The run is that of a search that keeps so many hypotheses, and is over."""
    old, hands = run._group, run._hands
    asked = run._rules[-1][1].asked.changed({"n_best": keeps, "num_return_sequences": 1})
    call = asked.session(run.model, run.tokenizer).prepared(run._passed, 0)
    rules = Rules.of(asked, call, run._rules[0][1].first)
    request = rules.request(run.model, 0, hands.name())
    bank = cast(Beam, request.strategy).widened(old)
    twin = hands.fork(old, request, Known(bank, not bool(bank.open.any())))
    try:
        while not over(twin):
            hands.step(twin)
            if twin.error is not None:
                raise twin.error
    except BaseException:
        hands.drop(twin)
        raise
    hands.drop(old)
    hands.mail(twin).clear()
    run._group, run._rules = twin, [(0, rules)]
    run._reword()


def _require_search(group: Group) -> None:
    strategy = group.request.strategy
    if not isinstance(strategy, Beam):
        raise RequestError(
            "only a beam search has further hypotheses",
            wanted="a run with num_beams above 1, in one group",
            got=type(strategy).__name__,
            do="Open it with num_beams=4, say",
        )


def _ranked(group: Group) -> list[Finished]:
    found = results_of(group)
    return [one for one in found if one.serial >= 0]


def _serials(group: Group) -> frozenset[int]:
    return frozenset(one.serial for one in _ranked(group))


def first_of(group: Group) -> Any:
    """The one sequence of a group, live or done; None before it has any."""
    return next(iter([*group.live, *group.done]), None)


def known_of(group: Group) -> dict[str, Any]:
    """What that sequence remembers that ids cannot tell."""
    return values_of(getattr(first_of(group), "memo", {}))
