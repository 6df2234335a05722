"""`everystep quantize`: a model of floats in, a folder with its weights in 8 or 4 bits out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everystep.cli.loading import Watched
from everystep.cli.options import Offline, Rounding
from everystep.cli.terminal import write_line


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

    with Watched(source) as progress:
        written = write_quantized(
            source,
            target,
            format.value,
            offline=offline or context.obj.offline,
            progress=progress,
        )
    write_line(str(written))
