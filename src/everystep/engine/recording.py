"""From the steps of a watched request to the lines of its record.

All numbers are those that were there: logits as the model gave them, scores as every stage left
them. Nothing is computed a second time but summaries: totals, entropies, ranks, and the part of the
draw that leads to the chosen token.
"""

from __future__ import annotations

import base64
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from everystep.adapters import Adapter, vectors_of
from everystep.config import Effective
from everystep.draws import SeededDraws
from everystep.engine.recorded_scores import HeldScores, candidates_of
from everystep.engine.watching import StepRecord, WatchedStep
from everystep.errors import NOBODYS
from everystep.processors.base import UserProcessor
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.warpers import TemperatureLogitsWarper
from everystep.records import Line, RecordWriter, exact, exact_all, spelled
from everystep.stops.ends import EosToken
from everystep.text import bytes_by_id
from everystep.types import Event, Prompt, Request, Scores
from everystep.types.protocols import Processor
from everystep.types.request import places_of

_MOST_VALUE = 4000
"""Characters of a value of the configuration as JSON, at most."""
_MOST_PROMPT = 100_000
"""Ids of a prompt that are recorded: the last so many."""
_MOST_STEERING = 2**17
"""Bytes of vectors that are recorded."""
Spell = Callable[[int], bytes]


@dataclass(slots=True, eq=False)
class RunRecorder:
    """A watcher that writes the steps of a request, and of the runs that fork off from it.

    `about`: what is said of the run before its first step. `spell`: the bytes of an id, None where
    nothing spells.
    """

    writer: RecordWriter
    digests: tuple[str, str]
    about: Mapping[str, object]
    spell: Spell | None
    _names: dict[str, str] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)
    _written: dict[str, int] = field(default_factory=dict)
    _lengths: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def stages(self) -> bool:
        """True if the scores that each processor left are recorded."""
        return self.writer.stages

    @classmethod
    def of(
        cls,
        writer: RecordWriter,
        fields: Effective,
        tokenizer: Any,
        digests: tuple[str, str],
        trims: bool,
        adapted: str | None,
        source: Prompt | None,
        shown: tuple[str, ...],
        request: Request,
    ) -> RunRecorder:
        """Return the recorder of a request; `fields`: the configuration in force.

        `digests`: of model and tokenizer. `trims`: whether texts lose the stop string that ended
        them. `adapted`: the digest of the model with the request's adapters, if it has some.
        `source`: what an encoder reads. `shown`: names of what is read inside the prompt.
        """
        about = {**_about(request, shown), "configuration": _configuration(fields), "trims": trims}
        if adapted is not None:
            about["adapted"] = adapted
        if not writer.stages:
            about["every_stage"] = False
        if source is not None:
            about |= _about_source(source)
        spell = None if tokenizer is None else bytes_by_id(tokenizer)
        return cls(writer, digests, about, spell)

    def __call__(self, step: WatchedStep) -> None:
        """Write a step, what became final in it, and what ended, beside the steps that follow; an
        error ends the record alone."""
        request, number = step.request.request_id, step.number
        if number <= self._last.get(request, 0):
            return  # told again after an interrupt
        try:
            seen = StepSeen.of(step)
        except NOBODYS:
            raise
        except Exception as error:
            self.writer.stop(error)
            return
        self.writer.later(partial(self._write, seen), 1 + seen.size)
        self._last[request] = number
        if any(event.finish is not None for event in step.events):
            self.writer.flush()

    def _write(self, seen: StepSeen) -> None:
        if seen.number <= self._written.get(seen.request, 0):
            return  # an interrupt came after it was handed over
        self._written[seen.request] = seen.number
        lines = [*self._begun(seen.request)]
        name = self._names[seen.request]
        if made := seen.line(name):
            lines += [*self._spelling(made), made]
        lines += self._tokens(name, seen.events)
        self.writer.write(lines)

    def begin(self, request: str) -> None:
        """Write the first lines of a run, unless they are there."""
        self.writer.settle()
        self.writer.write([*self._begun(request)])

    def name(self, request: str) -> str | None:
        """Return the name that a run has in the record; None before its first line."""
        self.writer.settle()
        return self._names.get(request)

    def edited(self, request: str, at: int, tokens: list[int], given: list[int]) -> None:
        """Write that other ids stand after the prompt from now on; the first `at` are as before."""
        self.writer.settle()
        lines = [*self._begun(request)]
        at = min(at, self._lengths.get((request, 0), 0))
        own = tokens[at:]
        kind = {"type": "edit", "run": self._names[request], "at": at}
        self.writer.write([*lines, *self._texts(own), {**kind, "ids": own, "given": given}])
        self._lengths[request, 0] = len(tokens)

    def resumed(self, request: str, texts: list[list[int]], given: list[int]) -> None:
        """Write the ids that stand after the prompt of a run whose first steps are elsewhere, of
        each of its sequences; of the first, those at `given` were not chosen."""
        self.begin(request)
        for index, ids in enumerate(texts):
            line = {"type": "tokens", "run": self._names[request], "index": index, "at": 0}
            if ids:
                self.writer.write([*self._texts(ids), {**line, "ids": ids}])
                self._lengths[request, index] = len(ids)
        if given:
            self.edited(request, 0, texts[0], given)

    def changed(self, request: str, at: int, changes: Mapping[str, object]) -> None:
        """Write that other values hold from the choice after `at` tokens on."""
        self.writer.settle()
        said = {name: _simple(value) for name, value in changes.items()}
        lines = [*self._begun(request)]
        line = {"type": "set", "run": self._names[request], "at": at, "values": said}
        self.writer.write([*lines, line])

    def forked(self, parent: str, request: str) -> None:
        """Write that a run goes on from another one."""
        self.writer.settle()
        lines = [*self._begun(parent)]
        name = self._names[request] = self.writer.begin(*self.digests)
        fork = {"type": "fork", "run": name, "parent": self._names[parent]}
        self.writer.write([*lines, fork])
        for (owner, index), length in list(self._lengths.items()):
            if owner == parent:
                self._lengths[request, index] = length

    def _begun(self, request: str) -> Iterator[Line]:
        """Yield the first lines of a run that has none yet."""
        if request not in self._names:
            name = self._names[request] = self.writer.begin(*self.digests)
            for ids in (self.about["prompt"], self.about.get("source")):
                yield from self._texts(ids if isinstance(ids, list) else [])
            yield {"type": "run", "run": name, **self.about}

    # --- texts ------------------------------------------------------------------------------------

    def _texts(self, ids: list[int]) -> Iterator[Line]:
        """Yield the spelling of ids that were not spelled yet."""
        fresh = [id for id in dict.fromkeys(ids) if id not in self.writer.known]
        if self.spell is None or not fresh:
            return
        self.writer.known.update(fresh)
        for first in range(0, len(fresh), 4096):
            own = fresh[first : first + 4096]
            yield {"type": "spelling", "texts": {str(id): spelled(self.spell(id)) for id in own}}

    def _spelling(self, made: dict[str, object]) -> Iterator[Line]:
        """Yield the spelling of the candidates, children and drafts of a step."""
        found: list[int] = []
        for row in made.get("rows", ()):  # type: ignore[attr-defined]
            found += [*row["ids"], *(end[0] for end in row.get("ends", ()))]
        for child in made.get("children", ()):  # type: ignore[attr-defined]
            found += child[2]
        for draft in made.get("drafts", ()):  # type: ignore[attr-defined]
            found += draft[1]
        return self._texts(found)

    def _tokens(self, name: str, events: tuple[Event, ...]) -> Iterator[Line]:
        """Yield what became final, sequence by sequence, and what ended."""
        for index in dict.fromkeys(event.index for event in events):
            own = [event for event in events if event.index == index]
            ids = [event.token for event in own if event.token >= 0]
            request = own[0].request_id
            if ids:
                yield from self._texts(ids)
                at = own[0].position
                yield {"type": "tokens", "run": name, "index": index, "at": at, "ids": ids}
                self._lengths[request, index] = at + len(ids)
            for event in own:
                if (end := event.finish) is not None:
                    length = self._lengths.get((request, index), 0)
                    said = {"kind": end.kind, "matched": _plain(end.matched), "length": length}
                    yield {"type": "end", "run": name, "index": index, **said}


@dataclass(frozen=True, slots=True, eq=False)
class StepSeen:
    """A step of a request as its record has it, none of which later steps change."""

    request: str
    number: int
    chosen: ChosenRows | None
    events: tuple[Event, ...]
    fed: tuple[tuple[int, int, int], ...]
    seconds: Mapping[str, float]
    beside: int

    @classmethod
    def of(cls, step: WatchedStep) -> StepSeen:
        """Take what is recorded of a step."""
        chosen = None if step.record is None else ChosenRows.of(step.record, step.place)
        told = step.events, step.fed, step.seconds, step.beside
        return cls(step.request.request_id, step.number, chosen, *told)

    @property
    def size(self) -> int:
        """The number of rows that it holds."""
        return 0 if self.chosen is None else len(self.chosen.rows)

    def line(self, name: str) -> dict[str, object]:
        """Return the line of the step; empty where nothing was fed or chosen."""
        if self.chosen is None and not self.fed:
            return {}
        line: dict[str, object] = {"type": "step", "run": name, "step": self.number}
        if self.chosen is not None:
            line["rows"] = [self.chosen.row(row) for row in self.chosen.rows]
            line["children"] = self.chosen.children
            if self.chosen.drafts:
                line["drafts"] = self.chosen.drafts
        line["fed"] = [list(one) for one in self.fed]
        line["seconds"] = {phase: round(one, 7) for phase, one in self.seconds.items()}
        line["beside"] = self.beside
        return line


class StageOfRow(NamedTuple):
    """The scores that a stage left: its name, and the number of a row among them."""

    name: str
    scores: Scores
    number: int
    processor: Processor | None = None


@dataclass(frozen=True, slots=True)
class RowSeen:
    """A row that led to tokens, as it was in its step.

    `number`: among the rows of the step. `of`, `at`, `score`: as in a record. `tokens`: one of each
    child, here. `draft`: the id that was drafted here, if one was. `drawn`: what was drawn.
    """

    number: int
    of: int
    at: int
    score: float
    tokens: list[int]
    draft: int | None
    drawn: float | None
    stages: list[StageOfRow]


class HeldOfStep:
    """The scores of a step on the host, held once for the watchers of all its requests.

    `members`: the sequences of each group; `born`: the children of each sequence; `drawn`: what was
    drawn in each row, where that can be told.
    """

    def __init__(self, record: StepRecord) -> None:
        self.scored = record.scored
        self._lock = threading.Lock()
        self._held: dict[int, HeldScores] = {}
        self.drawn = _drawn(record)
        self.members: dict[int, list[int]] = {}
        for s, g in enumerate(record.scored.layout.group_of):
            self.members.setdefault(g, []).append(s)
        self.born: list[list[int]] = [[] for _ in record.scored.layout.sequences]
        for child, parent in enumerate(record.children.parent.tolist()):
            self.born[parent].append(child)

    @classmethod
    def of(cls, record: StepRecord) -> HeldOfStep:
        """Return what is held of a step, made for the first that asks."""
        found = record.notes.get("held")
        if not isinstance(found, HeldOfStep):
            found = record.notes["held"] = cls(record)
        return found

    def scores(self, scores: Scores) -> HeldScores:
        """Return some scores of the step on the host."""
        if (known := self._held.get(id(scores))) is not None:
            return known
        with self._lock:
            if (held := self._held.get(id(scores))) is None:
                held = self._held[id(scores)] = HeldScores.of(scores)
                if scores is self.scored.given and scores.tokens is not None:
                    held.know(self.scored.logits)
            return held


def _drawn(record: StepRecord) -> list[float] | None:
    """Return the number that was drawn in each row of a step; None without draws that can be
    told."""
    one, own = record.scored.groups[0].request, record.scored.batch.sequences
    told = one.strategy.reads.number and isinstance(one.draws, SeededDraws)
    if not told or record.scored.offered is not record.scored.scores:
        return None
    position = np.array([sequence.length for sequence in own], dtype=np.uint64)
    places = places_of(own, position, np.zeros(len(own), np.int64), 1)
    found: list[float] = one.draws.uniform("choice", places)[:, 0].tolist()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """The choices of a step for one request, as they were: later steps change nothing of it.

    `rows`: those that led to tokens. `children`, `drafts`: as in a record.
    """

    request: Request
    rows: list[RowSeen]
    children: list[list[object]]
    drafts: list[list[object]]
    held: HeldOfStep

    @classmethod
    def of(cls, record: StepRecord, place: int) -> ChosenRows:
        """Take what the step did with the group at this place."""
        scored, children, layout = record.scored, record.children, record.scored.layout
        request, held = scored.groups[place].request, HeldOfStep.of(record)
        rows: list[RowSeen] = []
        said: list[list[object]] = []
        drafts: list[list[object]] = []
        for s in held.members[place]:
            own = held.born[s]
            ids = [children.tokens[child, : children.counts[child]].tolist() for child in own]
            if layout.sequences[s].finish is None:
                rows += _rows_seen(record, s, ids, held.drawn)
                said += _children(record, s, own, ids)
            for draft in layout.tried(s):
                right = max([_agreed(draft.tolist(), one) for one in ids], default=0)
                drafts.append([layout.sequences[s].index, draft.tolist(), right])
        return cls(request, rows, said, drafts, held)

    def row(self, row: RowSeen) -> dict[str, object]:
        """Return what is recorded of a row."""
        held, scored, number = self.held.scores, self.held.scored, row.number
        before, after = held(scored.given), held(scored.offered)
        first = before.summary(number)  # first, as it tells how many are possible
        stages = self._stages(row)
        ids = self._candidates(row, stages)
        last = after.summary(number)
        found: dict[str, object] = {
            "of": row.of,
            "at": row.at,
            "ids": ids,
            "logits": exact_all(before.values(number, ids)),
            "stages": [*self._told(number, stages, ids)],
            "totals": [exact(first.total), exact(last.total)],
            "entropies": [exact(first.entropy), exact(last.entropy)],
        }
        if row.score:
            found["score"] = exact(row.score)
        for token in row.tokens[:1]:
            logit, score = before.value(number, token), after.value(number, token)
            found["chosen"] = token
            came = "drafted" if token == row.draft else "chosen"
            found["origin"] = "forced" if last.possible == 1 else came
            found["ranks"] = [before.rank(number, token, logit), after.rank(number, token, score)]
            found["surprise"] = exact(first.total - logit)
            if row.drawn is not None:
                found["draw"] = [row.drawn, *after.part(number, token)]
        if ends := [id for id in _ends(self.request) if id < before.scores.vocabulary]:
            found["ends"] = [
                [id, exact(before.value(number, id)), exact(score), after.rank(number, id, score)]
                for id in ends
                for score in [after.value(number, id)]
            ]
        return found

    def _stages(self, row: RowSeen) -> list[StageOfRow]:
        """Return what each stage left of a row, hooks and drafts among them."""
        found, held, scored = [*row.stages], self.held.scores, self.held.scored
        last = found[-1] if found else StageOfRow("", scored.given, row.number)
        left, after = held(scored.scores), held(scored.offered)
        if not held(last.scores).equals(last.number, left, row.number):
            name = "hooks" if self.request.hooks else "unknown"
            if self.request.watcher is not None and not self.request.watcher.stages:
                name = "all"
            found.append(StageOfRow(name, scored.scores, row.number))
        if not left.equals(row.number, after, row.number):
            found.append(StageOfRow("drafts", scored.offered, row.number))
        return found

    def _candidates(self, row: RowSeen, stages: list[StageOfRow]) -> list[int]:
        """Return the best ids before and after every stage, and those of the children."""
        before = self.held.scores(self.held.scored.given)
        best = min(candidates_of(self.request), before.scores.vocabulary)
        lists = [self.held.scores(one.scores).best(one.number, best) for one in reversed(stages)]
        lists += [before.best(row.number, best), row.tokens]
        return [*dict.fromkeys(id for one in lists for id in one)]

    def _told(self, number: int, stages: list[StageOfRow], ids: list[int]) -> Iterator[Line]:
        """Yield the stages of a row with the values of its candidates."""
        was, place = self.held.scores(self.held.scored.given), number
        least = was.summary(number).least
        for stage in stages:
            now = self.held.scores(stage.scores)
            least, removed = _lowered(least, stage), 0
            if math.isfinite(least):
                now.know_possible(stage.number, was.possible(place))
            else:
                removed = now.removed(stage.number, was, place)
            values = exact_all(now.values(stage.number, ids))
            yield {"name": stage.name, "removed": removed, "values": values}
            was, place = now, stage.number


def _rows_seen(
    record: StepRecord, s: int, ids: list[list[int]], drawn: list[float] | None
) -> Iterator[RowSeen]:
    """Yield the rows of a sequence that led to tokens; `ids`: those of its children."""
    scored, layout = record.scored, record.scored.layout
    sequence, draft, first = layout.sequences[s], layout.drafts[s], layout.first[s]
    request = sequence.request
    start = sequence.visible - request.prompt_visible
    for i in range(max([1, *map(len, ids)])):
        noted = [] if scored.stages is None else scored.stages.of(sequence, sequence.visible + i)
        processors, stages = iter(request.processors), []
        for name, scores, number in noted:
            one = None if name is not None else next(processors)
            said = str(name) if one is None else name_of(one)
            stages.append(StageOfRow(said, scores, number, one))
        yield RowSeen(
            number=first + i,
            of=sequence.index,
            at=start + i,
            score=sequence.score,
            tokens=[own[i] for own in ids if len(own) > i],
            draft=int(draft[i]) if i < len(draft) else None,
            drawn=None if drawn is None else drawn[first + i],
            stages=stages,
        )


def _children(
    record: StepRecord, s: int, own: list[int], ids: list[list[int]]
) -> Iterator[list[object]]:
    """Yield every hypothesis that came out of a sequence."""
    children, parent = record.children, record.scored.layout.sequences[s].index
    index = children.index
    for child, tokens in zip(own, ids, strict=True):
        end, score = children.finish[child], exact(float(children.score[child]))
        place = parent if index is None else int(index[child])
        yield [parent, place, tokens, score, None if end is None else end.kind]


def _ends(request: Request) -> list[int]:
    """Return the ids that end a text of the request."""
    stops = [one for one in request.stops if isinstance(one, EosToken)]
    return [*dict.fromkeys(id for one in stops for id in one.ids)]


def _about(request: Request, shown: tuple[str, ...]) -> dict[str, object]:
    """Return what is decided of a request before its first step, as JSON."""
    prompt, draws = request.visible_prompt(), request.draws
    drafter, readout = request.drafter, request.readout
    return {
        "prompt": prompt[-_MOST_PROMPT:].tolist(),
        "left_out": max(0, len(prompt) - _MOST_PROMPT),
        "first_position": max(0, len(prompt) - _MOST_PROMPT) - request.shift,
        "positions": request.prompt.length,
        "cached": request.prompt.start,
        "beyond_ids": [*_beyond_ids(request.prompt), *shown],
        "strategy": _said(request.strategy),
        "width": request.strategy.width,
        "returns": request.strategy.returns,
        "seed": draws.seed if isinstance(draws, SeededDraws) else None,
        "readout": None if readout is None else type(readout).__name__,
        "processors": [[name_of(one), _said(one)] for one in request.processors],
        "stops": [_said(one) for one in request.stops],
        "drafter": None if drafter is None else type(drafter).__name__,
        "hooks": [type(hook).__name__ for hook in request.hooks],
        "follows": _followed(request),
        "adapters": [[name, weight] for name, weight in request.adapters],
        "steer": _steering(request),
    }


def _steering(request: Request) -> dict[str, object] | None:
    """Return the vectors that steer a request, by layer, whole unless they are too long; None
    without any."""
    found: dict[str, object] = {}
    size = 0
    for one in request.resolved:
        for layer, vector in vectors_of(one).items() if isinstance(one, Adapter) else ():
            values = vector.detach().cpu().numpy()
            size += values.nbytes
            raw = base64.b64encode(values.tobytes()).decode() if size <= _MOST_STEERING else None
            norm = exact(float(np.linalg.norm(values)))
            found[str(layer)] = {"norm": norm, str(values.dtype): raw}
    return found or None


def _about_source(source: Prompt) -> dict[str, object]:
    """Return the ids that an encoder reads, and what it reads beside them."""
    ids, beyond = source.ids, _beyond_ids(source)
    if ids is None or len(ids) > _MOST_PROMPT:
        return {"source": [], "beyond_ids": beyond or ["source"]}
    return {"source": ids.tolist(), "beyond_ids": beyond}


def _beyond_ids(prompt: Prompt) -> list[str]:
    """Return the names of what a prompt has beside the ids that a record holds."""
    given = ("embeds", "injected", "positions", "encoder", "mask")
    found = [name for name in given if getattr(prompt, name) is not None]
    return [*found, *prompt.inputs, *prompt.whole, *(["past"] if prompt.before else [])]


def _followed(request: Request) -> list[str] | None:
    """Return the kind and the text of the grammar that a request follows; None without one, or
    where it is long."""
    masks = [one for one in request.processors if isinstance(one, GrammarMask)]
    if not masks or len(masks[0].grammar.source.text) > _MOST_VALUE:
        return None
    source = masks[0].grammar.source
    return [source.kind, source.text]


def _said(value: object) -> str:
    """Return what a value of the library says of itself; of a caller's, its class alone."""
    own = type(value).__module__.startswith("everystep.") and not isinstance(value, UserProcessor)
    return repr(value)[:400] if own else type(value).__name__


def _configuration(fields: Effective) -> dict[str, object]:
    """Return every value of the configuration that is not a default, and its source."""
    found: dict[str, object] = {}
    for name, value in fields.items():
        if (source := fields.source(name)) != "default":
            found[name] = [_simple(value), source]
    return found


def _simple(value: object) -> object:
    """Return a value as JSON has it, if it is of such and not long; else what it says of itself."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return json.loads(text) if 0 < len(text) <= _MOST_VALUE else repr(value)[:400]


def name_of(processor: Processor) -> str:
    """Return the name of a processor: that of its class, or of the caller's function."""
    inner = processor.call if isinstance(processor, UserProcessor) else processor
    return str(getattr(inner, "__name__", type(inner).__name__))


def _lowered(least: float, stage: StageOfRow) -> float:
    """Return a bound below the possible scores after a stage that rules nothing out if it is
    finite; -inf where that is not known."""
    one = stage.processor
    if isinstance(one, TemperatureLogitsWarper) and isinstance(one.temperature, float | int):
        return float(np.float32(least / one.temperature))
    return -math.inf


def _agreed(draft: list[int], tokens: list[int]) -> int:
    """Count the first ids of a draft that were chosen."""
    pairs = zip(draft, tokens, strict=False)
    return next(
        (i for i, (one, other) in enumerate(pairs) if one != other), min(len(draft), len(tokens))
    )


def _plain(value: object) -> object:
    """Return what ended a text as JSON: a token, a string, the kind and text of an error."""
    if value is None or isinstance(value, int | str):
        return value
    return f"{type(value).__name__}: {value}"[:500]
