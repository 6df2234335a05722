"""What of JSON schema is promised: a schema is judged keyword by keyword, before it is compiled.

The dialect is draft 2020-12. A keyword that the grammar could not enforce is refused with its
place, never ignored; annotations change nothing. Source: JSON Schema Core and Validation, 2020-12.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from everystep.config.kinds import is_integer, is_number
from everystep.errors import RequestError, UnsupportedError, nearest, shown
from everystep.processors.grammars.numbers import check_multiples, check_numbers
from everystep.processors.grammars.objects import close_objects, tell_apart

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
_KINDS_OF_VALUES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float", "double", "password", "binary"),
)
"""Formats of OpenAPI and pydantic that say how a program keeps or shows a value."""
Judge = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return is_integer(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_types(value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    return (
        bool(several)
        and all(one in _TYPES for one in several if isinstance(one, str))
        and (all(map(_is_text, several)))
    )


_A_COUNT = (_is_count, "an integer of at least 0")
_A_NUMBER = (is_number, "a number")
_A_TEXT = (_is_text, "a text")
_A_SCHEMA = (_is_schema, "a schema")
_SCHEMAS = (_are_schemas, "a list of schemas, at least one")
_NAMED = (_are_named, "an object of schemas")
PROMISED: dict[str, tuple[Judge, str]] = {
    "type": (_are_types, f"one or several of {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "const": (lambda value: True, "any value"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _NAMED),
    **dict.fromkeys(("items", "additionalProperties"), _A_SCHEMA),
    "required": (_are_names, "a list of names"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _A_COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _A_COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _A_NUMBER),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "pattern": _A_TEXT,
    "format": (lambda value: value in _FORMATS, f"one of {', '.join(_FORMATS)}"),
    "$ref": (_is_text, "the place of another schema"),
}
"""Keywords that are followed -> which of their values are, and what those are called."""
_READ = ("$schema", "$id", "$anchor")
"""Keywords by which places are found."""
_ANNOTATIONS = (
    *("$comment", "$vocabulary", "title", "description", "default", "examples", "deprecated"),
    *("readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
    *("discriminator", "example", "externalDocs"),
)
REFUSED: dict[str, str] = {
    "not": "Say what is allowed, with enum, type or pattern",
    **dict.fromkeys(("if", "then", "else"), "List the cases with anyOf"),
    "uniqueItems": "Leave it out, and check the items of the answer",
    **dict.fromkeys(
        ("contains", "minContains", "maxContains"), "Say what every item is, with items"
    ),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"), "List the cases with anyOf"
    ),
    "propertyNames": "Use patternProperties with additionalProperties: false",
    **dict.fromkeys(
        ("unevaluatedProperties", "additionalItems", "unevaluatedItems"),
        "Use additionalProperties, or items, beside properties or prefixItems",
    ),
    **dict.fromkeys(
        ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"), "Use $ref"
    ),
    "x-guidance": "Leave it out: how a text is spaced is the model's choice",
}
"""Keywords that no grammar here can enforce -> what to do."""


_MOST_SCHEMAS = 1_000
_MOST_REFERENCES = 300  # each of which may lead into the next
_MOST_PATTERNS = 12  # that may meet, in time that grows with each by half
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema as grammars follow it: without annotations, with closed objects, and with
    'anyOf' for a 'oneOf' whose schemas are told apart.

    RequestError or UnsupportedError, which name keyword and place, where it says what cannot be
    followed.
    """
    places: list[tuple[str, dict[str, Any]]] = []
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, dict):
            for name in [name for name, value in one.items() if _is_annotation(name, value)]:
                del one[name]
            for name, value in one.items():
                _check(place, name, value)
            _check_count(place, one)
            check_numbers(place, one)
            places.append((place, one))
            waiting += _inside(place, one)
    _check_bounds(places)
    _check_size([one for _, one in places])
    close_objects(schema, lambda one: (inner for _, inner in _inside("", one)))
    tell_apart(schema, [one for _, one in places])
    return schema


def _is_annotation(name: str, value: Any) -> bool:
    if name == "format":
        return value in _KINDS_OF_VALUES
    if name == "uniqueItems":
        return value is False
    return name in _ANNOTATIONS or (name.startswith("x-") and name not in REFUSED)


def _inside(place: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that stand in a schema, with their places."""
    for name, value in schema.items():
        kind, at = PROMISED.get(name), f"{place}/{name}"
        if kind is _A_SCHEMA:
            yield at, value
        elif kind is _SCHEMAS:
            yield from ((f"{at}/{i}", one) for i, one in enumerate(value))
        elif kind is _NAMED:
            yield from ((f"{at}/{key}", one) for key, one in value.items())


def _check(place: str, name: str, value: Any) -> None:
    if name in _READ:
        return
    if name in REFUSED:
        raise UnsupportedError(
            f"schema has {name!r} at {place}, which no grammar here can enforce",
            wanted=f"keywords out of {', '.join(PROMISED)}",
            do=REFUSED[name],
        )
    if name not in PROMISED:
        near = nearest(name, PROMISED)
        raise RequestError(
            f"schema has {name!r} at {place}, which is no keyword of JSON schema",
            do=f"Perhaps you meant {near}" if near else "Leave it out",
        )
    accepts, wanted = PROMISED[name]
    if not accepts(value):
        what = f"schema has an impossible {name!r} at {place}"
        raise RequestError(what, wanted=wanted, got=shown(value)[:80])


def _check_count(place: str, schema: dict[str, Any]) -> None:
    """UnsupportedError where a name that comes twice would be counted twice."""
    least, named = schema.get("minProperties", 0), len(set(schema.get("required", ())))
    if least > named + 1:
        raise UnsupportedError(
            f"schema has a 'minProperties' at {place} beyond what is required, and one more",
            wanted=f"at most {named + 1}: names that the schema does not list may come twice",
            got=least,
            do="List the properties, and name them in required",
        )


def _check_bounds(places: list[tuple[str, dict[str, Any]]]) -> None:
    """UnsupportedError for a whole number that is excluded, and less than one from the other bound:
    version 1.9 of the library lets it through. Bounds of different places may meet in allOf."""
    bounds: dict[str, dict[float, str]] = {name: {} for name in _BOUNDS}
    for place, one in places:
        for name in _BOUNDS & one.keys():
            bounds[name].setdefault(one[name], place)
    for excluded, others, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        for value, place in bounds[excluded].items():
            near = [b for name in others for b in bounds[name] if 0 < sign * (b - value) < 1]
            if value == int(value) and near:
                raise UnsupportedError(
                    f"schema has an {excluded!r} at {place} too near to its other bound",
                    wanted=f"a bound that is not whole, or one at least 1 from {near[0]}",
                    got=value,
                    do="Move one of the two",
                )


def _check_size(schemas: list[dict[str, Any]]) -> None:
    """UnsupportedError for a schema that could keep the library busy for long."""
    counts: Counter[str] = Counter()
    for one in schemas:
        counts.update(one.keys() & {"$ref", "pattern"})
        counts.update(branches=len(one.get("allOf", ())))
        beside = one.keys() - {"$defs", "definitions", *_READ}
        counts.update(beside=len(beside & {"$ref", "anyOf", "oneOf"}) if len(beside) > 1 else 0)
    meeting = min(counts["pattern"], counts["branches"] + counts["$ref"])
    for what, count, most in (
        ("subschemas", len(schemas), _MOST_SCHEMAS),
        ("uses of '$ref'", counts["$ref"], _MOST_REFERENCES),
        ("patterns that may meet in 'allOf' or '$ref'", meeting, _MOST_PATTERNS),
    ):
        if count > most:
            raise UnsupportedError(
                f"schema has too many {what}",
                wanted=f"at most {most}",
                got=count,
                do="Ask for less at a time",
            )
    multiples = [one["multipleOf"] for one in schemas if "multipleOf" in one]
    check_multiples(multiples, counts["branches"] + counts["beside"])
