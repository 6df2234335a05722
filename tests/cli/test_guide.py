"""The outputs in docs/guide/command-line.md are what the commands there write."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.running import Caller
from tests.reading import ROOT

GUIDE = ROOT / "docs" / "guide" / "command-line.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
TIME = re.compile(r'("\w+_seconds": )[\d.]+')
SPENT = re.compile(r"[\d.]+(?= s[;,\n]| a second)")
EXECUTOR = re.compile(r'("executor": ")[^"]+')


class Example(NamedTuple):
    """A command of the guide and the output that is shown under it."""

    command: str
    shown: str


def examples() -> list[Example]:
    """Every command with an output; those without one are not meant to be run here."""
    found = []
    for block in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        for part in block.split("$ ")[1:]:
            command, _, shown = part.partition("\n")
            found += [Example(command, shown)] if shown else []
    return found


def marked(example: Example) -> Any:
    """An example whose output is not an error needs the default model."""
    marks = [] if example.shown.startswith("everystep: ") else [pytest.mark.model]
    return pytest.param(example, marks=marks, id=example.command)


@pytest.mark.parametrize("example", [marked(example) for example in examples()])
def test_the_output_is_the_one_shown(
    example: Example, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, bar, command = example.command.rpartition(" | ")
    given = subprocess.run(["bash", "-c", source], capture_output=True).stdout if bar else b""
    outcome = call(*shlex.split(command)[1:], given=given)
    assert steady(outcome.out + outcome.err) == steady(example.shown)


def steady(shown: str) -> str:
    """The text without what differs from run to run and from machine to machine."""
    return SPENT.sub("-", EXECUTOR.sub(r"\1-", TIME.sub(r"\1-", shown)))


def test_the_guide_has_examples() -> None:
    assert len(examples()) >= 8
