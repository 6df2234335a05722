"""`everystep doctor`: what is slow, missing or wrong on this machine, and what to do about it.

`everystep info` has the facts; here they are judged, each as ok, as something to know, or as a
problem.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from everystep.cli import command_options as o
from everystep.cli.adapters import CheckedAdapters, checked_adapters
from everystep.cli.loading import fetch, working
from everystep.cli.models import AsJson
from everystep.cli.terminal import is_terminal, write_item, write_report, write_table

if TYPE_CHECKING:
    from everystep.cli.machine_findings import Finding


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A name, a folder, a .gguf file or a hub id."),
    ] = None,
    adapter: CheckedAdapters = None,
    as_json: AsJson = False,
    offline: o.Offline = False,
) -> None:
    """Check this machine, and with MODEL how that runs here, and say what to do.

    With an adapter also what its folder holds, and how MODEL runs it.

    The exit code is 1 if there is a problem.
    """
    # They import torch, which takes a second that other commands do not need.
    from everystep.cli.machine_findings import machine_findings
    from everystep.cli.model_findings import adapter_findings, model_findings
    from everystep.memory import memory_speed

    asked = checked_adapters(adapter)
    with working("measuring the memory"):
        speed = memory_speed(1 << 28)
    found = machine_findings(speed, offline or context.obj)
    loaded = None
    if model is not None:
        loaded, own = model_findings(fetch(model, offline or context.obj), speed)
        found += own
    for one in asked:
        found += adapter_findings(one, loaded)
    if as_json:
        write_report([asdict(one) for one in found])
    else:
        _show(found)
    if any(one.verdict == "problem" for one in found):
        raise typer.Exit(1)


def _show(found: list[Finding]) -> None:
    """Show a line per finding, for a person with what is to be done under it."""
    if not is_terminal(sys.stdout):
        rows = [(one.verdict, one.what, one.found, one.do) for one in found]
        write_table(("verdict", "what", "here", "what to do"), rows)
        return
    for one in found:
        write_item(f"{one.verdict:9}", f"{one.what}: {one.found}")
        if one.do:
            write_item(" " * 9, one.do)
