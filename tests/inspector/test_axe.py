"""What axe finds on the page, light and dark, wide and narrow: nothing serious."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.inspector.page import write_page
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import LiveSession
from everystep.records import read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.inspector.browser import Browser, needs_chromium

pytestmark = needs_chromium
GIVEN: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.7, "seed": 3}
READY = "document.querySelectorAll('#step td').length > 0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def found(browser: Browser) -> list[str]:
    """Serious findings, each with the first element that has it."""
    script = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    browser.value(f"{script};0")
    every = json.loads(browser.later("axe.run().then((one) => JSON.stringify(one.violations))"))
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0].get('failureSummary')}"
        for one in every
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1100, 380])
def test_axe_finds_nothing_serious(
    browser: Browser, tmp_path: Path, width: int, *, dark: bool
) -> None:
    model = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
    tokenizer = tiny_tokenizer(320)
    browser.show(width, 900, dark=dark)
    if width == 380:
        es.generate(model, tokenizer, "ab", **GIVEN, num_beams=3, record=tmp_path / "a")
        es.generate(model, tokenizer, "ab", **GIVEN, **SAMPLED, record=tmp_path / "b")
        pair = [read_record(tmp_path / name) for name in "ab"]
        write_page(pair[0], tmp_path / "page.html", "a", ("b", pair[1]))
        browser.open(tmp_path / "page.html", READY)
        assert found(browser) == []
        return
    session = LiveSession.opened(
        model, tokenizer, "ab", tmp_path / "c", "live", **GIVEN, **SAMPLED
    )  # fmt: skip
    session.obey("step 4")
    session.obey("pick #1 2")
    with PageServer(session) as page:
        browser.visit(page.url, "document.getElementById('hands') !== null")
        browser.press("Tab", "Tab", "Tab", "Tab", "Home")
        browser.until(READY)
        assert found(browser) == []


def test_axe_would_find_something(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<title>x</title><button></button><img src='data:,'>")
    browser.open(page, "document.querySelector('button') !== null")
    assert {one.partition(":")[0] for one in found(browser)} >= {"button-name", "image-alt"}
