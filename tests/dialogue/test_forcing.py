"""Grammars of calls: they take what a dialect writes, and nothing that breaks a schema."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from everystep.dialogue import ToolChoice, grammar_for, read_choice, read_tools, written
from everystep.dialogue.dialects import ROWS, Channels, Dialect
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.processors.grammars.grammar import compiled
from everystep.processors.grammars.source import GrammarSource
from everystep.processors.grammars.vocabulary import special_tokens, vocabulary_of
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Tokenizer
from tests.dialogue.calls import CALLS, READ, TOOLS

MAKE_CALLS = [row for row in ROWS if row.form is not None]
BY_NAME = {row.name: row for row in reversed(ROWS)}
REQUIRED = ToolChoice("required")
SIZE = 440
STRICT = read_tools([{**one["function"], "strict": True} for one in TOOLS])


def tokenizer_of(row: Dialect, special: bool) -> tuple[Tokenizer, dict[str, int]]:
    """A tiny tokenizer, perhaps with the dialect's marks as special tokens."""
    made = tiny_tokenizer(360)
    if special:
        marks = [mark.strip() for mark in row.spoken]
        named = [mark for mark in marks if len(mark) > 3 and not set(mark) & set(' \n"=')]
        tokens = [tokenizers.AddedToken(one, special=True, normalized=False) for one in named]
        made.backend.add_tokens(tokens)
    known = special_tokens(made)
    return made, {one: known[one] for one in known if any(one in mark for mark in row.spoken)}


def takes(grammar: str, text: str, tokenizer: Tokenizer) -> bool:
    """Whether the whole text is one of the grammar."""
    made = compiled(GrammarSource("grammar", grammar), vocabulary_of(tokenizer, SIZE))
    matcher, ids = made.matcher.deep_copy(), tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def call(row: Dialect, count: int = 1) -> str:
    """Calls, as an answer begins with them."""
    return written(row, CALLS[:count]).removesuffix("<|call|>").lstrip()


def answers(row: Dialect, mode: str, thinks: bool) -> list[str]:
    """Texts that a grammar has to take."""
    thoughts, channels = row.thoughts, isinstance(row.form, Channels)
    closing = "" if thoughts is None else thoughts.closing.strip()
    head = f"hm\n{closing}\n\n" if thinks else ""
    found = [head + call(row)]
    if row.parallel is not None:
        found.append(head + call(row, 2))
    if thoughts is not None and not thinks:
        after = "<|start|>assistant" if channels else "\n\n"
        found.append(f"{thoughts.opening}hm\n{closing}{after}{call(row)}")
    if mode == "auto" and not channels:
        found += [f"{head}Just a text.", head]
        found += [] if row.bare else [f"{head}I look: {call(row)}"]
    return found


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("row", MAKE_CALLS, ids=lambda row: row.name)
def test_a_grammar_takes_what_the_family_writes_and_no_broken_schema(
    row: Dialect, special: bool
) -> None:
    tokenizer, marks = tokenizer_of(row, special)
    for mode, thinks in (("required", False), ("required", True), ("auto", False), ("auto", True)):
        if thinks and (row.thoughts is None or isinstance(row.form, Channels)):
            continue
        grammar = grammar_for(row, STRICT, ToolChoice(mode), thinks=thinks, special=marks)  # type: ignore[arg-type]
        assert grammar is not None
        for text in answers(row, mode, thinks):
            assert takes(grammar, text, tokenizer), (mode, text)
        head = answers(row, mode, thinks)[0].removesuffix(call(row))
        for right, wrong in (("days", "dayz"), ("3", "0"), ("get_weather", "get_whether")):
            assert right in call(row)
            assert not takes(grammar, head + call(row).replace(right, wrong), tokenizer), wrong
        if mode == "required":
            assert not takes(grammar, f"{head}Just a text.", tokenizer)


@pytest.mark.parametrize("name", ["hermes", "mistral-v11", "lfm2", "deepseek-v3.1", "glm-4.5"])
def test_one_call_alone_and_one_tool_alone(name: str) -> None:
    row = BY_NAME[name]
    tokenizer, marks = tokenizer_of(row, special=False)
    single = grammar_for(row, READ, REQUIRED, parallel=False, special=marks)
    assert single is not None
    assert takes(single, call(row), tokenizer) and not takes(single, call(row, 2), tokenizer)
    named = grammar_for(row, READ, read_choice("now", READ), special=marks)
    assert named is not None
    own = written(row, CALLS[1:]).lstrip()
    assert takes(named, own, tokenizer) and not takes(named, call(row), tokenizer)


def test_any_text_will_do_where_nothing_is_forced() -> None:
    row = BY_NAME["hermes"]
    assert grammar_for(row, READ) is None
    assert grammar_for(row, STRICT, ToolChoice("none")) is None
    assert grammar_for(row, READ, strict=False) is None
    assert grammar_for(row, READ, strict=True) is not None


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "deepseek-v3.2"])
def test_arguments_without_a_schema_to_follow(name: str) -> None:
    row = BY_NAME[name]
    tokenizer, _ = tokenizer_of(row, special=False)
    loose = grammar_for(row, READ, REQUIRED, strict=False)
    assert loose is not None
    text = written(row, [("get_weather", {"city": "x", "days": -7})])
    assert takes(loose, text.lstrip(), tokenizer)


def test_a_tool_without_parameters_takes_none() -> None:
    row = BY_NAME["hermes"]
    tokenizer, _ = tokenizer_of(row, special=False)
    grammar = grammar_for(row, read_tools([{"name": "stop"}]), REQUIRED)
    assert grammar is not None
    assert takes(grammar, written(row, [("stop", {})]), tokenizer)
    assert not takes(grammar, written(row, [("stop", {"a": 1})]), tokenizer)


def test_schemas_that_lead_into_themselves_take_no_time() -> None:
    many = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 6
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/c"}},
        "$defs": {
            "a": {"anyOf": [*many, {"type": "integer"}]},
            "b": {"anyOf": [*many, {"type": "null"}]},
            "c": {"type": "array", "items": {"$ref": "#/$defs/c"}},
        },
    }
    (tool,) = read_tools([{"name": "f", "parameters": schema}])
    assert tool.kinds("x") == {"integer", "null"} and tool.kinds("y") == {"array"}
    with pytest.raises(UnsupportedError, match="cannot be held"):
        grammar_for(BY_NAME["gemma-4"], [tool], REQUIRED)


def test_so_many_arguments_are_too_many() -> None:
    schema = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(999)}}
    tools = read_tools([{"name": "f", "parameters": schema}])
    with pytest.raises(UnsupportedError, match="too many"):
        grammar_for(BY_NAME["qwen3-coder"], tools, REQUIRED)


def of_schema(schema: Any) -> list[Any]:
    return [{"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}]


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        ("hermes", {"not": {"type": "null"}}, r"tool 'f'.*'not' at #/properties/a"),
        ("qwen3-coder", {"type": "string", "pattern": "a+"}, "tool 'f'.*without quotes"),
        ("qwen3-coder", {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}, "tool"),
        ("gemma-4", {"type": "array", "minItems": 2}, "tool 'f'.*cannot be held"),
    ],
)
def test_what_a_form_cannot_hold_is_refused(name: str, schema: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        grammar_for(BY_NAME[name], read_tools(of_schema(schema)), REQUIRED)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "gemma-4", "lfm2"])
def test_references_and_optional_values(name: str) -> None:
    row = BY_NAME[name]
    tokenizer, _ = tokenizer_of(row, special=False)
    schema = {
        "type": "object",
        "properties": {
            "kind": {"$ref": "#/$defs/Kind"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["kind"],
        "$defs": {"Kind": {"enum": ["a", "b"], "type": "string"}},
    }
    if name != "qwen3-coder" and name != "gemma-4":
        schema["$defs"] = {"Kind": {"enum": ["a", "b"]}}
    grammar = grammar_for(row, read_tools([{"name": "f", "parameters": schema}]), REQUIRED)
    assert grammar is not None
    for given in ({"kind": "a"}, {"kind": "b", "note": "x"}, {"kind": "b", "note": None}):
        assert takes(grammar, written(row, [("f", given)]), tokenizer), given
    assert not takes(grammar, written(row, [("f", {"note": "x"})]), tokenizer)
    assert not takes(grammar, written(row, [("f", {"kind": "c"})]), tokenizer)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([], "empty"),
        ([{"type": "web_search"}], r"tools\[0\] is no function"),
        ([{"name": "a b"}], "impossible name"),
        ([{"name": "a"}, {"name": "a"}], "two tools"),
        ([{"name": "a", "parameters": 3}], "no schema"),
        ([{"name": "a", "parameters": {"type": "array"}}], "no object"),
        ([{"name": "a", "strict": "yes"}], "strict"),
        ([{"name": f"a{n}"} for n in range(513)], "too many"),
        ([3], "neither"),
    ],
)
def test_wrong_tools_are_refused(tools: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_tools(tools)


def test_choices() -> None:
    assert read_choice(None, READ) == ToolChoice("auto")
    assert read_choice("now", READ) == ToolChoice("required", "now")
    of_openai = {"type": "function", "function": {"name": "now"}}
    assert read_choice(of_openai, READ) == ToolChoice("required", "now")
    for wrong in ("nov", {"type": "custom"}, 3, "functions"):
        with pytest.raises(RequestError, match="tool_choice is impossible"):
            read_choice(wrong, READ)
    with pytest.raises(EverystepError, match="'now'"):
        read_choice("nov", READ)
