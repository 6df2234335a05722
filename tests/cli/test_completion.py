"""Completion: which candidates there are, and that each shell's script asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from everystep.cli.app import app
from everystep.cli.completion import SCRIPTS, VALUES, candidates
from everystep.config.named_strategies import NAMED
from everystep.files.hub import cached_repositories
from everystep.files.sources import DEFAULT_MODEL
from tests.cli.running import Caller
from tests.reading import ROOT

TREE = typer.main.get_command(app)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ge", ["generate"]),
        ("models ", ["known", "list", "remove"]),
        ("--offline mod", ["models"]),
        ("completion ", ["bash", "fish", "zsh"]),
        ("generate --do", ["--do-sample"]),
        ("generate Why --no-do", ["--no-do-sample"]),
        ("generate --dtype fl", ["float16", "float32", "float64"]),
        ("generate --dtype = bf", ["bfloat16"]),
        ("generate --dtype =", ["bfloat16", "float16", "float32", "float64"]),
        ("generate --dtype=bf", ["--dtype=bfloat16"]),
        ("generate -m smol", [DEFAULT_MODEL]),
        ("chat --model smol", [DEFAULT_MODEL]),
        ("generate --assistant smol", [DEFAULT_MODEL]),
        ("pull smol", [DEFAULT_MODEL]),
        ("quantize smol", [DEFAULT_MODEL]),
        ("quantize a b --format q4", ["q4_k_m"]),
        ("generate --strategy ", sorted(NAMED)),
        ("generate --quantize ", ["int4", "int8"]),
        ("generate --cache-dtype int", ["int8"]),
        ("generate --file ", []),  # a shell knows files
        ("generate Wh", []),
        ("generate --temperature ", []),
        ("generate --nonsense=a", []),
        ("nonsense ", []),
    ],
)
def test_candidates(line: str, found: list[str]) -> None:
    assert candidates(TREE, line.split(" ")) == found


def test_every_option_of_a_command_is_offered_and_none_that_is_hidden() -> None:
    found = candidates(TREE, ["generate", "--"])
    assert {"--chat", "--max-new-tokens", "--model", "--help", "--offline"} <= set(found)
    assert "words" not in candidates(TREE, ["completion", ""])


def test_every_value_belongs_to_a_parameter() -> None:
    groups = [TREE, *TREE.commands.values()]  # type: ignore[attr-defined]
    commands = [one for group in groups for one in getattr(group, "commands", {}).values()]
    names = {parameter.name for command in commands for parameter in command.params}
    assert set(VALUES) <= names


def test_models_of_the_hubs_cache_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("models--org--name", "datasets--org--other", "models--org--$(touch x)"):
        (tmp_path / name).mkdir()
    assert cached_repositories() == ["org/name"]
    assert candidates(TREE, ["generate", "-m", "org/"]) == ["org/name"]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_is_printed(call: Caller, shell: str) -> None:
    outcome = call("completion", shell)
    assert (outcome.code, outcome.out) == (0, SCRIPTS[shell])


ASKED = {
    "bash": "COMP_WORDS=(everystep chat --dtype fl); COMP_CWORD=3; _everystep\n"
    'printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": "words=(everystep chat --dtype fl); CURRENT=4; _everystep",
    "fish": "complete -C 'everystep chat --dtype fl'",
}
BEFORE = {"zsh": 'compdef() { : }\ncompadd() { print -l -- "${(@P)2}" }'}


@pytest.mark.parametrize(
    "shell", [pytest.param(name, marks=pytest.mark.shell(name)) for name in SCRIPTS]
)
def test_a_shell_gets_the_candidates(tmp_path: Path, shell: str) -> None:
    program = tmp_path / "everystep"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m everystep "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(f"{BEFORE.get(shell, '')}\n{SCRIPTS[shell]}\n{ASKED[shell]}\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    surroundings = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(
        [shell, str(tmp_path / "script")], capture_output=True, text=True, env=surroundings
    )
    assert (done.stdout.split(), done.stderr) == (["float16", "float32", "float64"], "")


def test_completing_imports_no_torch() -> None:
    line = ["completion", "words", "--", "generate", "--model", ""]
    code = (
        f"import sys; from everystep.cli import main; main({line}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False" and DEFAULT_MODEL in done.stdout
