"""JSON schemas, keyword by keyword: nothing that a schema forbids is let through, and what cannot
be promised is refused by name."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.processors.grammars.grammar import Grammar, GrammarPlace, compiled, tokens_in
from everystep.processors.grammars.source import read_source
from everystep.processors.grammars.vocabulary import vocabulary_of
from everystep.testing.tokenizer import tiny_tokenizer
from tests.processors.schemas import REFUSED, VALUES, Schema, every_schema

TOKENIZER = tiny_tokenizer()
END = 2
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@cache
def vocabulary() -> Any:
    return vocabulary_of(TOKENIZER, len(TOKENIZER))


def grammar_of(schema: Schema) -> Grammar:
    return compiled(read_source("schema", schema), vocabulary())


def validator(schema: Schema) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKER)


def accepts(grammar: Grammar, text: str) -> bool:
    ids, matcher = TOKENIZER.encode(text), grammar.matcher.deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def written(grammar: Grammar, pick: random.Random, most: int = 150) -> str | None:
    """A text of the grammar, token by token from its masks; None where it has no end in sight."""
    place, line = GrammarPlace(grammar, 0, (END,)), np.zeros(most, np.int64)
    for length in range(most):
        words = place.mask(line, length)
        assert words is not None
        allowed = tokens_in(words, 10_000)
        assert allowed is not None and len(allowed)
        if END in allowed and (len(allowed) == 1 or pick.random() < 0.5):
            return str(TOKENIZER.decode(line[:length].tolist()))
        closing = [id for id in allowed.tolist() if id != END and TOKENIZER.decode(id) in '"]}']
        free = closing if closing and pick.random() < 0.4 else allowed[allowed != END].tolist()
        line[length] = pick.choice(free)
    return None


def judged() -> tuple[list[tuple[Schema, Grammar]], list[tuple[Schema, EverystepError]]]:
    """What is compiled, and what is refused, of all schemas."""
    accepted: list[tuple[Schema, Grammar]] = []
    refused: list[tuple[Schema, EverystepError]] = []
    for schema in every_schema():
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            accepted.append((schema, grammar_of(schema)))
        except RequestError as error:
            refused.append((schema, error))
    return accepted, refused


judge = cache(judged)


def test_there_are_enough_of_them() -> None:
    accepted, refused = judge()
    assert len(accepted) >= 300
    assert len(refused) >= 3 * len(REFUSED)


def test_nothing_that_a_schema_forbids_is_accepted() -> None:
    texts = [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in VALUES]
    let_through: Counter[tuple[bool, bool]] = Counter()
    for schema, grammar in judge()[0]:
        judging = validator(schema)
        for value, text in zip(VALUES, texts, strict=True):
            accepted = accepts(grammar, text)
            let_through[accepted, judging.is_valid(value)] += 1
            assert not accepted or judging.is_valid(value), (schema, text)
    # They accept what they should, but for numbers such as 1.0 and names in another order.
    assert let_through[True, True] > 10 * let_through[False, True]


def test_what_is_written_by_the_masks_is_valid() -> None:
    pick, ended = random.Random(0), 0
    for schema, grammar in judge()[0]:
        text = written(grammar, pick)
        if text is not None:
            assert validator(schema).is_valid(json.loads(text)), (schema, text)
            ended += 1
    assert ended > 0.8 * len(judge()[0])


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_promised_is_refused_by_keyword(keyword: str) -> None:
    for schema in REFUSED[keyword]:
        inside = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}
        for asked, place in ((schema, "#"), (inside, "#/properties/a/items")):
            with pytest.raises(RequestError, match=re.escape(repr(keyword))) as found:
                read_source("schema", asked)
            assert f"at {place}" in str(found.value)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "text"}, "impossible 'type' at #"),
        ({"minlength": 3}, "Perhaps you meant minLength"),
        ({"properties": {"a": {"minLength": "3"}}}, "'minLength' at #/properties/a"),
        ({"required": "a"}, "'required' at #"),
        ({"items": [{"type": "string"}]}, "'items' at #"),
        ({"anyOf": []}, "'anyOf' at #"),
        ({"multipleOf": 0}, "'multipleOf' at #"),
        ({"exclusiveMinimum": True}, "'exclusiveMinimum' at #"),
        ('{"type": "string"', "not valid JSON"),
        ('{"type": "string", "type": "null"}', "'type' comes twice"),
        ("[]", "holds no object"),
        ({"const": {1, 2}}, "cannot be written as JSON"),
        ({"minimum": float("nan")}, "cannot be written as JSON"),
        (7, "schema is of another kind"),
    ],
)
def test_a_schema_that_is_none_is_refused_with_its_place(schema: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told.replace("(", r"\(")):
        read_source("schema", schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/$defs/none"},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
    ],
)
def test_a_schema_without_texts_or_beyond_the_library_is_refused(schema: Schema) -> None:
    with pytest.raises(RequestError, match="schema"):
        grammar_of(schema)


def test_a_class_with_a_schema_will_do() -> None:
    class Person:
        @classmethod
        def model_json_schema(cls) -> Schema:
            return {"type": "object", "properties": {"name": {"type": "string"}}}

    assert read_source("schema", Person) == read_source("schema", Person.model_json_schema())
    assert read_source("schema", json.dumps(Person.model_json_schema())).kind == "schema"


def test_an_unsupported_keyword_is_an_unsupported_error() -> None:
    with pytest.raises(UnsupportedError, match="Say what is allowed"):
        read_source("schema", {"not": {}})
