"""A long record is shown by parts: how many steps are asked for, and how much is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Reading
from everystep.records import read_record
from tests.inspector.browser import Browser, chromium
from tests.inspector.long_records import long_record

STEPS = 3000
COUNTS = "everystep.counts"


@pytest.mark.skipif(chromium() is None, reason="chromium is not installed")
def test_a_jump_asks_for_one_window_and_draws_one_part(tmp_path: Path) -> None:
    long_record(tmp_path / "a.jsonl.gz", STEPS)
    session = Reading(("long", read_record(tmp_path / "a.jsonl.gz")))
    ready = "document.querySelectorAll('#step tbody tr').length > 0"
    with PageServer(session) as server, Browser(tmp_path / "profile") as browser:
        browser.visit(server.url, ready)
        assert browser.value(COUNTS) == {"windows": 1, "spans": 500, "bars": 1}
        assert browser.value("document.querySelectorAll('#tokens span').length") == 500
        for turn, at in enumerate((1700, 2999, 1701), 2):
            browser.value(f"everystep.go({at})")
            browser.until(f"document.querySelector('#step h2').textContent.includes('Token {at}')")
            browser.until(ready)
            windows = min(turn, 3)  # the last one is in a window that is there
            assert browser.value(COUNTS) == {"windows": windows, "spans": 500 * turn, "bars": 1}
            assert browser.value("document.querySelector('#tokens .here').id") == f"token-{at}"
        documents = [one for one in browser.requests if re.search("/document$", one)]
        assert len(documents) == 1 and browser.problems == []
        steps = [one for one in browser.requests if "/steps?" in one]
        assert sorted(int(re.findall(r"from=(\d+)", one)[0]) for one in steps) == [0, 1700, 2900]


def test_a_document_is_made_once_for_records_in_files(tmp_path: Path) -> None:
    long_record(tmp_path / "a.jsonl", 20)
    session = Reading(("long", read_record(tmp_path / "a.jsonl")))
    assert session.document() is session.document()
    assert len(session.steps(0, 3, 10)) == 10
