"""`everystep inspect`: what a record of generations says, how two of them differ, what would have
been, and a run that is driven by hand."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import command_options as o
from everystep.cli.adapters import AdapterOption, SteerOption
from everystep.cli.live_inspection import Loaded, hold, serve_page
from everystep.cli.terminal import is_terminal, note, write_line, write_table
from everystep.errors import MissingExtraError
from everystep.files.sources import DEFAULT_MODEL
from everystep.inspector import views
from everystep.inspector.paths import choosing
from everystep.records import Record, RecordedRun, read_record, redact_record

_LEVELS = ("", "on #1d3b53", "on #5c4a00 underline", "on #7a3b00 underline", "on #7d1128 bold")
_ORIGINS = {"given": "italic cyan", "forced": "dim", "drafted": "green"}
_live = "A run in your hands, or questions to a model"

Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", metavar="TEXT", help="Open a run that is driven by hand.", rich_help_panel=_live
    ),
]
Web = Annotated[
    bool,
    typer.Option(
        "--web", help="Show it as a page that this machine alone can open.", rich_help_panel=_live
    ),
]
Port = Annotated[
    int, typer.Option(metavar="N", min=0, max=65535, help="Of the page.", rich_help_panel=_live)
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:PORT",
        help="Another name by which the page is called. Repeatable.",
        rich_help_panel=_live,
    ),
]
WhatIfs = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="NAME=VALUE",
        help="Go on otherwise: seed=7, temperature=0.5, without=TopK, mask=2:5, adapter=NAME."
        " Repeatable.",
        rich_help_panel=_live,
    ),
]
Why = Annotated[
    str | None,
    typer.Option(
        "--why",
        metavar="TOKEN",
        help="What an id, #RANK or a text in quotes would have needed.",
        rich_help_panel=_live,
    ),
]
At = Annotated[
    int | None,
    typer.Option("--at", metavar="N", min=0, help="From this token on.", rich_help_panel=_live),
]
OfPrompt = Annotated[
    bool,
    typer.Option(
        "--which-prompt", help="Which parts of the prompt mattered.", rich_help_panel=_live
    ),
]
LensOption = Annotated[
    bool,
    typer.Option(
        "--lens", help="What the head makes of each layer's state.", rich_help_panel=_live
    ),
]
AttentionOption = Annotated[
    bool, typer.Option("--attention", help="What each head looked at.", rich_help_panel=_live)
]


@o.takes(*o.OPTIONS)
def inspect(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A record, by --record FILE.")
    ] = None,
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="Another one, to compare with.")
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
        bool, typer.Option("--tree", help="Show hypotheses, forks and drafts as a tree.")
    ] = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=0, help="Lines of the table of steps.")
    ] = 40,
    find: Annotated[
        str | None, typer.Option("--find", metavar="TEXT", help="Show where a text stands.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="TARGET",
            help="Write a page (.html), a series (.csv, .parquet) or a trace (.json).",
        ),
    ] = None,
    redact: Annotated[
        Path | None,
        typer.Option("--redact", metavar="OUT", help="Write it without texts, to hand on."),
    ] = None,
    tui: Annotated[bool, typer.Option("--tui", help="Walk through it with arrow keys.")] = False,
    *,
    prompt: Prompt = None,
    as_message: o.AsMessage = False,
    web: Web = False,
    port: Port = 0,
    allow_host: AllowHost = None,
    what_if: WhatIfs = None,
    why: Why = None,
    at: At = None,
    which_prompt: OfPrompt = False,
    lens: LensOption = False,
    attention: AttentionOption = False,
    model: o.Model = DEFAULT_MODEL,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
    adapter: AdapterOption = None,
    steer_file: SteerOption = None,
    **said: Any,
) -> None:
    """Show every step of a recorded generation: what was chosen, from what, and why it stopped.

    With --prompt, open a run and drive it by hand, in the terminal or on a page.
    """
    how = (dtype, quantize, cache_dtype, device, offline or context.obj)
    loaded = Loaded(model, how, adapter, steer_file)
    _require_sense(context, file=file, prompt=prompt)
    if file is None:
        hold(loaded, str(prompt), said, as_message=as_message, web=(web, port, allow_host))
        return
    if redact is not None:
        redact_record(file, redact)
        note(f"wrote {redact}: ids and numbers without texts; ids of the answer can be spelled")
        return
    record = read_record(file)
    rival = None if other is None else (other.name, read_record(other))
    inner = [name for name, asked in (("lens", lens), ("attention", attention)) if asked]
    lines = _questions(what_if, why, at, which_prompt, inner, sequence)
    if web:
        asked = _was_typed(context, "model") or bool(lines)
        shown = (file.name, record), rival
        serve_page(shown, loaded if asked else None, port, allow_host)
    elif lines:
        loaded.answer(record, file.name, _run(record, run).name, lines)
    elif export is not None:
        _export(record, file, export, rival)
    elif rival is not None:
        for line in views.comparison(record, rival[1], sequence):
            write_line(line)
    elif tui:
        _walk(record, _run(record, run), sequence)
    else:
        chosen = _run(record, run)
        _show(record, chosen, sequence, rows, step=step, tree=tree, find=find)


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


_OF_FILES = ("other", "run", "sequence", "step", "tree", "rows", "find", "export", "redact", "tui")
_OF_LAYERS = ("lens", "attention")
_OF_QUESTIONS = ("what_if", "why", "at", "which_prompt", *_OF_LAYERS)
_OF_PAGES = ("port", "allow_host")
_OF_MODELS = ("dtype", "quantize", "cache_dtype", "device", "adapter", "model")


def _require_sense(context: typer.Context, *, file: Path | None, prompt: str | None) -> None:
    """Refuse options that the rest of the command line gives no effect."""
    if (file is None) == (prompt is None):
        raise typer.BadParameter("give FILE, or --prompt TEXT for a run that is driven by hand")
    typed = {name for name in context.params if _was_typed(context, name)}
    questions = typed & {*_OF_QUESTIONS}
    if prompt is not None:
        wrong, why = typed & {*_OF_FILES, *_OF_QUESTIONS}, "are for records in files"
    else:
        wrong, why = typed & {*o.OPTIONS, "as_message", "steer_file"}, "belong to --prompt"
    if not wrong and not (typed & {"web"}):
        wrong, why = typed & {*_OF_PAGES}, "belong to --web"
    if not wrong and prompt is None and not questions and "web" not in typed:
        wrong, why = typed & {*_OF_MODELS}, "belong to --prompt, --web or a question to the model"
    if not wrong and questions <= {"at", "which_prompt"}:
        wrong, why = questions & {"at"}, "belongs to --what-if, --why, --lens or --attention"
    if not wrong and questions and not questions <= {"at", *_OF_LAYERS}:
        wrong, why = typed & {"sequence"}, "is of --lens and --attention, not of other questions"
    ways = typed & {"web", "tui", "export", "redact", "step", "tree", "find"}
    if not wrong and "redact" in typed and "other" in typed:
        wrong, why = {"other"}, "is compared; a record is redacted alone"
    if not wrong and len(ways | ({"what-if"} if questions else set())) > 1 and questions:
        wrong, why = ways, "and questions are asked one at a time"
    if not wrong and len(ways) > 1:
        wrong, why = ways, "are ways to show it; give one of them"
    if wrong:
        known = {"as_message": "chat", "other": "OTHER", "steer_file": "steer"}
        spelled = sorted(known.get(name, name).replace("_", "-") for name in wrong)
        names = ", ".join(f"--{one}" if one.islower() else one for one in spelled)
        raise typer.BadParameter(f"{names} {why}")


def _questions(
    what_if: list[str] | None,
    why: str | None,
    at: int | None,
    which_prompt: bool,
    inner: list[str],
    sequence: int,
) -> list[str]:
    """Return what is asked, as the lines of a session; `inner`: questions about layers."""
    import shlex

    found = []
    if what_if:
        place = "" if at is None else f" at {at}"
        found.append(f"if {shlex.join(what_if)}{place}")
    if why is not None:
        found.append(f"why {why}" if at is None else f"why {why} {at}")
    found += ["prompt"] if which_prompt else []
    for name in inner:
        if at is None and sequence:
            raise typer.BadParameter(f"--{name} of another sequence than the first needs --at")
        found.append(name if at is None else f"{name} {at} {sequence}")
    return found


def _export(record: Record, file: Path, target: Path, other: tuple[str, Record] | None) -> None:
    from everystep.inspector.exports import export
    from everystep.inspector.page import write_page

    if other is None:
        export(record, target, file.name)
    elif target.suffix.lower() != ".html":
        raise typer.BadParameter("two records are compared on a page, a file that ends in .html")
    else:
        write_page(record, target, file.name, other)
    note(f"wrote {target}, which holds the prompts and texts of the record")


def _walk(record: Record, run: RecordedRun, sequence: int) -> None:
    require_textual()
    from everystep.inspector.walking import walk

    _require_sequence(run, sequence)
    walk(record, run, sequence)


def require_textual() -> None:
    """Raise MissingExtraError where the library of the walk is not installed."""
    try:
        import_module("textual")
    except ImportError as error:
        raise MissingExtraError.of("everystep inspect --tui", "textual", "tui") from error


def _require_sequence(run: RecordedRun, sequence: int) -> None:
    if sequence not in run.tokens and run.tokens:
        known = ", ".join(map(str, sorted(run.tokens)))
        raise typer.BadParameter(f"there is no sequence {sequence}; there are {known}")


def _run(record: Record, name: str | None) -> RecordedRun:
    if not record.runs:
        raise typer.BadParameter("the record holds no run yet")
    if name is None:
        return next(iter(record.runs.values()))
    if name not in record.runs:
        names = ", ".join(map(views.marked, list(record.runs)[:20]))
        raise typer.BadParameter(f"there is no run {name!r}; there are {names}")
    return record.runs[name]


def _show(
    record: Record,
    run: RecordedRun,
    sequence: int,
    rows: int,
    *,
    step: int | None,
    tree: bool,
    find: str | None,
) -> None:
    """Show a run in one of the ways."""
    if step is not None:
        show_step(record, run, step)
    elif tree:
        for line in views.forest(record, run):
            write_line(line)
    elif find is not None:
        _show_places(record, run, sequence, find)
    else:
        _show_run(record, run, sequence, rows)


def _show_places(record: Record, run: RecordedRun, sequence: int, text: str) -> None:
    """Show where a text stands among the tokens, with what is around it."""
    _require_sequence(run, sequence)
    tokens = views.tokens_of(record, run, sequence)
    places = views.places_of(tokens, text)
    for at in places:
        around = "".join(one.text for one in tokens[max(0, at - 8) : at + 9])
        write_line(f"{at}\t{tokens[at].id}\t{around}")
    if not places:
        raise typer.BadParameter(f"{text!r} does not stand in this sequence")


def _show_run(record: Record, run: RecordedRun, sequence: int, rows: int) -> None:
    write_table(("what", "here"), views.heading(record, run))
    if len(record.runs) > 1:
        names = ", ".join(map(views.marked, list(record.runs)[:20]))
        write_line(f"\nruns: {names}; show another with --run")
    _require_sequence(run, sequence)
    tokens = views.tokens_of(record, run, sequence)
    write_line()
    show_text(tokens)
    write_line()
    for name, strip, span in views.series(tokens):
        write_line(f"{name:14} {strip}  {span}")
    for line in [*views.ends(record, run), *views.findings(tokens)]:
        write_line(line)
    head, lines = views.steps(record, run)
    write_line()
    write_table(head, lines[:rows])
    if len(lines) > rows:
        write_line(f"{len(lines) - rows} more; --rows {len(lines)} shows them")


def show_text(tokens: list[views.Token]) -> None:
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


def show_step(record: Record, run: RecordedRun, step: int) -> None:
    """Write one step: its candidates by stage, and what else there was."""
    steps = choosing(run)
    if step >= len(steps):
        raise typer.BadParameter(f"there is no step {step}; the run has {len(steps)}")
    one = steps[step]
    for row in one.rows:
        for line in views.about_choice(record, row):
            write_line(line)
        write_table(*views.candidates(record, row))
        write_line()
    for line in views.unseen_at(record, run, one):
        write_line(line)
    for line in views.about_step(record, one):
        write_line(line)
