"""What is answered without a model: help and version, without importing what runs one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer
from rich.cells import cell_len

from everystep import __version__
from everystep.cli.app import app
from everystep.cli.command_options import OPTIONS, keyword_of
from everystep.cli.completion import SCRIPTS
from everystep.config.named_strategies import NAMED
from everystep.requests.door import KEYWORDS
from tests.cli.running import Caller, everystep, run
from tests.reading import ROOT

TREE = typer.main.get_command(app)
COMMANDS = (
    *(
        "generate",
        "chat",
        "transcribe",
        "serve",
        "run-batch",
        "train",
        "pull",
        "models",
        "inspect",
        "info",
        "doctor",
        "bench",
        "quantize",
    ),
    *("perplexity", "verify", "completion"),
)
GROUPED = (
    "models known",
    "models list",
    "models remove",
    *(f"completion {shell}" for shell in SCRIPTS),
)


def test_the_version_is_shown(call: Caller) -> None:
    assert call("--version") == (0, f"everystep {__version__}\n", "")


def test_the_module_is_the_command() -> None:
    assert run(everystep("--version")) == (0, f"everystep {__version__}\n", "")


@pytest.mark.parametrize("line", [[], ["--help"], ["-h"]])
def test_help_names_every_command(call: Caller, line: list[str]) -> None:
    outcome = call(*line)
    assert outcome.code == 0
    assert [name for name in COMMANDS if name not in outcome.out] == []


def test_no_command_is_missing_here() -> None:
    groups = {**TREE.commands}  # type: ignore[attr-defined]
    inner = [
        f"{group} {name}"
        for group, command in groups.items()
        for name, one in getattr(command, "commands", {}).items()
        if not one.hidden
    ]
    assert (sorted(groups), sorted(inner)) == (sorted(COMMANDS), sorted(GROUPED))


@pytest.mark.parametrize("name", [*COMMANDS, *GROUPED])
@pytest.mark.parametrize("columns", ["40", "100"])
def test_every_command_has_help(
    call: Caller, name: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    outcome = call(*name.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    words = " ".join(outcome.out.replace("│", " ").split())
    assert f"everystep {name}" in words
    # What a command does is one sentence at least, and no line is longer than the terminal.
    assert re.search(r"[A-Z][^.]+\.", words)
    assert max(map(cell_len, outcome.out.splitlines())) <= int(columns)


def test_every_option_says_what_it_does() -> None:
    commands = [*TREE.commands.values()]  # type: ignore[attr-defined]
    commands += [one for group in commands for one in getattr(group, "commands", {}).values()]
    silent = [
        f"{command.name} {parameter.name}"
        for command in commands
        for parameter in command.params
        if not parameter.help
    ]
    assert silent == []


def test_options_for_keywords_say_what_the_table_says() -> None:
    commands = TREE.commands  # type: ignore[attr-defined]
    found = {one.name: one for name in ("generate", "chat") for one in commands[name].params}
    own = {name for name, option in OPTIONS.items() if option.meaning is not None}
    assert {name for name in found if name in KEYWORDS} <= OPTIONS.keys() <= found.keys()
    kinds = ("strategy", "processor", "hook")
    assert own == {*kinds, *(f"{kind}_option" for kind in kinds)}
    for name in OPTIONS.keys() - own:
        assert found[name].help.startswith(KEYWORDS[keyword_of(name)].line)


def test_help_and_guide_name_every_strategy(call: Caller) -> None:
    shown = call("generate", "--help").out
    guide = (ROOT / "docs" / "guide" / "command-line.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.splitlines() if line.startswith("| `--strategy NAME` |")]
    assert [name for name in NAMED if not re.search(rf"\b{name}\b", shown)] == []
    assert [name for name in NAMED if f"`{name}`" not in line] == []


HEAVY = {"torch", "numpy", "tokenizers", "safetensors", "jinja2"}


LIGHT = [
    *(["--version"], ["--help"], ["models"], ["models", "--json"], ["completion", "bash"]),
    *([name, "--help"] for name in ("generate", "chat", "info", "doctor", "bench")),
]


@pytest.mark.parametrize("line", LIGHT, ids=" ".join)
def test_what_runs_a_model_is_imported_only_to_run_one(line: list[str]) -> None:
    code = (
        f"import sys; from everystep.cli import main; main({line}); "
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
