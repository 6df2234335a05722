"""Objects and numbers as classes and other programs describe them: unions that a property tells
apart, objects without further names, whole numbers of 64 bits, formats that say nothing of a text.
"""

from __future__ import annotations

import json
import random
import re
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

from everystep.errors import RequestError, TokenizerError, UnsupportedError
from everystep.processors.grammars.source import KINDS, read_source
from tests.processors.schemas import Schema
from tests.processors.test_schemas import accepts, grammar_of, validator, written

LARGEST = 2**63 - 1
ODD = 2**53 + 1  # the first whole number that is no float


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    bark: bool


class Cat(pydantic.BaseModel):
    kind: Literal["cat", "kitten"] = "cat"
    lives: int = pydantic.Field(ge=0, le=9)


class Owner(pydantic.BaseModel):
    pet: Annotated[Dog | Cat, pydantic.Field(discriminator="kind")]
    age: int = pydantic.Field(ge=0, le=99)


class Leaf(pydantic.BaseModel):
    node: Literal["leaf"] = "leaf"
    value: bool


class Branch(pydantic.BaseModel):
    node: Literal["branch"] = "branch"
    left: Tree
    right: Tree


Tree = Annotated[Leaf | Branch, pydantic.Field(discriminator="node")]
Branch.model_rebuild()


class Zoo(pydantic.BaseModel):
    """A union in a union."""

    one: Annotated[
        Annotated[Dog | Cat, pydantic.Field(discriminator="kind")] | Leaf | None,
        pydantic.Field(),
    ]


def test_a_discriminated_union_is_followed() -> None:
    grammar = grammar_of(Owner.model_json_schema())
    assert accepts(grammar, '{"pet":{"kind":"dog","bark":true},"age":3}')
    assert accepts(grammar, '{"pet":{"kind":"kitten","lives":9},"age":3}')
    assert not accepts(grammar, '{"pet":{"kind":"cat","bark":true},"age":3}')
    assert not accepts(grammar, '{"pet":{"lives":9},"age":3}'), "pydantic has to know which it is"


@pytest.mark.parametrize("model", [Owner, Branch, Zoo], ids=lambda one: one.__name__)
def test_what_is_written_is_an_object_of_the_class(model: type[pydantic.BaseModel]) -> None:
    schema, pick, ended = model.model_json_schema(), random.Random(1), 0
    grammar = grammar_of(model.model_json_schema())
    for _ in range(50):
        text = written(grammar, pick)
        if text is not None:
            model.model_validate_json(text, extra="forbid")
            assert validator(schema).is_valid(json.loads(text)), text
            ended += 1
    assert ended > 5


def tagged(kind: Any, **properties: Schema) -> Schema:
    named = {"kind": kind if isinstance(kind, dict) else {"const": kind}, **properties}
    return {"type": "object", "properties": named, "required": ["kind"]}


A_NUMBER, A_WORD = {"type": "integer"}, {"type": "string", "maxLength": 3}
UNIONS: tuple[tuple[list[Any], Any], ...] = (
    ([tagged("a", x=A_NUMBER), tagged("b", x=A_WORD)], {"kind": "b", "x": "hi"}),
    ([tagged({"enum": [1, 2]}), tagged({"enum": [3, True]})], {"kind": True}),
    ([tagged("a"), {"type": "null"}, A_NUMBER], None),
    ([{"const": 1}, {"enum": ["a", False]}], "a"),
    ([tagged("a"), {"anyOf": [tagged("b"), tagged("c")]}], {"kind": "c"}),
    ([{"allOf": [tagged("a")]}, tagged("b")], {"kind": "a"}),
    ([tagged("a"), {"properties": {"kind": {"const": "b"}}}], 7),
)


@pytest.mark.parametrize(("branches", "value"), UNIONS, ids=str)
@pytest.mark.parametrize("referred", [False, True])
def test_one_of_several_that_are_told_apart(
    branches: list[Any], value: Any, referred: bool
) -> None:
    names = [f"n~{i}/" for i in range(len(branches))]
    places = [{"$ref": f"#/$defs/n~0{i}~1"} for i in range(len(branches))]
    schema = {
        "oneOf": places if referred else branches,
        "discriminator": {"propertyName": "kind"},
        "$defs": dict(zip(names, branches, strict=True)),
    }
    grammar, pick = grammar_of(schema), random.Random(0)
    assert accepts(grammar, json.dumps(value, separators=(",", ":")))
    for _ in range(10):
        text = written(grammar, pick)
        assert text is None or validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize(("steps", "told"), [(0, True), (15, True), (25, False)])
def test_references_are_followed_for_a_while(steps: int, told: bool) -> None:
    definitions = {f"{kind}{steps}": tagged(kind) for kind in "ab"}
    for i in range(steps):
        definitions |= {f"{kind}{i}": {"$ref": f"#/$defs/{kind}{i + 1}"} for kind in "ab"}
    schema = {"oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}], "$defs": definitions}
    if told:
        assert accepts(grammar_of(schema), '{"kind":"b"}')
    else:
        with pytest.raises(UnsupportedError, match="oneOf"):
            grammar_of(schema)


@pytest.mark.parametrize(
    "branches",
    [
        [tagged("a"), tagged("a")],
        [tagged({"const": 1}), tagged({"const": 1.0})],
        [{"properties": {"kind": {"const": one}}} for one in "ab"],
        [A_NUMBER, {"type": "number"}],
        [{"$ref": "#/$defs/a"}, tagged("a")],
    ],
    ids=str,
)
def test_several_that_may_hold_at_once_are_refused_in_our_words(branches: list[Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"oneOf.*use anyOf") as found:
        grammar_of({"oneOf": branches, "$defs": {"a": tagged("a")}})
    assert "coerce" not in str(found.value)


def test_objects_have_no_names_that_are_not_listed() -> None:
    named = {"type": "object", "properties": {"a": A_NUMBER}}
    inside = {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": named}}
    for schema, open_ in ((named, "{}"), (inside, "[{}]")):
        grammar = grammar_of(json.loads(json.dumps(schema)))
        for text, told in (('{"a":1}', True), ('{"b":1}', False), ('{"a":1,"b":1}', False)):
            assert accepts(grammar, open_.replace("{}", text)) is told
    assert accepts(grammar_of({**named, "additionalProperties": True}), '{"a":1,"b":1}')
    assert accepts(grammar_of({**named, "patternProperties": {"^x": True}}), '{"a":1,"x1":1}')
    assert not accepts(grammar_of({**named, "patternProperties": {"^x": True}}), '{"b":1}')
    assert accepts(grammar_of({"type": "object", "properties": {}}), "{}")
    assert not accepts(grammar_of({"type": "object", "properties": {}}), '{"b":1}')
    assert accepts(grammar_of({"type": "object"}), '{"b":1}')


A, B = {"properties": {"a": A_NUMBER}}, {"properties": {"b": A_NUMBER}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/a"}], **B},
        {"$ref": "#/$defs/a", **B},
        {"anyOf": [A, {"required": ["a"]}], **B},
        {"allOf": [{"anyOf": [{"$ref": "#/$defs/a"}]}, B]},
        {**A, "required": ["b"]},
        {"properties": {"a": A_NUMBER}, "minProperties": 1, "required": ["b"]},
    ],
    ids=str,
)
def test_objects_that_several_describe_stay_open(schema: Schema) -> None:
    whole = {"type": "object", **schema, "$defs": {"a": {"properties": {"a": A_NUMBER}}}}
    assert accepts(grammar_of(json.loads(json.dumps(whole))), '{"a":1,"b":1}')


def test_formats_of_kinds_of_numbers_and_other_annotations_change_nothing() -> None:
    plain = {"type": "integer", "minimum": 0}
    for more in ({"format": "int64"}, {"format": "int32"}, {"discriminator": {}}, {"example": 1}):
        assert read_source("schema", {**plain, **more}) == read_source("schema", plain)
    for kind in ("float", "double"):
        assert accepts(grammar_of({"type": "number", "format": kind}), "1.5")
    assert accepts(grammar_of({"type": "array", "uniqueItems": False}), "[1,1]")
    with pytest.raises(UnsupportedError, match="uniqueItems"):
        read_source("schema", {"type": "array", "uniqueItems": True})


NUMBERS = (
    *(2**53 - 1, 2**53, ODD, ODD + 1, 2**60, 2**60 + 1, LARGEST - 1, LARGEST, LARGEST + 1),
    *(2**64 - 1, 2**64, 10**18, 10**19, 10**19 + 1, 10**22, 10**400, 1e22, 1e300, 2.0**53 + 2),
)


def test_what_is_written_of_a_large_number_is_that_number() -> None:
    followed = 0
    for value in (*NUMBERS, *(-one for one in NUMBERS)):
        for schema in ({"const": value}, {"enum": [{"a": [value]}]}):
            try:
                grammar = grammar_of(schema)
            except UnsupportedError as error:
                assert abs(value) > 2**53
                assert str(value)[:80] in str(error)
                continue
            text = written(grammar, random.Random(0))
            assert text is not None
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text
            followed += 1
    assert followed >= 36


@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_large_bound_is_kept_to_the_last_digit(name: str, kind: str) -> None:
    followed = []
    for bound in (one for one in NUMBERS for one in (one, -one)):
        schema = {"type": kind, name: bound}
        try:
            grammar = grammar_of(schema)
        except RequestError:
            continue
        followed.append(bound)
        for value in (int(bound) + step for step in (-2, -1, 0, 1, 2)):
            assert accepts(grammar, str(value)) <= validator(schema).is_valid(value)
    assert {2**53 - 1, 1 - 2**53} <= set(followed)
    if kind == "integer" and name == "maximum":
        assert LARGEST in followed


def test_a_rounded_number_is_refused_with_both() -> None:
    with pytest.raises(UnsupportedError, match=f"{ODD}.*'const' at #/properties/a.*{ODD - 1}"):
        read_source("schema", {"properties": {"a": {"const": ODD}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 10**6 + 3},
        {"multipleOf": 123.4567},
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"type": "integer", "multipleOf": 997, "anyOf": [{"multipleOf": 991}, {"minimum": 3}]},
        {"type": "integer", "allOf": [{"multipleOf": 1000}, {"multipleOf": 990}]},
        {"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": {"multipleOf": 991}}},
        {"prefixItems": [{"multipleOf": 9001 + i} for i in range(20)]},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_multiples_that_are_dear_are_refused(schema: Schema) -> None:
    with pytest.raises(UnsupportedError, match=r"'multipleOf'.*50000 remainders"):
        read_source("schema", schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 9973},
        {"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 101}]},
        {"prefixItems": [{"multipleOf": 997}, {"multipleOf": 991}, {"multipleOf": 0.001}]},
        {
            "prefixItems": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"multipleOf": 997}, "b": {"multipleOf": 991}},
        },
        {"allOf": [{"type": "number"}, *({"multipleOf": 2**n} for n in range(10))]},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_common_multiples_are_followed(schema: Schema) -> None:
    text = written(grammar_of(schema), random.Random(0))
    assert text is None or validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_surrogate_is_an_error_of_ours(kind: Any) -> None:
    given: dict[str, list[Any]] = {
        "schema": [{"const": "\ud800"}, '{"const": "\\ud800"}', {"properties": {"\udc00": True}}],
        "regex": ["a\ud800"],
        "grammar": ['start: "\ud800"'],
        "choices": [["a", "b\udfff"]],
    }
    for value in given[kind]:
        with pytest.raises((TokenizerError, RequestError), match=rf"{kind} holds a lone surrogate"):
            read_source(kind, value)


@pytest.mark.parametrize(
    ("limit", "noun", "schema"),
    [
        ("_MOST_SCHEMAS", "subschemas", {"type": "array", "items": {"type": "null"}}),
        (
            "_MOST_REFERENCES",
            "uses of '$ref'",
            {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}}
            | {"$defs": {"n": {"type": "null"}}},
        ),
    ],
)
def test_a_schema_may_be_as_large_as_the_limit_says(
    limit: str, noun: str, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"everystep.processors.grammars.schema.{limit}"
    monkeypatch.setattr(place, 2)
    assert read_source("schema", schema).kind == "schema"
    monkeypatch.setattr(place, 1)
    with pytest.raises(
        UnsupportedError, match=f"too many {re.escape(noun)}; wanted at most 1; got 2"
    ):
        read_source("schema", schema)


def test_a_large_union_is_judged_at_once() -> None:
    branches = [tagged(f"kind {i}") for i in range(300)]
    grammar = grammar_of({"oneOf": branches})
    assert accepts(grammar, '{"kind":"kind 299"}')
    assert not accepts(grammar, '{"kind":"kind 300"}')
    assert re.search("anyOf", grammar.source.text)
