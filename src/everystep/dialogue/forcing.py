"""The grammar that holds an answer to calls, made of the same row of the table as the parser.

It is written in the syntax of Lark, as `grammar=` takes it. Marks that a tokenizer has as special
tokens are ids in it; schemas of arguments are checked as `schema=` is. Where the form has tags in
place of JSON, a rule of its own is written for each argument.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from everystep.dialogue.dialects import (
    Braced,
    Channels,
    Dialect,
    JsonObjects,
    Named,
    Pythonic,
    Tagged,
    Thoughts,
)
from everystep.dialogue.tools import Tool, ToolChoice, kinds_of, referred
from everystep.dialogue.writing import brackets, is_together, object_begin
from everystep.errors import EverystepError, UnsupportedError
from everystep.processors.grammars.schema import check_schema
from everystep.processors.grammars.source import LONGEST, MOST_RULES
from everystep.text.native import checked_text

_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_ANY = "(?s:.*)"
_MOST_NESTED = 16
_NOTHING: Mapping[str, int] = {}
_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}
_OF_TEXTS = frozenset({"type", "minLength", "maxLength"})
_SAYS_NOTHING = frozenset({"title", "description", "default", "examples"})


def grammar_for(
    dialect: Dialect,
    tools: Sequence[Tool],
    choice: ToolChoice | None = None,
    *,
    parallel: bool = True,
    strict: bool | None = None,
    thinks: bool = False,
    special: Mapping[str, int] = _NOTHING,
) -> str | None:
    """Return the grammar of answers that make the calls asked for, None where any text will do.

    `choice`: "required" or a name: calls alone, after thoughts; "auto": any text, in which each
    call is as its tool says. `parallel`: whether there may be several. `strict`: whether arguments
    follow the schemas of their tools; None: they do unless a tool says `strict: false`, under
    "auto" only if one says `strict: true`. `thinks`: the prompt ends within a thought. `special`:
    the ids of the dialect's marks that the tokenizer has as special tokens. UnsupportedError where
    a form or a schema cannot be held to.
    """
    choice = choice or ToolChoice()
    forced = choice.mode == "required"
    held = strict if strict is not None else forced or any(tool.strict for tool in tools)
    if choice.mode == "none" or not (forced or held):
        return None
    if dialect.form is None:
        raise UnsupportedError(
            f"the form of calls of the dialect {dialect.name} is not known",
            wanted="a model whose chat template shows how it calls tools",
            do="Leave tool_choice out",
        )
    named = [tool for tool in tools if choice.name in (None, tool.name)]
    rules = _Rules(dialect, special)
    several = parallel and dialect.parallel is not None
    calls = {tool.name: rules.call(tool, _holds(tool, strict, forced)) for tool in named}
    start = rules.forced(calls, several, thinks) if forced else rules.free(calls, several, thinks)
    text = checked_text(rules.text(start), "tools")
    if text.count("\n") > MOST_RULES:
        raise UnsupportedError(
            "the tools have too many arguments together",
            wanted=f"a grammar of at most {MOST_RULES} rules",
            got=text.count("\n"),
            do="Pass fewer tools, or strict=False for some of them",
        )
    if len(text) > LONGEST["schema"]:
        raise UnsupportedError(
            "the schemas of the tools are too long together",
            wanted=f"a grammar of at most {LONGEST['schema']} characters",
            got=len(text),
            do="Pass fewer tools, or strict=False for some of them",
        )
    return text


def _holds(tool: Tool, strict: bool | None, forced: bool) -> bool:
    """Return True if the arguments of a call follow the tool's schema."""
    if strict is not None:
        return strict
    return tool.strict is not False if forced else tool.strict is True


class _Rules:
    """The rules of one grammar, as they are written."""

    def __init__(self, dialect: Dialect, special: Mapping[str, int]) -> None:
        self._dialect = dialect
        self._special = special
        found = sorted((one for one in special if one), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, found)) or "(?!)")
        self._lines = [f"TEXT: /{_ANY}/", "BLANKS: /[ \\n]{0,2}/"]
        self._known: dict[str, str] = {}
        self._depth = 0  # of values in values

    def text(self, start: str) -> str:
        """Return the grammar."""
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def rule(self, body: str, options: str = "") -> str:
        """Return the name of a rule with this body."""
        key = f"{options}: {body}"
        if key not in self._known:
            self._known[key] = name = f"r{len(self._known)}"
            self._lines.append(f"{name}{key}")
        return self._known[key]

    def spelled(self, text: str) -> str:
        """Return a text as it is written in a rule: special tokens as ids, the rest in quotes."""
        found, last = list[str](), 0
        for match in self._tokens.finditer(text):
            found += [_quoted(text[last : match.start()]), f"<[{self._special[match[0]]}]>"]
            last = match.end()
        found.append(_quoted(text[last:]))
        return " ".join(one for one in found if one)

    def until(self, mark: str, least: int = 0, most: int | None = None) -> str:
        """Return a rule of any text and the first such mark behind it."""
        any_text = _ANY if (least, most) == (0, None) else f"(?s:.{{{least},{_or_empty(most)}}})"
        token = self._tokens.search(mark)
        cut = len(mark) if token is None else token.start()
        if token is not None:  # which is part of no text
            return self.rule(f"/{any_text}{_escaped(mark[:cut])}/ {self.spelled(mark[cut:])}")
        return self.rule(f"/{any_text}{_escaped(mark)}/", "[lazy]")

    # --- answers ----------------------------------------------------------------------------------

    def forced(self, calls: Mapping[str, str], several: bool, thinks: bool) -> str:
        """Return the body of answers that are calls, after thoughts."""
        dialect = self._dialect
        if isinstance(dialect.form, Channels):
            return f"{self._said_before()}* ({_either(calls.values())})"
        thoughts = dialect.thoughts
        head = ""
        if thoughts is not None:
            rest = self.until(thoughts.closing.strip())
            opened = rest if thinks else f"{self.spelled(thoughts.opening.strip())} {rest}"
            head = f"({opened} BLANKS)" + ("" if thinks else "?")
        begin, each, end = self._around(calls, several)
        return f"{head} {self.spelled(begin.lstrip())} {each} {self.spelled(end)}"

    def _around(self, calls: Mapping[str, str], several: bool) -> tuple[str, str, str]:
        """Return what stands before all calls, the calls, and what stands behind them."""
        dialect = self._dialect
        call, between = f"({_either(calls.values())})", self.spelled(dialect.parallel or "")
        begin, end = brackets(dialect) if is_together(dialect) else dialect.section
        if not is_together(dialect):
            opening, closing = self.spelled(dialect.opening), self.spelled(dialect.closing)
            call = f"({opening} {call} {closing})"
        return begin, f"{call} ({between} {call})*" if several else call, end

    def free(self, calls: Mapping[str, str], several: bool, thinks: bool) -> str:
        """Return the body of any answer, whose calls are as they have to be."""
        dialect, thoughts = self._dialect, self._dialect.thoughts
        if isinstance(dialect.form, Channels):
            return f"{self._said_before()}* ({self._final()} | {_either(calls.values())})"
        begin, each, end = self._around(calls, several)
        opening = (dialect.section[0] or dialect.opening or _before(dialect)).strip()
        first = self._beginning(thoughts if not thinks else None, opening)
        if dialect.bare:
            sign = "[" if isinstance(dialect.form, Pythonic) else "{"
            other = self.rule(f"/[^{_escaped(sign)} \\n](?s:.*)/")
            return f"({self.spelled(begin)} {each} {self.spelled(end)}) | {other}?"
        rest = self._after_opening(calls, several, opening, end)
        more = f"({self.until(opening)} {rest})" + ("*" if several else "?")
        body = f"({first[0]} {rest} {more if several else ''} TEXT | {first[1]})"
        if thoughts is None:
            return body
        closing = self.until(thoughts.closing.strip())
        if thinks:
            return f"{closing} {body}"
        return f"({self.spelled(thoughts.opening.strip())} {closing})? {body}"

    def _beginning(self, thoughts: Thoughts | None, opening: str) -> tuple[str, str]:
        """Return a rule of text up to the first opening, and one of text without any; neither
        begins as a thought does."""
        if thoughts is None or self._tokens.match(thoughts.opening.strip()):
            return self.until(opening), "TEXT"
        mark = _escaped(thoughts.opening.strip())
        self._lines.append(f"OTHER: /{_ANY}/ & ~/{mark}{_ANY}/")
        token = self._tokens.search(opening)
        if token is not None and not token.start():
            return self.rule(f"OTHER {self.spelled(opening)}"), "OTHER"
        terminal = f"OTHER_FIRST: /{_ANY}{_escaped(opening)}/ & ~/{mark}{_ANY}/"
        self._lines.append(terminal)
        return self.rule("OTHER_FIRST", "[lazy]"), "OTHER"

    def _after_opening(
        self, calls: Mapping[str, str], several: bool, opening: str, end: str
    ) -> str:
        """Return the body of the calls behind their opening mark, which stands already."""
        dialect = self._dialect
        call = f"({_either(calls.values())})"
        if is_together(dialect):
            begin = brackets(dialect)[0].lstrip().removeprefix(opening)
            between = self.spelled(dialect.parallel or "")
            each = f"{call} ({between} {call})*" if several else call
            return f"{self.spelled(begin)} {each} {self.spelled(end)}"
        marks = self.spelled(dialect.opening), self.spelled(dialect.closing)
        whole = f"{marks[0]} {call} {marks[1]}"
        if dialect.section[0]:
            begin = self.spelled(dialect.section[0].lstrip().removeprefix(opening))
            more = f"({self.spelled(dialect.parallel or '')} {whole})*" if several else ""
            return f"{begin} {whole} {more} {self.spelled(end)}"
        if not dialect.opening.strip():  # the calls begin with the mark themselves
            cut = [self._known_cut(one, opening) for one in calls.values()]
            return f"({_either(cut)}) {marks[1]}"
        return f"{self.spelled(dialect.opening.lstrip().removeprefix(opening))} {call} {marks[1]}"

    def _known_cut(self, rule: str, opening: str) -> str:
        """Return the rule of a call without the mark that it begins with."""
        line = next(line for line in self._lines if line.startswith(f"{rule}: "))
        body, token = line.removeprefix(f"{rule}: "), self.spelled(opening)
        if token[0] != '"':
            return self.rule(body.removeprefix(token).strip())
        return self.rule('"' + body.removeprefix(token[:-1]))

    def _said_before(self) -> str:
        """Return a rule of a thought, or of something said, before a call or the answer."""
        said = self.rule(f"({self.spelled('analysis')} | {self.spelled('commentary')})")
        head = f"{self.spelled('<|channel|>')} {said} {self.spelled('<|message|>')}"
        return self.rule(f"{head} {self.until('<|end|>')} {self.spelled('<|start|>assistant')}")

    def _final(self) -> str:
        head = self.spelled("<|channel|>final<|message|>")
        return self.rule(f"{head} TEXT")

    # --- calls ------------------------------------------------------------------------------------

    def call(self, tool: Tool, held: bool) -> str:
        """Return the rule of a call of a tool."""
        form, name = self._dialect.form, tool.name
        try:
            schema = _schema(tool) if held else {"type": "object"}
            match form:
                case JsonObjects():
                    before, number, after = object_begin(form, name, 0).partition('"0"')
                    head = self.spelled(before)
                    if number:  # of the call, counted by the model
                        head += f' "\\"" /[0-9]{{1,3}}/ {self.spelled(chr(34) + after)}'
                    return self.rule(f"{head} {_json(schema)} {self.spelled('}')}")
                case Named():
                    head = self.spelled(form.before + name + ("" if form.counted else form.between))
                    if form.counted:
                        head += f' ":" /[0-9]{{1,3}}/ {self.spelled(form.between)}'
                    return self.rule(f"{head} {_json(schema)} {self.spelled(form.after)}")
                case Tagged():
                    return self._tagged(tool, form, schema, held)
                case Pythonic():
                    inner = self._members(schema, held, "=", ", ", self._python_value)
                    return self.rule(f"{self.spelled(name + '(')} {inner} {self.spelled(')')}")
                case Braced():
                    inner = self._members(schema, held, ":", ",", self._braced_value)
                    head = self.spelled(f"call:{name}{{")
                    return self.rule(f"{head} {inner} {self.spelled('}')}")
                case Channels():
                    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                    return self.rule(f"{self.spelled(head)} {_json(schema)}")
        except EverystepError as error:
            raise type(error)(f"tool {name!r}: {error}") from error
        return ""

    def _tagged(self, tool: Tool, form: Tagged, schema: Mapping[str, Any], held: bool) -> str:
        parts = [self.spelled(f"{form.before}{tool.name}{form.named}")]
        properties, required = _listed(schema if held else tool.parameters, held)
        for name, one in properties.items():
            parts.append(self._parameter(form, name, one, schema, held))
            parts[-1] += "" if name in required else "?"
        return self.rule(" ".join([*parts, self.spelled(form.after)]))

    def _parameter(
        self, form: Tagged, name: str, given: Any, root: Mapping[str, Any], held: bool
    ) -> str:
        """Return the rule of one argument between its tags."""
        schema, key = _resolved(given, root), form.key + name
        kinds = kinds_of(schema, root)
        other = ""
        if not held or kinds != {"string"}:
            value = _json(_with_definitions(given, root) if held else {})
            keyed = self.spelled(key + (form.keyed_json or form.keyed))
            other = f"{keyed} {value} {self.spelled(form.valued)}"
        if held and "string" not in kinds:
            return self.rule(other)
        text = self._texts(schema, form.valued) if held else self.until(form.valued)
        text = f"{self.spelled(key + form.keyed)} {text}"
        return self.rule(f"{text} | {other}" if other and form.keyed_json else text)

    def _texts(self, schema: Mapping[str, Any], closing: str) -> str:
        """Return the body of a text that stands as it is, and its closing mark."""
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and all(isinstance(one, str) for one in listed):
            return (
                f"({_either(self.spelled(one) or EMPTY for one in listed)}) {self.spelled(closing)}"
            )
        if _is_mixed(schema):
            return self.until(closing)
        own = schema.keys() - _SAYS_NOTHING
        if schema.get("type") == "string" and own <= _OF_TEXTS:
            return self.until(closing, schema.get("minLength", 0), schema.get("maxLength"))
        raise UnsupportedError(
            "an argument is a text that this dialect writes without quotes",
            wanted="a string with minLength, maxLength, enum or const alone",
            got=json.dumps(dict(schema))[:200],
            do="Loosen the schema, or pass strict=False and check the call",
        )

    def _members(
        self,
        schema: Mapping[str, Any],
        held: bool,
        between: str,
        comma: str,
        value: Callable[[Any, Mapping[str, Any]], str],
    ) -> str:
        """Return the body of arguments by name with marks between them, in the schema's order."""
        if not held:
            raise UnsupportedError(
                f"calls of the dialect {self._dialect.name} are held to schemas alone",
                do="Leave strict out, or tool_choice",
            )
        properties, required = _listed(schema, held)
        first, later = '""', '""'
        for name, one in reversed(list(properties.items())):
            part = self.rule(f"{self.spelled(name + between)} {value(one, schema)}")
            first_now = f"{part} {later}"
            later_now = f"{self.spelled(comma)} {part} {later}"
            if name not in required:
                first_now, later_now = f"{first_now} | {first}", f"{later_now} | {later}"
            first, later = self.rule(first_now), self.rule(later_now)
        return first

    def _python_value(self, given: Any, root: Mapping[str, Any]) -> str:
        """Return the body of a value, whose words are those of Python where it is one of them."""
        schema = _resolved(given, root)
        kinds = kinds_of(schema, root)
        if kinds.isdisjoint(_WORDS) or not (
            _is_mixed(schema) or schema.keys() - _SAYS_NOTHING == {"type"}
        ):
            return _json(_with_definitions(given, root))
        words = [_WORDS[kind] for kind in sorted(kinds & _WORDS.keys())]
        rest = kinds - _WORDS.keys()
        return f"({_either([*words, *([_json({'type': sorted(rest)})] if rest else [])])})"

    def _braced_value(self, given: Any, root: Mapping[str, Any]) -> str:
        self._depth += 1
        try:
            return self._braced(_resolved(given, root), given, root)
        finally:
            self._depth -= 1

    def _braced(self, schema: Mapping[str, Any], given: Any, root: Mapping[str, Any]) -> str:
        """Return the body of a value in Gemma's syntax."""
        form = self._dialect.form
        quote = form.quote if isinstance(form, Braced) else ""
        kinds = kinds_of(schema, root)
        if kinds == {"string"} or (kinds >= {"string"} and _is_mixed(schema)):
            rest = _json({"type": sorted(kinds - {"string"})})
            text = f"{self.spelled(quote)} {self._texts(schema, quote)}"
            return text if kinds == {"string"} else f"({text} | {rest})"
        if kinds.isdisjoint({"string", "array", "object"}):
            return _json(_with_definitions(given, root))
        own = schema.keys() - _SAYS_NOTHING
        shallow = self._depth <= _MOST_NESTED
        if shallow and schema.get("type") == "array" and own <= {"type", "items"}:
            item = self.rule(self._braced_value(schema.get("items", {"type": "string"}), root))
            return f'"[" ({item} ("," {item})*)? "]"'
        if shallow and schema.get("type") == "object" and "properties" in schema:
            inner = self._members(
                {**schema, "$defs": root.get("$defs", {})}, True, ":", ",", self._braced_value
            )
            return f'"{{" {inner} "}}"'
        raise UnsupportedError(
            f"calls of the dialect {self._dialect.name} cannot be held to an argument's schema",
            wanted="texts, numbers, true, false, null, and lists and objects of these",
            got=json.dumps(dict(schema))[:200],
            do="Loosen the schema, or leave tool_choice out",
        )


EMPTY = '""'


def _is_mixed(schema: Mapping[str, Any]) -> bool:
    """Return True if a schema asks for one of several types, and for nothing else."""
    kinds = schema.get("type")
    listed = [{"type": one} for one in kinds] if isinstance(kinds, list) else []
    branches = schema.get("anyOf") or listed
    own = schema.keys() - _SAYS_NOTHING
    plain = all(isinstance(one, Mapping) and {*one} <= {"type", *_SAYS_NOTHING} for one in branches)
    return len(branches) > 1 and plain and own <= {"type", "anyOf"}


def _before(dialect: Dialect) -> str:
    form = dialect.form
    return form.before if isinstance(form, Named | Tagged) else ""


def _either(bodies: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(bodies))


def _or_empty(number: int | None) -> str:
    return "" if number is None else str(number)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    return _META.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _json(schema: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value with this schema, in one line as templates write it."""
    spaced = {"x-guidance": {"whitespace_pattern": " ?"}, **schema}
    return f"%json {json.dumps(spaced, ensure_ascii=False)}"


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments as grammars follow it."""
    given = copy.deepcopy({"type": "object", **tool.parameters})
    if len(given) == 1:
        given |= {"properties": {}, "additionalProperties": False}
    return check_schema(given)


def _listed(schema: Mapping[str, Any], held: bool) -> tuple[Mapping[str, Any], set[str]]:
    """Return the properties of an object that lists all of them, and which are required."""
    beside = schema.keys() - {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        *_SAYS_NOTHING,
    }
    properties = schema.get("properties") or {}
    required = {*schema.get("required", ())}
    if held and (beside or required - properties.keys()):
        raise UnsupportedError(
            "this form of calls lists arguments one by one",
            wanted="an object with properties and required alone",
            got=", ".join(sorted(beside | (required - properties.keys()))),
            do="Say so in the schema, or pass strict=False and check the call",
        )
    return properties, required


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the one that it refers to."""
    found = schema
    for _ in range(16):
        if not isinstance(found, Mapping) or "$ref" not in found:
            break
        found = referred(found["$ref"], root)
    return found if isinstance(found, Mapping) else {}


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with what its references lead into."""
    if not isinstance(schema, Mapping):
        return {} if schema is not False else {"enum": []}
    kept = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**kept, **schema}
