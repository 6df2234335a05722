"""Replicas on the page at `/`: how each is, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from tests.inspector.browser import Browser, needs_chromium
from tests.server.serving import Served, served
from tests.server.test_fan import FanMooring, MortalReplicas, told

pytestmark = needs_chromium
READY = "document.querySelectorAll('#models tr').length > 0"
ROWS = "document.querySelectorAll('#states tr').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def replicas(folder: Path) -> MortalReplicas:
    return MortalReplicas(str(folder))


@pytest.fixture
def front(replicas: MortalReplicas, browser: Browser) -> Iterator[Served]:
    with served(FanMooring(replicas)) as one:
        yield one
        browser.visit("about:blank", "location.href === 'about:blank'")


def cells(browser: Browser) -> list[list[str]]:
    """The table, row by row."""
    every = "[...document.querySelectorAll('#replicas tr')].map((one) => "
    found: list[list[str]] = browser.value(
        f"{every}[...one.cells].map((cell) => cell.textContent))"
    )
    return found


def test_each_replica_is_a_row_that_is_told_anew(
    browser: Browser, front: Served, replicas: MortalReplicas
) -> None:
    for _ in range(2):
        front.completion(prompt="hello the " * 20, max_tokens=2, ignore_eos=True)
    state = told(front, 2)["data"][0]
    browser.visit(front.url, f"{ROWS} === 2")
    head, *rows = cells(browser)
    (executor,) = state["models"].values()
    for number, row in enumerate(rows):
        named = dict(zip(head, row, strict=True))
        assert named["node and process"] == f"{state['node']}, {number}"
        assert named["models"] == f"tiny on {executor}" and named["age"].split()[1] in ("s", "min")
        assert (named["rows"], named["tokens made"], named["engine restarts"]) == ("16", "4", "0")
        assert 33 < int(named["prompts from cache"].removesuffix(" %")) <= 50
    said = "document.getElementById('replicas-told').textContent"
    assert browser.value(said) == "2 there, 2 of them shown, none died at work."
    replicas.replicas = 3
    browser.until(f"{ROWS} === 3")
    replicas.replicas = 2
    browser.until(f"{ROWS} === 2")
    assert browser.problems == []
    assert all(one.startswith((front.url, "data:")) for one in browser.requests)


@pytest.mark.parametrize("width", [1100, 390])
def test_it_is_read_by_keyboard_on_any_width(browser: Browser, front: Served, width: int) -> None:
    browser.show(width, 800)
    browser.visit(front.url, f"{READY} && {ROWS} === 2")
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
    browser.value("document.querySelector('[aria-labelledby=models-title][tabindex]').focus()")
    browser.press("Tab")
    inside = "document.activeElement.contains(document.getElementById('states'))"
    assert browser.value(inside), "who cannot point scrolls the table where it is wider"
    script = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    browser.value(f"{script};0")
    every = json.loads(browser.later("axe.run().then((one) => JSON.stringify(one.violations))"))
    assert [one["id"] for one in every if one["impact"] in ("serious", "critical")] == []
    browser.show(1100, 900)


def test_an_engine_alone_shows_none(browser: Browser, server: Served) -> None:
    browser.visit(server.url, READY)
    asked = (
        "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/{}')).length"
    )
    browser.until(f"{asked.format('load')} > 1")
    assert browser.value("document.getElementById('replicas').hidden")
    assert browser.value(asked.format("replicas")) == 1, "it is asked once"
    browser.visit("about:blank", "location.href === 'about:blank'")
