"""`everystep pull`, `models` and `quantize`: which models are on this machine.

Only named models are listed and removed. Models of the hub lie in the hub's own cache, which other
programs share.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize

from everystep.cli.command_options import Offline
from everystep.cli.loading import Watched, fetch
from everystep.cli.terminal import is_terminal, note, write_line, write_report, write_table
from everystep.cli.user_input import read_text
from everystep.files.sources import DEFAULT_MODEL, KNOWN_MODELS, cached_models, remove_model

models = typer.Typer(help="List or remove the models in the cache folder.")

WrittenFormat = StrEnum("WrittenFormat", "int8 int4 q8_0 q6_k q5_k_m q4_k_m")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


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
def list_by_default(context: typer.Context, as_json: AsJson = False) -> None:
    """List or remove the models in the cache folder."""
    if context.invoked_subcommand is None:
        list_models(as_json)
    elif as_json:
        raise typer.BadParameter(f"--json goes after {context.invoked_subcommand}")


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


@models.command("known")
def list_known(as_json: AsJson = False) -> None:
    """List the models that have a name here, with their sizes and licences, also those that are not
    in the cache folder."""
    here = {one.name for one in cached_models()}
    if as_json:
        write_report(
            [
                {
                    "name": name,
                    "bytes": one.nbytes,
                    "sha256": one.sha256,
                    "licence": one.licence,
                    "cached": name in here,
                }
                for name, one in KNOWN_MODELS.items()
            ]
        )
        return
    size = filesize.decimal if is_terminal(sys.stdout) else str
    rows = [
        (name, size(one.nbytes), "yes" if name in here else "no", one.licence)
        for name, one in KNOWN_MODELS.items()
    ]
    write_table(("name", "size", "cached", "licence"), rows)


@models.command("remove")
def remove(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name that `everystep models` lists.")
    ],
) -> None:
    """Remove a model from the cache folder."""
    removed = remove_model(name)
    write_line(f"removed {removed.name} ({filesize.decimal(removed.bytes)})")


def quantize(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A name, a folder, a .gguf file or a hub id.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder, or the .gguf file, to write.")
    ],
    format: Annotated[
        WrittenFormat | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="For a folder int8 or int4; for a file q4_k_m, q5_k_m, q6_k or q8_0. Without it"
            " int8 or q4_k_m.",
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option(
            "--importance",
            metavar="FILE",
            help="A text of the model's kind: rounding errors count by how much it uses them.",
        ),
    ] = None,
    offline: Offline = False,
) -> None:
    """Write SOURCE with its weights in 8, 6, 5 or 4 bits to the new TARGET, and print where it is.

    What is quantised already is refused: rounding it again would ruin it.
    """
    from everystep.api.quantize import quantize as write  # torch is a second of importing

    offline = offline or context.obj
    usual = WrittenFormat.q4_k_m if target.suffix == ".gguf" else WrittenFormat.int8
    text = None if importance is None else read_text(importance)
    with Watched(source) as progress:
        chosen: Any = (format or usual).value
        write(source, target, chosen, importance=text, offline=offline, progress=progress)
    write_line(str(target))
