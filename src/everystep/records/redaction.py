"""Records without texts, to hand on: numbers, names and ids stay, and nothing that somebody wrote.

What stays is listed, so a field that this version does not know goes. Prompts become a digest and
a length. Ids of the answer stay: whoever has the tokenizer can spell them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from os import PathLike

from everystep.errors import RequestError
from everystep.files.atomic import write_atomic
from everystep.files.opening import as_path
from everystep.records.packed_lines import Json
from everystep.records.reader import read_record, whole_lines
from everystep.records.record_lines import Line, encoded

_GONE = "(left out)"
_STEP = ("type", "run", "step", "drafts", "fed", "beside", "children")
_ROW = ("of", "at", "score", "chosen", "ids", "logits", "totals", "entropies", "ranks", "surprise")
_MORE = ("draw", "ends")
_NUMBERS = ("positions", "cached", "first_position", "width", "returns", "seed", "adapted")
_CLASSES = ("strategy", "readout", "drafter")
_PHASES = 64
_NAME = 100


def redact_record(source: str | PathLike[str], target: str | PathLike[str]) -> None:
    """Write a record without its texts, whole or not at all; compressed where its name ends in .gz.

    FormatError for a file that is no record, RequestError where both are one file.
    """
    old, new = as_path(source), as_path(target)
    if new.exists() and old.exists() and new.samefile(old):
        raise RequestError("a record cannot be redacted in its own place", do="Name another file")
    read_record(old)  # it is judged before a line of it is believed
    data = bytearray()  # and no list of lines, of which a short one takes several times its bytes
    for line in map(redacted_line, whole_lines(old)):
        if line is not None:
            data += encoded(line)
    write_atomic(new, gzip.compress(data, 6, mtime=0) if new.suffix == ".gz" else bytes(data))


def redacted_line(line: Mapping[str, Json]) -> Line | None:
    """Return a line without its texts; None for one that has nothing else."""
    make = _LINES.get(str(line.get("type")))
    return None if make is None else make(line)


def _header(line: Mapping[str, Json]) -> Line:
    kept = ("type", "version", "everystep", "model", "tokenizer")
    return {**_short(line, kept), "redacted": True}


def _run(line: Mapping[str, Json]) -> Line:
    found: dict[str, object] = {**_short(line, ("type", "run")), "prompt": []}
    found |= {name: line[name] for name in _NUMBERS if type(line.get(name)) in (int, str)}
    for name in ("prompt", "source"):
        if isinstance(ids := line.get(name), list):
            found[f"{name}_ids"] = len(ids)
            found[f"{name}_sha256"] = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    found["left_out"] = _whole(line.get("left_out")) + _whole(found["prompt_ids"])
    found |= {name: _class(line[name]) for name in _CLASSES if isinstance(line.get(name), str)}
    found["processors"] = [
        [str(one[0])[:_NAME], str(one[0])[:_NAME]]
        for one in _list(line.get("processors"))
        if isinstance(one, list) and one
    ]
    for name in ("stops", "hooks"):
        found[name] = [_class(one) for one in _list(line.get(name))]
    found["adapters"] = [
        [f"adapter {place}", one[1]]
        for place, one in enumerate(_list(line.get("adapters")))
        if isinstance(one, list) and len(one) == 2 and _is_number(one[1])
    ]
    if line.get("every_stage") is False:
        found["every_stage"] = False
    found["beyond_ids"] = [_class(one) for one in _list(line.get("beyond_ids"))]
    follows = _list(line.get("follows"))
    found["follows"] = [str(follows[0])[:_NAME], _GONE] if follows else None
    said = line.get("configuration")
    found["configuration"] = {
        str(name)[:_NAME]: [_plain(one[0]), str(one[1])[:_NAME]]
        for name, one in (said.items() if isinstance(said, dict) else ())
        if isinstance(one, list) and len(one) == 2
    }
    return found


def _step(line: Mapping[str, Json]) -> Line:
    rows = [_row(one) for one in _list(line.get("rows")) if isinstance(one, dict)]
    seconds = line.get("seconds")
    phases = list(seconds.items())[:_PHASES] if isinstance(seconds, dict) else []
    times = {str(name)[:_NAME]: one for name, one in phases if _is_number(one)}
    return {**{name: line[name] for name in _STEP if name in line}, "rows": rows, "seconds": times}


def _row(row: Mapping[str, Json]) -> dict[str, object]:
    stages = [
        {"name": str(one.get("name"))[:_NAME], "removed": one["removed"], "values": one["values"]}
        for one in _list(row.get("stages"))
        if isinstance(one, dict)
    ]
    found = {name: row[name] for name in (*_ROW, *_MORE) if name in row}
    return {**found, "origin": _class(row.get("origin", "chosen")), "stages": stages}


def _end(line: Mapping[str, Json]) -> Line:
    matched = line.get("matched")
    kept = {name: line[name] for name in ("index", "length")}
    said = matched if type(matched) is int else None if matched is None else _GONE
    return {**_short(line, ("type", "run", "kind")), **kept, "matched": said}


def _set(line: Mapping[str, Json]) -> Line:
    values = line.get("values")
    plain = {
        str(name)[:_NAME]: _plain(one)
        for name, one in (values.items() if isinstance(values, dict) else ())
    }
    return {**_short(line, ("type", "run")), "at": line["at"], "values": plain}


def _only(*names: str) -> Callable[[Mapping[str, Json]], Line]:
    """Return what keeps these fields of a line, which hold numbers and ids."""

    def kept(line: Mapping[str, Json]) -> Line:
        return {**_short(line, ("type", "run")), **{name: line[name] for name in names}}

    return kept


def _fork(line: Mapping[str, Json]) -> Line:
    return _short(line, ("type", "run", "parent"))


def _cut(line: Mapping[str, Json]) -> Line:
    return {"type": "cut", "what": _class(line.get("what"))}


_LINES: Mapping[str, Callable[[Mapping[str, Json]], Line]] = {
    "record": _header,
    "run": _run,
    "step": _step,
    "tokens": _only("index", "at", "ids"),
    "end": _end,
    "edit": _only("at", "ids", "given"),
    "set": _set,
    "fork": _fork,
    "cut": _cut,
}


def _short(line: Mapping[str, Json], names: tuple[str, ...]) -> dict[str, object]:
    """Return these fields, names that the writer gave, none of them long."""
    return {name: _cut_short(line[name]) for name in names if name in line}


def _cut_short(value: Json) -> Json:
    return value[:_NAME] if isinstance(value, str) else value


def _class(value: Json) -> str:
    """Return the name that a description begins with, without what it is made of."""
    name = str(value).partition("(")[0][:_NAME]
    return name if name.isidentifier() else _GONE


def _plain(value: Json) -> object:
    """Return a value of the configuration if it is a number or a flag, and a list of numbers."""
    if value is None or type(value) is bool or _is_number(value):
        return value
    whole = isinstance(value, list) and all(map(_is_number, value))
    return value if whole else _GONE


def _is_number(value: Json) -> bool:
    return type(value) in (int, float)


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _whole(value: object) -> int:
    return value if type(value) is int else 0
