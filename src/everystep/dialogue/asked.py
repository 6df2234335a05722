"""What a conversation asks of tools and thoughts, and what becomes of it in one answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everystep.dialogue.dialects import Dialect, dialect_of
from everystep.dialogue.forcing import grammar_for
from everystep.dialogue.parsed import CallArguments, CallBegin, CallEnd, Content, Thought, ToolCall
from everystep.dialogue.parser import Parser
from everystep.dialogue.tools import Tool, ToolChoice, read_choice, read_tools
from everystep.dialogue.writing import written
from everystep.errors import RequestError, TokenizerError, UnsupportedError, shown
from everystep.processors.grammars.grammar import compiled
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.grammars.source import GrammarSource
from everystep.processors.grammars.vocabulary import special_tokens, vocabulary_of
from everystep.processors.thoughts import ThoughtBudget
from everystep.text import ChatTemplate, Spelling
from everystep.text.tool_schemas import tool_schemas

ANY_CHOICE = ToolChoice()
_MOST_THOUGHTS = 10_000_000
_THINKING = ("enable_thinking", "thinking")
"""Names by which templates ask whether a model thinks."""


@dataclass(frozen=True, slots=True)
class Message:
    """An answer in its parts: what is said, what was thought before, and the calls of tools.

    `reasoning_content` is None where nothing was thought, or the model's thoughts have no marks.
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return it as the next message of the conversation."""
        found: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": one.id,
                    "type": "function",
                    "function": {"name": one.name, "arguments": one.arguments},
                }
                for one in self.tool_calls
            ]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """A conversation's wishes about tools and thoughts, read and judged.

    `schemas`: the tools as templates read them, None for none. `special`: the ids of the dialect's
    marks that the tokenizer has as special tokens. `variables`: what the chat template is told
    beside. `budget`: after how many tokens thoughts end, None for no bound.
    """

    dialect: Dialect
    tools: tuple[Tool, ...] = ()
    schemas: tuple[Any, ...] | None = None
    choice: ToolChoice = ANY_CHOICE
    parallel: bool = True
    budget: int | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, object] = field(default_factory=dict)

    @property
    def kept(self) -> frozenset[int]:
        """The special ids whose text an answer keeps, as calls and thoughts are told by it."""
        return frozenset(self.special.values())

    @property
    def template(self) -> dict[str, Any]:
        """The keywords that the chat template gets."""
        shows = self.schemas is not None and not self.dialect.taught
        return {**({"tools": list(self.schemas or ())} if shows else {}), **self.variables}

    def messages(self, given: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Return the messages as the dialect's templates read them.

        Arguments are objects, or texts where the templates want these. A dialect whose templates
        read no tools is told of them in the system message, and its own calls are written out.
        """
        found = [_with_calls(one, self.dialect) for one in given]
        if self.schemas is None or not self.dialect.taught:
            return found
        told = _instructions(self.schemas)
        if found and found[0].get("role") == "system":
            return [{**found[0], "content": f"{found[0].get('content')}\n\n{told}"}, *found[1:]]
        return [{"role": "system", "content": told}, *found]

    def grammar(self, thinks: bool) -> str | None:
        """Return the grammar that answers are held to; `thinks`: the prompt ends in a thought."""
        if not self.tools:
            return None
        dialect = self.dialect
        if not thinks and False in self.variables.values():  # it was told not to think
            dialect = replace(dialect, thoughts=None)
        asked: dict[str, Any] = {"parallel": self.parallel, "thinks": thinks}
        return grammar_for(dialect, self.tools, self.choice, special=self.special, **asked)

    def mask(self, prompt: str, tokenizer: Any, ends: tuple[int, ...], size: int) -> Any:
        """Return the processor that holds the answer to a prompt to its grammar, if it has one."""
        text = self.grammar(self.dialect.thinks_after(prompt))
        if text is None:
            return None
        source = GrammarSource("grammar", text)
        return GrammarMask(compiled(source, vocabulary_of(tokenizer, size)), ends)

    def bound(self, prompt: str, tokenizer: Any) -> ThoughtBudget | None:
        """Return the processor that ends thoughts, if they are bounded."""
        thoughts = self.dialect.thoughts
        if self.budget is None or thoughts is None:
            return None
        closing = tokenizer.encode(thoughts.closing, add_special_tokens=False)
        return ThoughtBudget(
            self.budget,
            thoughts.opening.strip(),
            thoughts.closing.strip(),
            tuple(int(token) for token in closing),
            self.dialect.thinks_after(prompt),
            thoughts.anywhere,
            Spelling.of(tokenizer),
        )

    def parser(self, prompt: str, key: str) -> Parser:
        """Return a parser of the answer to a prompt; from `key` come the ids of its calls."""
        dialect = self.dialect
        if not self.tools or self.choice.mode == "none":  # thoughts alone are told apart
            among = dialect.thoughts is not None and dialect.thoughts.anywhere
            dialect = dialect if among else _silent(dialect)
        return Parser(dialect, self.tools, thinks=dialect.thinks_after(prompt), key=key)

    def message(self, text: str, prompt: str, key: str) -> Message:
        """Return the parts of an answer."""
        parser = self.parser(prompt, key)
        content, thought = list[str](), list[str]()
        calls: list[ToolCall] = []
        for event in (*parser.feed(text), *parser.close()):
            match event:
                case Content():
                    content.append(event.text)
                case Thought():
                    thought.append(event.text)
                case CallBegin():
                    calls.append(ToolCall(event.id, event.name, "", complete=False))
                case CallArguments():
                    said = calls[-1].arguments + event.text
                    calls[-1] = replace(calls[-1], arguments=said)
                case CallEnd():
                    calls[-1] = replace(calls[-1], complete=event.complete)
        thinks = bool(thought) or self.dialect.thinks_after(prompt)
        return Message("".join(content), "".join(thought) if thinks else None, tuple(calls))


def _silent(dialect: Dialect) -> Dialect:
    """Return a dialect with its thoughts and without its calls."""
    return replace(dialect, form=None, opening="", closing="", section=("", ""), bare=False)


def read_dialogue(
    tokenizer: Any,
    tools: object,
    tool_choice: object,
    parallel_tool_calls: object,
    enable_thinking: object,
    thinking_budget: object,
) -> Dialogue | None:
    """Return what a conversation asks for by these keywords, None where it asks for nothing.

    RequestError or UnsupportedError where it is impossible, or cannot be done for the chat
    template.
    """
    _require_kinds(tools, parallel_tool_calls, enable_thinking, thinking_budget)
    asked = (tools, tool_choice, parallel_tool_calls, enable_thinking, thinking_budget)
    if all(one is None for one in asked):
        return None
    for name, value in (("tool_choice", tool_choice), ("parallel_tool_calls", parallel_tool_calls)):
        if tools is None and value is not None:
            raise RequestError(f"{name} is about tools", wanted="tools=...", got="none")
    source = getattr(tokenizer, "chat_template", None)
    if tokenizer is None or source is None:
        raise TokenizerError(
            "tools and thoughts need a chat template",
            wanted="a tokenizer with one",
            got="none" if tokenizer is None else type(tokenizer).__name__,
            do="Pass the tokenizer that es.load returned, or set tokenizer.chat_template",
        )
    dialect = dialect_of(source)
    read = read_tools(tools) if isinstance(tools, list | tuple) else ()
    choice = read_choice(tool_choice, read) if read else ANY_CHOICE
    if read and dialect.form is None:
        raise UnsupportedError(
            "the chat template shows no known form of calls",
            wanted="a model whose template shows how it calls tools",
            got=f"one of the dialect {dialect.name}",
            do="Leave tools out",
        )
    if thinking_budget is not None and dialect.thoughts is None:
        raise UnsupportedError(
            "thinking_budget has no effect: the chat template knows no thoughts",
            do="Leave thinking_budget out, or load a model that thinks",
        )
    shown_tools = (
        tuple(tool_schemas(list(tools)) or ()) if isinstance(tools, list | tuple) else None
    )
    found = Dialogue(
        dialect,
        read,
        None if choice.mode == "none" else shown_tools,
        choice,
        parallel_tool_calls is not False,
        thinking_budget if isinstance(thinking_budget, int) else None,
        _marks(tokenizer, dialect),
        {} if enable_thinking is None else _thinking(source, enable_thinking),
    )
    found.grammar(thinks=False)  # what is wrong with a schema is known before any compute
    return found


def thoughts_apart(tokenizer: Any) -> Dialogue | None:
    """Return what asks for nothing and tells thoughts apart, None for a chat template without."""
    source = getattr(tokenizer, "chat_template", None)
    try:
        dialect = dialect_of(source)
    except UnsupportedError:  # a form that is not known
        return None
    if dialect.thoughts is None:
        return None
    return Dialogue(dialect, special=_marks(tokenizer, dialect))


def switches_thoughts(tokenizer: Any) -> bool:
    """Return whether the chat template asks if the model thinks."""
    source = getattr(tokenizer, "chat_template", None)
    return source is not None and _switch(source) is not None


def _marks(tokenizer: Any, dialect: Dialect) -> dict[str, int]:
    """Return the dialect's marks that are special tokens, with their ids."""
    special = special_tokens(tokenizer)
    return {one: special[one] for one in special if one and _stands_in(one, dialect.spoken)}


def _require_kinds(tools: object, parallel: object, thinking: object, budget: object) -> None:
    """RequestError for values of another kind."""
    if tools is not None and not isinstance(tools, list | tuple):
        wanted = "a list of functions or of JSON schemas"
        raise RequestError("tools are no list", wanted=wanted, got=shown(tools)[:200])
    for name, value in (("parallel_tool_calls", parallel), ("enable_thinking", thinking)):
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{name} is no bool", wanted="True or False", got=shown(value)[:80])
    whole = isinstance(budget, int) and not isinstance(budget, bool)
    if budget is not None and not (whole and 0 <= budget <= _MOST_THOUGHTS):  # type: ignore[operator]
        wanted = f"a number of tokens, from 0 to {_MOST_THOUGHTS}"
        raise RequestError("thinking_budget is impossible", wanted=wanted, got=shown(budget)[:80])


def _stands_in(token: str, marks: Sequence[str]) -> bool:
    return any(token in mark for mark in marks)


def _switch(source: str | Mapping[str, str]) -> str | None:
    """Return the variable by which a template asks whether the model thinks, None for none."""
    named = {"default": source} if isinstance(source, str) else dict(source)
    reads = ChatTemplate(named.get("tool_use") or named.get("default") or "").reads
    return next((name for name in _THINKING if name in reads), None)


def _thinking(source: str | Mapping[str, str], value: object) -> dict[str, object]:
    """Return the template's variable for thinking with a value; UnsupportedError for none."""
    if (name := _switch(source)) is not None:
        return {name: value}
    raise UnsupportedError(
        "enable_thinking has no effect: the chat template does not ask for it",
        wanted=f"a template that reads {' or '.join(_THINKING)}",
        do="Leave enable_thinking out",
    )


def _with_calls(message: Mapping[str, object], dialect: Dialect) -> Mapping[str, object]:
    """Return a message with its calls as the dialect's templates read them."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list | tuple) or not calls:
        return message
    made = [_call_of(one) for one in calls]
    if dialect.taught:
        said = message.get("content") or ""
        text = written(dialect, [(name, arguments) for name, arguments, _ in made])
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": f"{said}{text}"}
    found = []
    for name, arguments, given in made:
        said = json.dumps(arguments, ensure_ascii=False) if dialect.as_text else arguments
        inner = {**dict(given.get("function", {})), "name": name, "arguments": said}
        found.append({"type": "function", **given, "function": inner})
    return {"content": "", **message, "tool_calls": found}


def _call_of(given: Any) -> tuple[str, dict[str, Any], Mapping[str, Any]]:
    """Return the name and the arguments of a call in a message, and the call."""
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    arguments = inner.get("arguments", {}) if isinstance(inner, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise RequestError(
            "a message has a call that is none",
            wanted="{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}} "
            "with arguments that are one JSON object",
            got=shown(given)[:200],
            do="Leave a call out that was cut",
        )
    flat = {key: value for key, value in given.items() if key not in ("name", "arguments")}
    return name, dict(arguments), flat


def _instructions(schemas: Sequence[Any]) -> str:
    """Return what a system message says of tools where the chat template says nothing."""
    listed = json.dumps(list(schemas), ensure_ascii=False)
    return (
        "You can call these functions:\n"
        f"<tools>{listed}</tools>\n\n"
        "To call some of them, answer with nothing but a list of calls, in this form:\n"
        '<tool_call>[{"name": "the function", "arguments": {"an argument": "its value"}}]'
        "</tool_call>\n"
        "If none of them helps, answer in words."
    )
