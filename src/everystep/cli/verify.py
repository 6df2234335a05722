"""`everystep verify`: whether a model computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import everystep as es
from everystep.cli import command_options as o
from everystep.cli.adapters import VerifiedAdapter, one_adapter
from everystep.cli.loading import fetch
from everystep.cli.models import AsJson
from everystep.cli.terminal import note, write_report, write_table
from everystep.cli.user_input import read_text
from everystep.files.atomic import require_writable, write_atomic
from everystep.files.sources import DEFAULT_MODEL


def verify(
    context: typer.Context,
    model: o.ModelArgument = DEFAULT_MODEL,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Compare what follows FILE's text."),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Greedy tokens to compare.")
    ] = 32,
    adapter: VerifiedAdapter = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the differences as SVG.")
    ] = None,
    as_json: AsJson = False,
    offline: o.Offline = False,
) -> None:
    """Compare MODEL with transformers: every logit of a text, and greedy tokens.

    Needs everystep[transformers]. The exit code is 1 if MODEL differs by more than the order of
    sums; where weights are rounded, that is judged in float32, and the rounding is shown beside it.
    """
    asked = one_adapter(
        adapter,
        "one is compared as a whole, with PEFT's",
        "Compare each alone; a mix as a model of its own, which "
        "save_pretrained(folder, adapters=[...]) writes",
    )
    folder = None if asked is None else asked.folder
    if picture is not None:
        require_writable(picture)
    local = fetch(model, offline or context.obj)
    said = None if text is None else read_text(text)
    found = es.verify(local, text=said, tokens=tokens, adapter=folder, offline=True)
    if picture is not None:
        write_atomic(picture, found.picture().encode())
    rows = [one.summary() for one in found.comparisons]
    if as_json:
        named = [{key.replace(" ", "_"): value for key, value in row.items()} for row in rows]
        write_report(
            {
                "model": model,
                "adapter": None if folder is None else str(folder),
                "transformers": found.transformers,
                "holds": found.holds,
                "forms": named,
            }
        )
    else:
        shown = [[_cell(value) for value in row.values()] for row in rows]
        write_table(list(rows[0]), shown)
    if not found.holds:
        note(f"{model} differs from transformers {found.transformers}")
        raise typer.Exit(1)


def _cell(value: object) -> str:
    return f"{value:.2e}" if isinstance(value, float) else str(value)
