"""JSON that a stranger wrote, and typed access to its fields.

Stricter than Python's own reader: a key may come once, numbers are finite, nesting is bounded, and
every failure is a FormatError that names the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from everystep.errors import FormatError, message
from everystep.files.opening import impostor, is_there, read_bounded

MAX_JSON_BYTES = 16 << 20
MAX_SETTINGS_BYTES = 1 << 20
"""Of a file whose values are checked one by one: they are a few dozen."""
MAX_DEPTH = 64

T = TypeVar("T", str, list[Any], dict[str, Any])

_KINDS: dict[type[object], str] = {str: "a text", list: "a list", dict: "an object"}
_NAMES: dict[type[object], str] = {list: "list", dict: "object"}
_SHAPES: dict[type[object], str] = {list: "[...]", dict: "{...}"}


def whole_number(text: str) -> int | None:
    """Return the number of 64 bits that ASCII digits without leading zeros write; None for other
    text."""
    plain = text.isascii() and text.isdecimal() and (text == "0" or text[0] != "0")
    return int(text) if plain and len(text) < 20 and int(text) < 1 << 63 else None


def read_json(
    file: Path, *, infinite: bool = False, most: int = MAX_JSON_BYTES
) -> dict[str, object] | None:
    """Return the object in a file of at most `most` bytes, read by `parse_object`; None without a
    file."""
    if not is_there(file):
        return None
    return parse_object(read_bounded(file, most), str(file), infinite=infinite)


def parse_object(data: bytes, name: str, *, infinite: bool = False) -> dict[str, object]:
    """Returns the JSON object in `data`; `name` is the file's, for errors.

    Raises FormatError for anything but one object in strict JSON, nested at most MAX_DEPTH deep;
    with `infinite` the words Infinity and -Infinity are numbers.
    """
    return _parsed(data, name, dict, infinite)


def parse_list(data: bytes, name: str) -> list[object]:
    """Return the JSON list in `data`, read as `parse_object` reads an object."""
    return _parsed(data, name, list, infinite=False)


def _parsed(data: bytes, name: str, kind: type[T], infinite: bool) -> T:
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_infinity if infinite else _refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise _too_deep(name) from error
    except ValueError as error:
        raise FormatError(_invalid_text(data, name, error)) from error
    if not isinstance(value, kind):
        what, wanted = f"{name} holds no {_NAMES[kind]}", _SHAPES[kind]
        raise FormatError(what, wanted=wanted, got=type(value).__name__)
    if _deeper_than(value, MAX_DEPTH):
        raise _too_deep(name)
    return value


def require_single_keys(data: bytes) -> None:
    """Refuse JSON in which an object has a key twice; ValueError names it.

    For JSON that another parser reads, of which the last one of two would hold. Numbers stay texts,
    so that none is too long.
    """
    json.loads(data, object_pairs_hook=_unique, parse_int=str, parse_float=str)


def field(
    data: dict[str, object], key: str, kind: type[T], name: str, default: T | None = None
) -> T:
    """Return the field `key` of the file `name`, or the default where it is absent or null.

    FormatError without a default, and for a field of another kind.
    """
    value = data.get(key)
    if value is None:
        if default is None:
            raise FormatError(f"{name}: the field {key!r} is missing.")
        return default
    if not isinstance(value, kind):
        what = f"{name}: the field {key!r} is of the wrong kind"
        raise FormatError(what, wanted=_KINDS[kind], got=value)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} comes twice")
        found[key] = value
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _infinity(text: str) -> float:
    return _refuse_constant(text) if text == "NaN" else float(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _invalid_text(data: bytes, name: str, error: ValueError) -> str:
    known = impostor(data[:64]) if data.strip() else "empty"
    return message(f"{name} is {known}" if known else f"{name} is not valid JSON: {error}")


def _deeper_than(value: object, limit: int) -> bool:
    # A loop and not a recursion: the parser's own limit is far above this one.
    layer: list[Any] = [value]
    for _ in range(limit):
        inside = [node.values() if isinstance(node, dict) else node for node in layer]
        layer = [child for each in inside for child in each if isinstance(child, dict | list)]
    return bool(layer)


def _too_deep(name: str) -> FormatError:
    return FormatError(f"{name} is nested too deeply", wanted=f"at most {MAX_DEPTH} deep")
