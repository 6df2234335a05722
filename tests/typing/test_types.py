"""Type checkers see what calls take and return: scripts pass, mistakes do not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.reading import ROOT

FOLDER = Path(__file__).parent
WRONG = re.compile(r"# wrong: (\w+)$", re.M)
MISTAKES = {
    match[1]: (FOLDER / "mistakes.py").read_text()[: match.start()].count("\n") + 1
    for match in WRONG.finditer((FOLDER / "mistakes.py").read_text())
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Counter[tuple[str, int]]:
    """How many errors mypy finds in which line of which file, by one run over both, which takes
    most of a minute."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-error-summary"]
    cache = f"--cache-dir={tmp_path_factory.mktemp('mypy')}"
    files = [str(FOLDER / "examples.py"), str(FOLDER / "mistakes.py")]
    done = subprocess.run([*command, cache, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^([^:\n]+):(\d+): error:", done.stdout, re.M)
    return Counter((Path(name).name, int(line)) for name, line in found)


@pytest.mark.slow
def test_scripts_pass(errors: Counter[tuple[str, int]]) -> None:
    assert {line for name, line in errors if name == "examples.py"} == set()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(errors: Counter[tuple[str, int]], mistake: str) -> None:
    assert errors["mistakes.py", MISTAKES[mistake]] >= 1


@pytest.mark.slow
def test_nothing_else_is_wrong(errors: Counter[tuple[str, int]]) -> None:
    known = {("mistakes.py", line) for line in MISTAKES.values()}
    assert {*errors} - known == set()


def test_there_are_mistakes_of_many_kinds() -> None:
    assert len(MISTAKES) == len(WRONG.findall((FOLDER / "mistakes.py").read_text())) > 10
