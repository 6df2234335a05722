"""What is answered without a model: help and version, without importing what runs one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from everystep import __version__
from everystep.config.named import NAMED
from tests.cli.running import Caller, everystep, run
from tests.reading import ROOT

COMMANDS = ("generate", "chat", "pull", "models", "info")


def test_the_version_is_shown(call: Caller) -> None:
    assert call("--version") == (0, f"everystep {__version__}\n", "")


def test_the_module_is_the_command() -> None:
    assert run(everystep("--version")) == (0, f"everystep {__version__}\n", "")


@pytest.mark.parametrize("line", [[], ["--help"], ["-h"]])
def test_help_names_every_command(call: Caller, line: list[str]) -> None:
    outcome = call(*line)
    assert outcome.code == 0
    assert [name for name in COMMANDS if name not in outcome.out] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(call: Caller, name: str) -> None:
    outcome = call(name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"everystep {name}" in outcome.out


def test_help_and_guide_name_every_strategy(call: Caller) -> None:
    shown = call("generate", "--help").out
    guide = (ROOT / "docs" / "guide" / "command-line.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.splitlines() if line.startswith("| `--strategy NAME` |")]
    assert [name for name in NAMED if not re.search(rf"\b{name}\b", shown)] == []
    assert [name for name in NAMED if f"`{name}`" not in line] == []


HEAVY = {"torch", "numpy", "tokenizers", "safetensors", "jinja2"}


@pytest.mark.parametrize("line", [["--version"], ["--help"], ["generate", "--help"], ["models"]])
def test_what_runs_a_model_is_imported_only_to_run_one(line: list[str]) -> None:
    code = (
        f"import sys; from everystep.cli import main; main({line}); "
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
