"""Documents do what they say: their Python runs, their commands parse, their links lead somewhere.

The Python blocks of README.md, and those of each page of docs/guide, run in order in one namespace,
as a reader would type them. A page whose blocks load the default model needs it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import OTHERS
from tests.reading import ROOT, project_files

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
LOADING = re.compile(r"\bload\(|smollm2", re.I)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
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
        if path.stem == "why-it-went-wrong":
            continue  # tests/inspector/test_went_wrong.py runs it, and looks at what it has made
        code = blocks(path.read_text(encoding="utf-8"), "python")
        loads = any(LOADING.search(block.text) for block in code)
        marks = [pytest.mark.model] if loads else []
        marks += [pytest.mark.others] * (path.stem == "with-other-programs")
        found.append(pytest.param(path, marks=marks, id=path.name))
    return found


def run_python(path: Path, found: list[Block]) -> dict[str, Any]:
    """Runs blocks one after another, and gives what they named; a failure points at the line of the
    document."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        tree = ast.parse(block.text, str(path))
        ast.increment_lineno(tree, block.line - 1)
        exec(compile(tree, str(path), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("path", python_guides())
def test_python_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(path.read_text(encoding="utf-8"), "python")
    monkeypatch.chdir(tmp_path)
    run_python(path, found)


def test_other_programs_are_those_that_their_page_imports() -> None:
    page = ROOT / "docs" / "guide" / "with-other-programs.md"
    code = "".join(block.text for block in blocks(page.read_text(encoding="utf-8"), "python"))
    compile(code, str(page), "exec")  # where the programs are missing it does not run
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.M))
    assert imported - {"everystep", "transformers", "typing", "langchain_core"} == set(OTHERS)


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_code_fits_its_column(path: Path) -> None:
    """docs/images/site.css makes the column this wide."""
    text = path.read_text(encoding="utf-8")
    typed = [one for block in blocks(text, "bash") for one in commands(block)]
    typed += [block.text for block in blocks(text, "python")]
    assert [line for one in typed for line in one.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("path", guides(), ids=lambda path: path.name)
def test_an_installation_takes_the_build_for_cpus_first(path: Path) -> None:
    """Without it pip takes CUDA's build, several GB."""
    for block in blocks(path.read_text(encoding="utf-8"), "bash"):
        lines = [line for line in block.text.splitlines() if line.startswith("pip install")]
        if any('"' + ".[cli" in line for line in lines):
            assert lines[0].startswith(f"pip install torch --index-url {CPU_INDEX} ")


def test_the_container_has_what_it_copies_and_the_torch_of_the_tests() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    environment = (ROOT / "scripts" / "environment").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch_version=(\S+)", environment, re.M)
    assert f"torch=={torch}" in text and f"TORCH_INDEX={CPU_INDEX}\n" in text
    copied = [name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
              for name in line.split()]  # fmt: skip
    assert {"pyproject.toml", "setup.py", "src"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in kept if line.startswith("!")} == set(copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert '".[$EXTRAS]"' in text
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", text, re.M)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert {project["readme"], *project["license-files"]} <= set(copied)


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
