"""References that are read off the program: its commands, and the options of `generate`."""

from __future__ import annotations

from typing import Any

import typer

from everystep.cli.app import app
from everystep.config.fields import FIELDS, META, Field

_COMMANDS = """\
# Commands

Every command of `everystep` with its arguments and options, as `everystep COMMAND --help` shows
them. [The command line](../guide/command-line.md) shows how they are used.
"""
_OPTIONS = """\
# Options of generate

Every field of `GenerationConfig`, which `generate`, `stream`, `chat`, `open` and the methods of
`AsyncEngine` take as keywords too. A field that nobody sets has its default.
[Configuration](../guide/configuration.md) says whose value wins. *One per row*: a list gives each
row of the call a value of its own.
"""


def command_line() -> str:
    """A page of Markdown with every command."""
    return "\n".join([_COMMANDS, *_command(typer.main.get_command(app), "everystep", None)])


def options() -> str:
    """A page of Markdown with every field of a generation configuration."""
    head = ["| option | what it is | values |", "| --- | --- | --- |"]
    rows = [_option(field) for name, field in FIELDS.items() if name not in META]
    return "\n".join([_OPTIONS, *head, *rows, ""])


def _option(field: Field) -> str:
    wanted = _cell(field.kind.wanted) + ("; one per row" if field.per_row else "")
    return f"| `{field.name}` | {_cell(field.line)} | {wanted} |"


def _command(command: Any, name: str, above: Any) -> list[str]:
    """The lines of a command, and of those below it."""
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=above)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = ["", f"## {name}", "", "```text", usage, "```", "", command.help or "", ""]
    parameters = [one for one in command.get_params(context) if not getattr(one, "hidden", False)]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        rows = [_row(one, context) for one in parameters if one.param_type_name == kind]
        if rows:
            lines += [f"| {title} | |", "| --- | --- |", *rows, ""]
    for below, inner in getattr(command, "commands", {}).items():
        lines += _command(inner, f"{name} {below}", context)
    return lines


def _row(parameter: Any, context: Any) -> str:
    written, meaning = parameter.get_help_record(context)
    given = parameter.default
    plain = isinstance(given, str | int | float) and not isinstance(given, bool)
    default = f" Default: `{given}`." if plain and "default:" not in meaning else ""
    return f"| `{written}` | {_cell(meaning)}{default} |"


def _cell(text: str) -> str:
    """Text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
