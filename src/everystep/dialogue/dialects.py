"""The table of forms: how each dialect of chat templates writes calls and thoughts.

One row is everything that is known of a dialect. The parser, the writer and the grammar walk the
same row, so that what one of them takes is what the others make. Source: the chat templates and
model cards of the dialects named in the rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from everystep.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around thoughts. `anywhere`: thoughts may begin later than an answer does."""

    opening: str
    closing: str
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class JsonObjects:
    """Calls as JSON objects with a name and arguments; `listed`: in a JSON list. `numbered`: a key
    that comes first and holds the number of the call, as a text."""

    name: str = "name"
    arguments: str = "arguments"
    listed: bool = False
    numbered: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """Calls as a name and a JSON object: `before` name `between` object `after`.

    `identity`: a mark after which an id follows the name, if the model writes one. `counted`: the
    name goes on with a colon and a number, and this with what is before it is the id.
    """

    before: str = ""
    between: str = ""
    after: str = ""
    identity: str = ""
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Tagged:
    """Calls as a name and parameters between tags: `before` name `named`, for each parameter `key`
    its name `keyed` value `valued`, and `after`.

    Texts stand as they are, other values as JSON; `keyed_json` is `keyed` of these where it is
    another one.
    """

    before: str
    named: str
    key: str
    keyed: str
    valued: str
    after: str
    keyed_json: str = ""


@dataclass(frozen=True, slots=True)
class Pythonic:
    """Calls as a list of calls in the syntax of Python, with arguments by name."""


@dataclass(frozen=True, slots=True)
class Braced:
    """Calls as `call:`, a name and an object without quotes around its keys; `quote` stands on both
    sides of a text."""

    quote: str


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages with a header each, which names a channel and perhaps who is called."""


Form = JsonObjects | Named | Tagged | Pythonic | Braced | Channels


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form that models of one dialect write calls and thoughts in.

    `marks`: texts that stand in the dialect's chat templates, all of them. `opening` and `closing`
    stand around each call, or around the list of calls; `section` around all that are made
    together. `bare`: a call may stand without its opening where an answer begins. `parallel`: what
    stands between two calls, None where a turn has one. `thoughts`: None if it has none.
    `identity`: how an id looks that the dialect's templates take. `as_text`: its templates take
    arguments as a text of JSON, and not as an object. `taught`: the templates do not read tools, so
    that a system message says how calls are written.
    """

    name: str
    marks: tuple[str, ...]
    form: Form | None
    opening: str = ""
    closing: str = ""
    section: tuple[str, str] = ("", "")
    parallel: str | None = "\n"
    bare: bool = False
    thoughts: Thoughts | None = None
    identity: Literal["call", "short", "counted"] = "call"
    as_text: bool = False
    taught: bool = False

    @property
    def spoken(self) -> tuple[str, ...]:
        """The texts by which calls and thoughts are told from an answer; where a tokenizer has one
        of them as a special token, a text has to keep it."""
        thoughts, form = self.thoughts, self.form
        found = [*self.section, self.opening, self.closing]
        found += [thoughts.opening, thoughts.closing] if thoughts else []
        if isinstance(form, Named):
            found += [form.before, form.between, form.after, form.identity]
        elif isinstance(form, Tagged):
            found += [form.before, form.named, form.key, form.keyed, form.keyed_json]
            found += [form.valued, form.after]
        elif isinstance(form, Braced):
            found.append(form.quote)
        elif isinstance(form, Channels):
            found = [*CHANNEL_MARKS]
        return tuple(dict.fromkeys(one for one in found if one.strip()))

    def thinks_after(self, prompt: str) -> bool:
        """Return True if a prompt ends where a thought has begun."""
        thoughts = self.thoughts
        return thoughts is not None and prompt.rstrip().endswith(thoughts.opening.strip())


CHANNEL_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
CHANNEL_MARKS = (*CHANNEL_ENDS, "<|message|>", "<|constrain|>")
_THINK = Thoughts("<think>\n", "\n</think>\n\n")
_CHANNEL_THOUGHTS = Thoughts("<|channel|>analysis<|message|>", "<|end|>", anywhere=True)
_DSML = Tagged(
    before='<｜DSML｜invoke name="',
    named='">\n',
    key='<｜DSML｜parameter name="',
    keyed='" string="true">',
    keyed_json='" string="false">',
    valued="</｜DSML｜parameter>\n",
    after="</｜DSML｜invoke>\n",
)
_INVOKED = Tagged(
    before='<invoke name="',
    named='">\n',
    key='<parameter name="',
    keyed='">',
    valued="</parameter>\n",
    after="</invoke>\n",
)
_IN_LINES = Tagged(
    before="<function=",
    named=">\n",
    key="<parameter=",
    keyed=">\n",
    valued="\n</parameter>\n",
    after="</function>\n",
)
_WITHOUT_LINES = replace(_IN_LINES, keyed=">", valued="</parameter>\n")
_KEYS_AND_VALUES = Tagged(
    before="",
    named="\n",
    key="<arg_key>",
    keyed="</arg_key>\n<arg_value>",
    valued="</arg_value>\n",
    after="",
)
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = Named("functions.", "<|tool_call_argument_begin|>", counted=True)
_FENCED = Named("function<｜tool▁sep｜>", "\n```json\n", "\n```")

ROWS: tuple[Dialect, ...] = (
    # gpt-oss
    Dialect(
        name="harmony",
        marks=("<|channel|>", "<|message|>", "commentary"),
        form=Channels(),
        parallel=None,
        thoughts=_CHANNEL_THOUGHTS,
    ),
    # DeepSeek V3.2, and V4, which names the section otherwise
    Dialect(
        name="deepseek-v3.2",
        marks=("｜DSML｜", "function_calls>"),
        form=_DSML,
        section=("\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        parallel="",
        thoughts=_THINK,
    ),
    Dialect(
        name="deepseek-v4",
        marks=("｜DSML｜", "tool_calls>"),
        form=_DSML,
        section=("\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
        parallel="",
        thoughts=_THINK,
    ),
    # DeepSeek V3 and R1 with its distilled models, then V3.1
    Dialect(
        name="deepseek-v3",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        form=_FENCED,
        opening="<｜tool▁call▁begin｜>",
        closing="<｜tool▁call▁end｜>",
        section=_SECTION,
        parallel="\n",
        thoughts=_THINK,
        as_text=True,
    ),
    Dialect(
        name="deepseek-v3.1",
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        form=Named(between="<｜tool▁sep｜>"),
        opening="<｜tool▁call▁begin｜>",
        closing="<｜tool▁call▁end｜>",
        section=_SECTION,
        parallel="",
        thoughts=_THINK,
    ),
    # Kimi K2
    Dialect(
        name="kimi-k2",
        marks=("<|tool_calls_section_begin|>",),
        form=_KIMI,
        opening="<|tool_call_begin|>",
        closing="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        parallel="",
        thoughts=_THINK,
        identity="counted",
    ),
    # MiniMax M2
    Dialect(
        name="minimax-m2",
        marks=("<minimax:tool_call>", "<invoke name="),
        form=_INVOKED,
        section=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        parallel="",
        thoughts=_THINK,
    ),
    # Seed-OSS
    Dialect(
        name="seed-oss",
        marks=("<seed:tool_call>", "<function="),
        form=_WITHOUT_LINES,
        opening="<seed:tool_call>\n",
        closing="</seed:tool_call>",
        thoughts=Thoughts("<seed:think>", "</seed:think>"),
    ),
    # Gemma 4 and FunctionGemma
    Dialect(
        name="gemma-4",
        marks=("<|tool_call>call:",),
        form=Braced('<|"|>'),
        opening="<|tool_call>",
        closing="<tool_call|>",
        parallel="",
        thoughts=Thoughts("<|channel>thought\n", "\n<channel|>", anywhere=True),
    ),
    Dialect(
        name="function-gemma",
        marks=("<start_function_call>call:",),
        form=Braced("<escape>"),
        opening="<start_function_call>",
        closing="<end_function_call>",
        parallel="",
    ),
    # LFM2
    Dialect(
        name="lfm2",
        marks=("List of tools: ", "<|im_start|>"),
        form=Pythonic(),
        opening="<|tool_call_start|>",
        closing="<|tool_call_end|>",
        parallel=", ",
        thoughts=_THINK,
    ),
    # Llama 4
    Dialect(
        name="llama-4",
        marks=("<|header_start|>", "<|python_start|>"),
        form=Pythonic(),
        opening="<|python_start|>",
        closing="<|python_end|>",
        parallel=", ",
        bare=True,
    ),
    # Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5
    Dialect(
        name="qwen3-coder",
        marks=("<tool_call>", "<function=", "<parameter="),
        form=_IN_LINES,
        opening="<tool_call>\n",
        closing="</tool_call>",
        thoughts=_THINK,
    ),
    # GLM 4.5 to 4.7
    Dialect(
        name="glm-4.5",
        marks=("<tool_call>", "<arg_key>"),
        form=_KEYS_AND_VALUES,
        opening="<tool_call>",
        closing="</tool_call>",
        thoughts=Thoughts("<think>", "</think>\n"),
    ),
    # Apriel 1.5 and 1.6
    Dialect(
        name="apriel",
        marks=("<tool_calls>[", "</tool_calls>"),
        form=JsonObjects(listed=True),
        opening="<tool_calls>",
        closing="</tool_calls>",
        parallel=", ",
        thoughts=Thoughts("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n\n"),
    ),
    # Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, MiMo, and others that learned from them
    Dialect(
        name="hermes",
        marks=("<tool_call>", '"arguments"'),
        form=JsonObjects(),
        opening="<tool_call>\n",
        closing="\n</tool_call>",
        thoughts=_THINK,
    ),
    # SmolLM3, whose template shows tools in its own words
    Dialect(
        name="hermes",
        marks=("SmolLM", "enable_thinking"),
        form=JsonObjects(),
        opening="<tool_call>",
        closing="</tool_call>",
        thoughts=_THINK,
    ),
    # Functionary 3.1, and the custom calls of Llama 3.1
    Dialect(
        name="functionary-3.1",
        marks=("<function=", "</function>"),
        form=Named("<function=", ">", "</function>"),
        parallel="",
    ),
    # Mistral: since v11 of its tokenizer, with ids for a time, and before
    Dialect(
        name="mistral-v11",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        form=Named(between="[ARGS]", identity="[CALL_ID]"),
        opening="[TOOL_CALLS]",
        parallel="",
        thoughts=Thoughts("[THINK]", "[/THINK]"),
        identity="short",
    ),
    Dialect(
        name="mistral",
        marks=("[TOOL_CALLS]",),
        form=JsonObjects(listed=True),
        opening="[TOOL_CALLS]",
        parallel=", ",
        identity="short",
    ),
    # Granite 3, then Phi-4-mini, and its form with a word in place of a token
    Dialect(
        name="granite-3",
        marks=("<|tool_call|>", "start_of_role"),
        form=JsonObjects(listed=True),
        opening="<|tool_call|>",
        parallel=", ",
        thoughts=Thoughts("<think>", "</think>"),
    ),
    Dialect(
        name="phi-4-mini",
        marks=("<|tool|>", "<|/tool|>"),
        form=JsonObjects(listed=True),
        opening="<|tool_call|>",
        closing="<|/tool_call|>",
        parallel=", ",
    ),
    Dialect(
        name="functools",
        marks=("functools[",),
        form=JsonObjects(listed=True),
        opening="functools",
        parallel=", ",
    ),
    # Nemotron Nano 2
    Dialect(
        name="nemotron-2",
        marks=("<TOOLCALL>",),
        form=JsonObjects(listed=True),
        opening="<TOOLCALL>",
        closing="</TOOLCALL>",
        parallel=", ",
        thoughts=_THINK,
    ),
    # Command R7B and A
    Dialect(
        name="command-r7b",
        marks=("<|START_ACTION|>", '"tool_name"'),
        form=JsonObjects("tool_name", "parameters", listed=True, numbered="tool_call_id"),
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        parallel=", ",
        thoughts=Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    # Llama 3.1 to 3.3: a bare object, or one after the mark of code
    Dialect(
        name="llama-3",
        marks=("<|start_header_id|>", '"parameters": '),
        form=JsonObjects(arguments="parameters"),
        opening="<|python_tag|>",
        parallel="; ",
        bare=True,
    ),
    # SmolLM2, whose card says how to ask
    Dialect(
        name="smollm2",
        marks=("SmolLM, trained by Hugging Face",),
        form=JsonObjects(listed=True),
        opening="<tool_call>",
        closing="</tool_call>",
        parallel=", ",
        taught=True,
    ),
    # Models that think and make no calls
    Dialect(name="thinking", marks=("</think>",), form=None, parallel=None, thoughts=_THINK),
)
"""Every dialect; the first whose marks a template has is its own."""

_WRITES_JSON = re.compile(r"arguments'?\]?\s*\|\s*tojson")
_NAMES = tuple(dict.fromkeys(row.name for row in ROWS))


def dialect_of(template: str | Mapping[str, str] | None) -> Dialect:
    """Return the dialect of a chat template, or of the named ones that a tokenizer has.

    UnsupportedError for a template in which no known form stands: nothing is guessed.
    """
    named = {"default": template} if isinstance(template, str) else dict(template or {})
    source = named.get("tool_use") or named.get("default") or ""
    for row in ROWS:
        if all(mark in source for mark in row.marks):
            thinks = row.thoughts is not None and _appears(row, row.thoughts, source)
            found = row if thinks else replace(row, thoughts=None)
            # Some templates of such a dialect write the arguments as JSON themselves.
            return replace(found, as_text=row.as_text and not _WRITES_JSON.search(source))
    raise UnsupportedError(
        "the chat template shows no known form of calls or thoughts",
        wanted=f"a template of one of the dialects {', '.join(_NAMES)}",
        got="no chat template" if not source else f"one of {len(source)} characters",
        do="Load a model whose template has tools, or set tokenizer.chat_template to one",
    )


def _appears(row: Dialect, thoughts: Thoughts, source: str) -> bool:
    """Return True if a template speaks of thoughts, or its dialect has them whatever it says."""
    return isinstance(row.form, Channels) or thoughts.closing.strip() in source
