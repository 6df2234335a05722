"""The reader of a record: every line judged before it is believed, all of it bounded.

A file that was cut off at any byte opens with the lines that are whole. Fields that this version
does not know are kept.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from everystep.errors import FormatError
from everystep.files.opening import as_path, open_regular
from everystep.records.packed_lines import Json, KeptLines, PackedLines
from everystep.records.record_lines import MOST_LINE, VERSION
from everystep.shown import marked

MOST_READ = 2**31
"""Bytes that are read of a record at most, after decompression."""
MOST_MEMORY = 2**31
"""Bytes of memory that any record may take at most."""
MORE_MEMORY = 16
"""Bytes that it may take beyond these for each byte of its file, as far as that was read."""
MOST_DEPTH = 12
_VALUE, _RUN, _SEQUENCE, _STEP, _ROW, _PART = 64, 1024, 256, 256, 768, 128
"""Bytes of memory for a value of a line or one that a fork copies, which a page makes more of; for
a run and a sequence of it; for a step, a row of it, and a child or a draft of it."""
_BLOCK = 2**16
_GZIP = b"\x1f\x8b"
_MOST_SHOWN_RUNS = 4
_MOST_SHOWN_TOKENS = 2000
_UNDERLINED = ' style="background: {}; color: #1b1b1f; border-bottom: 2px {} #1b1b1f"'
_SHARES = (
    (0.5, ""),
    (0.1, _UNDERLINED.format("#e3eefb", "none")),
    (0.01, _UNDERLINED.format("#fdeec2", "dotted")),
    (0.001, _UNDERLINED.format("#ffd4ad", "dashed")),
    (-1.0, _UNDERLINED.format("#ffb7ba", "solid")),
)
"""How a token of a share above these is underlined."""
Number = float | None


@dataclass(frozen=True, slots=True)
class Stage:
    """The candidates' scores after a stage, None for those that it ruled out; `removed`: how many
    tokens of the vocabulary it ruled out."""

    name: str
    removed: int
    values: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class RecordedDraw:
    """The number in (0, 1) that was drawn, and the part of it that leads to the chosen token."""

    number: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class EndToken:
    """An id that would have ended the text: its logit, its score and its rank among the scores."""

    id: int
    logit: Number
    score: Number
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A line that is kept packed, or one of its rows; equal to another one that says the same."""

    lines: PackedLines
    step: int
    row: int | None = None

    def said(self) -> Mapping[str, Json]:
        """Return what stands there."""
        line = self.lines.line(self.step)
        return line if self.row is None else _object(_list(line["rows"])[self.row])

    def __eq__(self, other: object) -> bool:
        return self._read() == other._read() if isinstance(other, _Place) else NotImplemented

    def _read(self) -> tuple[object, ...]:
        """Return what is read of it when it is asked for."""
        said = self.said()
        if self.row is None:
            return _fed(said), _seconds(said)
        scores = _ids(said["ids"]), _numbers(said["logits"]), _stages(said)
        return *scores, _draw(said), _end_tokens(said)

    def __hash__(self) -> int:
        return hash((self.step, self.row))


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One choice: `of`: the index of its sequence; `at`: how many ids stand after the prompt.

    `score`: that of the sequence before. `chosen`: the token, None where nothing goes on from here.
    `origin`: "chosen", "drafted" or "forced". `totals`, `entropies`, `ranks`: logarithms of the
    sums of exponentials, entropies in nats, and the ranks of the chosen token, before and after all
    stages. `surprise`: -log of the model's probability of the chosen token. What is known of each
    candidate was judged when the line was read, and is unpacked when it is asked for.
    """

    of: int
    at: int
    score: Number
    chosen: int | None
    origin: str
    totals: tuple[Number, Number]
    entropies: tuple[Number, Number]
    ranks: tuple[int, int] | None
    surprise: Number
    _place: _Place = field(repr=False)

    @property
    def ids(self) -> tuple[int, ...]:
        """The candidates."""
        return _ids(self._place.said()["ids"])

    @property
    def logits(self) -> tuple[Number, ...]:
        """The candidates' logits."""
        return _numbers(self._place.said()["logits"])

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The candidates after each stage, in order."""
        return _stages(self._place.said())

    @property
    def scores(self) -> tuple[Number, ...]:
        """The candidates' scores after all stages."""
        stages = self.stages
        return stages[-1].values if stages else self.logits

    @property
    def draw(self) -> RecordedDraw | None:
        """The number that was drawn; None where the best was taken."""
        return _draw(self._place.said())

    @property
    def ends(self) -> tuple[EndToken, ...]:
        """The ids that would have ended the text."""
        return _end_tokens(self._place.said())


@dataclass(frozen=True, slots=True)
class RecordedChild:
    """A hypothesis that came out of a step; `end`: the reason if it ended."""

    parent: int
    index: int
    ids: tuple[int, ...]
    score: Number
    end: str | None


@dataclass(frozen=True, slots=True)
class RecordedDraft:
    """Ids that were drafted after the sequence `of`; the first `right` of them were right."""

    of: int
    ids: tuple[int, ...]
    right: int


@dataclass(frozen=True, slots=True)
class Fed:
    """Positions that a sequence fed: `count` from `start` on; those before came from a cache."""

    of: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of a run; one without rows only fed. `spent`: its seconds, all phases together.
    `beside`: how many other requests shared it."""

    number: int
    rows: tuple[RecordedRow, ...]
    children: tuple[RecordedChild, ...]
    drafts: tuple[RecordedDraft, ...]
    spent: float
    beside: int
    _place: _Place = field(repr=False)

    @property
    def line(self) -> Mapping[str, Json]:
        """The whole line, with fields that this version does not know."""
        return self._place.said()

    @property
    def fed(self) -> tuple[Fed, ...]:
        """The positions that each sequence fed."""
        return _fed(self._place.said())

    @property
    def seconds(self) -> Mapping[str, float]:
        """The time of each phase, which decides nothing."""
        return _seconds(self._place.said())


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """The end of a sequence: why, and after how many ids."""

    index: int
    kind: str
    matched: Json
    length: int


@dataclass(frozen=True, slots=True)
class _Origin:
    """The place where a fork began: the run whose choices it goes on from, after how many of its
    steps, and how long each sequence was."""

    run: RecordedRun = field(repr=False, compare=False)
    steps: int
    lengths: Mapping[int, int]


@dataclass(slots=True)
class RecordedRun:
    """One run. `about`: its line, all that was decided before the first step. `choices`: how many
    of its steps chose something. `tokens`: the ids of each sequence by its index. `given`:
    positions whose ids were not chosen. `parent`: the run that it goes on from, and after how many
    ids. `changes`: what was set, and after how many ids. `settled`: after how many steps how many
    ids of a sequence were final: (steps, index, length). `forks`: the runs that go on from it. A
    fork shares the choices before it with its parent: a line of sixty bytes must not copy as many
    as somebody likes."""

    name: str
    about: Mapping[str, Json]
    prompt: tuple[int, ...] = ()
    steps: list[RecordedStep] = field(default_factory=list)
    choices: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    ends: list[RecordedEnd] = field(default_factory=list)
    parent: tuple[str, int] | None = None
    changes: list[tuple[int, Mapping[str, Json]]] = field(default_factory=list)
    settled: list[tuple[int, int, int]] = field(default_factory=list, repr=False)
    forks: list[RecordedRun] = field(default_factory=list, repr=False, compare=False)
    _origin: _Origin | None = field(default=None, repr=False)
    _ended: dict[int, RecordedEnd] = field(default_factory=dict, repr=False, compare=False)

    def row_at(self, position: int, index: int = 0) -> RecordedRow | None:
        """Return the last choice of what stands at this position; None where it was given."""
        for step, length in self._choices(index):
            for row in step.rows if position < length else ():
                if row.at == position and row.of == index:
                    return row
        return None

    def rows(self, index: int = 0) -> dict[int, RecordedRow]:
        """Return the last choice at every position of a sequence."""
        return {
            row.at: row
            for step, length in reversed([*self._choices(index)])
            for row in step.rows
            if row.of == index and row.at < length
        }

    def _choices(self, index: int) -> Iterator[tuple[RecordedStep, float]]:
        """Yield the steps that a sequence was made by, the last one first, those before a fork
        included; with the length up to which their choices count."""
        run, count, length = self, len(self.steps), math.inf
        while length > 0:
            for at in range(count - 1, -1, -1):
                yield run.steps[at], length
            if (origin := run._origin) is None:
                return
            run, count = origin.run, origin.steps
            length = min(length, origin.lengths.get(index, 0))

    def fork(self, name: str) -> RecordedRun:
        """Return a run that goes on from here under another name."""
        lengths = {index: len(ids) for index, ids in self.tokens.items()}
        origin = _Origin(self, len(self.steps), lengths)
        if not self.steps and self._origin is not None:  # so that no chain is longer than its steps
            theirs = self._origin
            least = {i: min(one, theirs.lengths.get(i, 0)) for i, one in lengths.items()}
            origin = _Origin(theirs.run, theirs.steps, least)
        twin = RecordedRun(name, self.about, self.prompt, given=self.given, _origin=origin)
        twin.tokens = {index: [*ids] for index, ids in self.tokens.items()}
        twin.parent = self.name, len(self.tokens.get(0, []))
        twin.changes = [*self.changes]
        self.forks.append(twin)
        return twin


@dataclass(slots=True)
class Record:
    """All that a file holds. `cut`: whether something is missing: the end, or what was too long.

    `texts`: bytes of ids. `others`: lines of kinds that this version does not know. `packed`: what
    is asked for rarely of its steps.
    """

    header: Mapping[str, Json]
    runs: dict[str, RecordedRun] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)
    others: KeptLines = field(default_factory=KeptLines)
    cut: bool = False
    packed: PackedLines = field(default_factory=PackedLines, repr=False, compare=False)

    def spell(self, id: int) -> str:
        """Return the text of an id, with marks for bytes that are no text; <id> if it has none."""
        text = self.texts.get(id)
        return f"<{id}>" if text is None else text.decode(errors="backslashreplace")

    def _repr_html_(self) -> str:
        """Return the runs for a notebook: their texts coloured by surprise, without a script."""
        parts = [_run_shown(self, run) for run in [*self.runs.values()][:_MOST_SHOWN_RUNS]]
        if (more := len(self.runs) - len(parts)) > 0:
            parts.append(f"<p>{more} more runs</p>")
        return "".join(parts) or "<p>the record holds no run yet</p>"

    def text(self, run: RecordedRun, index: int = 0) -> str:
        """Return the text of a sequence; bytes that are no text are replaced."""
        ids = run.tokens.get(index, [])
        return b"".join(self.texts.get(id, b"") for id in ids).decode(errors="replace")


def _run_shown(record: Record, run: RecordedRun) -> str:
    """Return a run as HTML: every sequence as marked texts, and why it ended."""
    said = html.escape(marked(f"run {run.name}: {run.about.get('strategy')}")[:200])
    lines = [f"<p><b>{said}</b></p>"]
    for index in sorted(run.tokens)[:_MOST_SHOWN_RUNS]:
        rows, ids = run.rows(index), run.tokens[index]
        spans = [
            _token_shown(record, at, id, None if at in run.given else rows.get(at))
            for at, id in enumerate(ids[:_MOST_SHOWN_TOKENS])
        ]
        left = f" and {len(ids) - len(spans)} more" if len(ids) > len(spans) else ""
        lines.append(f'<p style="overflow-wrap: anywhere">{"".join(spans)}{left}</p>')
    ends = "; ".join(f"sequence {end.index}: {end.kind} after {end.length}" for end in run.ends)
    return "".join([*lines, f"<p>{html.escape(marked(ends, spaces=False)[:400])}</p>"])


def _token_shown(record: Record, at: int, id: int, row: RecordedRow | None) -> str:
    """Return a token as HTML: underlined the more, the less likely it was."""
    text = html.escape(marked(record.spell(id)))
    if row is None or row.chosen != id or row.surprise is None:
        return f'<i title="token {at}, id {id}">{text}</i>'
    share = math.exp(-max(row.surprise, 0.0))
    lines = next((style for least, style in _SHARES if share > least), _SHARES[-1][1])
    title = f"token {at}, id {id}, share {share:.2%}"
    return f'<span title="{title}"{lines}>{text}</span>'


def read_record(path: str | PathLike[str]) -> Record:
    """Return what a record holds that `record=FILE` wrote, as far as the file is whole.

    FormatError for a file that is no record, or that holds what no writer writes.

    Example:

        >>> text = es.generate(model, tokenizer, "Once", max_new_tokens=4, record=folder / "a")
        >>> (run,) = es.read_record(folder / "a").runs.values()
        >>> len(run.steps)
        4
    """
    found = GrowingRecord(as_path(path))
    found.read(to_end=True)
    return found.record


class GrowingRecord:
    """A record that grows: it is read on from where it was read to, and what was read stays.

    `bytes_read`: how many bytes of the file were read so far, all times together.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.bytes_read = 0
        self._record: Record | None = None
        self._offset = self._number = self._unpacked = self._memory = 0

    @property
    def record(self) -> Record:
        """The record as it was read last; FormatError where its first line is not there yet."""
        if self._record is None:
            wanted = "a file that record=FILE wrote"
            raise FormatError(f"{self.file} is no record", wanted=wanted, got="no first line")
        return self._record

    def read(self, *, to_end: bool = False) -> Record | None:
        """Read the lines that were appended; None until there is a first one.

        A line without its end is left for the next time; with `to_end` there is none, and the
        record counts as cut off.
        """
        with open_regular(self.file) as file:
            if file.seek(0, 2) < self._offset:  # another record in its place
                self._record = None
                self._offset = self._number = self._unpacked = self._memory = 0
            file.seek(self._offset)
            reader = _Lines(self.file, file, self._unpacked)
            for data, whole in reader:
                if not whole and not to_end:
                    break
                self._number += 1
                if not self._take(data, whole):
                    break
                self._require_small(self._offset + reader.read)
            self._unpacked = reader.unpacked
            self._offset += reader.consumed
            self.bytes_read += reader.read
        return self._record

    def _take(self, data: bytes, whole: bool) -> bool:
        """Take a line; False for one that was cut off, after which there is nothing."""
        line, count = _parsed(data)
        if line is None and not whole:
            if self._record is not None:
                self._record.cut = True
            return False
        if line is None:
            raise _damaged(self.file, self._number, "it is no JSON object, or too deep")
        try:
            if self._record is None:
                self._record = _begun(self.file, line)
            else:
                self._memory += _read(self._record, line, data, count)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise _damaged(self.file, self._number, what) from error
        return True

    def _require_small(self, size: int) -> None:
        """Refuse a record that takes far more memory than so many bytes of its file stand for."""
        most = MOST_MEMORY + MORE_MEMORY * size
        if self._memory > most:
            raise FormatError(
                f"{self.file} takes too much memory, up to line {self._number}",
                wanted=f"at most {most} bytes for a file of its size",
                got=f"some {self._memory}",
                do="Take a file that you know, or fewer of its lines",
            )


def _damaged(file: Path, number: int, what: str) -> FormatError:
    return FormatError(f"{file} is no record: line {number} is damaged", got=what[:200])


def _begun(file: Path, line: Mapping[str, Json]) -> Record:
    if line.get("type") != "record":
        raise FormatError(f"{file} is no record", wanted="a first line of the type record")
    version = line.get("version")
    if version != VERSION:
        what = f"{file} is a record of another version"
        raise FormatError(what, wanted=VERSION, got=repr(version)[:40], do="Install that version")
    return Record(line)


def whole_lines(path: Path) -> Iterator[Mapping[str, Json]]:
    """Yield the lines of a record that are whole, as they stand there."""
    with open_regular(path) as file:
        for data, _ in _Lines(path, file, 0):
            line, _ = _parsed(data)
            if line is not None:
                yield line


# --- bytes and lines ------------------------------------------------------------------------------


class _Lines:
    """The lines of a file from where it stands, each with whether it had its end.

    `unpacked`: bytes of lines so far, those before included. `read`: bytes of the file that were
    read. `consumed`: bytes of the file after which the next line begins: whole lines, or blocks of
    a compressed file with whole lines.
    """

    def __init__(self, path: Path, file: BinaryIO, unpacked: int) -> None:
        self._path, self._file = path, file
        self.unpacked, self.read, self.consumed = unpacked, 0, 0

    def __iter__(self) -> Iterator[tuple[bytes, bool]]:
        rest, number = b"", 0
        for block, place in self._blocks():
            self.unpacked += len(block)
            if self.unpacked > MOST_READ:
                raise FormatError(f"{self._path} is too large", wanted=f"at most {MOST_READ} bytes")
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                number += 1
                yield line, True
            if place is None:
                self.consumed = self.read - len(rest)
            elif not rest:
                self.consumed = place
            if len(rest) > MOST_LINE:
                raise _damaged(self._path, number + 1, f"more than {MOST_LINE} bytes")
        if rest:
            yield rest, False

    def _more(self) -> bytes:
        data = self._file.read(_BLOCK)
        self.read += len(data)
        return data

    def _blocks(self) -> Iterator[tuple[bytes, int | None]]:
        """Yield the bytes, decompressed where they are, up to the first that is damaged; with the
        place after a compressed block where one ends, None where nothing is compressed."""
        data = self._more()
        if not data.startswith(_GZIP):
            while data:
                yield data, None
                data = self._more()
            return
        unzip, ended = zlib.decompressobj(31), 0
        while data:
            try:
                found = unzip.decompress(data, _BLOCK)
            except zlib.error:
                return
            if unzip.eof:
                ended = self.read - len(unzip.unused_data)
                data, unzip = unzip.unused_data or self._more(), zlib.decompressobj(31)
            else:
                data = unzip.unconsumed_tail or self._more()
            yield found, ended


def _parsed(data: bytes) -> tuple[Mapping[str, Json] | None, int]:
    """Return a line's object, and how many values are in it; None for anything else."""
    if len(data) > MOST_LINE:
        return None, 0
    try:
        found = json.loads(data.decode(), parse_constant=_refused)
    except (ValueError, RecursionError):
        return None, 0
    count = _values_of(found) if isinstance(found, dict) else None
    return (None, 0) if count is None else (found, count)


def _refused(name: str) -> None:
    raise ValueError(name)


def _values_of(value: Json) -> int | None:
    """Return how many values are in it; None where something lies too deep."""
    level, count = [value], 0
    for _ in range(MOST_DEPTH):
        inner: list[Json] = []
        for one in level:
            if isinstance(one, dict | list):
                inner += one.values() if isinstance(one, dict) else one
        if not inner:
            return count
        level, count = inner, count + len(inner)
    return None


# --- what lines say -------------------------------------------------------------------------------


def _whole(value: Json) -> int:
    if type(value) is not int or not -(2**53) < value < 2**53:
        raise TypeError(f"no whole number: {value!r}"[:80])
    return value


def _number(value: Json) -> Number:
    """Return a number; None for what was ruled out, and for what is none."""
    if value is None or value == "nan":
        return None
    if value == "inf":
        return float("inf")
    if type(value) not in (int, float):
        raise TypeError(f"no number: {value!r}"[:80])
    return float(value)  # type: ignore[arg-type]


def _real(value: Json) -> float:
    found = _number(value)
    if found is None:
        raise TypeError("no number")
    return found


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text: {value!r}"[:80])
    return value


def _list(value: Json, count: int | None = None) -> list[Json]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise TypeError(f"no list, or one of another length: {value!r}"[:80])
    return value


def _object(value: Json) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"no object: {value!r}"[:80])
    return value


def _ids(value: Json) -> tuple[int, ...]:
    return tuple(map(_whole, _list(value)))


def _numbers(value: Json, count: int | None = None) -> tuple[Number, ...]:
    return tuple(map(_number, _list(value, count)))


def _read(record: Record, line: Mapping[str, Json], data: bytes, count: int) -> int:
    """Take a line with so many values into the record, and return how much memory that takes.

    A line of a kind that this version does not know takes none, as it stays compressed.
    """
    kind = str(line.get("type"))
    if kind == "step":
        return _step(record, line, data)
    if kind not in _READERS:
        record.cut |= kind == "cut"
        record.others.add(data)
        return 0
    _READERS[kind](record, line)
    if kind in ("run", "fork"):
        run = _run_of(record, line)
        count += len(run.changes) + sum(map(len, run.tokens.values()))
        return _VALUE * count + _RUN + _SEQUENCE * len(run.tokens)
    return _VALUE * count


def _run_of(record: Record, line: Mapping[str, Json]) -> RecordedRun:
    return record.runs[_text(line["run"])]


def _run(record: Record, line: Mapping[str, Json]) -> None:
    name = _text(line["run"])
    if name in record.runs:
        raise ValueError(f"run {name} begins twice")
    record.runs[name] = RecordedRun(name, line, _ids(line["prompt"]))


def _spelling(record: Record, line: Mapping[str, Json]) -> None:
    for id, text in _object(line["texts"]).items():
        if isinstance(text, dict):
            try:
                raw = base64.b64decode(_text(text["base64"]), validate=True)
            except binascii.Error as error:
                raise ValueError("no base64") from error
        else:
            raw = _text(text).encode(errors="backslashreplace")
        record.texts[int(id)] = raw


def _step(record: Record, line: Mapping[str, Json], data: bytes) -> int:
    """Take a step, most of which stays packed, and return how much memory the rest takes."""
    run = _run_of(record, line)
    number = _whole(line["step"])
    if run.steps and number <= run.steps[-1].number:
        return 0  # written twice, around an interrupt
    _fed(line)  # judged now; see RecordedStep
    spent = sum(_seconds(line).values())
    place = record.packed.add(data)
    step = RecordedStep(
        number,
        tuple(
            _row(_object(row), _Place(record.packed, place, at))
            for at, row in enumerate(_list(line.get("rows", [])))
        ),
        tuple(_child(_list(one, 5)) for one in _list(line.get("children", []))),
        tuple(
            RecordedDraft(_whole(of), _ids(ids), _whole(right))
            for of, ids, right in (_list(one, 3) for one in _list(line.get("drafts", [])))
        ),
        spent,
        _whole(line.get("beside", 0)),
        _Place(record.packed, place),
    )
    run.steps.append(step)
    run.choices += bool(step.rows)
    parts = [*(one.ids for one in step.children), *(one.ids for one in step.drafts)]
    ids = sum(map(len, parts))
    return _STEP + _ROW * len(step.rows) + _PART * len(parts) + _VALUE * ids


def _fed(line: Mapping[str, Json]) -> tuple[Fed, ...]:
    return tuple(Fed(*map(_whole, _list(one, 3))) for one in _list(line.get("fed", [])))


def _seconds(line: Mapping[str, Json]) -> dict[str, float]:
    said = _object(line.get("seconds", {}))
    return {_text(name): _real(value) for name, value in said.items()}


def _row(row: Mapping[str, Json], place: _Place) -> RecordedRow:
    ids = _ids(row["ids"])
    _numbers(row["logits"], len(ids))
    for stage in _stages(row):
        if len(stage.values) != len(ids):
            raise ValueError("a stage has another number of candidates")
    _draw(row), _end_tokens(row)  # judged now; see RecordedRow
    chosen, ranks = row.get("chosen"), row.get("ranks")
    before, after = _numbers(row["totals"], 2)
    sure, unsure = _numbers(row["entropies"], 2)
    return RecordedRow(
        _whole(row["of"]),
        _whole(row["at"]),
        _number(row.get("score", 0.0)),
        None if chosen is None else _whole(chosen),
        _text(row.get("origin", "chosen")),
        (before, after),
        (sure, unsure),
        None if ranks is None else (_whole(_list(ranks, 2)[0]), _whole(_list(ranks, 2)[1])),
        _number(row.get("surprise")),
        place,
    )


def _stages(row: Mapping[str, Json]) -> tuple[Stage, ...]:
    said = map(_object, _list(row.get("stages", [])))
    return tuple(
        Stage(_text(one["name"]), _whole(one["removed"]), _numbers(one["values"])) for one in said
    )


def _draw(row: Mapping[str, Json]) -> RecordedDraw | None:
    draw = row.get("draw")
    return None if draw is None else RecordedDraw(*map(_real, _list(draw, 3)))


def _end_tokens(row: Mapping[str, Json]) -> tuple[EndToken, ...]:
    ends = (_list(one, 4) for one in _list(row.get("ends", [])))
    return tuple(
        EndToken(_whole(id), _number(logit), _number(score), _whole(rank))
        for id, logit, score, rank in ends
    )


def _child(child: list[Json]) -> RecordedChild:
    parent, index, ids, score, end = child
    named = None if end is None else _text(end)
    return RecordedChild(_whole(parent), _whole(index), _ids(ids), _number(score), named)


def _tokens(record: Record, line: Mapping[str, Json]) -> None:
    run, at, ids = _run_of(record, line), _whole(line["at"]), _ids(line["ids"])
    index = _whole(line["index"])
    own = run.tokens.setdefault(index, [])
    if not 0 <= at <= len(own):
        raise ValueError("tokens begin behind the end of the text")
    own[at:] = ids
    run.settled.append((len(run.steps), index, len(own)))


def _end(record: Record, line: Mapping[str, Json]) -> None:
    index, kind = _whole(line["index"]), _text(line["kind"])
    ended = RecordedEnd(index, kind, line.get("matched"), _whole(line["length"]))
    run = _run_of(record, line)
    if run._ended.get(index) != ended:  # else it was written twice, around an interrupt
        run.ends.append(ended)
        run._ended[index] = ended


def _edit(record: Record, line: Mapping[str, Json]) -> None:
    run, at = _run_of(record, line), _whole(line["at"])
    own = run.tokens.setdefault(0, [])
    if not 0 <= at <= len(own):
        raise ValueError("an edit begins behind the end of the text")
    own[at:] = _ids(line["ids"])
    run.given = set(_ids(line["given"]))
    run.ends.clear()
    run._ended.clear()


def _set(record: Record, line: Mapping[str, Json]) -> None:
    _run_of(record, line).changes.append((_whole(line["at"]), _object(line["values"])))


def _fork(record: Record, line: Mapping[str, Json]) -> None:
    name, parent = _text(line["run"]), record.runs[_text(line["parent"])]
    if name in record.runs:
        raise ValueError(f"run {name} begins twice")
    record.runs[name] = parent.fork(name)


_READERS = {
    "run": _run,
    "spelling": _spelling,
    "tokens": _tokens,
    "end": _end,
    "edit": _edit,
    "set": _set,
    "fork": _fork,
}
