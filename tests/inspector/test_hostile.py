"""Records all of whose texts are attacks, with steps, drafts, beams and two files: on the page of a
file and on that of a server nothing of them runs, and nobody is asked for anything."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.inspector.page import write_page
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Reading
from everystep.records import Record, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.inspector.answers import RawRecord
from tests.inspector.browser import Browser, needs_chromium
from tests.inspector.test_live import OPEN, tab_to

AWAY = "http://evil.example/x"
ATTACKS: tuple[str, ...] = (
    "<script>document.title='taken'</script>",
    "</script><script>document.title='taken'</script>",
    f"<img src={AWAY} onerror=\"document.title='taken'\">",
    "<svg onload=\"document.title='taken'\">",
    f"<iframe src={AWAY} srcdoc='<script>top.document.title=1</script>'></iframe>",
    f"<style>@import url({AWAY}); body {{ background: url({AWAY}) }}</style>",
    f"<link rel=stylesheet href={AWAY}><base href={AWAY}>",
    f"<meta http-equiv=refresh content='0;url={AWAY}'>",
    f"<form action={AWAY}><button autofocus onfocus=\"document.title='taken'\">x</button></form>",
    f"<a href=\"javascript:document.title='taken'\" ping={AWAY}>x</a>",
    '" onfocus="document.title=\'taken\'" autofocus="',
    "'];document.title='taken';//",
    "${document.title='taken'}`${alert(1)}`",
    "\x1b[2J\x1b]8;;http://evil.example\x07\u202egnp.exe\u2066\u200b",
    "__proto__",
    "</textarea><script>document.title='taken'</script>",
    "--><!--<script>document.title='taken'</script>",
    "‹U+001B›{policy}{data}|`|",
)
GIVEN: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {
        **GIVEN,
        "do_sample": True,
        "top_k": 20,
        "temperature": 0.5,
        "seed": 1,
        "eos_token_id": 2,
        "min_new_tokens": 8,
        "stop_strings": ["never"],
    },
    "beams": {**GIVEN, "num_beams": 3, "num_return_sequences": 2},
    "drafted": {**GIVEN, "prompt_lookup_num_tokens": 3, "repetition_penalty": 0.5},
}
MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)


HALVES = (b"\xe2\x80", b"\xf0\x9f\x98", b"\xff<", b"\xc3")
"""Bytes that begin a character and do not end it, or are none."""


def halved(attack: str, id: int) -> str | dict[str, str]:
    """The attack, of every other id between bytes that are no text."""
    if id % 2:
        return attack
    half = HALVES[id // 2 % len(HALVES)]
    return {"base64": base64.b64encode(half + attack.encode() + half).decode()}


def attacked(line: dict[str, Any], attack: Callable[[], str]) -> dict[str, Any]:
    """A line of a record whose texts are all attacks."""
    kind = line["type"]
    if kind == "record":
        line |= {name: attack() for name in ("model", "tokenizer", "everystep")}
    elif kind == "spelling":
        line["texts"] = {id: halved(attack(), int(id)) for id in line["texts"]}
    elif kind == "run":
        line |= {name: attack() for name in ("strategy", "readout", "drafter")}
        line["processors"] = [[attack(), attack()] for _ in line["processors"]]
        line |= {"stops": [attack()], "hooks": [attack()], "adapters": [[attack(), 1.0]]}
        line |= {"beyond_ids": [attack()], "follows": ["regex", attack()]}
        line["configuration"] = {attack(): [attack(), attack()] for _ in line["configuration"]} | {
            "length_penalty": [1.0, attack()]
        }
    elif kind == "step":
        for row in line.get("rows", ()):
            for stage in row["stages"]:
                stage["name"] = attack()
        line["seconds"] = {attack(): one for one in line["seconds"].values()}
    elif kind == "end":
        line |= {"kind": attack(), "matched": attack()}
    return line


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("hostile"), {}
    turn = 0

    def attack() -> str:
        nonlocal turn
        turn += 1
        return f"{ATTACKS[turn % len(ATTACKS)]}{turn}"

    for kind, given in KINDS.items():
        es.generate(MODEL, TOKENIZER, "ab ab ab", **given, record=folder / "real")
        lines = map(json.loads, (folder / "real").read_text().splitlines())
        found[kind] = folder / f"{kind}.jsonl"
        text = "".join(json.dumps(attacked(line, attack)) + "\n" for line in lines)
        found[kind].write_text(text)
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def texts_of(browser: Browser, selector: str) -> list[str]:
    every = f"[...document.querySelectorAll('{selector}')].map((one) => one.textContent)"
    found: list[str] = browser.value(every)
    return found


def unharmed(browser: Browser, title: str) -> None:
    """The page is as its own script made it."""
    assert browser.value("document.title") == title
    made = (
        "img, svg, iframe, style:not(head style), meta[http-equiv=refresh], form, a, base, object"
    )
    assert browser.value(f"document.querySelectorAll('{made}').length") == 0
    assert browser.value("document.scripts.length") in (2, 3)
    named = "[...document.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())"
    assert not [one for one in browser.value(named) if one.startswith("on")]
    assert browser.problems == []


def walked(browser: Browser, record: Record, raw: RawRecord, title: str) -> None:
    """Every token, candidate and stage is read as a text, by keyboard."""
    ids = raw.tokens()
    assert texts_of(browser, "#tokens span") == [raw.spell(id) for id in ids]
    (run,) = record.runs.values()
    tab_to(browser, "tokens")
    browser.press("Home")
    for at, row in enumerate(run.row_at(place) for place in range(len(ids))):
        browser.until(f"document.querySelector('#step h2').textContent.startsWith('Token {at}:')")
        browser.until("document.querySelector('#step tbody tr') !== null")
        assert texts_of(browser, "#step h2") == [f"Token {at}: {raw.spell(ids[at])}"]
        cells = texts_of(browser, "#step tbody td.text")[:-1]
        if row is not None and raw.about()["width"] == 1:
            assert sorted(cells) == sorted(raw.spell(id) for id in row.ids)
            assert len(texts_of(browser, "#step thead th")) == 4 + len(row.stages)
        unharmed(browser, title)
        browser.press("ArrowRight")
    browser.press("m", "b", "c")
    tab_to(browser, "tokens")
    browser.press("/")
    browser.type(ATTACKS[0])
    browser.press("Enter")
    for button in ("lowest", "unsure", "repetition", "copy"):
        tab_to(browser, button)
        browser.press("Enter")
        unharmed(browser, title)
    assert "Token" in browser.value("document.getElementById('copied').value")
    prompt = [raw.spell(id) for id in raw.about()["prompt"]]
    assert texts_of(browser, ".prompt > span") == prompt
    assert len(texts_of(browser, "dd")) > 8
    unharmed(browser, title)


READY = "document.querySelectorAll('#step tbody tr').length > 0"


@needs_chromium
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_file_runs(
    kind: str, files: dict[str, Path], browser: Browser, tmp_path: Path
) -> None:
    record, page = read_record(files[kind]), tmp_path / "page.html"
    write_page(record, page, "hostile")
    browser.open(page, READY)
    walked(browser, record, RawRecord.of(files[kind]), "hostile")
    assert browser.requests == [page.as_uri()]


@needs_chromium
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_served_record_runs(
    kind: str, files: dict[str, Path], browser: Browser
) -> None:
    record = read_record(files[kind])
    with PageServer(Reading((ATTACKS[1], record))) as server:
        browser.visit(server.url, READY)
        walked(browser, record, RawRecord.of(files[kind]), "everystep inspect")
        own = f"http://127.0.0.1:{server.port}/"
        assert [one for one in browser.requests if not one.startswith((own, "data:"))] == []
        browser.value("document.body.innerHTML = '<b>x</b>'")  # what the policy forbids
        assert browser.value("document.querySelector('b')") is None
        browser.value("document.body.append(document.createElement('script')); 1")
        browser.value(f"new Image().src = '{AWAY}'")
        browser.value(f"fetch('{AWAY}').catch(() => 1)")
        refused = "".join(browser.problems)
        assert "TrustedHTML" in refused and "Content Security Policy" in refused


@needs_chromium
def test_nothing_of_two_records_runs(files: dict[str, Path], browser: Browser) -> None:
    both = [(name, read_record(files[name])) for name in ("sampled", "beams")]
    with PageServer(Reading((ATTACKS[0], both[0][1]), (ATTACKS[1], both[1][1]))) as server:
        browser.visit(server.url, OPEN)
        assert ATTACKS[1].replace(" ", "·") in browser.value(
            "document.querySelector('h1').textContent"
        )
        assert len(texts_of(browser, "#comparison td button")) > 8
        unharmed(browser, "everystep inspect")


GIANT = 900_000


@needs_chromium
@pytest.mark.parametrize("served", [False, True])
def test_nothing_of_a_giant_text_runs(
    served: bool, files: dict[str, Path], browser: Browser, tmp_path: Path
) -> None:
    """It is shown whole, as the text of the first token of the answer."""
    lines = [*map(json.loads, files["sampled"].read_text().splitlines())]
    first = next(line["ids"][0] for line in lines if line["type"] == "tokens")
    attack = "".join(ATTACKS)
    text = (attack * (GIANT // len(attack.encode()) + 1)).encode()[:GIANT].decode(errors="ignore")
    lines.append({"type": "spelling", "texts": {str(first): text}})
    file = tmp_path / "giant.jsonl"
    file.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))
    raw, record = RawRecord.of(file), read_record(file)
    assert raw.spell(first) != RawRecord.of(files["sampled"]).spell(first)

    def look(title: str) -> None:
        assert texts_of(browser, "#tokens span")[0] == raw.spell(first)
        tab_to(browser, "tokens")
        browser.press("Home")
        browser.until("document.querySelector('#step h2').textContent.startsWith('Token 0:')")
        assert texts_of(browser, "#step h2") == [f"Token 0: {raw.spell(first)}"]
        unharmed(browser, title)

    if served:
        with PageServer(Reading(("giant", record))) as server:
            browser.visit(server.url, READY)
            look("everystep inspect")
    else:
        write_page(record, tmp_path / "page.html", "hostile")
        browser.open(tmp_path / "page.html", READY)
        look("hostile")
        assert browser.requests == [(tmp_path / "page.html").as_uri()]


HEADERS = {
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
}


@pytest.mark.parametrize(
    ("method", "path", "changed", "status"),
    [
        ("GET", "/", {"Authorization": ""}, 200),
        ("GET", "/page.js", {"Authorization": ""}, 200),
        ("GET", "/served.js", {}, 200),
        ("GET", "/page.css", {}, 200),
        ("GET", "/document", {}, 200),
        ("GET", "/steps?run=0&from=0&count=2", {}, 200),
        ("POST", "/obey", {}, 200),
        ("POST", "/halt", {}, 200),
        ("GET", "/steps?run=0&from=0&count=x", {}, 400),
        ("GET", "/document", {"Authorization": "Bearer wrong"}, 401),
        ("GET", "/", {"Host": "evil.example"}, 403),
        ("POST", "/obey", {"Origin": AWAY}, 403),
        ("GET", "/nowhere", {}, 404),
        ("PUT", "/document", {}, 405),
        ("POST", "/obey", {"Content-Type": "text/plain"}, 415),
    ],
)
def test_every_answer_has_the_headers_of_a_page_that_is_for_one_alone(
    method: str, path: str, changed: dict[str, str], status: int, files: dict[str, Path]
) -> None:
    with PageServer(Reading(("a", read_record(files["sampled"])))) as server:
        own = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        body = b'{"line": "help"}' if method == "POST" else None
        connection.request(method, path, body, {**own, **changed})
        answer = connection.getresponse()
        answer.read()
        connection.close()
    assert answer.status == status
    every = [(name.lower(), value) for name, value in answer.getheaders()]
    for name, value in HEADERS.items():
        assert [one for own, one in every if own == name] == [value]
    names = {name for name, _ in every}
    assert not {name for name in names if name.startswith("access-control")}
    assert not names & {"server", "set-cookie", "etag"}
