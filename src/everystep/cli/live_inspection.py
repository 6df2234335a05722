"""`everystep inspect` with a model: a run in hands, a page of it, and questions about a record."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everystep.cli import command_options as o
from everystep.cli.adapters import asked_adapters, asked_steering, with_adapters
from everystep.cli.loading import load
from everystep.cli.questions import CommandPrompt
from everystep.cli.terminal import is_terminal, note, write_line, write_table
from everystep.errors import EverystepError, MissingExtraError
from everystep.files.atomic import require_writable
from everystep.inspector import views
from everystep.inspector.paths import rows_along
from everystep.records import Record

if TYPE_CHECKING:  # these import torch
    from everystep.inspector.sessions import InspectorSession, LiveSession

_LIBRARIES = ("starlette", "uvicorn")
_SHOWN = 5
"""Candidates that are shown after a step."""


@dataclass(frozen=True)
class Loaded:
    """A model to be loaded once something asks for it: its name, how, its adapters and steering."""

    source: str
    how: tuple[Any, ...]
    adapters: list[str] | None
    steer: Path | None = None

    def load(self) -> tuple[Any, Any, dict[str, Any]]:
        """Return the model, its tokenizer and the arguments of a call that runs with adapters."""
        asked, steering = asked_adapters(self.adapters), asked_steering(self.steer)
        model, tokenizer = load(self.source, *self.how)
        return model, tokenizer, {**with_adapters(model, asked), **steering}

    def answer(self, record: Record, title: str, run: str, lines: Sequence[str]) -> None:
        """Answer questions about a record."""
        from everystep.inspector.sessions import Reading

        model, tokenizer, _ = self.load()
        session = Reading((title, record), None, model, tokenizer)
        for line in lines:
            for said in session.obey(line, run).said:
                write_line(said)


def serve_page(
    shown: tuple[tuple[str, Record], tuple[str, Record] | None],
    loaded: Loaded | None,
    port: int,
    hosts: Sequence[str] | None,
) -> None:
    """Serve records as a page until Ctrl-C."""
    _require_libraries()
    from everystep.inspector.sessions import Reading

    model, tokenizer = (None, None) if loaded is None else loaded.load()[:2]
    _serve(Reading(*shown, model, tokenizer), port, hosts)


def hold(
    loaded: Loaded,
    text: str,
    said: Mapping[str, Any],
    *,
    as_message: bool,
    web: tuple[bool, int, Sequence[str] | None],
) -> None:
    """Open a run of a prompt, and let it be driven by lines or on a page."""
    if web[0]:
        _require_libraries()
    options = dict(said)
    file = options.pop("record")
    if file is not None:
        require_writable(file)
    decoding = {**o.decoding(options), **o.following(options)}
    model, tokenizer, mix = loaded.load()
    decoding |= o.forced_words(options["force_words"], tokenizer)
    if (assistant := decoding.pop("assistant_model", None)) is not None:
        helper, words = load(assistant, *loaded.how)
        decoding |= {"assistant_model": helper, "assistant_tokenizer": words}
    asked = CommandPrompt(text, as_message, None, {})
    with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
        from everystep.inspector.sessions import LiveSession

        own = Path(folder) / "live.jsonl" if file is None else file
        with o.spelled_as_typed(o.typed_fields(options)):
            session = LiveSession.opened(
                *(model, tokenizer, asked.for_model(model, tokenizer), own, own.name),
                **{**decoding, **mix, "seed": options["seed"]},
            )
        if web[0]:
            _serve(session, *web[1:])
        else:
            _talk(session)


def _require_libraries() -> None:
    """Raise MissingExtraError where a library of the page's server is not installed."""
    for library in _LIBRARIES:
        try:
            import_module(library)
        except ImportError as error:
            raise MissingExtraError.of("everystep inspect --web", library, "server") from error


def _serve(session: InspectorSession, port: int, hosts: Sequence[str] | None) -> None:
    """Serve a session until Ctrl-C."""
    from everystep.inspector.page_server import PageServer

    with PageServer(session, port, hosts or ()) as page:
        write_line(page.url)
        note("the address is for you alone; Ctrl-C ends the page")
        page.wait()


# --- lines ----------------------------------------------------------------------------------------

_OWN = {
    "show [AT]": "the candidates of a token, by stage",
    "text": "the text, coloured by surprise",
    "tree": "hypotheses, forks and drafts",
    "quit": "leave",
}


def _talk(session: LiveSession) -> None:
    """Do what is typed, or what a pipe says, until it ends."""
    typed = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    if typed:
        note("help shows the verbs; step, then pick #1 goes on with the next best")
    for line in _lines(typed):
        if line in ("quit", "exit"):
            return
        try:
            _do(session, line)
        except EverystepError as error:
            if not typed:  # the first failure ends a script
                raise
            note(str(error))


def _lines(typed: bool) -> Iterator[str]:
    """Yield the lines that are said."""
    while True:
        try:
            line = input("inspect> ") if typed else sys.stdin.readline()
        except EOFError:
            return
        if not typed and not line:
            return
        if line.strip():
            yield line.strip()


def _do(session: LiveSession, line: str) -> None:
    """Do one line, and show what came of it."""
    name, _, rest = line.partition(" ")
    record, run = session.record(), session.run_name()
    own = record.runs[run]
    if name == "show":
        _show_choice(record, session, rest.strip())
    elif name == "text":
        write_line("".join(one.text for one in views.tokens_of(record, own)))
    elif name == "tree":
        for shown in views.forest(record, own):
            write_line(shown)
    else:
        with _halting(session):
            spoken = session.obey(line)
        for shown in spoken.said:
            write_line(shown)
        if name == "help":
            for usage, what in _OWN.items():
                write_line(f"{usage}  {what}")
        if spoken.changed:
            _show_standing(session)


def _show_standing(session: LiveSession) -> None:
    """Show the text, and what its last token was chosen from."""
    record = session.record()
    run = record.runs[session.run_name()]
    tokens = views.tokens_of(record, run)
    write_line("".join(one.text for one in tokens[-200:]))
    if tokens and tokens[-1].row is not None:
        head, lines = views.candidates(record, tokens[-1].row)
        write_table(head, lines[:_SHOWN])


def _show_choice(record: Record, session: LiveSession, rest: str) -> None:
    """Show the candidates of a token, of the last one where none is said."""
    rows = rows_along(record.runs[session.run_name()])
    at = int(rest) if rest.isdecimal() else len(rows) - 1
    row = rows[at] if 0 <= at < len(rows) else None
    if row is None:
        write_line("there is no choice")
        return
    for line in views.about_choice(record, row):
        write_line(line)
    write_table(*views.candidates(record, row))


@contextmanager
def _halting(session: InspectorSession) -> Iterator[None]:
    """Let Ctrl-C end what is under way after its step, and a second one raise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def halt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        session.halt()

    before = signal.signal(signal.SIGINT, halt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
