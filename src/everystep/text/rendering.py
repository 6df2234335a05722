"""A chat template as a program: compiled once, then rendered, each time with an answer.

An answer is made of plain values, so that it can cross a pipe: this file and `sandbox.py` are all
of the package that the process of `cage.py` imports, and it starts in a tenth of a second because
of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.meta

from everystep.text.sandbox import (
    CURRENT,
    BoundedEnvironment,
    Budget,
    LimitReached,
    RefusedByTemplate,
    TemplateLimits,
)

MEMORY = "it needs more memory than a template gets"


@dataclass(frozen=True)
class Rendering:
    """The outcome of a template: the text it printed and the number of generation blocks.

    `refused` is what it says against these messages. `what` says that it fails, `got` how, and `do`
    what helps.
    """

    text: str = ""
    generations: int = 0
    refused: str | None = None
    what: str | None = None
    got: str | None = None
    do: str | None = None


class WrongTemplate(Exception):
    """A source that cannot be compiled; `answer` says why."""

    def __init__(self, answer: Rendering) -> None:
        super().__init__(answer.what)
        self.answer = answer


class CompiledTemplate:
    """A compiled template; WrongTemplate if the source is not one.

    `reads` holds the names that it takes from the call.
    """

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._limits = limits
        environment = BoundedEnvironment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as failure:
            what = f"Line {failure.lineno} of the chat template is wrong"
            raise WrongTemplate(Rendering(what=what, got=str(failure.message)[:500])) from None
        except (Exception, RecursionError) as failure:
            raise WrongTemplate(not_compiled(failure)) from None
        self.reads = frozenset(names)

    def run(self, names: Mapping[str, Any]) -> Rendering:
        """Return the text as the template prints it, or why there is none."""
        budget = Budget(self._limits)
        token = CURRENT.set(budget)
        pieces = []
        try:
            for piece in self._template.generate(names):
                budget.printed(len(piece))
                pieces.append(piece)
            return Rendering("".join(pieces), budget.generations)
        except RefusedByTemplate as refusal:
            return Rendering(refused=str(refusal))
        except (Exception, RecursionError) as failure:
            return failed(failure)
        finally:
            CURRENT.reset(token)


def not_compiled(cause: object) -> Rendering:
    """Return the answer of a source that no program comes of."""
    return Rendering(what="The chat template cannot be compiled", got=str(cause)[:500] or MEMORY)


def failed(failure: BaseException) -> Rendering:
    """Return the answer of a template that fails while it runs, with the line that failed."""
    lines = []
    trace = failure.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    place = f"Line {lines[-1]} of the chat template" if lines else "The chat template"
    if isinstance(failure, LimitReached | MemoryError):
        cause = str(failure) if isinstance(failure, LimitReached) else MEMORY
        return exceeded(place, cause)
    return Rendering(
        what=f"{place} fails",
        got=f"{type(failure).__name__}: {failure}"[:500],
        do="Check that the messages have the form that the template expects",
    )


def exceeded(place: str, cause: str) -> Rendering:
    """Return the answer of a template that uses more than it may."""
    do = "Shorten the chat, or raise the TemplateLimits if you trust the template"
    return Rendering(what=f"{place} exceeds its limits", got=cause, do=do)
