"""Every requirement says where it is proved, and what it names is there."""

from __future__ import annotations

import re

import pytest

from tests.reading import ROOT
from tests.test_notation import table

ROWS = [
    *table("docs/requirements.md", "id | requirement"),
    *table("docs/requirements.md", "id | evidence"),
    *table("docs/requirements.md", "id | asked for"),
    *table("docs/requirements.md", "id | what stays out"),
]
PLACE = re.compile(r"(?:tests|bench|scripts|\.ci)/[\w./]+")


def test_the_rows_are_found() -> None:
    assert len(ROWS) >= 50


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_proves_a_requirement_is_there(row: list[str]) -> None:
    places = PLACE.findall(row[2])
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []
