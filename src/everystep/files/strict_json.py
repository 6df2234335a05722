"""JSON that a stranger wrote, and typed access to its fields.

Stricter than Python's own reader: a key may come once, numbers are finite, nesting is bounded, and
every failure is a FormatError that names the file. Which fields a file should have is not known
here.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, TypeVar

from everystep.errors import FormatError, message
from everystep.files.opening import impostor

MAX_DEPTH = 64

T = TypeVar("T", int, float, str, bool, list[Any], dict[str, Any])


def parse_object(data: bytes, name: str, *, infinite: bool = False) -> dict[str, object]:
    """Returns the JSON object in `data`; `name` is the file's, for errors.

    Raises FormatError for anything but one object in strict JSON, nested at most MAX_DEPTH deep;
    with `infinite` the words Infinity and -Infinity are numbers.
    """
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
    if not isinstance(value, dict):
        raise FormatError(
            message(f"{name} holds no object", wanted="{...}", got=type(value).__name__)
        )
    if _deeper_than(value, MAX_DEPTH):
        raise _too_deep(name)
    return value


def field(
    data: dict[str, object], key: str, kind: type[T], name: str, default: T | None = None
) -> T:
    """The field `key` of the file `name`, of that kind (an int serves as a float).

    An absent field, or one that is null, gives the default; without one that is a FormatError, as
    is a field of another kind.
    """
    value = data.get(key)
    if value is None:
        if default is None:
            raise FormatError(message(f"{name}: the field {key!r} is missing"))
        return default
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return kind(value)
    raise FormatError(
        message(
            f"{name}: the field {key!r} is of the wrong kind", wanted=_kind_name(kind), got=value
        )
    )


def _kind_name(kind: type[object]) -> str:
    names: dict[type[object], str] = {
        int: "an integer",
        float: "a number",
        str: "a text",
        bool: "true or false",
        list: "a list",
        dict: "an object",
    }
    return names[kind]


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
    if not data.strip():
        return message(f"{name} is empty")
    known = impostor(data[:64])
    if known is not None:
        return message(f"{name} is {known}")
    return message(f"{name} is not valid JSON: {error}")


def _deeper_than(value: dict[str, object], limit: int) -> bool:
    # A loop and not a recursion: the parser's own limit is far above this one.
    layer: list[dict[str, object] | list[object]] = [value]
    for _ in range(limit):
        layer = [child for node in layer for child in _children(node)]
        if not layer:
            return False
    return True


def _children(node: dict[str, object] | list[object]) -> list[dict[str, object] | list[object]]:
    values = node.values() if isinstance(node, dict) else node
    return [value for value in values if isinstance(value, dict | list)]


def _too_deep(name: str) -> FormatError:
    return FormatError(message(f"{name} is nested too deeply", wanted=f"at most {MAX_DEPTH} deep"))
