"""Scripts in the style of transformers' documentation: one changed import, the same output.

Each script under `scripts/` is written for transformers. It runs as it is, and once more with
`from transformers import` replaced, and both runs print the same.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

from tests.cli.tiny_model import write_tiny_model

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
IMPORT = "from transformers import"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("switching") / "model")


def printed(source: str, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a script prints when it is run with the folder as its argument."""
    monkeypatch.setattr(sys, "argv", [path.name, str(folder)])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_only_the_import_changes(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("transformers") == 1
    theirs = printed(source, path, folder, monkeypatch)
    ours = printed(source.replace(IMPORT, "from everystep import"), path, folder, monkeypatch)
    assert ours == theirs
    assert theirs.count("\n") > 1


def test_there_are_scripts_of_every_kind() -> None:
    kinds = {"chat", "batch", "streaming", "beams", "custom"}
    assert {path.stem for path in SCRIPTS} == kinds
