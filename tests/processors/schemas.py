"""Schemas in the standard's own vocabulary, keyword by keyword and in combinations, and values to
hold against them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

Schema = dict[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
WORDS = {"type": "string", "maxLength": 3}
COUNTS = {"type": "integer", "minimum": 0, "maximum": 20}
PATTERNS = ("^[a-c]+$", "b", "^a", "z$", "^(on|off)$", "^\\d{2,3}$", "[^a]", "^x?y*z$")
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
SUBJECTS: tuple[Schema, ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number", "minimum": 2},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "object", "required": ["a"]},
    {"enum": ["a", 1, None]},
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 4, 5, 7, 10, 21, -1, -7, 0.5, 1.5, 2.5, -0.25, 100),
    *("", "a", "b", "c", "z", "ab", "on", "off", "12", "xyz", "abc", "abcd", "über", 'q"q', "a\nb"),
    *("2024-02-30", "2024-02-28", "12:30:00Z", "2024-02-28T12:30:00Z", "P1D", "a@b.org"),
    *("example.org", "127.0.0.1", "::1", "2001:db8::1", "https://example.org/a?b=c"),
    *("123e4567-e89b-12d3-a456-426614174000", "256.1.1.1", "no date", "-"),
    *([], [1], [1, 2], [1, 2, 3], ["a"], ["a", 1], [1, "a"], [None], [[1]], [True, False], [1, 1]),
    *({}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"a": "x", "b": 1}, {"b": 1}, {"c": None}),
    *({"a": {"a": 1}}, {"a": [1, 2]}, {"x1": 1}, {"a": 1, "x1": "y"}, {"a": 1, "b": "x", "c": 3}),
    *({"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}),
)
REFUSED: dict[str, tuple[Schema, ...]] = {
    "not": ({"not": {"type": "string"}}, {"type": "integer", "not": {"const": 3}}),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 2}},),
    "then": ({"then": {"minLength": 2}},),
    "else": ({"else": {"minLength": 2}},),
    "uniqueItems": ({"type": "array", "uniqueItems": True},),
    "contains": ({"type": "array", "contains": {"const": 1}},),
    "minContains": ({"type": "array", "minContains": 2},),
    "maxContains": ({"type": "array", "maxContains": 2},),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}},),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}},),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}},),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False},),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False},),
    "additionalItems": ({"type": "array", "additionalItems": False},),
    "$dynamicRef": ({"$dynamicRef": "#a"},),
    "$dynamicAnchor": ({"$dynamicAnchor": "a"},),
    "x-guidance": ({"type": "object", "x-guidance": {"lenient": True}},),
    "exclusiveMinimum": ({"exclusiveMinimum": 2, "allOf": [{"maximum": 2.5}]},),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": -2, "minimum": -2.5},),
    "minProperties": ({"type": "object", "minProperties": 2},),
    "format": ({"type": "string", "format": "regex"}, {"type": "string", "format": "iri"}),
}
"""Keyword -> schemas that are refused because of it."""


def every_schema() -> Iterator[Schema]:
    """All of them, those that are refused included."""
    yield from _of_types()
    yield from _of_strings()
    yield from _of_numbers()
    yield from _of_arrays()
    yield from _of_objects()
    yield from _combined()
    yield from _referring()
    for schemas in REFUSED.values():
        yield from schemas
        yield from ({"type": "object", "properties": {"a": one}} for one in schemas)
        yield from ({"anyOf": [{"type": "null"}, one]} for one in schemas)


def _of_types() -> Iterator[Schema]:
    yield {}
    yield from ({"type": one} for one in TYPES)
    yield from ({"type": list(pair)} for pair in combinations(TYPES, 2))
    for value in (None, True, 0, -1.5, "a", "", [1, "a"], {"a": 1}):
        yield {"const": value}
        yield {"enum": [value, "other", 7]}
    yield {"type": "string", "enum": ["a", 1]}
    yield {"type": ["integer", "null"], "const": None}


def _of_strings() -> Iterator[Schema]:
    lengths: tuple[Schema, ...] = (
        {},
        {"minLength": 1},
        {"maxLength": 2},
        {"minLength": 2, "maxLength": 3},
        {"minLength": 4},
        {"maxLength": 0},
    )
    for length in lengths[1:]:
        yield {"type": "string", **length}
        yield length
    for pattern, length in product(PATTERNS, lengths[:4]):
        yield {"type": "string", "pattern": pattern, **length}
    yield from ({"pattern": one} for one in PATTERNS)
    yield from ({"type": "string", "format": one} for one in FORMATS)
    yield from ({"type": "string", "format": one, "maxLength": 30} for one in FORMATS)


def _of_numbers() -> Iterator[Schema]:
    low: tuple[Schema, ...] = ({}, {"minimum": 2}, {"exclusiveMinimum": 2}, {"minimum": -1.5})
    high: tuple[Schema, ...] = ({}, {"maximum": 7}, {"exclusiveMaximum": 7}, {"maximum": 2.5})
    steps: tuple[Schema, ...] = ({}, {"multipleOf": 1}, {"multipleOf": 3}, {"multipleOf": 0.5})
    for kind, least, most, step in product(("integer", "number"), low, high, steps):
        if least or most or step:
            yield {"type": kind, **least, **most, **step}
    yield from ({**least, **most} for least, most in product(low[1:3], high[1:3]))


def _of_arrays() -> Iterator[Schema]:
    items: tuple[Schema, ...] = ({}, {"items": COUNTS}, {"items": WORDS}, {"items": False})
    sizes: tuple[Schema, ...] = (
        {},
        {"minItems": 1},
        {"maxItems": 2},
        {"minItems": 2, "maxItems": 2},
        {"maxItems": 0},
    )
    heads: tuple[Schema, ...] = ({}, {"prefixItems": [WORDS, COUNTS]}, {"prefixItems": [COUNTS]})
    for head, item, size in product(heads, items, sizes):
        yield {"type": "array", **head, **item, **size}


def _of_objects() -> Iterator[Schema]:
    named = {"a": COUNTS, "b": WORDS}
    required: tuple[list[str], ...] = ([], ["a"], ["b"], ["a", "b"], ["c"])
    further: tuple[Any, ...] = (None, False, True, COUNTS)
    for names, more in product(required, further):
        rest = {} if more is None else {"additionalProperties": more}
        yield {"type": "object", "properties": named, "required": names, **rest}
        yield {"type": "object", "required": names, **rest}
    for least, most in ((0, 1), (1, 1), (1, 2), (0, 0), (0, 2)):
        size = {"minProperties": least, "maxProperties": most}
        yield {"type": "object", **size}
        yield {"type": "object", **size, "additionalProperties": COUNTS}
        yield {"type": "object", **size, "properties": {"a": COUNTS}, "required": ["a"]}
    for more in (False, True, COUNTS):
        yield {
            "type": "object",
            "patternProperties": {"^x": WORDS},
            "properties": {"a": COUNTS},
            "additionalProperties": more,
        }


def _combined() -> Iterator[Schema]:
    for one, other in combinations(SUBJECTS, 2):
        yield {"anyOf": [one, other]}
        yield {"oneOf": [one, other]}
        yield {"allOf": [one, other]}
    for key in ("anyOf", "oneOf", "allOf"):
        yield {key: [{"minLength": 2}, {"maxLength": 3}]}
        yield {"type": "integer", key: [{"minimum": 2}, {"maximum": 7}]}
        yield {"type": "object", key: [{"required": ["a"]}, {"required": ["b"]}]}


def _referring() -> Iterator[Schema]:
    defined = {"$defs": {"count": COUNTS, "word": WORDS}}
    yield {"$ref": "#/$defs/count", **defined}
    yield {"type": "array", "items": {"$ref": "#/$defs/word"}, **defined}
    yield {"$ref": "#/$defs/count", "maximum": 3, **defined}
    chain = {
        "type": "object",
        "properties": {
            "value": COUNTS,
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    yield {"$ref": "#/$defs/chain", "$defs": {"chain": chain}}
    yield {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    yield {"title": "A count", "description": "of things", "default": 3, "examples": [4], **COUNTS}
