"""The page at `/`: a conversation in a real browser, by keyboard alone, and who may load it."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

import everystep as es
from everystep.cli import main
from everystep.config.named_strategies import NAMED
from everystep.server.access import Keys, digest_of
from everystep.server.chat_page import PAGE_PATHS, STRATEGIES
from everystep.server.exchange import FrontSettings
from everystep.testing.models import tiny_llama
from tests.inspector.browser import Browser, needs_chromium
from tests.server.serving import TOKENIZER, Served, chunks_of, in_thread, served, tiny
from tests.server.test_strangers import idle

READY = "document.querySelectorAll('#models tr').length > 0"
DONE = "document.querySelector('#stop').disabled && document.querySelector('.turn .quiet') !== null"
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def talker() -> Iterator[Served]:
    """A server that other modules do not ask."""
    with served() as one:
        yield one


def told(browser: Browser, role: str) -> list[str]:
    """What turns of a role say."""
    every = f"[...document.querySelectorAll('.turn.{role} .said')].map((one) => one.textContent)"
    found: list[str] = browser.value(every)
    return found


def field(browser: Browser, name: str, value: str) -> None:
    """Writes a value where a person would."""
    event = "dispatchEvent(new Event('change'))"
    chosen = f"document.getElementById('{name}')"
    browser.value(f"{chosen}.value = {json.dumps(value)}; {chosen}.{event}")


def leave(browser: Browser) -> None:
    """Leaves a page before its server ends: it asks for the load every other second."""
    browser.visit("about:blank", "location.href === 'about:blank'")


# --- who may load it ------------------------------------------------------------------------------


def test_the_page_asks_its_own_server_alone(server: Served) -> None:
    for path in PAGE_PATHS:
        answer = server.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy and "*" not in policy
        for word in ("http://", "https://", "innerHTML", "eval(", "localStorage", "cookie"):
            assert word not in answer.text, word


def test_the_page_names_the_command_of_the_inspector(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it can be typed: the command line takes it, and holds a run on a page."""
    (told,) = re.findall(r'<pre id="inspect"[^>]*>(.*?)</pre>', server.client.get("/").text)
    name, *arguments = shlex.split(html.unescape(told))
    assert (name, arguments[0]) == ("everystep", "inspect")
    held: list[tuple[str, bool]] = []

    def hold(_: Any, prompt: str, *__: Any, web: Any, **___: Any) -> None:
        held.append((prompt, web[0]))

    monkeypatch.setattr("everystep.cli.inspect.hold", hold)
    assert main(arguments) == 0 and held == [("Hello", True)]


def test_its_own_origin_may_ask_and_no_other(server: Served) -> None:
    port = server.port
    own = (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}"), ("http://localhost", "localhost")
    for origin, host in own:
        headers = {"Origin": origin, "Host": host}
        answer = server.client.get("/v1/models", headers=headers)
        assert answer.status_code == 200, headers
        assert "access-control-allow-origin" not in answer.headers
    for origin, host in (
        (f"http://127.0.0.1:{port + 1}", f"127.0.0.1:{port}"),
        (f"https://127.0.0.1:{port}", f"127.0.0.1:{port}"),
        (f"http://localhost:{port}", f"127.0.0.1:{port}"),
        ("http://evil.example", "evil.example"),
        ("http://evil.example", "localhost"),
        ("null", "localhost"),
    ):
        headers = {"Origin": origin, "Host": host}
        for path in ("/", "/v1/models", "/v1/everystep/load"):
            assert server.client.get(path, headers=headers).status_code == 403, headers
    forwarded = {"Host": "127.0.0.1", "Origin": "https://127.0.0.1", "X-Forwarded-Proto": "https"}
    assert server.client.get("/v1/models", headers=forwarded).status_code == 200


def test_the_page_needs_no_key_and_its_data_does() -> None:
    with served(settings=FrontSettings(keys=Keys([digest_of("secret")]))) as server:
        for path in PAGE_PATHS:
            assert server.client.get(path).status_code == 200
        assert server.client.get("/v1/everystep/load").status_code == 401


# --- the load -------------------------------------------------------------------------------------


def test_the_load_counts_tokens_once(server: Served) -> None:
    before = server.client.get("/v1/everystep/load").json()
    asked: Any = {"prompt": "hello", "max_tokens": 7, "ignore_eos": True}
    server.completion(**asked)
    server.completion(**asked, n=2, seed=1, temperature=1.0)
    chunks_of(server.post("/v1/completions", **asked, stream=True).text)
    after = server.client.get("/v1/everystep/load").json()
    assert after["generated_tokens"] - before["generated_tokens"] == 7 + 2 * 7 + 7
    assert (after["ready"], after["running"], after["waiting"]) == (True, 0, 0)
    assert after["rows"] == 16 and after["seconds"] > before["seconds"]


# --- in a browser ---------------------------------------------------------------------------------


@needs_chromium
def test_a_conversation_by_keyboard_alone(browser: Browser, talker: Served) -> None:
    browser.visit(talker.url, READY)
    assert browser.value("document.querySelector('#models td').textContent") == "tiny"
    field(browser, "most", "6")
    field(browser, "strategy", "greedy")
    assert browser.value("document.activeElement.id") == "text", "whoever types writes a message"
    field(browser, "temperature", "99")
    field(browser, "strategy", "sample")
    browser.type("hello")
    browser.press("Enter")
    assert told(browser, "user") == [] and browser.value("document.activeElement.id") != "text"
    field(browser, "temperature", "")
    field(browser, "strategy", "greedy")
    browser.value("document.getElementById('text').focus()")
    browser.press("Enter")
    browser.until(DONE)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    options: Any = {"max_new_tokens": 6, "strategy": "greedy"}
    first = str(es.chat(tiny(), TOKENIZER, messages, **options))
    assert told(browser, "assistant") == [first]
    browser.type("and the")
    browser.press("Enter")
    browser.until("document.querySelectorAll('.turn.assistant > .quiet').length === 2")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and the"}]
    second = str(es.chat(tiny(), TOKENIZER, messages, **options))
    assert told(browser, "assistant") == [first, second]
    assert told(browser, "user") == ["hello", "and the"]
    browser.press("Tab")
    assert browser.value("document.activeElement.id") == "send"
    browser.press("Tab")
    assert browser.value("document.activeElement.id") == "fresh", "there is nothing to stop"
    browser.press("Enter")
    assert told(browser, "user") == []
    assert browser.problems == []
    assert all(one.startswith((talker.url, "data:")) for one in browser.requests)


@needs_chromium
def test_an_answer_is_stopped_and_the_engine_with_it(browser: Browser, talker: Served) -> None:
    browser.visit(talker.url, READY)
    field(browser, "most", "3500")
    field(browser, "seed", "1")
    field(browser, "temperature", "3")
    browser.value("document.getElementById('text').focus()")
    browser.type("hello")
    browser.press("Enter")
    browser.until("document.querySelector('.turn.assistant .said').textContent.length > 20")
    browser.press("Tab")
    assert browser.value("document.activeElement.id") == "stop", "nothing can be sent meanwhile"
    browser.press("Enter")
    browser.until(DONE)
    assert idle(talker), "the engine goes on with what nobody reads"
    assert "stopped by you" in browser.value(
        "document.querySelector('.turn.assistant').textContent"
    )
    assert browser.value("document.activeElement.id") == "text"


@needs_chromium
def test_errors_are_told_and_the_question_is_kept(browser: Browser, talker: Served) -> None:
    browser.visit(talker.url, READY)
    field(browser, "most", "99999999")
    browser.value("document.getElementById('text').focus()")
    browser.type(HOSTILE)
    browser.value("document.getElementById('ask').dispatchEvent(new Event('submit'))")
    browser.until("document.getElementById('error').textContent !== ''")
    assert "max_tokens" in browser.value("document.getElementById('error').textContent")
    browser.until("document.getElementById('text').value !== ''")
    assert browser.value("document.getElementById('text').value") == HOSTILE
    assert told(browser, "user") == [] == told(browser, "assistant")


@needs_chromium
def test_the_key_is_asked_for_and_kept_nowhere(browser: Browser) -> None:
    with served(settings=FrontSettings(keys=Keys([digest_of("secret")]))) as server:
        browser.visit(server.url, "!document.getElementById('opening').hidden")
        for key, said in (("wrong", "wrong"), ("secret", "running")):
            browser.value("document.getElementById('key').focus()")
            browser.type(key)
            browser.press("Enter")
            shown = "document.getElementById('load').textContent"
            browser.until(f"{shown}.includes('{said}')")
        browser.until(READY)
        assert browser.value("document.getElementById('opening').hidden")
        field(browser, "most", "3")
        browser.value("document.getElementById('text').focus()")
        browser.type("hello")
        browser.press("Enter")
        browser.until(DONE)
        assert browser.value("document.getElementById('error').textContent") == ""
        kept = "localStorage.length + sessionStorage.length + document.cookie.length"
        assert browser.value(kept) == 0
        assert "secret" not in browser.value("document.documentElement.outerHTML + location.href")
        leave(browser)


@needs_chromium
def test_what_a_model_says_is_text(browser: Browser) -> None:
    """A grammar makes the model write markup; the page shows it as it is."""
    with served(in_thread(tiny_llama(vocab_size=320))) as server:
        browser.visit(server.url, READY)
        patched = f"""(() => {{ const own = window.fetch; window.fetch = (path, more) => {{
          if (more && more.body) more = {{ ...more, body: JSON.stringify(
            {{ ...JSON.parse(more.body), choices: [{json.dumps(HOSTILE)}] }}) }};
          return own(path, more); }}; }})()"""
        browser.value(patched)
        browser.value("document.getElementById('text').focus()")
        browser.type(HOSTILE)
        browser.press("Enter")
        browser.until(DONE)
        assert told(browser, "assistant") == [HOSTILE] == told(browser, "user")
        assert browser.value("document.querySelector('img')") is None
        assert browser.value("document.title") == "everystep"
        assert browser.problems == []
        leave(browser)


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1100, 390])
def test_axe_finds_nothing_serious(
    browser: Browser, talker: Served, width: int, *, dark: bool
) -> None:
    browser.show(width, 800, dark=dark)
    browser.visit(talker.url, READY)
    browser.value("document.getElementById('settings').open = true")
    field(browser, "most", "8")
    browser.value("document.getElementById('text').focus()")
    browser.type("hello " * 40)
    browser.press("Enter")
    browser.until(DONE)
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
    script = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    browser.value(f"{script};0")
    every = json.loads(browser.later("axe.run().then((one) => JSON.stringify(one.violations))"))
    assert [one["id"] for one in every if one["impact"] in ("serious", "critical")] == []
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(20, 20, 23)") == dark
    browser.show(1100, 900)


def test_the_strategies_that_are_offered_need_nothing_more(server: Served) -> None:
    assert set(STRATEGIES) <= set(NAMED)
    messages = [{"role": "user", "content": "hello"}]
    for one in STRATEGIES:
        asked: Any = {"messages": messages, "strategy": one, "max_tokens": 3, "stream": True}
        answer = server.post("/v1/chat/completions", **asked)
        assert answer.status_code == 200, answer.text
        assert chunks_of(answer.text)
