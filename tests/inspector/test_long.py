"""A long record is shown by parts: how many steps are asked for, and how much is drawn."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Reading
from everystep.records import read_record
from tests.inspector.browser import Browser, needs_chromium
from tests.inspector.long_records import long_record

STEPS = 3000
COUNTS = "everystep.counts"


@needs_chromium
def test_a_jump_asks_for_one_window_and_draws_one_part(tmp_path: Path) -> None:
    long_record(tmp_path / "a.jsonl.gz", STEPS)
    session = Reading(("long", read_record(tmp_path / "a.jsonl.gz")))
    ready = "document.querySelectorAll('#step tbody tr').length > 0"
    with PageServer(session) as server, Browser(tmp_path / "profile") as browser:
        browser.visit(server.url, ready)
        assert browser.value(COUNTS) == {"windows": 1, "spans": 500, "bars": 1, "grown": 0}
        assert browser.value("document.querySelectorAll('#tokens span').length") == 500
        for turn, at in enumerate((1700, 2999, 1701), 2):
            browser.value(f"everystep.go({at})")
            browser.until(f"document.querySelector('#step h2').textContent.includes('Token {at}')")
            browser.until(ready)
            windows = min(turn, 3)  # the last one is in a window that is there
            found = {"windows": windows, "spans": 500 * turn, "bars": 1, "grown": 0}
            assert browser.value(COUNTS) == found
            assert browser.value("document.querySelector('#tokens .here').id") == f"token-{at}"
        documents = [one for one in browser.requests if re.search("/document$", one)]
        assert len(documents) == 1 and browser.problems == []
        steps = [one for one in browser.requests if "/steps?" in one]
        assert sorted(int(re.findall(r"from=(\d+)", one)[0]) for one in steps) == [0, 1700, 2900]


def test_a_step_takes_little_memory_until_it_is_asked_for(tmp_path: Path) -> None:
    """Seventeen kilobytes a step before; the rest of a line is kept compressed."""
    long_record(tmp_path / "a.jsonl.gz", 2000)
    read_record(tmp_path / "a.jsonl.gz")
    tracemalloc.start()
    try:
        record = read_record(tmp_path / "a.jsonl.gz")
        held = tracemalloc.get_traced_memory()[0]
        for step in record.runs["0"].steps:
            assert len(step.rows[0].stages) == 2 and len(step.fed) == 1 and len(step.seconds) == 3
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 2000 * 2500 and after - held < 2_000_000


def test_a_document_is_made_once_for_records_in_files(tmp_path: Path) -> None:
    long_record(tmp_path / "a.jsonl", 20)
    session = Reading(("long", read_record(tmp_path / "a.jsonl")))
    assert session.document() is session.document()
    assert len(session.steps(0, 3, 10)) == 10
