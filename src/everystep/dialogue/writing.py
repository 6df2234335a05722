"""Calls in the words of a dialect: what its models write, and what grammars hold them to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from everystep.dialogue.dialects import (
    Braced,
    Channels,
    Dialect,
    JsonObjects,
    Named,
    Pythonic,
    Tagged,
)
from everystep.errors import UnsupportedError

Written = tuple[str, Mapping[str, Any]]
"""The name of a call, and its arguments."""


def written(dialect: Dialect, calls: Sequence[Written]) -> str:
    """Return the text with which a model of the dialect makes these calls, thoughts apart.

    UnsupportedError where the dialect makes none, or only one at a time.
    """
    form, between = dialect.form, dialect.parallel
    if form is None or (between is None and len(calls) > 1):
        raise UnsupportedError(f"models of the dialect {dialect.name} make no such calls")
    parts = [_call(form, name, arguments, place) for place, (name, arguments) in enumerate(calls)]
    if is_together(dialect):
        opening, closing = brackets(dialect)
        return opening + (between or "").join(parts) + closing
    each = [dialect.opening + part + dialect.closing for part in parts]
    return dialect.section[0] + (between or "").join(each) + dialect.section[1]


def is_together(dialect: Dialect) -> bool:
    """Return True if all calls stand between one pair of marks."""
    listed = isinstance(dialect.form, JsonObjects) and (dialect.form.listed or dialect.bare)
    return listed or isinstance(dialect.form, Pythonic)


def brackets(dialect: Dialect) -> tuple[str, str]:
    """Return what stands before and behind calls that stand together."""
    if isinstance(dialect.form, JsonObjects) and not dialect.form.listed:
        return "", dialect.closing
    opening = "" if dialect.bare else dialect.opening
    return f"{opening}[", f"]{'' if dialect.bare else dialect.closing}"


def object_begin(form: JsonObjects, name: str, place: int) -> str:
    """Return what stands before the arguments of a call that is an object."""
    number = f'"{form.numbered}": "{place}", ' if form.numbered else ""
    return f'{{{number}"{form.name}": {json.dumps(name)}, "{form.arguments}": '


def _call(form: Any, name: str, arguments: Mapping[str, Any], place: int) -> str:
    match form:
        case JsonObjects():
            return f"{object_begin(form, name, place)}{_json(arguments)}}}"
        case Named():
            count = f":{place}" if form.counted else ""
            return f"{form.before}{name}{count}{form.between}{_json(arguments)}{form.after}"
        case Tagged():
            inner = "".join(_parameter(form, key, value) for key, value in arguments.items())
            return f"{form.before}{name}{form.named}{inner}{form.after}"
        case Pythonic():
            inner = ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
            return f"{name}({inner})"
        case Braced(quote):
            return f"call:{name}{_braced(arguments, quote)}"
        case Channels():
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return f"{head}{_json(arguments)}<|call|>"
    return ""


def _parameter(form: Tagged, key: str, value: Any) -> str:
    plain = isinstance(value, str)
    keyed = form.keyed if plain else form.keyed_json or form.keyed
    return f"{form.key}{key}{keyed}{value if plain else _json(value)}{form.valued}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    return _json(value)


def _braced(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return f"{{{','.join(f'{key}:{_braced(one, quote)}' for key, one in value.items())}}}"
        case list():
            return f"[{','.join(_braced(one, quote) for one in value)}]"
    return _json(value)
