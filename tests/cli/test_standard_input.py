"""Standard input: read where it is asked for, joined to a prompt, and never waited for in vain."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everystep.cli import main, user_input
from tests.cli.fakes import Stage
from tests.cli.running import Caller, program, run
from tests.reading import ROOT


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard input is a pipe into which this descriptor writes."""
    read, write = os.pipe()
    with io.TextIOWrapper(os.fdopen(read, "rb"), encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield write


def test_what_a_pipe_says_follows_the_prompt() -> None:
    assert run(program("generate", "Sum up:"), b"one\ntwo\n").out == "Sum up:\n\none\ntwo\n"


def test_it_follows_a_file_and_a_message_too(stage: Stage, call: Caller, tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text("Sum up:\n")
    call("generate", "--file", str(tmp_path / "asked.txt"), given=b"data\n")
    call("chat", "Sum up:", given=b"data\n")
    (text, _), ((message,), _) = stage.streams
    assert text == message["content"] == "Sum up:\n\ndata"


@pytest.mark.parametrize("source", ["<data.txt", "< <(sleep 0.3; echo data)"])
def test_files_and_slow_pipes_are_read(tmp_path: Path, source: str) -> None:
    (tmp_path / "data.txt").write_text("data\n")
    line = f"{shlex.join(program('generate', 'Sum up:'))} {source}"
    surroundings = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, env=surroundings, text=True
    )
    assert done.stdout == "Sum up:\n\ndata\n"


@pytest.mark.parametrize("source", ["</dev/null", "<&-", "< <(true)", "</dev/zero"])
def test_what_says_nothing_changes_nothing(source: str) -> None:
    line = f"{shlex.join(program('generate', 'Why?'))} {source}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Why?\n", "")


def test_a_pipe_that_nobody_writes_to_is_left_out(
    stage: Stage,
    pipe: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(user_input, "PATIENCE", 0.05)
    assert main(["generate", "Why?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Why?\n" and "nothing came through the pipe" in err and "</dev/null" in err
    os.close(pipe)


def test_a_dash_waits_as_long_as_it_takes(
    stage: Stage,
    pipe: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write() -> None:
        time.sleep(0.3)
        os.write(pipe, b"late\n")
        os.close(pipe)

    monkeypatch.setattr(user_input, "PATIENCE", 0.01)
    writer = threading.Thread(target=write)
    writer.start()
    assert main(["generate", "-"]) == 0
    writer.join()
    assert capsys.readouterr().out == "late\n"


@pytest.mark.parametrize("command", [["generate", "-"], ["chat", "-"]])
def test_a_dash_reads_the_pipe(command: list[str]) -> None:
    assert run(program(*command), b"a long\ntext\n").out == "a long\ntext\n"


@pytest.mark.parametrize("command", [["generate"], ["generate", "-"], ["chat", "-"]])
def test_a_closed_standard_input_is_no_prompt(command: list[str]) -> None:
    line = f"{shlex.join(program(*command))} <&-"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no prompt was given" in done.stderr
