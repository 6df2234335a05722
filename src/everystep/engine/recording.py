"""From the steps of a watched request to the lines of its record.

All numbers are those that were there: logits as the model gave them, scores as every stage left
them. Nothing is computed a second time but summaries: totals, entropies, ranks, and the part of the
draw that leads to the chosen token.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.adapters import Adapter, vectors_of
from everystep.config import Effective
from everystep.draws import SeededDraws
from everystep.engine.watching import StepRecord, WatchedStep
from everystep.errors import NOBODYS, EverystepError
from everystep.processors.base import UserProcessor
from everystep.processors.grammars.mask import GrammarMask
from everystep.records import Line, RecordWriter, exact, spelled
from everystep.stops.ends import EosToken
from everystep.text import Spelling
from everystep.types import Event, Prompt, Request
from everystep.types.protocols import Processor
from everystep.types.request import places_of

BEST = 10
"""Candidates of a choice that are recorded before and after every stage, at least."""
_MOST_BEST = 66
_BLOCK = 64
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
    _lengths: dict[tuple[str, int], int] = field(default_factory=dict)

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
        request: Request,
    ) -> RunRecorder:
        """Return the recorder of a request; `fields`: the configuration in force.

        `digests`: of model and tokenizer. `trims`: whether texts lose the stop string that ended
        them. `adapted`: the digest of the model with the request's adapters, if it has some.
        `source`: what an encoder reads.
        """
        about = {**_about(request), "configuration": _configuration(fields), "trims": trims}
        if adapted is not None:
            about["adapted"] = adapted
        if source is not None:
            about |= _about_source(source)
        spell = None if tokenizer is None else _speller(tokenizer)
        return cls(writer, digests, about, spell)

    def __call__(self, step: WatchedStep) -> None:
        """Write a step, what became final in it, and what ended; an error ends the record alone."""
        if step.number <= self._last.get(step.request.request_id, 0):
            return  # told again after an interrupt
        try:
            self._write(step)
        except NOBODYS:
            raise
        except Exception as error:
            self.writer.stop(error)

    def _write(self, step: WatchedStep) -> None:
        request = step.request.request_id
        lines = [*self._begun(request)]
        name = self._names[request]
        made = self._step(name, step)
        lines += [*self._spelling(made), made] if made else []
        lines += self._tokens(name, step.events)
        self.writer.write(lines)
        self._last[request] = step.number
        if any(event.finish is not None for event in step.events):
            self.writer.flush()

    def begin(self, request: str) -> None:
        """Write the first lines of a run, unless they are there."""
        self.writer.write([*self._begun(request)])

    def name(self, request: str) -> str | None:
        """Return the name that a run has in the record; None before its first line."""
        return self._names.get(request)

    def edited(self, request: str, at: int, tokens: list[int], given: list[int]) -> None:
        """Write that other ids stand after the prompt from now on; the first `at` are as before."""
        lines = [*self._begun(request)]
        at = min(at, self._lengths.get((request, 0), 0))
        own = tokens[at:]
        kind = {"type": "edit", "run": self._names[request], "at": at}
        self.writer.write([*lines, *self._texts(own), {**kind, "ids": own, "given": given}])
        self._lengths[request, 0] = len(tokens)

    def changed(self, request: str, at: int, changes: Mapping[str, object]) -> None:
        """Write that other values hold from the choice after `at` tokens on."""
        said = {name: _simple(value) for name, value in changes.items()}
        lines = [*self._begun(request)]
        line = {"type": "set", "run": self._names[request], "at": at, "values": said}
        self.writer.write([*lines, line])

    def forked(self, parent: str, request: str) -> None:
        """Write that a run goes on from another one."""
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

    # --- steps ------------------------------------------------------------------------------------

    def _step(self, name: str, step: WatchedStep) -> dict[str, object]:
        """Return the line of a step; empty where nothing was fed or chosen."""
        if step.record is None and not step.fed:
            return {}
        line: dict[str, object] = {"type": "step", "run": name, "step": step.number}
        if step.record is not None:
            chosen = ChosenRows.of(step.record, step.place)
            line["rows"] = [row for row in map(chosen.row, range(len(chosen.rows))) if row]
            line["children"] = chosen.children()
            if drafts := chosen.drafts():
                line["drafts"] = drafts
        line["fed"] = [list(one) for one in step.fed]
        line["seconds"] = {phase: round(one, 7) for phase, one in step.seconds.items()}
        line["beside"] = step.beside
        return line


class RowPlace(NamedTuple):
    """A row that led to tokens: its number, its sequence, and how many drafted ids it follows."""

    number: int
    sequence: int
    place: int


@dataclass(slots=True, eq=False)
class ChosenRows:
    """The rows of one request in the record of a step, as numbers on the host.

    `before`, `after`: (R, V) logits, and the scores that were chosen from. `born`: of each sequence
    its children, as indices. `numbers`: (R,) what was drawn, None without a draw that can be told.
    """

    record: StepRecord
    request: Request
    rows: list[RowPlace]
    born: dict[int, list[int]]
    before: np.ndarray
    after: np.ndarray
    numbers: list[float] | None

    @classmethod
    def of(cls, record: StepRecord, place: int) -> ChosenRows:
        """Take the rows of the group at this place."""
        scored, children, layout = record.scored, record.children, record.scored.layout
        request = scored.groups[place].request
        members = [s for s, g in enumerate(layout.group_of) if g == place]
        born: dict[int, list[int]] = {s: [] for s in members}
        for child, parent in enumerate(children.parent.tolist()):
            if parent in born:
                born[parent].append(child)
        rows = []
        for s in members:
            if layout.sequences[s].finish is None:
                most = max([1, *children.counts[born[s]].tolist()])
                rows += [RowPlace(layout.first[s] + i, s, i) for i in range(most)]
        at = torch.tensor([row.number for row in rows], dtype=torch.int64)
        at = at.to(scored.logits.device)
        numbers = None
        drawn = request.strategy.reads.number and isinstance(request.draws, SeededDraws)
        if rows and drawn and scored.offered is scored.scores:
            own = [scored.batch.sequences[row.number] for row in rows]
            position = np.array([one.length for one in own], dtype=np.uint64)
            places = places_of(own, position, np.zeros(len(own), np.int64), 1)
            numbers = request.draws.uniform("choice", places)[:, 0].tolist()
        before = scored.logits[at].cpu().numpy()
        after = _on_host(scored.offered.select(at).whole().values)
        return cls(record, request, rows, born, before, after, numbers)

    def row(self, r: int) -> dict[str, object]:
        """Return what is recorded of a row."""
        at, before, after = self.rows[r], self.before[r], self.after[r]
        sequence = self.record.scored.layout.sequences[at.sequence]
        stages = self._stages(r)
        best = min(max(BEST, 2 * self.request.strategy.width + 2), _MOST_BEST, len(before))
        ids = self._candidates(at, [before, *(values for _, values in stages)], best)
        chosen = self._tokens(at)[:1]
        places = np.array(ids, dtype=np.int64)
        first, last = Summary.of(before), Summary.of(after)
        found: dict[str, object] = {
            "of": sequence.index,
            "at": sequence.visible - self.request.prompt_visible + at.place,
            "ids": ids,
            "logits": [*map(exact, before[places].tolist())],
            "stages": [*_told(before, stages, places)],
            "totals": [exact(first.total), exact(last.total)],
            "entropies": [exact(first.entropy), exact(last.entropy)],
        }
        if sequence.score:
            found["score"] = exact(sequence.score)
        for token in chosen:
            found["chosen"] = token
            found["origin"] = "forced" if last.possible == 1 else self._origin(at)
            found["ranks"] = [_rank(before, token), _rank(after, token)]
            found["surprise"] = exact(first.total - float(before[token]))
            if self.numbers is not None:
                found["draw"] = [self.numbers[r], *last.part(after, token)]
        if ends := self._ends():
            found["ends"] = [
                [id, exact(float(before[id])), exact(float(after[id])), _rank(after, id)]
                for id in ends
                if id < len(before)
            ]
        return found

    def _tokens(self, at: RowPlace) -> list[int]:
        """Return the token at this place of each child of the row's sequence."""
        children = self.record.children
        return [
            int(children.tokens[child, at.place])
            for child in self.born[at.sequence]
            if children.counts[child] > at.place
        ]

    def _stages(self, r: int) -> list[tuple[str, np.ndarray]]:
        """Return the name and the scores (V,) after each stage of a row."""
        scored, at, request = self.record.scored, self.rows[r], self.request
        sequence = scored.layout.sequences[at.sequence]
        noted = [] if scored.stages is None else scored.stages.of(
            sequence, sequence.visible + at.place
        )  # fmt: skip
        names = iter(request.processors)
        found = [
            (name_of(next(names)) if name is None else name, _on_host(values))
            for name, values in noted
        ]
        last = found[-1][1] if found else self.before[r]
        left = self.after[r]
        if scored.offered is not scored.scores:
            row = torch.tensor([at.number], device=scored.scores.values.device)
            left = _on_host(scored.scores.select(row).whole().values[0])
        if not _equal(last, left):
            found.append(("hooks" if request.hooks else "unknown", left))
        if scored.offered is not scored.scores and not np.array_equal(left, self.after[r]):
            found.append(("drafts", self.after[r]))
        return found

    def _candidates(self, at: RowPlace, stages: list[np.ndarray], best: int) -> list[int]:
        """Return the best ids before and after every stage, those of the children, and the ends."""
        found: dict[int, None] = {}
        for values in reversed(stages):
            ids = best_of(values, best)
            found |= dict.fromkeys(ids[values[ids] > -np.inf].tolist())
        found |= dict.fromkeys(self._tokens(at))
        return list(found)

    def _origin(self, at: RowPlace) -> str:
        """Return how the token of a row came about, where others were possible."""
        drafts = self.record.scored.layout.drafts[at.sequence]
        agreed = at.place < len(drafts) and self._tokens(at)[:1] == [int(drafts[at.place])]
        return "drafted" if agreed else "chosen"

    def _ends(self) -> list[int]:
        """Return the ids that end a text of the request."""
        stops = [one for one in self.request.stops if isinstance(one, EosToken)]
        return [*dict.fromkeys(id for one in stops for id in one.ids)]

    def children(self) -> list[list[object]]:
        """Return every hypothesis that came out of the step."""
        children, sequences = self.record.children, self.record.scored.layout.sequences
        index = children.index
        return [
            [
                sequences[parent].index,
                sequences[parent].index if index is None else int(index[child]),
                children.tokens[child, : children.counts[child]].tolist(),
                exact(float(children.score[child])),
                None if (end := children.finish[child]) is None else end.kind,
            ]
            for parent, own in self.born.items()
            for child in own
            if sequences[parent].finish is None
        ]

    def drafts(self) -> list[list[object]]:
        """Return what was drafted after each sequence, and how many of these ids were right."""
        children, layout = self.record.children, self.record.scored.layout
        found: list[list[object]] = []
        for s, own in self.born.items():
            draft = layout.drafts[s]
            if not len(draft):
                continue
            tokens = [children.tokens[c, : children.counts[c]] for c in own]
            right = max((_agreed(draft, one) for one in tokens), default=0)
            found.append([layout.sequences[s].index, draft.tolist(), right])
        return found


def _about(request: Request) -> dict[str, object]:
    """Return what is decided of a request before its first step, as JSON."""
    prompt, draws = request.visible_prompt(), request.draws
    drafter, readout = request.drafter, request.readout
    return {
        "prompt": prompt[-_MOST_PROMPT:].tolist(),
        "left_out": max(0, len(prompt) - _MOST_PROMPT),
        "first_position": max(0, len(prompt) - _MOST_PROMPT) - request.shift,
        "positions": request.prompt.length,
        "cached": request.prompt.start,
        "beyond_ids": _beyond_ids(request.prompt),
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


def _speller(tokenizer: Any) -> Spell:
    """Return what gives the bytes of an id."""
    try:
        return Spelling.of(tokenizer)
    except EverystepError:
        return lambda id: str(tokenizer.decode([id])).encode(errors="backslashreplace")


def name_of(processor: Processor) -> str:
    """Return the name of a processor: that of its class, or of the caller's function."""
    inner = processor.call if isinstance(processor, UserProcessor) else processor
    return str(getattr(inner, "__name__", type(inner).__name__))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether scores are equal, nan to nan."""
    return np.array_equal(one, other) or np.array_equal(one, other, equal_nan=True)


def _on_host(scores: Tensor) -> np.ndarray:
    """Return scores as float32."""
    found: np.ndarray = scores.float().cpu().numpy()
    return found


@dataclass(frozen=True, slots=True)
class Summary:
    """Three numbers about scores (V,) as a whole: the logarithm of the sum of their exponentials,
    the entropy of their softmax in nats, and how many are possible."""

    total: float
    entropy: float
    possible: int

    @classmethod
    def of(cls, scores: np.ndarray) -> Summary:
        """Sum up scores, of which some may be -inf."""
        ruled_out = scores == -np.inf
        possible = len(scores) - int(np.count_nonzero(ruled_out))
        if not possible:
            return cls(-math.inf, 0.0, 0)
        own = scores if possible == len(scores) else scores[~ruled_out]
        most = own.max()
        if not np.isfinite(most):
            return cls(float(most), math.nan, possible)
        below = own - most
        weights = np.exp(below)
        mass = float(weights.sum(dtype=np.float64))
        mean = float(np.dot(weights, below)) / mass
        return cls(float(most) + math.log(mass), max(math.log(mass) - mean, 0.0), possible)

    def part(self, scores: np.ndarray, token: int) -> tuple[float, float]:
        """Return the part of (0, 1) that leads to a token, where shares are in the order of ids."""
        shares = np.exp(scores[: token + 1].astype(np.float64) - self.total)
        return float(shares[:-1].sum()), float(shares.sum())


def best_of(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the best scores (V,), best first."""
    columns = len(scores) // _BLOCK
    if columns > count * 2:  # the best are in the columns whose best are the best
        tops = scores[: columns * _BLOCK].reshape(_BLOCK, columns).max(axis=0)
        best = np.argpartition(tops, -count)[-count:]
        near = (np.arange(_BLOCK)[:, None] * columns + best).reshape(-1)
        near = np.concatenate([near, np.arange(columns * _BLOCK, len(scores))])
    else:
        near = np.arange(len(scores))
    order = np.lexsort((near, -scores[near]))
    found: np.ndarray = near[order[:count]]
    return found


def _told(
    before: np.ndarray, stages: list[tuple[str, np.ndarray]], at: np.ndarray
) -> Iterator[Line]:
    """Yield the stages of a row with the values of its candidates."""
    possible = before != -np.inf
    for name, after in stages:
        removed = int(np.count_nonzero(possible & (after == -np.inf)))
        yield {"name": name, "removed": removed, "values": [*map(exact, after[at].tolist())]}
        possible = after != -np.inf


def _rank(scores: np.ndarray, token: int) -> int:
    """Return how many tokens have a higher score."""
    return int(np.count_nonzero(scores > scores[token]))


def _agreed(draft: np.ndarray, tokens: np.ndarray) -> int:
    """Count the first ids of a draft that were chosen."""
    shorter = min(len(draft), len(tokens))
    wrong = np.flatnonzero(draft[:shorter] != tokens[:shorter])
    return int(wrong[0]) if len(wrong) else shorter


def _plain(value: object) -> object:
    """Return what ended a text as JSON: a token, a string, the kind and text of an error."""
    if value is None or isinstance(value, int | str):
        return value
    return f"{type(value).__name__}: {value}"[:500]
