"""`everystep run-batch`: the lines of a batch file, answered without a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import command_options as o
from everystep.cli.adapters import ServedAdapters, named_adapters
from everystep.cli.serve import (
    Named,
    RayAddress,
    Replicas,
    Steering,
    pairs,
    require_replicas,
    require_server,
)
from everystep.cli.terminal import is_terminal, note


def run_batch(
    context: typer.Context,
    lines: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="The batch file, in the form of OpenAI's.")
    ],
    source: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A name, a folder, a .gguf file or a hub id."),
    ] = None,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT.jsonl", help="Where a row is written for each line."
        ),
    ],
    model: Named = None,
    adapter: ServedAdapters = None,
    steer: Steering = None,
    max_rows: Annotated[int | None, typer.Option(metavar="N", min=1, help="Rows at once.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of the engine.")] = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    offline: o.Offline = False,
    replicas: Replicas = None,
    ray_address: RayAddress = None,
) -> None:
    """Answer every line of a batch file, as a server answers requests.

    A line that cannot be answered has a row that says why. If OUT.jsonl has rows already, the work
    goes on after them, so a command that was killed is given again.
    """
    said: dict[str, Any] = {
        "model": source,
        "models": pairs(model, "--model"),
        "adapters": named_adapters(adapter),
        "steer": pairs(steer, "--steer"),
        "max_rows": max_rows,
        "threads": threads,
        "quantize": None if quantize is None else quantize.value,
        "cache_dtype": None if cache_dtype is None else cache_dtype.value,
        "offline": offline or context.obj or None,
        "replicas": replicas,
        "ray_address": ray_address,
    }
    require_server("everystep run-batch")
    require_replicas(replicas, ray_address)
    from everystep.server.batch_lines import BatchProgress
    from everystep.server.offline import run_batch as run
    from everystep.server.settings import read_settings

    given = {name: value for name, value in said.items() if value not in (None, [], {})}
    shows = is_terminal(sys.stderr)

    def told(so_far: BatchProgress, count: int) -> None:
        if shows and (so_far.rows == count or so_far.rows % max(1, count // 20) == 0):
            note(f"{so_far.rows} of {count} lines")

    settings = read_settings(None, given)
    settings.require_possible()
    if replicas is None:
        done = asyncio.run(run(lines, output, settings, told=told))
    else:
        from everystep.server.ray.batch import run_batch_on_replicas

        done = run_batch_on_replicas(lines, output, settings, replicas=replicas, told=told)
    note(f"{done.rows} lines, {done.failed} of them without an answer")
