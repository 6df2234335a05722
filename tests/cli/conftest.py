"""The stage and the caller of every test of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import everystep as es
from tests.cli.fakes import Stage
from tests.cli.running import Caller


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """`es.load` and `es.stream` lead to this fake."""
    stage = Stage()
    monkeypatch.setattr(es, "load", stage.load, raising=False)
    monkeypatch.setattr(es, "stream", stage.stream, raising=False)
    return stage


@pytest.fixture(autouse=True)
def _private_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tests marked `model` reach the machine's own cache folder: `models remove` means it."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An empty cache folder."""
    return tmp_path / "everystep"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Caller:
    """Runs a command line in this process."""
    return Caller(monkeypatch, capsys)
