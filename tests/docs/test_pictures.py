"""The pictures of docs/images: each is drawn by the script there, and shown by a document."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import pytest

from tests.inspector.pictures import VIEWS
from tests.reading import ROOT

IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script that draws, as a module."""
    found = importlib.util.spec_from_file_location("record", IMAGES / "record.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["record"] = module
    found.loader.exec_module(module)
    return module


def test_every_picture_is_drawn_by_the_script(script: Any) -> None:
    assert {path.stem for path in IMAGES.glob("*.svg")} == set(script.PICTURES)


def test_every_picture_is_shown(script: Any) -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs" / "guide").glob("*.md")]
    shown = {
        name
        for path in texts
        for name in re.findall(r"images/(\w+)\.svg\)", path.read_text(encoding="utf-8"))
    }
    assert shown == set(script.PICTURES)


def test_a_picture_shows_its_command_and_no_folder_of_the_machine(script: Any) -> None:
    for name, picture in script.PICTURES.items():
        text = (IMAGES / f"{name}.svg").read_text(encoding="utf-8").replace("&#160;", " ")
        assert picture.shown.partition('"')[0] in text
        assert re.findall(r"/(?:home|root|tmp|work)/", text) == []
        assert re.findall(r"https?://(?!www\.w3\.org|www\.textualize\.io)", text) == []


def test_the_demo_is_the_command_that_is_drawn(script: Any) -> None:
    last = (ROOT / "scripts" / "demo").read_text(encoding="utf-8").splitlines()[-1]
    command, question = script.PICTURES["demo"].arguments
    assert f'bin/everystep" {command} ' in last and question in last


def test_the_picture_of_a_step_is_of_the_program_beside_it(script: Any) -> None:
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 0 < front.index(script.PICTURES["step"].code) < front.index("(docs/images/step.svg)")
    drawn = (IMAGES / "step.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert "position 0: " in drawn and "drawn: " in drawn and re.search(r"\*  \d+\.\d\d% ", drawn)


def test_code_is_recorded_as_a_program(script: Any) -> None:
    assert script.recorded(script.Picture("python a.py", code="print(6 * 7)")) == "42\n"


def test_a_command_is_recorded_with_what_is_typed(script: Any) -> None:
    shown = script.recorded(script.Picture("", ("completion", "bash")))
    assert "complete -o bashdefault" in shown
    with pytest.raises(SystemExit, match="nonsense"):
        script.recorded(script.Picture("", ("nonsense",)))
    drawn = script.drawn("a", script.Picture("everystep x", ()), "  b < c\n")
    assert "&#160;&#160;b&#160;&lt;&#160;c" in drawn and "@font-face" not in drawn


def test_every_view_of_the_inspector_is_drawn_and_shown() -> None:
    guides = [ROOT / "docs" / "guide" / f"{name}.md" for name in ("inspect", "why-it-went-wrong")]
    texts = [path.read_text(encoding="utf-8") for path in guides]
    shown = {name for text in texts for name in re.findall(r"images/([\w-]+)\.png\)", text)}
    assert shown == set(VIEWS) == {path.stem for path in IMAGES.glob("*.png")}
    assert all(len(path.read_bytes()) < 200_000 for path in IMAGES.glob("*.png"))
