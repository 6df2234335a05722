"""What a terminal and a page talk to: records that are looked at, and a run in hands.

Both say the same lines, `pick 42 7` or `until low`; a session answers with lines and, where
something changed, with another document. What is done to a live run is done to a fork of it, so
undoing goes back to the run that was there before.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from everystep.api.open import open as open_run
from everystep.errors import EverystepError, RequestError, nearest
from everystep.inspector import views
from everystep.inspector.counterfactuals import (
    Spell,
    WhatIf,
    needed,
    needed_lines,
    occlusion,
    outcome_lines,
    repeat,
    speller,
    what_if,
)
from everystep.inspector.inside import lens, lens_lines, looks, looks_lines
from everystep.inspector.page import Titled, document, growth, shown_step
from everystep.inspector.paths import choosing, rows_along
from everystep.records import GrowingRecord, Record, RecordedRun
from everystep.runs.run import Run
from everystep.runs.steps import Step

MOST_RUNS = 64
"""Runs that a session keeps at once."""
MOST_STEPS = 1000
"""Steps that are answered at once."""
LONG = 1000
"""Tokens of a run from which on a page is told what came to it, in place of all of it."""
LOW_SHARE = 0.1
NEAR_END = 0.05


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """An answer to a line: what is said; whether something changed, and whether the run only grew;
    which run is looked at now."""

    said: list[str]
    changed: bool = False
    grew: bool = False
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """The state of a page: its tokens of the run that a line is about, and texts of its record."""

    tokens: int
    texts: int

    @classmethod
    def read(cls, value: object) -> Self | None:
        """Return what a page says of itself, [tokens, texts]; None for anything else."""
        if not isinstance(value, list) or [type(one) for one in value] != [int, int]:
            return None
        return cls(*value) if min(value) >= 0 else None


@dataclass(frozen=True, slots=True)
class LineVerb:
    """A word that lines begin with: how it is typed, what it does, and the method that does it."""

    usage: str
    what: str
    act: Callable[[Any, str], LineAnswer]


class InspectorSession(ABC):
    """Records, and what can be asked about them. `tokenizer` may be None; one line at a time."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.current: str | None = None
        self._lock = threading.Lock()
        self._halted = threading.Event()

    @abstractmethod
    def record(self) -> Record:
        """Return the record that lines are about, as it is now."""

    @abstractmethod
    def document(self) -> dict[str, object]:
        """Return what a page shows, without steps."""

    @abstractmethod
    def verbs(self) -> Mapping[str, LineVerb]:
        """Return what lines may begin with."""

    def steps(self, run: int, first: int, count: int) -> list[dict[str, object]]:
        """Return some steps of a run, by its number in the document."""
        runs = self.all_runs()
        if not 0 <= run < len(runs) or first < 0 or not 0 < count <= MOST_STEPS:
            raise RequestError("there are no such steps", wanted=f"at most {MOST_STEPS} of a run")
        return [*map(shown_step, choosing(runs[run])[first : first + count])]

    def all_runs(self) -> list[RecordedRun]:
        """Return the runs of the document, in its order."""
        return [*self.record().runs.values()]

    def halt(self) -> None:
        """End what is under way after its step."""
        self._halted.set()

    def obey(self, line: str, run: str | None = None) -> LineAnswer:
        """Do what a line says, about this run; RequestError for what cannot be."""
        name, _, rest = line.strip().partition(" ")
        verbs = self.verbs()
        if name not in verbs:
            close = nearest(name, verbs)
            do = f"Perhaps {close} is meant" if close else "help shows the verbs"
            raise RequestError(f"there is no verb {name[:40]!r}", do=do)
        with self._lock:
            self._halted.clear()
            if run is not None:
                self.turn_to(run)
            try:
                return verbs[name].act(self, rest.strip())
            except (ValueError, TypeError) as error:
                if isinstance(error, EverystepError):
                    raise
                what = f"{line[:40]!r} cannot be read: {error}"
                raise RequestError(what[:400], do="Type it as help shows") from error

    def answered(self, line: str, run: str | None, known: Known | None = None) -> dict[str, object]:
        """Do what a line says, and return what a page is told: with the document if it changed, or
        with what came to a long run of which the page has the rest."""
        spoken = self.obey(line, run)
        grown = None
        if spoken.grew and known is not None and known.tokens >= LONG:
            grown = self.growth(known)
        changed = self.document() if spoken.changed and grown is None else None
        said = {"said": spoken.said, "follows": spoken.follows}
        return {**said, "document": changed, "grown": grown}

    def growth(self, known: Known) -> dict[str, object] | None:
        """Return what came to the run that lines are about; None where that is not all."""
        return growth(self.record(), self.run_name(), known.tokens, known.texts)

    def turn_to(self, run: str) -> None:
        """Let lines be about this run."""
        if run not in self.record().runs:
            raise RequestError(f"there is no run {run[:40]!r}", do="Take one of the record")
        self.current = run

    def run_name(self) -> str:
        """Return the run that lines are about."""
        name = self.current or next(iter(self.record().runs), None)
        if name is None:
            raise RequestError("there is no run yet", do="Take a step first")
        return name

    def run_record(self) -> RecordedRun:
        """Return the recorded run that lines are about."""
        return self.record().runs[self.run_name()]

    # --- questions --------------------------------------------------------------------------------

    def why(self, rest: str) -> LineAnswer:
        """Say what a token would have needed to be chosen."""
        self._require_model()
        record, name = self.record(), self.run_name()
        token, at = self.read_token(record, name, rest)
        run = repeat(record, name, self.model, self.tokenizer, at).run
        try:
            found = needed(run, at, token)
        finally:
            run.cancel()
        return LineAnswer(needed_lines(found, speller(record, self.tokenizer)))

    def what_if(self, rest: str) -> LineAnswer:
        """Say what comes of another value."""
        self._require_model()
        record, name = self.record(), self.run_name()
        match = re.fullmatch(r"(.*?)(?:\s+at\s+(\d+))?", rest, re.DOTALL)
        said, at = (match[1], match[2]) if match else (rest, None)
        asked = WhatIf.read(shlex.split(said))
        place = 0 if at is None else int(at)
        found = what_if(record, name, self.model, self.tokenizer, place, asked)
        return LineAnswer(outcome_lines(found, speller(record, self.tokenizer)))

    def which_prompt(self, rest: str) -> LineAnswer:
        """Say which parts of the prompt the answer depends on."""
        self._require_model()
        record, name = self.record(), self.run_name()
        run = record.runs[name]
        parts = occlusion(record, name, self.model)
        lines = ["masked, and how much less likely the answer became, in nats; most first"]
        for one in sorted(parts, key=lambda part: -part.loss)[:20]:
            text = "".join(views.spelled(record, id) for id in run.prompt[one.first : one.end])
            lines.append(f"  {one.first}:{one.end}  {one.loss:8.3f}  {text}")
        return LineAnswer(lines)

    def lens(self, rest: str) -> LineAnswer:
        """Say what the head makes of the states after each layer."""
        given, at, index = self._place(rest)
        return LineAnswer(lens_lines(lens(*given, at, self._speller(), index=index)))

    def attention(self, rest: str) -> LineAnswer:
        """Say what each head looked at."""
        given, at, index = self._place(rest)
        return LineAnswer(looks_lines(looks(*given, at, self._speller(), index=index)))

    def _speller(self) -> Spell:
        return speller(self.record(), self.tokenizer)

    def _place(self, rest: str) -> tuple[tuple[Record, str, Any, Any], int, int]:
        """Return what is asked about, and the token and the sequence of [AT [SEQUENCE]]; the last
        token of the first sequence where nothing is said."""
        self._require_model()
        record, name = self.record(), self.run_name()
        said = rest.split()
        if len(said) > 2:
            raise RequestError("too much was said", wanted="AT SEQUENCE", got=rest[:40])
        index = _whole(said[1], "a sequence") if len(said) > 1 else 0
        last = max(0, len(record.runs[name].tokens.get(index, [])) - 1)
        at = _whole(said[0], "a place") if said else last
        return (record, name, self.model, self.tokenizer), at, index

    def help(self, rest: str) -> LineAnswer:
        """Say what there is to say."""
        verbs = self.verbs().values()
        width = max(len(one.usage) for one in verbs)
        return LineAnswer([f"{one.usage:{width}}  {one.what}" for one in verbs])

    def _require_model(self) -> None:
        if self.model is None:
            what = "a question like this needs the model that the record was made with"
            raise RequestError(what, do="Give it with --model")

    def read_token(self, record: Record, name: str, rest: str) -> tuple[int, int]:
        """Return the token and the place of TOKEN [AT]: an id, #RANK, or a text in quotes."""
        run = record.runs[name]
        if rest.startswith('"'):
            text, end = json.JSONDecoder().raw_decode(rest)
            word, place = "", rest[end:].strip()
        else:
            text, (word, _, place) = None, rest.partition(" ")
        last = max(0, len(run.tokens.get(0, [])) - 1)
        at = _whole(place.strip(), "a place") if place.strip() else last
        if text is not None:
            return self._id_of(str(text)), at
        if word.startswith("#"):
            return _ranked(run, at, _whole(word[1:], "a rank")), at
        return _whole(word, "a token"), at

    def _id_of(self, text: str) -> int:
        if self.tokenizer is None:
            raise RequestError("a text needs a tokenizer", do="Give the id of the token")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            what = f"{text!r} is {len(ids)} tokens: {[*ids][:8]}"
            raise RequestError(what, wanted="one token", do="Give one of these ids")
        return int(ids[0])


_WHY = LineVerb("why TOKEN [AT]", "what it would have needed to be chosen", InspectorSession.why)
_IF = LineVerb("if NAME=VALUE ... [at N]", "what comes of it: seed, temperature, without, mask",
           InspectorSession.what_if)  # fmt: skip
_PROMPT = LineVerb(
    "prompt", "which parts of the prompt the answer depends on", InspectorSession.which_prompt
)
_HELP = LineVerb(
    "help", "these lines; TOKEN: an id, #RANK, or a text in quotes", InspectorSession.help
)
_LENS = LineVerb("lens [AT [SEQUENCE]]", "what the head makes of each layer's state",
           InspectorSession.lens)  # fmt: skip
_ATTENTION = LineVerb(
    "attention [AT [SEQUENCE]]", "what each head looked at", InspectorSession.attention
)
_QUESTIONS = {
    "why": _WHY, "if": _IF, "prompt": _PROMPT, "lens": _LENS, "attention": _ATTENTION, "help": _HELP
}  # fmt: skip


def _whole(text: str, what: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise RequestError(
            f"this is not {what}", wanted="a whole number", got=text[:40] or "nothing"
        )
    return int(text)


def _ranked(run: RecordedRun, at: int, rank: int) -> int:
    """Return the candidate of this rank at a place, by the scores that were chosen from."""
    rows = rows_along(run)
    row = rows[at] if at < len(rows) else None
    if row is None:
        raise RequestError("there are no candidates there", got=at, do="Give the id of the token")
    pairs = zip(row.scores, row.ids, strict=True)
    order = sorted(pairs, key=lambda pair: math.inf if pair[0] is None else -pair[0])
    if not 0 <= rank < len(order):
        raise RequestError("there is no such rank", wanted=f"#0 to #{len(order) - 1}", got=rank)
    return order[rank][1]


class Reading(InspectorSession):
    """One or two records from files, and a model for questions, if there is one."""

    def __init__(
        self, shown: Titled, other: Titled | None = None, model: Any = None, tokenizer: Any = None
    ) -> None:
        super().__init__(model, tokenizer)
        self._shown, self._other = shown, other
        self._document: dict[str, object] | None = None

    def record(self) -> Record:
        """Return the first record."""
        return self._shown[1]

    def all_runs(self) -> list[RecordedRun]:
        """Return the runs of both records."""
        more = [] if self._other is None else [*self._other[1].runs.values()]
        return [*super().all_runs(), *more]

    def document(self) -> dict[str, object]:
        """Return both records without steps, made once, since files in hands do not change."""
        if self._document is None:
            title, record = self._shown
            found = document(record, title, self._other, whole=False)
            asks = self.model is not None and self._other is None
            self._document = {**found, "asks": asks, "live": None}
        return self._document

    def verbs(self) -> Mapping[str, LineVerb]:
        """Return the questions."""
        return _QUESTIONS


@dataclass(slots=True)
class _Past:
    """A run and how many ids it had, to go back to."""

    run: str
    length: int


@dataclass(slots=True)
class _Ends:
    """The ids that end the text of a session's run, read off its record once it has them."""

    session: InspectorSession
    ids: list[int] = field(default_factory=list)

    def share(self, step: Step) -> float:
        """Return the share that the model gives to ends in a step."""
        if not self.ids:
            record = self.session.run_record()
            rows = [row for step in choosing(record)[-1:] for row in step.rows]
            self.ids = [one.id for row in rows[:1] for one in row.ends]
        return float(_shares(step)[np.array(self.ids)].sum()) if self.ids else 0.0


@dataclass(slots=True)
class _Kept:
    """The runs of a session by the names that their record has."""

    runs: dict[str, Run] = field(default_factory=dict)

    def add(self, run: Run) -> str:
        """Keep a run, and return its name."""
        name = run.recorded_as
        if name is None:
            raise RequestError("the run keeps no record", do="Open it with record=FILE")
        self.runs[name] = run
        return name


class LiveSession(InspectorSession):
    """A run in hands, with its forks, each of which goes on by itself."""

    def __init__(self, model: Any, tokenizer: Any, run: Run, title: str) -> None:
        super().__init__(model, tokenizer)
        self._title = title
        self._kept = _Kept()
        self._past: list[_Past] = []
        self._seen: Record | None = None  # None once something has changed
        self._growing: GrowingRecord | None = None
        self._reading = threading.RLock()  # nobody looks while the record grows
        self.current = self._kept.add(run)

    @classmethod
    def opened(
        cls, model: Any, tokenizer: Any, prompt: Any, file: Path, title: str, **options: Any
    ) -> Self:
        """Return a session over a new run of the prompt, which is recorded in this file."""
        run = open_run(model, tokenizer, prompt, record=file, **options)
        return cls(model, tokenizer, run, title)

    @property
    def run(self) -> Run:
        """The run that lines are about."""
        return self._kept.runs[self.run_name()]

    def record(self) -> Record:
        """Return the record of all runs so far."""
        with self._reading:
            if self._growing is None:
                file = self.run.record_file
                self._growing = None if file is None else GrowingRecord(file)
            if self._seen is None:
                self._seen = self.run.inspect(self._growing)
            return self._seen

    def obey(self, line: str, run: str | None = None) -> LineAnswer:
        """Do what a line says; whatever it does, the record is read again."""
        self._seen = None
        return super().obey(line, run)

    def document(self) -> dict[str, object]:
        """Return the record without steps, and how the run stands."""
        with self._reading:
            found = document(self.record(), self._title, whole=False)
        state = {"current": self.current, "done": self.run.done, "alone": self.run.alone}
        return {**found, "asks": True, "live": state}

    def growth(self, known: Known) -> dict[str, object] | None:
        """Return what came to the run, between two moments at which the record grows."""
        if self.run.done or not self.run.alone:
            return None
        with self._reading:
            return super().growth(known)

    def steps(self, run: int, first: int, count: int) -> list[dict[str, object]]:
        """Return some steps of a run, between two moments at which the record grows."""
        with self._reading:
            return super().steps(run, first, count)

    def verbs(self) -> Mapping[str, LineVerb]:
        """Return what can be done and asked."""
        return _VERBS

    def turn_to(self, run: str) -> None:
        """Let lines be about this run."""
        if run not in self._kept.runs:
            there = ", ".join(self._kept.runs)
            raise RequestError(f"there is no run {run[:40]!r} in hands", wanted=there)
        self.current = run

    # --- steps ------------------------------------------------------------------------------------

    def step(self, rest: str) -> LineAnswer:
        """Take a step, or several."""
        count = _whole(rest, "a number of steps") if rest else 1
        return self._until(lambda step, taken: taken >= count)

    def until(self, rest: str) -> LineAnswer:
        """Run to a breakpoint: done, a position, a low share, an end among the likely tokens."""
        kind, _, value = rest.partition(" ")
        if kind == "done":
            return self._until(lambda step, taken: False)
        if kind == "low":
            share = _share(value, LOW_SHARE)
            return self._until(lambda step, taken: _least_share(step) < share)
        if kind == "stop":
            share, ends = _share(value, NEAR_END), _Ends(self)
            return self._until(lambda step, taken: ends.share(step) >= share)
        at = _whole(kind, "done, low, stop or a position")
        run = self.run
        return self._until(lambda step, taken: len(run.tokens) > at)

    def _until(self, here: Callable[[Step, int], bool]) -> LineAnswer:
        """Take steps until one of them is where to stop."""
        run, taken = self.run, 0
        if not run.done:
            self._remember()
        try:
            for step in run:
                taken += 1
                if here(step, taken) or self._halted.is_set():
                    break
        finally:
            self._seen = None
        return self._standing(grew=True)

    def _standing(self, *, grew: bool = False) -> LineAnswer:
        """Say how the run stands."""
        run, name = self.run, self.run_name()
        self._seen = None
        record = self.record()
        said = [f"run {name}: {len(run.tokens)} tokens, {'over' if run.done else 'open'}"]
        if name in record.runs:
            own = record.runs[name]
            if run.done:
                said += views.ends(record, own)
        return LineAnswer(said, changed=True, grew=grew, follows=name)

    # --- changes ----------------------------------------------------------------------------------

    def pick(self, rest: str) -> LineAnswer:
        """Go on with another token, in a fork that stands before it."""
        token, at = self.read_token(self.record(), self.run_name(), rest)
        return self._changed(at, lambda twin: twin.send([token]))

    def edit(self, rest: str) -> LineAnswer:
        """Put a text in place of all that follows a position."""
        place, _, said = rest.partition(" ")
        at, text = _whole(place, "a position"), _text(said)
        return self._changed(at, lambda twin: twin.send(text))

    def send(self, rest: str) -> LineAnswer:
        """Add a text."""
        text = _text(rest)
        return self._changed(None, lambda twin: twin.send(text))

    def set(self, rest: str) -> LineAnswer:
        """Set other values from here on."""
        changes = _values(rest)
        if not changes:
            raise RequestError("nothing was said to set", wanted="NAME=VALUE", got=rest[:40])
        return self._changed(None, lambda twin: twin.set(**changes))

    def back(self, rest: str) -> LineAnswer:
        """Take tokens back."""
        count = _whole(rest, "a number of tokens") if rest else 1
        return self._changed(max(0, len(self.run.tokens) - count), lambda twin: None)

    def without(self, rest: str) -> LineAnswer:
        """Go on without processors, in a fork."""
        known = {views.stage_name(one): one for one in self._stages()}
        names = [known.get(name, name) for name in rest.split()]
        if not names:
            raise RequestError("no processor was named", wanted=", ".join(known) or "a processor")
        self._require_alone("without")
        self._require_room()
        self._remember()
        self.current = self._kept.add(self.run.without(*names))
        return self._standing()

    def fork(self, rest: str) -> LineAnswer:
        """Go on in a fork, with other values if some are said."""
        changes = _values(rest)
        return self._changed(None, lambda twin: twin.set(**changes) if changes else None, "fork")

    def other(self, rest: str) -> LineAnswer:
        """Turn to another run."""
        self.turn_to(rest)
        return self._standing()

    def drop(self, rest: str) -> LineAnswer:
        """Give up a run, of which the record stays."""
        if rest not in self._kept.runs or rest == self.current or len(self._kept.runs) == 1:
            wanted = ", ".join(name for name in self._kept.runs if name != self.current)
            raise RequestError(f"run {rest[:40]!r} cannot be dropped", wanted=wanted or "no run")
        self._kept.runs.pop(rest).cancel()
        self._past = [one for one in self._past if one.run != rest]
        return self._standing()

    def undo(self, rest: str) -> LineAnswer:
        """Go back to how it was before the last line that changed something."""
        while self._past and self._past[-1].run not in self._kept.runs:
            self._past.pop()
        if not self._past:
            raise RequestError("there is nothing to undo", do="Take a step first")
        past = self._past[-1]
        run = self._kept.runs[past.run]
        if len(run.tokens) > past.length:
            run.rewind(len(run.tokens) - past.length)
        self._past.pop()
        self.current = past.run
        return self._standing()

    def _remember(self) -> None:
        self._past = [*self._past, _Past(self.run_name(), len(self.run.tokens))][-MOST_RUNS:]

    def _require_alone(self, what: str) -> None:
        if not self.run.alone:
            raise RequestError(
                f"{what} needs a run with one sequence",
                got="a run with several",
                do="Step and ask; or open a run per sequence",
            )

    def _require_room(self) -> None:
        if len(self._kept.runs) >= MOST_RUNS:
            what = f"a session keeps {MOST_RUNS} runs"
            raise RequestError(what, do="Drop some: drop NAME")

    def _changed(
        self, at: int | None, act: Callable[[Run], object], what: str = "a change"
    ) -> LineAnswer:
        """Fork the run, let it stand before position `at`, and change it."""
        run = self.run
        if what != "fork":
            self._require_alone(what)
        self._require_room()
        length = len(run.tokens)
        if at is not None and not 0 <= at <= length:
            raise RequestError("there is no such position", wanted=f"0 to {length}", got=at)
        twin = run.fork()
        name = self._kept.add(twin)
        try:
            if at is not None and at < length:
                twin.rewind(length - at)
            act(twin)
        except BaseException:
            self._kept.runs.pop(name).cancel()
            raise
        self._remember()
        self.current = name
        return self._standing()

    def _stages(self) -> list[str]:
        """Return the names of the processors of the next step."""
        run = self.run
        at = max(0, len(run.tokens) - 1) if run.done else len(run.tokens)
        return [one.name for one in run.step_at(at).changes]


_VERBS: Mapping[str, LineVerb] = {
    "step": LineVerb("step [N]", "take a step, or N", LiveSession.step),
    "until": LineVerb("until done|POSITION|low [SHARE]|stop [SHARE]",
                  "run to the end, a position, an unlikely token, a likely end", LiveSession.until),
    "pick": LineVerb("pick TOKEN [AT]", "go on with another token", LiveSession.pick),
    "edit": LineVerb("edit AT TEXT", "go on with a text from a position on", LiveSession.edit),
    "send": LineVerb("send TEXT", "add a text", LiveSession.send),
    "back": LineVerb("back [N]", "take tokens back", LiveSession.back),
    "set": LineVerb("set NAME=VALUE ...", "other values from here on", LiveSession.set),
    "without": LineVerb("without NAME ...", "go on without processors", LiveSession.without),
    "undo": LineVerb("undo", "go back to before the last change", LiveSession.undo),
    "fork": LineVerb("fork [NAME=VALUE ...]", "go on in a fork", LiveSession.fork),
    "run": LineVerb("run NAME", "turn to another run", LiveSession.other),
    "drop": LineVerb("drop NAME", "give up a run", LiveSession.drop),
    **_QUESTIONS,
}  # fmt: skip


def _values(rest: str) -> dict[str, Any]:
    """Return the values of NAME=VALUE ...; RequestError for what holds for a whole run alone."""
    asked = WhatIf.read(shlex.split(rest))
    if asked.without or asked.opens_anew:
        what = "a processor, an adapter or a mask is no value that a run is set to"
        raise RequestError(what, do="Say without NAME, or ask with if NAME=VALUE")
    return dict(asked.changes)


def _text(said: str) -> str:
    """Return a text, in quotes of JSON or as it is."""
    if said.startswith('"'):
        found = json.loads(said)
        said = found if isinstance(found, str) else ""
    if not said:
        raise RequestError("there is no text", do="Type one, in quotes where spaces matter")
    return said


def _share(text: str, otherwise: float) -> float:
    """Return a share between 0 and 1."""
    try:
        found = float(text) if text else otherwise
    except ValueError:
        found = math.nan
    if not 0.0 < found < 1.0:
        raise RequestError("this is no share", wanted="a number between 0 and 1", got=text[:40])
    return found


def _shares(step: Step) -> np.ndarray:
    """Return (V,) the shares by the model's logits in the first row of a step."""
    if step.logits is None:
        return np.zeros(0)
    logits = step.logits[0].float().cpu().numpy().astype(np.float64)
    weights = np.exp(logits - logits.max())
    found: np.ndarray = weights / weights.sum()
    return found


def _least_share(step: Step) -> float:
    """Return the share of the token that a step chose first."""
    chosen = step.branches[0].tokens if step.branches else ()
    return float(_shares(step)[chosen[0]]) if chosen and step.logits is not None else 1.0
