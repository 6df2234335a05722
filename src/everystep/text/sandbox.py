"""Jinja in a sandbox, with a bound on all that a chat template may use.

Templates come with models, so they are untrusted programs. Jinja's immutable sandbox keeps them
from Python's internals; this file adds what it lacks: every loop, call, operator and filter
counts against a budget of steps and processor time, and whatever could make a long text out of
short ones is measured before it is made. What a single operation of Python can still do beyond
these bounds is limited by the process that it runs in (`cage.py`). This file knows nothing of
messages or tokenizers, and imports nothing of this package.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Characters that Unicode reserves for use inside a program; they enclose what `{% generation %}`
# blocks print until the text is cut apart.
GENERATION_START, GENERATION_END = "\ufdd0", "\ufdd1"

# Those of Jinja that shape values. Left out: what prints at random, for HTML or for debugging.
FILTERS = (
    *("abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e"),
    *("escape", "first", "float", "format", "groupby", "indent", "int", "items", "join", "last"),
    *("length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
    *("reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string"),
    *("striptags", "sum", "title", "trim", "truncate", "unique", "upper", "urlencode"),
    "wordcount",
)
MAX_INTEGER_BITS = 4096
MAX_ITEMS = 1_000_000


class LimitReached(SecurityError):
    """A template uses more than it is allowed to."""


@dataclass(frozen=True)
class TemplateLimits:
    """The most that a template may use: its own length, its text, steps, processor seconds."""

    source_characters: int = 256 * 1024
    text_characters: int = 4 * 1024 * 1024
    steps: int = 500_000
    seconds: float = 1.0


class Budget:
    """The use that one rendering has made of its limits so far."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self.steps = 0
        self.generations = 0
        self._printed = 0
        self._deadline = time.thread_time() + limits.seconds

    def step(self, cost: int = 1) -> None:
        """Counts work done; LimitReached beyond the allowance."""
        self.steps += cost
        if self.steps > self.limits.steps:
            raise LimitReached(f"it takes more than {self.limits.steps} steps")
        if time.thread_time() > self._deadline:
            raise LimitReached(f"it takes more than {self.limits.seconds} s")

    def size(self, characters: int) -> None:
        """Admits a text before it is made, and counts the work of making it."""
        if characters > self.limits.text_characters:
            raise LimitReached(f"it makes more than {self.limits.text_characters} characters")
        self.step(1 + characters // 256)

    def printed(self, characters: int) -> None:
        """Admits a piece of the final text."""
        self._printed += characters
        self.size(characters if self._printed <= self.limits.text_characters else self._printed)


CURRENT: ContextVar[Budget] = ContextVar("CURRENT")


def weigh(value: object) -> int:
    """About how many characters `value` prints as; containers are followed, up to the limit."""
    if isinstance(value, str):
        return len(value)
    limit = CURRENT.get().limits.text_characters
    total, waiting, seen = 0, [value], 0
    while waiting and total <= limit:
        item = waiting.pop()
        total += 2 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            waiting += item
        seen += 1
        if seen + len(waiting) > MAX_ITEMS:
            raise LimitReached(f"it makes more than {MAX_ITEMS} items")
    return total


def each(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, each counted as a step."""
    budget = CURRENT.get()
    for value in values:
        budget.step()
        yield value


def admitted(value: Any) -> Any:
    """Return the value itself, if what it prints as is within the limit."""
    CURRENT.get().size(weigh(value))
    return value


def admitted_if_text(value: Any) -> Any:
    """Return the value itself; a text is admitted."""
    return admitted(value) if isinstance(value, str) else value


def concatenated(values: list[Any]) -> str:
    """Join texts as the operator ~ does."""
    admitted(values)
    return "".join(map(str, values))


class Bounds(NodeTransformer):
    """Puts the counting into a parsed template: into loops and the operator ~."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks what the assistant is to be trained on."""

    tags = {"generation"}  # noqa: RUF012, as the base class declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_enclosed")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _enclosed(self, caller: Callable[[], str]) -> str:
        CURRENT.get().generations += 1
        return f"{GENERATION_START}{caller()}{GENERATION_END}"


class TemplateNamespace(Namespace):
    """Jinja's namespace, without attributes that could pass for Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox in which everything that can grow is measured first."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=admitted,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        kept = {name: bounded(name, self.filters[name]) for name in FILTERS}
        kept["tojson"] = bounded("tojson", to_json)
        self.filters = {**kept, "_each": each, "_concatenated": concatenated}
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, namespace=TemplateNamespace
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        Bounds().visit(tree)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        measure_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        CURRENT.get().step()
        # The sandbox hands out str.format in a wrapper of its own.
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, (str, bytes)):
            args = tuple(map(listed, args))
            measure(method.__name__, method.__self__, [*args, *kwargs.values()])
        if isinstance(__obj, LoopContext) and args:
            args = (each(args[0]), *args[1:])  # a recursive loop bypasses the counting filter
        # A macro returns the text that it printed.
        return admitted_if_text(super().call(__context, __obj, *args, **kwargs))


class RefusedByTemplate(jinja2.TemplateError):
    """The template itself called raise_exception."""


def raise_exception(text: object) -> None:
    """Refuse the messages; templates call this when the model does not know their order."""
    raise RefusedByTemplate(str(text))


def strftime_now(form: str) -> str:
    """Return the present local time; templates of several families print the date."""
    return datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is measured before it runs."""
    # Filters that want the context, the environment or the like get it before the value.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(listed, args))
        measure(name, args[first], [*args[first + 1 :], *kwargs.values()])
        return admitted_if_text(function(*args, **kwargs))

    return measured


def listed(value: Any) -> Any:
    """List what an iterator yields, so that it can be measured; return any other value as it is."""
    return list(each(value)) if isinstance(value, Iterator) else value


def measure(name: str, value: Any, given: list[Any]) -> None:
    """Admits the largest text that a filter, or a method of text, can make of its arguments."""
    weight = weigh(value) + sum(map(weigh, given))
    number = max((abs(n) for n in given if type(n) is int), default=0)
    if name in ("format", "format_map"):
        _check_format(value)
        weight *= 1 + str(value).count("%") + str(value).count("{")
    elif name == "replace":
        texts = [str(text) for text in given if not isinstance(text, int)]
        weight += max((str(value).count(a) * len(b) for a in texts for b in texts), default=0)
    elif name == "join" and given:
        # The separator is the value of the method, and an argument of the filter.
        values = [value, *given]
        length = max((len(v) for v in values if isinstance(v, Sized)), default=0)
        weight += length * min(map(weigh, values))
    elif name in ("indent", "expandtabs", "tojson"):
        weight *= 1 + number
    elif name in ("batch", "slice"):
        weight += number * (1 + sum(map(weigh, given)))
    elif name == "sum" and any(isinstance(start, (list, tuple)) for start in given):
        raise LimitReached("it adds up lists")
    else:
        weight += number
    CURRENT.get().size(weight)


def _check_format(pattern: object) -> None:
    """Widths and precisions of up to three digits; none that come from arguments."""
    if re.search(r"\d{4,}|\*|\{[^{}]*\{", str(pattern)):
        raise LimitReached("it formats to a great width")


def measure_operator(operator: str, left: Any, right: Any) -> None:
    """Admits the result of an operator on texts, lists or large integers."""
    budget = CURRENT.get()
    budget.step()
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
        if bits > MAX_INTEGER_BITS:
            raise LimitReached(f"it makes integers of more than {MAX_INTEGER_BITS} bits")
    elif operator == "*":
        count, repeated = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int) and isinstance(repeated, Sized):
            budget.size(max(0, count) * len(repeated))
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        budget.size(len(left) + len(right))
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_format(left)
        budget.size(len(left) + weigh(right))
