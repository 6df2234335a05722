"""`everystep inspect`: what a record of generations says, and how two of them differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everystep.cli.terminal import is_terminal, note, write_line, write_table
from everystep.inspector import views
from everystep.inspector.paths import choosing
from everystep.records import Record, RecordedRun, read_record

_LEVELS = ("", "on #1d3b53", "on #5c4a00 underline", "on #7a3b00 underline", "on #7d1128 bold")
_ORIGINS = {"given": "italic cyan", "forced": "dim", "drafted": "green"}


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A record, by --record FILE.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="Another one, to compare with.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="N", help="Show this run; the first otherwise.")
    ] = None,
    sequence: Annotated[
        int, typer.Option("--sequence", metavar="N", min=0, help="Show this sequence of the run.")
    ] = 0,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="Show one step: its candidates, by stage."),
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show hypotheses and forks as a tree.")
    ] = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=0, help="Lines of the table of steps.")
    ] = 40,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="PAGE", help="Write a page that opens alone.")
    ] = None,
) -> None:
    """Show every step of a recorded generation: what was chosen, from what, and why it stopped."""
    record = read_record(file)
    if other is not None:
        for line in views.comparison(record, read_record(other), sequence):
            write_line(line)
        return
    if export is not None:
        _export(record, file, export)
        return
    chosen = _run(record, run)
    if step is not None:
        _show_step(record, chosen, step)
    elif tree:
        _show_trees(record, chosen)
    else:
        _show_run(record, chosen, sequence, rows)


def _export(record: Record, file: Path, target: Path) -> None:
    from everystep.inspector.page import write_page

    write_page(record, target, title=file.name)
    note(f"wrote {target}, which holds the prompts and texts of the record")


def _run(record: Record, name: str | None) -> RecordedRun:
    if not record.runs:
        raise typer.BadParameter("the record holds no run yet")
    if name is None:
        return next(iter(record.runs.values()))
    if name not in record.runs:
        names = ", ".join(map(views.marked, list(record.runs)[:20]))
        raise typer.BadParameter(f"there is no run {name!r}; there are {names}")
    return record.runs[name]


def _show_run(record: Record, run: RecordedRun, sequence: int, rows: int) -> None:
    write_table(("what", "here"), views.heading(record, run))
    if len(record.runs) > 1:
        names = ", ".join(map(views.marked, list(record.runs)[:20]))
        write_line(f"\nruns: {names}; show another with --run")
    if sequence not in run.tokens and run.tokens:
        known = ", ".join(map(str, sorted(run.tokens)))
        raise typer.BadParameter(f"there is no sequence {sequence}; there are {known}")
    tokens = views.tokens_of(record, run, sequence)
    write_line()
    _show_text(tokens)
    write_line()
    for name, strip, span in views.series(tokens):
        write_line(f"{name:14} {strip}  {span}")
    for line in views.ends(record, run):
        write_line(line)
    head, lines = views.steps(record, run)
    write_line()
    write_table(head, lines[:rows])
    if len(lines) > rows:
        write_line(f"{len(lines) - rows} more; --rows {len(lines)} shows them")


def _show_text(tokens: list[views.Token]) -> None:
    """Write the text: for a person every token coloured and underlined by its surprise."""
    if not is_terminal(typer.get_text_stream("stdout")):
        write_line("".join(one.text for one in tokens))
        return
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for one in tokens:
        style = f"{_ORIGINS.get(one.origin, '')} {_LEVELS[views.level(one.surprise)]}".strip()
        text.append(one.text, style=style)
    console = Console(highlight=False)
    console.print(text)
    key = Text("share of the token: ")
    for name, style in zip((">50%", ">10%", ">1%", ">0.1%", "less"), _LEVELS, strict=True):
        key.append(name, style=style)
        key.append(" ")
    for name, style in _ORIGINS.items():
        key.append(name, style=style)
        key.append(" ")
    console.print(key)


def _show_step(record: Record, run: RecordedRun, step: int) -> None:
    steps = choosing(run)
    if step >= len(steps):
        raise typer.BadParameter(f"there is no step {step}; the run has {len(steps)}")
    one = steps[step]
    for row in one.rows:
        for line in views.about_choice(record, row):
            write_line(line)
        write_table(*views.candidates(record, row))
        write_line()
    for draft in one.drafts:
        text = "".join(views.spelled(record, id) for id in draft.ids)
        write_line(f"drafted after sequence {draft.of}: {text}; the first {draft.right} were right")
    for fed in one.fed:
        write_line(f"sequence {fed.of} fed {fed.count} positions; {fed.start} came from a cache")
    spent = ", ".join(f"{views.marked(n)} {s * 1e3:.2f} ms" for n, s in one.seconds.items())
    write_line(f"{spent}; {one.beside} other requests in the step")


def _show_trees(record: Record, run: RecordedRun) -> None:
    for line in views.tree(record, run):
        write_line(line)
    for fork in record.runs.values():
        if fork.parent is not None and fork.parent[0] == run.name:
            write_line(f"run {views.marked(fork.name)} goes on from token {fork.parent[1]}:")
            for line in views.tree(record, fork)[1:]:
                write_line(f"  {line}")
