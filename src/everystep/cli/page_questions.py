"""`--page`, `--lines` and `--reasoning`: a question about a page, for a document model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

_page = partial(typer.Option, rich_help_panel="A question about a page, for a document model")

Page = Annotated[
    Path | None, _page("--page", metavar="FILE", help="Ask about the page in this picture.")
]
Lines = Annotated[
    Path | None,
    _page("--lines", metavar="FILE", help="The lines of the page with their boxes, as JSON."),
]
Reasoning = Annotated[bool, _page("--reasoning", help="Have the model think before it answers.")]


def asked_page(
    page: Path | None, lines: Path | None, reasoning: bool, system: str | None
) -> dict[str, Any]:
    """Return arguments of `layout_prompt()`, with what the files hold.

    There are none where no page is asked about.
    """
    if page is None and lines is None:
        if reasoning:
            raise typer.BadParameter("--reasoning needs --page and --lines")
        return {}
    if page is None or lines is None:
        there, missing = ("--page", "--lines") if lines is None else ("--lines", "--page")
        raise typer.BadParameter(f"{there} was given without {missing}; give both of them")
    from everystep.files.picture_files import read_picture
    from everystep.models.layout.pages import read_page  # imports torch, as no other command needs

    said = {} if system is None else {"system": system}
    read = {"image": read_picture(page), "lines": read_page(lines)}
    return {**read, "reasoning": reasoning, **said}
