"""A record as a page: it opens alone, by keyboard alone, and no text of a record is ever markup."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.inspector.page import document, page, write_page
from everystep.records import Record, RecordedRun, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.inspector.browser import Browser, needs_chromium

HOSTILE = (
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script>",
    "\x1b[2J\u202egnp.exe\u2066",
    "{policy}{data}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("records")
    model = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
    tokenizer = tiny_tokenizer(320)
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.5, "seed": 1}
    given: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
    es.generate(model, tokenizer, "ab ab", **given, **sampled, record=found / "sampled")
    beams = {"num_beams": 3, "num_return_sequences": 2}
    es.generate(model, tokenizer, "ab ab", **given, **beams, record=found / "beams")
    run = es.open(model, tokenizer, "ab", **given, **sampled, record=found / "run")
    next(run)
    run.send("xyz")
    next(run)
    run.fork(seed=4).result()
    run.result()
    return found


def hostile() -> Record:
    """A record whose every text is an attack."""
    texts = {id: text.encode() for id, text in enumerate(HOSTILE)}
    about = {"prompt": [0, 1], "strategy": HOSTILE[0], "processors": [[HOSTILE[1], HOSTILE[2]]]}
    about["configuration"] = {HOSTILE[0]: [HOSTILE[1], HOSTILE[2]]}
    run = RecordedRun(HOSTILE[2], about, (0, 1), tokens={0: [*texts]})
    return Record({"model": HOSTILE[0]}, {run.name: run}, texts)


def data_of(text: str) -> Any:
    found = re.search(r'id="record">([^<]*)<', text)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


@pytest.mark.parametrize("name", ["sampled", "beams", "run"])
def test_a_page_has_the_record(name: str, folder: Path) -> None:
    record = read_record(folder / name)
    text = page(record, name)
    assert data_of(text) == json.loads(json.dumps(document(record, name)))
    for run, shown in zip(record.runs.values(), data_of(text)["runs"], strict=True):
        for index, ids in run.tokens.items():
            tokens = shown["sequences"][str(index)]
            assert [token[0] for token in tokens] == ids
            for token in tokens:
                origin, step, place, owner = token[2:6]
                assert (origin in ("given", "unknown")) == (step < 0) and origin != "unknown"
                if step >= 0 and name != "beams":
                    own = data_of(text)["runs"][owner]["steps"]
                    assert own[step]["rows"][place]["chosen"] == token[0]


def test_a_page_names_no_place_in_the_network(folder: Path) -> None:
    text = page(read_record(folder / "beams"), "beams")
    assert not re.findall(r"https?://|src=|@import|url\(", text)
    assert "innerHTML" not in text and "eval" not in text


def test_a_hostile_record_is_data_alone() -> None:
    text = page(hostile(), "</title><script>document.title='taken'</script>")
    assert text.count("<script") == 3 and text.count("<img") == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


READY = "document.querySelectorAll('#tokens span').length > 0"


@needs_chromium
def test_arrow_keys_walk_through_the_choices(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    record = read_record(folder / "sampled")
    (run,) = record.runs.values()
    write_page(record, tmp_path / "page.html", "sampled")
    browser.open(tmp_path / "page.html", READY)
    browser.press("Tab", "Tab", "Tab", "Tab")
    assert browser.value("document.activeElement.id") == "tokens"
    browser.press("End", "ArrowLeft", "ArrowLeft")
    row = run.steps[9].rows[0]
    assert browser.value("document.querySelector('#step h2').textContent").startswith("Token 9")
    cells = "[...document.querySelectorAll('#step {}')].map((one) => one.textContent)"
    (chosen,) = browser.value(cells.format("tr.chosen td:first-child"))
    assert chosen == f"▸ {row.chosen}"
    heads = browser.value(cells.format("thead th"))
    assert heads == ["id", "token", "logit", "Temperature", "TopK", "share"]
    gone = sum(value is None for value in row.scores)
    assert len(browser.value(cells.format("tbody td.gone"))) == 2 * gone
    assert row.draw is not None
    assert f"drawn: {row.draw.number:.4f}" in browser.value(
        "document.querySelector('#step .draw').getAttribute('aria-label')"
    )
    browser.press("m")
    assert "entropy" in browser.value("document.querySelector('canvas').getAttribute('aria-label')")
    assert browser.problems == [] and browser.requests == [(tmp_path / "page.html").as_uri()]


@needs_chromium
def test_beams_and_given_ids_are_shown(browser: Browser, folder: Path, tmp_path: Path) -> None:
    for name in ("beams", "run"):
        write_page(read_record(folder / name), tmp_path / name, name)
        (tmp_path / name).rename(tmp_path / f"{name}.html")
    browser.open(tmp_path / "beams.html", READY)
    tree = browser.value("document.getElementById('tree').textContent")
    assert tree.count("returned") == 2 and "was not among the best" in tree
    browser.open(tmp_path / "run.html", READY)
    assert browser.value("document.querySelectorAll('#tokens .given').length") == 3
    assert browser.value("document.querySelectorAll('select')[0].length") == 2
    assert browser.problems == []


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_shows_all_of_it(
    browser: Browser, folder: Path, tmp_path: Path, *, dark: bool
) -> None:
    write_page(read_record(folder / "beams"), tmp_path / "page.html", "beams")
    browser.show(380, 700, dark=dark)
    browser.open(tmp_path / "page.html", READY)
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(20, 20, 23)") == dark
    browser.show(1100, 900)


@needs_chromium
def test_no_script_of_a_record_runs(browser: Browser, tmp_path: Path) -> None:
    write_page(hostile(), tmp_path / "page.html", "hostile")
    browser.open(tmp_path / "page.html", READY)
    assert browser.value("document.title") == "hostile"
    assert browser.value("document.querySelectorAll('img, script:not([id])').length") == 2
    assert browser.value("document.querySelector('#tokens span').textContent") == HOSTILE[
        0
    ].replace(" ", "·")
    assert browser.problems == [] and len(browser.requests) == 1
    # The policy forbids what nobody should do.
    browser.value("document.body.innerHTML = '<b>x</b>'")
    assert browser.value("document.querySelector('b')") is None
