"""A long record is shown by parts: how many steps are asked for, and how much is drawn."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep.inspector import sessions, views
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Known, LiveSession, Reading
from everystep.records import read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.inspector.browser import Browser, needs_chromium
from tests.inspector.long_records import long_record
from tests.inspector.test_live import tab_to

STEPS = 3000
COUNTS = "everystep.counts"


@needs_chromium
def test_a_jump_asks_for_one_window_and_draws_one_part(tmp_path: Path) -> None:
    long_record(tmp_path / "a.jsonl.gz", STEPS)
    session = Reading(("long", read_record(tmp_path / "a.jsonl.gz")))
    ready = "document.querySelectorAll('#step tbody tr').length > 0"
    with PageServer(session) as server, Browser(tmp_path / "profile") as browser:
        browser.visit(server.url, ready)
        first = {"windows": 1, "spans": 500, "bars": 1, "grown": 0}
        assert browser.value(COUNTS) == {**first, "columns": 1000, "rows": 10}
        assert browser.value("document.querySelectorAll('#tokens span').length") == 500
        for turn, at in enumerate((1700, 2999, 1701), 2):
            browser.value(f"everystep.go({at})")
            browser.until(f"document.querySelector('#step h2').textContent.includes('Token {at}')")
            browser.until(ready)
            windows = min(turn, 3)  # the last one is in a window that is there
            found = {"windows": windows, "spans": 500 * turn, "bars": 1, "grown": 0}
            counts = browser.value(COUNTS)
            # The strip is not drawn again: of its columns, those below the mark are.
            assert 1000 < counts.pop("columns") <= 1000 + 3 * turn
            assert counts == {**found, "rows": 10 * turn}
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


def pixels(browser: Browser) -> str:
    """The strip as it is drawn."""
    return str(browser.value("document.querySelector('canvas').toDataURL()"))


def long_run(file: Path, tokens: int) -> LiveSession:
    positions = {"max_position_embeddings": tokens + 100}
    model = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32, **positions)
    given = {"do_sample": True, "seed": 3, "max_new_tokens": tokens + 50, "eos_token_id": None}
    session = LiveSession.opened(model, tiny_tokenizer(320), "ab ab", file, "live", **given)
    session.obey(f"step {tokens}")
    return session


def test_of_a_long_run_what_comes_alone_is_spelled_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many strings for a step of a long run as for one of a short one, and as many bytes."""
    monkeypatch.setattr(sessions, "LONG", 5)
    short, long = (_told(tmp_path / str(tokens), tokens, monkeypatch) for tokens in (40, 400))
    # Texts of the record that the page has not yet, one token, and what it says of itself.
    assert long["token_of"] == short["token_of"] == 4
    assert long["spelled"] <= short["spelled"] and long["spelled"] < 40
    assert long["read"] < 1.5 * short["read"] and long["said"] < 1.5 * short["said"]


def _told(file: Path, tokens: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What is done for four steps of a run with so many tokens: calls, bytes read and told."""
    session = long_run(file, tokens)
    counts = {"spelled": 0, "token_of": 0, "said": 0}

    texts, growing = len(session.record().texts), session._growing
    assert growing is not None
    before = growing.bytes_read
    with monkeypatch.context() as patch:

        def counted(name: str) -> None:
            plain = getattr(views, name)

            def call(*given: Any) -> Any:
                counts[name] += 1
                return plain(*given)

            patch.setattr(views, name, call)

        counted("spelled"), counted("token_of")
        for i in range(4):
            answer = session.answered("step", None, Known(tokens + i, texts))
            assert answer["document"] is None
            counts["said"] += len(json.dumps(answer["grown"]))
            texts = len(session.record().texts)
    return {**counts, "read": growing.bytes_read - before}


@needs_chromium
def test_an_append_draws_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One span, the rows of one step, the columns that changed; the strip is not made again."""
    monkeypatch.setattr(sessions, "LONG", 5)
    session = long_run(tmp_path / "a", 1300)
    with PageServer(session) as server, Browser(tmp_path / "profile") as browser:
        browser.visit(server.url, "document.querySelectorAll('#step tbody tr').length > 0")
        assert browser.value(COUNTS)["columns"] == 650
        browser.value("everystep.go(Infinity)")
        label = "document.querySelector('canvas').getAttribute('aria-label')"
        drawn = 0
        for turn in range(4):
            browser.until("document.querySelector('#step tbody tr') !== null")
            before, said = browser.value(COUNTS), browser.value(label)
            browser.value("document.getElementById('do-step').click()")
            browser.until(f"document.querySelector('#token-{1300 + turn}.here') !== null")
            browser.until("document.querySelector('#step tbody tr') !== null")
            after = browser.value(COUNTS)
            changed = {name: after[name] - before[name] for name in after}
            assert changed["grown"] == changed["spans"] == changed["windows"] == 1
            assert changed["bars"] == 0
            shown = len(session.record().runs["0"].steps[-1].rows[0].ids)
            assert changed["rows"] == shown < 30
            if browser.value(label) == said:  # else another value is the highest
                assert changed["columns"] <= 5
                drawn += 1
        assert drawn > 1
        grown = pixels(browser)
        tab_to(browser, "again")
        browser.press("Enter")
        browser.until("document.getElementById('older').hidden")
        browser.value("everystep.go(Infinity)")
        assert browser.value(COUNTS)["bars"] == after["bars"] + 1
        assert pixels(browser) == grown  # as the strip is when all of it is drawn at once
        assert browser.problems == []
