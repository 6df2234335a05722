"""What the benchmarks make of measured seconds: ratios, the memory's limit, cliffs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from tests.reading import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its scripts find their parts as they do when they are run."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    yield


@pytest.fixture
def tables(bench: None) -> ModuleType:
    return import_module("parts.tables")


@pytest.fixture
def lengths(bench: None) -> ModuleType:
    return import_module("lengths")


def row(engine: str, speed: float | None, *, like: bool = True) -> dict[str, Any]:
    case = {"batch": 1, "prompt": "32", "tokens": 64, "first_s": 0.5, "peak_mib": 100.0}
    return {"engine": engine, "tokens_per_s": speed, "like": like, **case}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    about = {"everystep": {"weight_bytes": 36, "position_bytes": 1}}
    return {"rows": list(rows), "busy": [], "about": about, "bytes_per_s": 20_000.0}


def test_a_peer_of_another_precision_is_shown_and_not_counted(tables: ModuleType) -> None:
    found = result(
        row("everystep", 100), row("llama.cpp", 80), row("openvino-genai", 900, like=False)
    )
    line = tables.speed_table({"F32": found}).splitlines()[-1]
    assert "| 100 | 80 | 900 |" in line
    assert "| 1.25 | 50% |" in line  # 20,000 bytes a second over 36 + 32 + 64 / 2 bytes a token


def test_the_limit_is_that_of_the_memory_beside_the_case(tables: ModuleType) -> None:
    found = result({**row("everystep", 100), "bytes_per_s": 40_000.0}, row("llama.cpp", 80))
    assert "| 1.25 | 25% |" in tables.speed_table({"F32": found})


def test_a_speed_that_is_not_known_is_neither_shown_nor_counted(tables: ModuleType) -> None:
    found = result(row("everystep", 100), row("llama.cpp", 80), row("ctranslate2", None))
    assert "| 100 | 80 |  |  |  |  | 1.25 |" in tables.speed_table({"F32": found})


def test_the_page_of_benchmarks_shows_the_newest_figures(tables: ModuleType) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    missing = [table for table in tables.shown() if table not in text]
    assert not missing, "run scripts/bench plot and put its tables into docs/benchmarks.md"
    assert len(list(tables.shown())) == 4


def test_the_first_token_becomes_a_rate_where_the_prompt_is_long(tables: ModuleType) -> None:
    long = {**row("everystep", 90), "prompt": "512"}
    lines = tables.start_table({"F32": result(row("everystep", 100), long)}).splitlines()
    assert lines[-1] == "| F32 | everystep | 500 ms | 1024 tokens/s | 100 MiB |"


def test_what_a_busy_neighbour_leaves(tables: ModuleType) -> None:
    found = {**result(row("everystep", 100)), "busy": [row("everystep", 60)]}
    assert tables.busy_table({"F32": found}).splitlines()[-1].endswith("| 100 | 60 | 60% |")


def test_a_cliff_is_a_rise_over_the_model_and_not_over_the_neighbour(lengths: ModuleType) -> None:
    point = lengths.Point
    points = [
        point("prompt", 8, 8, seconds=1.0, bytes=1.0, operations=1.0),
        point("prompt", 64, 64, seconds=8.0, bytes=1.0, operations=64.0),  # at the best rate
        point("prompt", 128, 128, seconds=32.0, bytes=1.0, operations=128.0),
    ]
    rows = lengths.modelled(points, bytes_per_s=1.0)
    (cliff,) = lengths.cliffs(rows)
    assert (cliff["at"], cliff["factor"]) == (128, 2.0)


# --- strategies -----------------------------------------------------------------------------------


@pytest.fixture
def strategies(bench: None) -> ModuleType:
    return import_module("strategies")


def test_pairs_take_turns_and_ratios_are_of_pairs(strategies: ModuleType) -> None:
    called: list[str] = []
    slow, fast = iter([9.0, 2.0, 30.0, 4.0]), iter([9.0, 1.0, 10.0, 4.0])

    def one() -> float:
        called.append("one")
        return next(slow)

    def other() -> float:
        called.append("other")
        return next(fast)

    found = strategies.paired(3, one, other)
    assert called == ["one", "other", "one", "other", "other", "one", "one", "other"]
    assert (found["seconds"], found["base_seconds"], found["ratio"]) == (4.0, 4.0, 2.0)


@pytest.mark.parametrize(
    ("gains", "aim", "ratio", "reached"),
    [
        (False, 1.4, 1.3, True),
        (False, 1.4, 1.5, False),
        (True, 2, 0.4, True),
        (True, 2, 0.6, False),
    ],
)
def test_a_gain_is_a_ratio_the_other_way_round(
    strategies: ModuleType, gains: bool, aim: float, ratio: float, reached: bool
) -> None:
    found = strategies.judged(strategies.Case({}, aim, gains), {"ratio": ratio})
    assert found["reached"] is reached
    assert found["figure"] == pytest.approx(1 / ratio if gains else ratio)
