"""Functions as tools: the JSON schema that their signature and docstring say.

The schemas are those of transformers (`get_json_schema`, 5.23): types come from hints, descriptions
from a docstring in Google's style. The function is never called.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from everystep.errors import RequestError, shown

Schema = dict[str, Any]

_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGUMENTS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", re.DOTALL)
# An indented name, and what is said of it up to the next name that is indented no deeper.
_ARGUMENT = re.compile(
    r"(?:^|\n)([ \t]*)(\w+):\s*(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+:|\Z)", re.DOTALL
)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_TYPES: dict[Any, Schema] = {
    **{kind: {"type": name} for kind, name in _SCALARS.items()},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
    torch.Tensor: {"type": "audio"},
}
_BY_HAND = "Change the function, or pass the JSON schema of the tool as a dict"
_HINTS = "int, float, str, bool, an Enum, a Literal, or a list, tuple, dict or union of these"


class _NoSchemaError(Exception):
    """A type hint that no JSON schema stands for; the text says why."""


def tool_schemas(tools: Sequence[Any] | None) -> list[Any] | None:
    """Return the tools as JSON schemas: a mapping as it is, a function as its own.

    RequestError for anything else, and for a function that does not say what its schema needs.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        wanted = "a list of dicts or functions"
        raise RequestError("tools are no list", wanted=wanted, got=shown(tools))
    return [_tool(one) for one in tools]


def _tool(given: Any) -> Any:
    if isinstance(given, Mapping):
        return given
    if inspect.isfunction(given) or inspect.ismethod(given):
        return schema_of_function(given)
    raise RequestError(
        "A tool is neither a JSON schema nor a function",
        wanted="a dict, or a function or method with type hints and a docstring",
        got=shown(given)[:200],
    )


def schema_of_function(function: Callable[..., Any]) -> Schema:
    """Return the JSON schema of a tool: its name, what it does, and its arguments.

    RequestError if an argument lacks a type hint or a description, or has a hint of a class that
    no JSON stands for.
    """
    name = getattr(function, "__name__", "operation")
    text = (inspect.getdoc(function) or "").strip()
    if not text:
        what, wanted = f"The tool {name!r} has no docstring", "what it does, and a part 'Args:'"
        raise RequestError(what, wanted=wanted, do=_BY_HAND)
    described, returned = _descriptions(text), _RETURNS.search(text)
    properties, required, answer = _parameters(function, name)
    for argument, schema in properties.items():
        if argument not in described:
            raise RequestError(
                f"The docstring of the tool {name!r} does not describe {argument!r}",
                wanted=f"a line '{argument}: ...' under 'Args:'",
                do=_BY_HAND,
            )
        schema |= _described(described[argument], f"{argument!r} of the tool {name!r}")
    whole = _DESCRIPTION.search(text)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found: Schema = {
        "name": name,
        "description": whole[1].strip() if whole else None,
        "parameters": parameters,
    }
    if answer is not None:
        found["return"] = answer | ({"description": returned[1].strip()} if returned else {})
    return {"type": "function", "function": found}


def _descriptions(text: str) -> dict[str, str]:
    """Return what a docstring says of each argument, on one line."""
    found = _ARGUMENTS.search(text)
    lines = [line for line in found[1].split("\n") if line.strip()] if found else []
    said = _ARGUMENT.findall("\n".join(lines))
    return {name: re.sub(r"\s*\n+\s*", " ", one.strip()) for _, name, one in said}


def _described(text: str, whose: str) -> Schema:
    """Return a description as keys of a schema; `(choices: [...])` at its end is an enum."""
    listed = _CHOICES.search(text)
    if listed is None:
        return {"description": text}
    try:
        choices = json.loads(listed[1])
    except ValueError:
        choices = None
    if not isinstance(choices, list):
        what, wanted = f"The choices of {whose} are no list", "a list in JSON"
        raise RequestError(what, wanted=wanted, got=shown(listed[1])[:200])
    enum = [one.strip() if isinstance(one, str) else one for one in choices]
    return {"enum": enum, "description": text[: listed.start()].strip()}


def _parameters(
    function: Callable[..., Any], name: str
) -> tuple[dict[str, Schema], list[str], Schema | None]:
    """Return the schemas of the arguments, those without a default, and the schema of the result.

    A first argument `self` or `cls` without a hint is none of them.
    """
    try:
        hints = get_type_hints(function)
    except Exception as failure:
        what, got = f"The type hints of the tool {name!r} cannot be read", shown(failure)[:200]
        raise RequestError(what, wanted=_HINTS, got=got, do=_BY_HAND) from failure
    found, required = dict[str, Schema](), list[str]()
    for place, one in enumerate(inspect.signature(function).parameters.values()):
        whose = f"The argument {one.name!r} of the tool {name!r}"
        if one.name in hints:
            found[one.name] = _argument(hints[one.name], whose)
        elif place or one.name not in ("self", "cls"):
            raise RequestError(f"{whose} has no type hint", wanted=_HINTS, do=_BY_HAND)
        if one.name in found and one.default is inspect.Parameter.empty:
            required.append(one.name)
    return found, required, _result(hints["return"]) if "return" in hints else None


def _argument(hint: Any, whose: str) -> Schema:
    try:
        return _schema(hint)
    except _NoSchemaError as failure:
        what = f"{whose} has a type hint without a JSON schema"
        raise RequestError(what, wanted=_HINTS, got=str(failure)[:200], do=_BY_HAND) from None


def _result(hint: Any) -> Schema | None:
    """Return the schema of what a function returns; None where no JSON stands for it, since no
    model writes that."""
    try:
        return _schema(hint)
    except _NoSchemaError:
        return None


def _schema(hint: Any) -> Schema:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        return _schema_of_class(hint)
    if origin in (Union, types.UnionType):
        return _schema_of_union(inner)
    if origin is Literal:
        return _one_of(list(inner), hint)
    if origin is list:
        return _TYPES[list] | ({"items": _schema(inner[0])} if inner else {})
    if origin is tuple and len(inner) != 1 and ... not in inner:
        return _TYPES[tuple] | ({"prefixItems": [_schema(one) for one in inner]} if inner else {})
    if origin is dict:
        return _TYPES[dict] | ({"additionalProperties": _schema(inner[1])} if inner else {})
    raise _NoSchemaError(f"{hint}")


def _schema_of_class(hint: Any) -> Schema:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of([member.value for member in hint], hint)
    pictures = sys.modules.get("PIL.Image")  # absent, no hint names its class
    if pictures is not None and hint is pictures.Image:
        return {"type": "image"}
    try:
        return dict(_TYPES[hint])
    except (KeyError, TypeError):
        raise _NoSchemaError(shown(hint)) from None


def _schema_of_union(inner: tuple[Any, ...]) -> Schema:
    found = [_schema(one) for one in inner if one is not type(None)]
    if len(found) == 1:
        union = found[0]
    elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in found):
        names = sorted({one["type"] for one in found})
        union = {"type": names[0] if len(names) == 1 else names}
    else:
        union = {"anyOf": found}
    return union | ({"nullable": True} if type(None) in inner else {})


def _one_of(values: list[Any], hint: Any) -> Schema:
    """Return the schema of one of these values."""
    if not values or any(type(one) not in _SCALARS for one in values):
        raise _NoSchemaError(f"{hint}, whose values are {values} and not texts or numbers")
    kinds = list(dict.fromkeys(_SCALARS[type(one)] for one in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
