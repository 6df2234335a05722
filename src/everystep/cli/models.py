"""`everystep pull`, `models` and `quantize`: which models are on this machine.

Only named models are listed and removed. Models of the hub lie in the hub's own cache, which other
programs share.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize

from everystep.cli.loading import Watched, fetch
from everystep.cli.options import Offline, Rounding
from everystep.cli.terminal import is_terminal, note, write_line, write_report, write_table
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
    write_line(str(fetch(model, offline or context.obj)))


@models.callback(invoke_without_command=True)
def list_by_default(context: typer.Context) -> None:
    """List or remove the models in the cache folder."""
    if context.invoked_subcommand is None:
        list_models()


@models.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models in the cache folder, with their sizes."""
    found = cached_models()
    if as_json:
        write_report([{**asdict(one), "path": str(one.path)} for one in found])
        return
    if not found:
        note(f"no model is here yet; `everystep pull` fetches {DEFAULT_MODEL}")
        return
    size = filesize.decimal if is_terminal(sys.stdout) else str
    rows = [(one.name, size(one.bytes), str(one.path)) for one in found]
    write_table(("name", "size", "path"), rows)


@models.command("remove")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `everystep models` shows it.")],
) -> None:
    """Remove a model from the cache folder."""
    removed = remove_model(name)
    write_line(f"removed {removed.name} ({filesize.decimal(removed.bytes)})")


def quantize(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A name, a folder, a .gguf file or a hub id.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write.")],
    format: Annotated[
        Rounding, typer.Option("--format", metavar="FORMAT", help="int8 or int4.")
    ] = Rounding.int8,
    offline: Offline = False,
) -> None:
    """Write SOURCE with its weights in 8 or 4 bits to the new folder TARGET, and print where it is.

    What is quantised already is refused: rounding it again would ruin it.
    """
    from everystep.api.load import write_quantized  # torch is a second of importing

    offline = offline or context.obj
    with Watched(source) as progress:
        rounding: Any = format.value
        write_quantized(source, target, rounding, offline=offline, progress=progress)
    write_line(str(target))
