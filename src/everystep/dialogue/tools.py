"""The tools of a call, read and judged: names, and schemas of arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everystep.errors import RequestError, nearest, shown
from everystep.text.tool_schemas import tool_schemas

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_MOST = 512
_CHOICES = ("auto", "required", "none")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters`: the JSON schema of its arguments, an object.
    `strict`: whether the definition asks for it to be kept, None where it says nothing."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool | None = None

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of its arguments by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    def kinds(self, name: str) -> frozenset[str] | None:
        """Return the types of JSON schema that an argument may have; None if nothing says so."""
        schema = self.properties.get(name)
        return None if schema is None else kinds_of(schema, self.parameters)


_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
_TYPES = frozenset({*_OF_VALUES.values(), "array", "null"})
_MOST_STEPS = 16


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows at most, `root` being what its references lead into."""
    return _kinds(schema, root, set(), _MOST_STEPS)


def _kinds(schema: Any, root: Mapping[str, Any], seen: set[str], steps: int) -> frozenset[str]:
    """Return the same of a schema so many steps inside; references that were `seen` add nothing."""
    if not isinstance(schema, Mapping) or not steps:
        return _TYPES
    if isinstance(schema.get("type"), str | list):
        named = schema["type"]
        return frozenset([named] if isinstance(named, str) else map(str, named))
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return frozenset(_type_of(value) for value in listed)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            parts = [_kinds(one, root, seen, steps - 1) for one in schema[name]]
            return frozenset().union(*parts)
    if isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return frozenset()
        seen.add(reference)
        return _kinds(referred(reference, root), root, seen, steps - 1)
    return _TYPES


def _type_of(value: Any) -> str:
    return "null" if value is None else _OF_VALUES.get(type(value), "array")


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within `root` leads to; None where it leads nowhere."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The calls that are to be made: `mode` says whether there are any, `name` of which tool, None
    for any."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None


def read_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """Return the tools of a call: functions, definitions as OpenAI writes them, or what stands
    under `function` in these. RequestError names the one that is none."""
    given = tool_schemas(tools) or []
    if not given:
        do = "Pass at least one, or leave tools out"
        raise RequestError("tools are an empty list", do=do)
    if len(given) > _MOST:
        raise RequestError("there are too many tools", wanted=f"at most {_MOST}", got=len(given))
    found = [_tool(one, f"tools[{place}]") for place, one in enumerate(given)]
    names = [one.name for one in found]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise RequestError("two tools have one name", got=twice, do="Rename one of them")
    return tuple(found)


def _tool(given: Any, place: str) -> Tool:
    inner = given.get("function", given)
    if given.get("type", "function") != "function" or not isinstance(inner, Mapping):
        wanted = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
        raise RequestError(f"{place} is no function", wanted=wanted, got=shown(given)[:200])
    name, schema, strict = inner.get("name"), inner.get("parameters"), inner.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "1 to 128 letters, digits, _ - ."
        raise RequestError(f"{place} has an impossible name", wanted=wanted, got=shown(name)[:200])
    if schema is not None and not isinstance(schema, Mapping):
        wanted, got = "a JSON schema of an object", shown(schema)[:200]
        raise RequestError(f"the parameters of {place} are no schema", wanted=wanted, got=got)
    kind = (schema or {}).get("type", "object")
    if kind != "object":
        what = f"the parameters of {place} are no object"
        raise RequestError(what, wanted="'type': 'object'", got=shown(kind)[:200])
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"strict of {place} is no bool", wanted="true or false", got=strict)
    return Tool(name, dict(schema or {}), strict)


def read_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Return what `tool_choice` asks for: "auto", "required", "none", the name of a tool, or a
    mapping that names one. RequestError for anything else, and for a name that no tool has."""
    if choice is None:
        return ToolChoice()
    names = [tool.name for tool in tools]
    name = choice
    if isinstance(choice, Mapping):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, Mapping) else None
    elif choice in _CHOICES and choice not in names:
        return ToolChoice(choice)  # type: ignore[arg-type]
    if isinstance(name, str) and name in names:
        return ToolChoice("required", name)
    near = nearest(name, [*_CHOICES, *names]) if isinstance(name, str) else None
    raise RequestError(
        "tool_choice is impossible",
        wanted=f"{', '.join(map(repr, _CHOICES))}, or the name of a tool: {', '.join(names)}",
        got=shown(choice)[:200],
        do=f"Perhaps you meant {near!r}" if near else None,
    )
