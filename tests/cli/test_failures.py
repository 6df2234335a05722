"""Exit codes and what stands on standard error, whatever goes wrong."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import warnings

import pytest

from everystep import errors
from everystep.cli.failures import exit_code_of
from tests.cli.fakes import Stage
from tests.cli.running import LONGEST, Caller, everystep, on_terminal, program, run, surroundings
from tests.reading import ROOT


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (errors.RequestError("wrong."), 2, "wrong."),
        (errors.UnknownArgumentError("wrong."), 2, "wrong."),
        (errors.UnsupportedError("not here."), 1, "not here."),
        (errors.ModelClassError("no model."), 1, "no model."),
        (errors.FormatError("broken."), 1, "broken."),
        (errors.DownloadError("no network."), 1, "no network."),
        (errors.TokenizerError("no text."), 1, "no text."),
        (errors.CapacityError("no room."), 1, "no room."),
        (PermissionError(13, "Permission denied", "a"), 1, "[Errno 13] Permission denied: 'a'."),
        (MemoryError(), 1, "There is not enough memory."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_a_code_and_a_line(
    stage: Stage, call: Caller, error: BaseException, code: int, text: str
) -> None:
    stage.stream_failure = error
    assert call("generate", "a") == (code, "", f"everystep: {text}\n")


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), errors.InvariantError("by zero")])
def test_a_defect_says_how_to_see_more(stage: Stage, call: Caller, error: Exception) -> None:
    stage.load_failure = error
    outcome = call("generate", "a")
    assert outcome.code == 1
    assert outcome.err == (
        f"everystep: Unexpected failure: {type(error).__name__}: by zero.\n"
        "everystep: EVERYSTEP_DEBUG=1 shows where it happened.\n"
    )


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False)])
def test_debugging_shows_the_traceback(
    stage: Stage, call: Caller, monkeypatch: pytest.MonkeyPatch, value: str, shown: bool
) -> None:
    monkeypatch.setenv("EVERYSTEP_DEBUG", value)
    stage.load_failure = errors.FormatError("broken.")
    outcome = call("generate", "a")
    assert outcome.code == 1
    assert ("Traceback" in outcome.err) is shown


def test_a_text_of_several_lines_is_one_line(stage: Stage, call: Caller) -> None:
    stage.load_failure = OSError("broken\n  here\tand \x1b[31mthere.")
    assert call("generate", "a").err == "everystep: broken here and [31mthere.\n"


def test_a_warning_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def warn() -> None:
        warnings.simplefilter("always")
        warnings.warn("both are set", stacklevel=1)

    assert exit_code_of(warn) == 0
    assert capsys.readouterr().err == "everystep: warning: both are set\n"


def test_a_reader_who_leaves_is_no_complaint() -> None:
    command = program("generate", "one two three", delay=0.2)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=surroundings(), **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read1(1)
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (141, b"")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_reader_who_never_came_is_no_complaint(option: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        everystep(option), stdout=write, stderr=subprocess.PIPE, env=surroundings(), check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupt_has_its_code() -> None:
    command = program("generate", "one two three four five six", delay=0.3)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=surroundings(), **pipes) as process:
        assert process.stdout is not None
        process.stdout.read1(1)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=LONGEST)
    assert (process.returncode, complaint) == (130, b"everystep: interrupted\n")


def test_an_interrupted_answer_keeps_its_line() -> None:
    with on_terminal(program("generate", "one two three four five six", delay=0.3)) as terminal:
        terminal.until("one")
        terminal.type("\x03")
        assert terminal.end() == 130
    assert terminal.shown.endswith("\r\neverystep: interrupted\r\n")


def test_a_narrow_encoding_loses_characters_and_nothing_else() -> None:
    outcome = run(program("generate", "größer"), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (outcome.code, outcome.out) == (0, "gr??er\n")


def test_json_loses_nothing_in_a_narrow_encoding() -> None:
    outcome = run(program("generate", "ß", "--json"), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert r'"text": "\u00df"' in outcome.out


def test_the_program_ends_with_the_code() -> None:
    assert run(everystep("nonsense")).code == 2


@pytest.mark.skipif(os.name != "posix", reason="a shell of a POSIX system")
@pytest.mark.parametrize("command", [["generate", "a"], ["models"], ["--help"]])
def test_a_closed_standard_output_is_explained(command: list[str]) -> None:
    line = shlex.join(program(*command))
    done = subprocess.run(f"{line} >&-", shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "standard output is closed" in done.stderr
    both = subprocess.run(f"{line} >&- 2>&-", shell=True, cwd=ROOT, capture_output=True)
    assert both.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("seed", [[], ["--seed", "1"]])  # beside greedy decoding: a warning
def test_notes_that_find_no_room_end_no_work(seed: list[str]) -> None:
    line = shlex.join(program("generate", "a", *seed))
    done = subprocess.run(f"{line} 2>/dev/full", shell=True, cwd=ROOT, stdout=subprocess.PIPE)
    wanted = run(program("generate", "a", *seed))
    assert bool(seed) == bool(wanted.err) and done.stdout.decode() == wanted.out
    assert done.returncode == wanted.code == 0


def test_a_path_is_shown_as_it_is() -> None:
    with on_terminal(everystep("pull", "./[/x]/[bold]a")) as terminal:
        assert terminal.end() == 1
    assert "[/x]/[bold]a" in terminal.shown and "Unexpected" not in terminal.shown


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_name_cannot_command_the_terminal(debug: str) -> None:
    name = "./a\x1b[31m\u202eb\x9b2J\x07"
    for command in (["pull", name], ["generate", "--file", name]):
        with on_terminal(program(*command), EVERYSTEP_DEBUG=debug) as terminal:
            assert terminal.end() == 1
        assert {*"\u202e\x9b\x07"}.isdisjoint(terminal.shown) and "\x1b[31m" not in terminal.shown
    with on_terminal(program("generate", "an answer", "-m", name)) as terminal:
        assert terminal.end() == 0  # the name was shown while it was loaded
    assert {*"\u202e\x9b\x07"}.isdisjoint(terminal.shown) and "\x1b[31m" not in terminal.shown
