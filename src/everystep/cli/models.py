"""`everystep pull` and `everystep models`: which models are on this machine.

Only named models are listed and removed. Models of the hub lie in the hub's own cache, which other
programs share.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich import filesize

from everystep.cli.loading import fetch
from everystep.cli.options import Offline
from everystep.cli.tables import print_table
from everystep.cli.terminal import is_terminal, note, write_line
from everystep.cli.writers import write_document
from everystep.files.sources import DEFAULT_MODEL, cached_models, remove_model

models = typer.Typer(help="List or remove the models in the cache folder.")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def pull(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A name or a hub id.")] = (
        DEFAULT_MODEL
    ),
    offline: Offline = False,
) -> None:
    """Fetch MODEL, so that it works without a network from then on, and print where it is."""
    write_line(str(fetch(model, offline or context.obj.offline)))


@models.callback(invoke_without_command=True)
def list_unless_told(context: typer.Context) -> None:
    """List or remove the models in the cache folder."""
    if context.invoked_subcommand is None:
        list_models()


@models.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models in the cache folder, with their sizes."""
    found = cached_models()
    if as_json:
        write_document([{**asdict(one), "path": str(one.path)} for one in found])
        return
    if not found:
        note(f"no model is here yet; `everystep pull` fetches {DEFAULT_MODEL}")
        return
    person = is_terminal(sys.stdout)
    sizes = [filesize.decimal(one.bytes) if person else str(one.bytes) for one in found]
    rows = [(one.name, size, str(one.path)) for one, size in zip(found, sizes, strict=True)]
    print_table(("name", "size", "path"), rows)


@models.command("remove")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `everystep models` shows it.")],
) -> None:
    """Remove a model from the cache folder."""
    removed = remove_model(name)
    write_line(f"removed {removed.name} ({filesize.decimal(removed.bytes)})")
