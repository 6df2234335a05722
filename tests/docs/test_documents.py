"""Documents do what they say: their Python runs, their commands parse, their links lead somewhere.

The Python blocks of README.md, and those of each page of docs/guide, run in order in one namespace,
as a reader would type them. A page whose blocks load the default model needs it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.reading import ROOT, project_files

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
LOADING = re.compile(r"\bload\(|smollm2", re.I)
ELSEWHERE = ("http://", "https://", "mailto:")


class Block(NamedTuple):
    """A fenced block of a document, and the line its text begins on."""

    language: str
    text: str
    line: int


def documents() -> list[Path]:
    return [path for path in project_files() if path.suffix == ".md"]


def guides() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


def blocks(text: str, language: str) -> list[Block]:
    found = (
        Block(match["language"], match["text"], text[: match.start("text")].count("\n") + 1)
        for match in FENCE.finditer(text)
    )
    return [block for block in found if block.language == language]


def commands(block: Block) -> list[str]:
    """What a reader would type: the lines after a `$` if there are some, else the whole block."""
    prompted = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    return prompted or [block.text]


def links(text: str) -> list[str]:
    """Targets of links and pictures, without those in code."""
    outside = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return [match["target"] or match["image"] for match in LINK.finditer(outside)]


def broken_links(path: Path, text: str) -> list[str]:
    """Links into the project that lead to no file or to no heading of it."""
    return [target for target in links(text) if not leads_somewhere(path, target)]


def leads_somewhere(path: Path, target: str) -> bool:
    if target.startswith(ELSEWHERE):
        return True
    name, _, anchor = target.partition("#")
    file = path.parent / name if name else path
    return file.exists() and (not anchor or anchor in anchors(file.read_text(encoding="utf-8")))


def anchors(text: str) -> set[str]:
    """The names that headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def python_guides() -> list[Any]:
    found = []
    for path in guides():
        code = blocks(path.read_text(encoding="utf-8"), "python")
        loads = any(LOADING.search(block.text) for block in code)
        marks = [pytest.mark.model] if loads else []
        found.append(pytest.param(path, marks=marks, id=path.name))
    return found


def run_python(path: Path, found: list[Block]) -> None:
    """Runs blocks one after another; a failure points at the line of the document."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        tree = ast.parse(block.text, str(path))
        ast.increment_lineno(tree, block.line - 1)
        exec(compile(tree, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", python_guides())
def test_python_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(path.read_text(encoding="utf-8"), "python")
    monkeypatch.chdir(tmp_path)
    run_python(path, found)


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_parse(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8"), "bash"):
        for command in commands(block):
            result = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
            assert result.returncode == 0, f"{path.name}:{block.line}: {result.stderr}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_that_are_named_exist(path: Path) -> None:
    named = set(re.findall(r"(?<![\w/])scripts/(\w+)", path.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / "scripts" / name).is_file()] == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text", ["[a](missing.md)", "![a](missing.png)", "[a](README.md#no-such-heading)", "[a](#none)"]
)
def test_a_broken_link_is_found(text: str) -> None:
    assert len(broken_links(ROOT / "README.md", f"# One\n\n{text}\n")) == 1


@pytest.mark.parametrize("text", ["[a](LICENSE)", "`[a](b)`", "```text\n[a](b)\n```"])
def test_a_good_link_is_let_through(text: str) -> None:
    assert broken_links(ROOT / "README.md", text) == []


def test_blocks_of_a_document_share_a_namespace() -> None:
    text = "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as failure:
        run_python(ROOT / "README.md", blocks(text, "python"))
    assert failure.traceback[-1].lineno == 5


def test_only_prompted_lines_are_commands() -> None:
    assert commands(Block("bash", "$ everystep info\nan answer (\n", 1)) == ["everystep info"]
