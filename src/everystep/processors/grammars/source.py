"""What a text has to follow, as the caller gave it: read, bounded, and kept as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from everystep.errors import FormatError, RequestError, shown
from everystep.files.strict_json import parse_object
from everystep.processors.grammars.schema import check_schema
from everystep.text.native import checked_text

Kind = Literal["schema", "regex", "grammar", "choices"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The keywords of a call that say what its texts have to follow."""
LONGEST: dict[Kind, int] = {
    "schema": 200_000,
    "regex": 20_000,
    "grammar": 20_000,
    "choices": 50_000,
}
"""How many characters each may have: what is compiled within a second or so."""
MOST_RULES = 1_000
"""How many rules a Lark grammar may have; the library's stack bounds how deep they refer."""
_RULE = re.compile(r"^[ \t]*[?!]?\w+[^:\n]*:", re.M)


_LESS = "Ask for less at a time"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The rules that were asked for, as text: a JSON schema or a list of choices as JSON, an
    expression, a Lark grammar."""

    kind: Kind
    text: str


def read_source(kind: Kind, value: Any) -> GrammarSource:
    """Read what was given under this keyword; RequestError where it is of another kind, is too
    long, or asks for what cannot be promised of a schema; TokenizerError for characters that no
    text has."""
    if kind == "schema":
        text = _schema_text(value)
    elif kind == "choices":
        text = _choices_text(value)
    elif isinstance(value, str) and value:
        text = value
    else:
        what = "a regular expression" if kind == "regex" else "a grammar in the syntax of Lark"
        got = shown(value) if isinstance(value, str) else type(value).__name__
        raise RequestError(f"{kind} is no text", wanted=what, got=got)
    _require_short(kind, text)
    checked_text(text, kind)
    rules = len(_RULE.findall(text)) if kind == "grammar" else 0
    if rules > MOST_RULES:
        raise RequestError(
            "grammar has too many rules", wanted=f"at most {MOST_RULES}", got=rules, do=_LESS
        )
    return GrammarSource(kind, text)


def plain_value(value: object) -> object:
    """Return a value that JSON has a place for as it is, but a mapping as its text."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("schema cannot be written as JSON", got=error) from error


def _require_short(kind: Kind, text: str) -> None:
    if len(text) > LONGEST[kind]:
        raise RequestError(
            f"{kind} is too long",
            wanted=f"at most {LONGEST[kind]} characters",
            got=len(text),
            do=_LESS,
        )


def _schema_text(value: Any) -> str:
    """Return a schema given as a mapping, as text, or by a class that has one, as one line of
    JSON."""
    named = getattr(value, "model_json_schema", None)
    if callable(named):
        value = named()
    value = plain_value(value)
    if not isinstance(value, str):
        raise RequestError(
            "schema is of another kind",
            wanted="a JSON schema as a mapping or as text, or a pydantic class",
            got=type(value).__name__,
        )
    _require_short("schema", value)
    try:
        schema = parse_object(checked_text(value, "schema").encode(), "schema")
    except FormatError as error:
        raise RequestError(error) from error
    return json.dumps(check_schema(schema), ensure_ascii=False)


def _choices_text(value: Any) -> str:
    """Return a list of texts as JSON, each of them once."""
    listed = list(value) if isinstance(value, list | tuple) else [None]
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise RequestError(
            "choices is not a list of texts",
            wanted="a list of texts, none of them empty",
            got=shown(value)[:80],
        )
    return json.dumps(list(dict.fromkeys(listed)), ensure_ascii=False)
