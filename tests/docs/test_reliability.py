"""Every row of docs/reliability.md names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.api.hostile_places import PLACES
from tests.api.hostile_values import VALUES
from tests.api.test_hostile_calls import CALLS
from tests.api.test_hostile_values import EACH
from tests.reading import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
LINES = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [
    [cell.strip() for cell in line] for line in LINES if len(line) == 4 and "`tests/" in line[3]
]
PLACE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_the_rows_are_found() -> None:
    assert len(ROWS) >= 36
    assert len({row[0] for row in ROWS}) == len(ROWS)


def test_the_hostile_calls_are_as_many_as_it_says() -> None:
    places, values = len(PLACES), len(VALUES)
    said = f"{len(CALLS)} hostile calls, and {places} places of the API with {values} values"
    assert said in PAGE and f"{places * values:,} calls" in PAGE
    assert len(CALLS) + places * values // EACH >= 300


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_shows_a_row_is_there(row: list[str]) -> None:
    places = PLACE.findall(row[3])
    assert places
    for path, name in places:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{path} has no {name}"
