"""`everystep models`, `pull` and `info`: what is on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everystep import __version__
from everystep.cli import models
from everystep.executors.native import status
from everystep.files.sources import DEFAULT_MODEL, KNOWN_MODELS
from tests.cli.running import Caller

KNOWN = KNOWN_MODELS[DEFAULT_MODEL]


@pytest.fixture
def cached(cache: Path) -> Path:
    """The default model's file, with the right name and size and nothing in it."""
    file = cache / "models" / DEFAULT_MODEL / KNOWN.name
    file.parent.mkdir(parents=True)
    with file.open("wb") as opened:
        opened.truncate(KNOWN.nbytes)
    return file


def test_an_empty_cache_folder_is_no_failure(cache: Path, call: Caller) -> None:
    outcome = call("models")
    assert (outcome.code, outcome.out) == (0, "")
    assert "everystep pull" in outcome.err


@pytest.mark.parametrize("line", [["models"], ["models", "list"]])
def test_models_are_listed_for_programs(cached: Path, call: Caller, line: list[str]) -> None:
    assert call(*line).out == f"{DEFAULT_MODEL}\t{KNOWN.nbytes}\t{cached}\n"


def test_models_are_listed_for_people(
    cached: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("models", "terminal"):
        monkeypatch.setattr(f"everystep.cli.{module}.is_terminal", lambda stream: True)
    heading, line, *_ = call("models").out.splitlines()
    assert heading.split() == ["name", "size", "path"]
    assert line.startswith(f"{DEFAULT_MODEL}  98.4 MB")


@pytest.mark.parametrize("line", [["models", "--json"], ["models", "list", "--json"]])
def test_models_are_listed_as_json(cached: Path, call: Caller, line: list[str]) -> None:
    (found,) = json.loads(call(*line).out)
    assert found == {"name": DEFAULT_MODEL, "path": str(cached), "bytes": KNOWN.nbytes}


def test_models_with_a_name_are_listed_with_their_licences(cached: Path, call: Caller) -> None:
    lines = [line.split("\t") for line in call("models", "known").out.splitlines()]
    assert [line[0] for line in lines] == [*KNOWN_MODELS]
    assert lines[0] == [DEFAULT_MODEL, str(KNOWN.nbytes), "yes", "Apache-2.0"]
    assert {line[2] for line in lines[1:]} == {"no"}
    first, *_ = json.loads(call("models", "known", "--json").out)
    assert first == {
        "name": DEFAULT_MODEL,
        "bytes": KNOWN.nbytes,
        "sha256": KNOWN.sha256,
        "licence": "Apache-2.0",
        "cached": True,
    }


def test_no_models_are_an_empty_json_list(cache: Path, call: Caller) -> None:
    assert json.loads(call("models", "list", "--json").out) == []


def test_remove_removes(cached: Path, call: Caller) -> None:
    assert call("models", "remove", DEFAULT_MODEL).out == f"removed {DEFAULT_MODEL} (98.4 MB)\n"
    assert not cached.exists()


def test_pull_prints_where_the_model_is(cached: Path, call: Caller) -> None:
    assert call("pull") == (0, f"{cached}\n", "")


def test_pull_takes_another_model(
    cache: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def fetch(source: str, offline: bool) -> Path:
        asked.append((source, offline))
        return Path("here")

    monkeypatch.setattr(models, "fetch", fetch)
    assert call("pull", "org/name", "--offline").out == "here\n"
    assert asked == [("org/name", True)]


def test_info_shows_what_a_report_needs(cached: Path, call: Caller) -> None:
    found = json.loads(call("info", "--json").out)
    assert found["everystep"] == __version__
    assert found["default model's file"] == str(cached)
    assert {"python", "torch", "devices", "threads", "native executor", "cache folder"} <= set(
        found
    )


def test_info_says_what_is_missing(cache: Path, call: Caller) -> None:
    assert "default model's file\tnot here\n" in call("info").out


def test_info_knows_the_native_executor(cache: Path, call: Caller) -> None:
    told = json.loads(call("info", "--json").out)["native executor"]
    assert told == (status().instructions or f"missing: {status().reason}")
