"""The command line as a whole: its commands, and what may stand before their names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from everystep._version import __version__
from everystep.cli.bench import bench
from everystep.cli.chat import chat
from everystep.cli.command_options import Offline
from everystep.cli.completion import completion
from everystep.cli.doctor import doctor
from everystep.cli.failures import exit_code_of
from everystep.cli.generate import generate
from everystep.cli.info import info
from everystep.cli.inspect import inspect
from everystep.cli.models import models, pull, quantize
from everystep.cli.perplexity import perplexity
from everystep.cli.run_batch import run_batch
from everystep.cli.serve import serve
from everystep.cli.terminal import require_streams, tolerate_narrow_encodings, write_line
from everystep.cli.train import train
from everystep.cli.transcribe import transcribe
from everystep.cli.verify import verify

app = typer.Typer(
    name="everystep",
    add_completion=False,  # it would write into files of the user's; see `completion`
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command()(generate)
app.command()(chat)
app.command()(transcribe)
app.command()(serve)
app.command()(run_batch)
app.command()(train)
app.command()(pull)
app.add_typer(models, name="models")
app.command()(inspect)
app.command()(info)
app.command()(doctor)
app.command()(bench)
app.command()(quantize)
app.command()(perplexity)
app.command()(verify)
app.add_typer(completion, name="completion")


def _show_version(wanted: bool) -> None:
    if wanted:
        write_line(f"everystep {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def everystep(
    context: typer.Context,
    offline: Offline = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Text generation you can see, steer and trust at every step."""
    context.obj = offline  # what stands before the name of a command holds for it
    # With rich installed `get_help` prints, and returns nothing that could be printed.
    if context.invoked_subcommand is None and (text := context.get_help()):
        write_line(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0: done. 1: something failed. 2: the command line is wrong. 130: Ctrl-C. 141: nothing reads the
    output any more. Without `arguments` they are the program's own.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> None:
        require_streams()
        command = typer.main.get_command(app)
        # Not `app()`: it would print errors, and end the process, in its own way.
        with command.make_context("everystep", given) as context:
            command.invoke(context)

    tolerate_narrow_encodings()
    return exit_code_of(run)
