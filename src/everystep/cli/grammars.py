"""`--schema`, `--regex`, `--grammar` and `--choices`: what an answer has to follow."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli.user_input import read_text

_following = partial(typer.Option, rich_help_panel="Structured output; one of these")

Schema = Annotated[
    Path | None,
    _following("--schema", metavar="FILE", help="Answer with JSON that fits the schema in FILE."),
]
Regex = Annotated[
    str | None,
    _following("--regex", metavar="PATTERN", help="Answer with a text that matches PATTERN."),
]
GrammarFile = Annotated[
    Path | None,
    _following("--grammar", metavar="FILE", help="Answer with a text of the Lark grammar in FILE."),
]
Choices = Annotated[
    list[str] | None,
    _following("--choices", metavar="TEXT", help="Answer with one of the TEXTs. Repeatable."),
]


def following(
    schema: Path | None, regex: str | None, grammar: Path | None, choices: list[str] | None
) -> dict[str, Any]:
    """Return arguments of `generate()`: those that were said, with what their files hold."""
    said = {
        "schema": None if schema is None else read_text(schema),
        "regex": regex,
        "grammar": None if grammar is None else read_text(grammar),
        "choices": choices or None,
    }
    given = {name: value for name, value in said.items() if value is not None}
    if len(given) > 1:
        named = " and ".join(f"--{name}" for name in given)
        raise typer.BadParameter(f"{named} were both given; give one of them")
    return given
