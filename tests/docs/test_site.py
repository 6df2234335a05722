"""The documentation site: what its pages hold, and the site as it is built."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import everystep as es
from everystep import errors
from everystep.config.fields import FIELDS, META
from tests.inspector.browser import Browser, needs_chromium
from tests.reading import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
HELP = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, es.EverystepError)
]
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*"
    r"\bhref=[\"']?(?:https?:)?//[^\"'\s>]+"
)
IMPORTED = re.compile(r"@import[^;]*//[^;]*|url\([\"']?(?:https?:)?//[^)]*\)")


# --- pages ----------------------------------------------------------------------------------------


def test_each_public_name_is_on_one_page_of_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = Counter(re.findall(r"^::: everystep\.(\w+)$", text, re.M))
    assert found == Counter(es.__all__)


def test_each_class_of_error_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert Counter(re.findall(r"^::: .*\.(\w+)$", text, re.M)) == Counter(
        one.__name__ for one in CLASSES
    )


def section(name: str) -> str:
    """The text below a heading of the troubleshooting page."""
    return HELP.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_troubleshooting_has_each_class_once_and_no_other() -> None:
    assert re.findall(r"^## (.+)$", HELP, re.M) == [one.__name__ for one in CLASSES]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_troubleshooting_says_what_a_class_is(kind: type[es.EverystepError]) -> None:
    text = " ".join(section(kind.__name__).split())
    docstring = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    assert text.startswith(f"**Means.** {docstring.rstrip('.')}")
    assert "**What to do.** " in text
    builtin = [one.__name__ for one in kind.__bases__ if one.__module__ == "builtins"]
    assert [name for name in builtin if name != "Exception" and f"`{name}`" not in text] == []


# --- the front page -------------------------------------------------------------------------------


def test_the_front_page_begins_with_installing_code_a_picture_and_no_list() -> None:
    front = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    begins = ("pip install torch --index-url", 'pip install ".[cli', "```python", "run.explain(")
    places = [front.index(one) for one in (*begins, "](docs/images/step.svg)")]
    assert places == sorted(places)
    code = front.partition("```python\n")[2].partition("```")[0].splitlines()
    assert len(code) <= 12 and max(map(len, code)) <= 60, "it stands beside the picture"
    assert re.findall(r"^[-*] ", front, re.M) == []


def test_names_in_tables_are_not_broken() -> None:
    """The theme breaks code wherever its cell is narrow, as in `max_lengt h` on a phone."""
    style = (ROOT / "docs" / "images" / "site.css").read_text(encoding="utf-8")
    cells = dict(re.findall(r"^(\S.*? td\S* code) \{(.*)\}$", style, re.M))
    rule = cells[".md-typeset table:not([class]) td code"]
    assert "overflow-wrap: normal" in rule and "word-break: normal" in rule
    assert not any("anywhere" in one or "break-word" in one for one in cells.values())


# --- the site -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: the extra docs")
    pytest.importorskip("mkdocstrings_handlers.python", reason="no mkdocstrings: the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    yield folder


@pytest.mark.slow
def test_nothing_is_fetched_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    found = {p.name: FETCHED.findall(p.read_text(encoding="utf-8")) for p in pages}
    found |= {p.name: IMPORTED.findall(p.read_text(encoding="utf-8")) for p in site.rglob("*.css")}
    assert {name: hosts for name, hosts in found.items() if hosts} == {}


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://host/a.js">',
        "<link href=https://host/a.css rel=stylesheet>",
        '<link rel="preconnect" href="//host">',
        '<img alt="x" src="http://host/a.png">',
    ],
)
def test_what_is_fetched_is_found(text: str) -> None:
    assert FETCHED.search(text)


@pytest.mark.slow
def test_the_reference_is_that_of_the_program(site: Path) -> None:
    options = (site / "reference" / "options.html").read_text(encoding="utf-8")
    assert [n for n in FIELDS if n not in META and f"<code>{n}</code>" not in options] == []
    commands = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    for name in ("chat", "models remove", "--temperature"):
        assert name in commands
    api = (site / "reference" / "generating.html").read_text(encoding="utf-8")
    assert 'id="everystep.generate"' in api and "on_error" in api


@pytest.mark.slow
def test_search_knows_pages_of_every_kind(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    for place in ("index.html", "guide/web.html", "reference/generating.html", "laws.html"):
        assert f'"location":"{place}' in index, place


@pytest.mark.slow
def test_search_ranks_guides_above_pages_for_developers(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    boosts: dict[str, set[float]] = {}
    for one in index["docs"]:
        boosts.setdefault(one["location"].partition("#")[0], set()).add(one.get("boost", 1.0))
    guides = {place for place in boosts if place.startswith("guide/")}
    walks = {place for place in guides if "walkthrough" in place}
    lowest = min(min(boosts[place]) for place in guides - walks)
    developers = {*walks, "requirements.html", "parts.html", "log.html", "reliability.html"}
    developers |= {place for place in boosts if place.startswith("decisions/")}
    assert len(developers) > 50 and developers <= set(boosts)
    assert all(max(boosts[place]) < lowest / 2 for place in developers)


@pytest.mark.slow
def test_signatures_are_laid_out_over_lines(site: Path) -> None:
    page = (site / "reference" / "generating.html").read_text(encoding="utf-8")
    shown = page.partition('id="everystep.generate"')[2].partition("</code></pre>")[0]
    lines = html.unescape(re.sub("<[^>]+>", "", shown.rpartition("<code>")[2])).splitlines()
    assert lines[0] == "generate(" and len(lines) > 6
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_the_front_page_has_code_beside_its_picture(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    grid = re.split(r'<div class="?grid"?>', front)[1].partition("<h2")[0]
    assert "explain" in grid and re.search(r'src="?images/step\.svg', grid)


@pytest.mark.slow
def test_links_of_the_repository_lead_to_pages(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r'href="?laws\.html', front) and re.search(r'src="?images/demo\.svg', front)
    assert ".md)" not in front and "bench/results" not in re.sub(r"<code.*?</code>", "", front)


# --- the site in a browser ------------------------------------------------------------------------

WINDOW = "document.documentElement"
WRAPPED = "document.querySelector('article .md-typeset__scrollwrap') !== null"
"""The theme's own script has made tables scroll."""
FOUND = """[...document.querySelectorAll(".md-search-result__item > a")].map(
    (one) => new URL(one.href).pathname.slice(1))"""
"""The pages that a search has found, the best first."""
WIDER = """[...document.querySelectorAll("article *")].filter((one) =>
    one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    && !one.closest("pre, .md-typeset__table")).map((one) => one.outerHTML.slice(0, 80))"""
"""What leads out of the window; code and tables are scrolled in their place."""
BROKEN = """[...document.querySelectorAll("article table td code")].filter((one) =>
    /^[\\w.]+$/.test(one.textContent) && one.getClientRects().length > 1
    ).map((one) => one.textContent)"""
"""The names in tables that take more than one line."""


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served: a page from disk may not read the index that a search needs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
@needs_chromium
def test_a_search_finds_a_guide_before_any_decision(address: str, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        for words in ("gguf", "chat template", "temperature", "lora"):
            asked = f"{address}/index.html?q={words.replace(' ', '+')}"
            browser.visit(asked, f"({FOUND}).length > 0")
            found = browser.value(FOUND)
            folders = [place.partition("/")[0] for place in found]
            assert "guide" in folders, words
            before = folders[: folders.index("guide")]
            assert {*before} <= {"reference"}, (words, found)


@pytest.mark.slow
@needs_chromium
def test_on_a_phone_no_page_is_wider_and_no_name_in_a_table_is_broken(
    address: str, tmp_path: Path
) -> None:
    pages = ("index", "guide/switching", "guide/models", "guide/sampling", "reference/options")
    with Browser(tmp_path / "profile") as browser:
        browser.show(390, 844)
        for page in pages:
            browser.visit(f"{address}/{page}.html", WRAPPED)
            assert browser.value("document.querySelectorAll('article table td code').length"), page
            assert browser.value(f"{WINDOW}.clientWidth - {WINDOW}.scrollWidth") == 0, page
            assert browser.value(WIDER) == [], page
            assert browser.value(BROKEN) == [], page
