"""A run in hands: by lines, and on a page that one browser alone can open, by keyboard."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, RequestError
from everystep.inspector import sessions, views
from everystep.inspector.page_server import MOST_BODY, PageServer
from everystep.inspector.sessions import MOST_RUNS, Known, LiveSession, Reading
from everystep.records import read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.inspector.browser import Browser, needs_chromium

MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)
PROMPT = "ab ab"
GIVEN: dict[str, Any] = {
    "do_sample": True,
    "top_k": 20,
    "temperature": 0.7,
    "seed": 3,
    "max_new_tokens": 12,
    "eos_token_id": 2,
}


def opened(file: Path, **changes: Any) -> LiveSession:
    return LiveSession.opened(MODEL, TOKENIZER, PROMPT, file, "live", **{**GIVEN, **changes})


@pytest.fixture
def session(tmp_path: Path) -> LiveSession:
    return opened(tmp_path / "live.jsonl")


def whole() -> tuple[int, ...]:
    found: tuple[int, ...] = es.open(MODEL, TOKENIZER, PROMPT, **GIVEN).result().tokens
    return found


def say(session: LiveSession, *lines: str) -> list[int]:
    for line in lines:
        session.obey(line)
    return [*session.run.tokens]


def test_steps_are_those_of_the_run(session: LiveSession) -> None:
    assert session.document()["live"] == {"current": "0", "done": False, "alone": True}
    ids = whole()
    assert say(session, "step") == [*ids[:1]]
    assert say(session, "step 2") == [*ids[:3]]
    assert say(session, "until 5") == [*ids[:6]]
    assert say(session, "until done") == [*ids]
    assert session.document()["live"] == {"current": "0", "done": True, "alone": True}
    assert session.record().runs["0"].tokens[0] == [*ids]


def test_breakpoints_are_the_first_such_places(tmp_path: Path) -> None:
    ids, run = whole(), es.open(MODEL, TOKENIZER, PROMPT, **GIVEN)
    run.result()
    shares = [torch.softmax(run.step_at(at).logits[0].double(), -1) for at in range(len(ids))]  # type: ignore[index]
    own = [float(share[id]) for share, id in zip(shares, ids, strict=True)]
    ends = [float(share[2]) for share in shares]
    for least in (0.02, 0.05, 0.5):
        at = next((i for i, one in enumerate(own) if one < least), len(ids) - 1)
        assert len(say(opened(tmp_path / "a"), f"until low {least}")) == at + 1
    for most in (sorted(ends)[-1] * 0.99, sorted(ends)[-3] * 0.99):
        at = next(i for i, one in enumerate(ends) if one >= most)
        assert len(say(opened(tmp_path / "b"), f"until stop {most}")) == at + 1


def test_changes_are_forks_and_undone(session: LiveSession) -> None:
    ids = [*whole()]
    say(session, "step 4")
    best = session.record().runs["0"].rows()[2]
    order = sorted(range(len(best.ids)), key=lambda i: -(best.scores[i] or -1e9))
    second = next(best.ids[i] for i in order if best.ids[i] != ids[2])
    rank = next(n for n, i in enumerate(order) if best.ids[i] == second)
    assert say(session, f"pick #{rank} 2") == [*ids[:2], second]
    assert session.current == "1" and session.run.given == (2,)
    went = say(session, "step 2")
    other = es.open(MODEL, TOKENIZER, PROMPT, **GIVEN)
    other.send([*ids[:2], second])
    next(other), next(other)
    assert went == [*other.tokens]
    assert say(session, "undo") == [*ids[:2], second]
    assert say(session, "undo") == ids[:4] and session.current == "0"
    assert say(session, 'send "xy"')[:4] == ids[:4] and len(session.run.given) == 2
    assert say(session, 'edit 1 "q"')[:1] == ids[:1] and session.run.given == (1,)
    assert say(session, "undo", "undo") == ids[:4]
    assert say(session, "back 3") == ids[:1]
    assert say(session, "until done") == ids
    say(session, "run 0", "set temperature=0.2")
    assert session.record().runs[str(session.current)].changes == [(4, {"temperature": 0.2})]
    say(session, "run 0", "without TopK", "step")
    rows = session.record().runs[str(session.current)].rows()
    assert [stage.name for stage in rows[4].stages] == ["TemperatureLogitsWarper"]
    say(session, "run 0", "fork seed=8", "until done")
    assert session.run.tokens[:4] == tuple(ids[:4]) and session.run.tokens != tuple(ids)
    assert "with seed=8" in "".join(session.document()["runs"][0]["tree"])  # type: ignore[index]


def test_questions_are_about_the_run_in_hands(session: LiveSession) -> None:
    say(session, "step 6", "pick #1 3", "step 2")
    assert "in place of" in session.obey("why #2 4").said[0]
    assert "to the bit" in session.obey("if seed=8 at 4").said[0]
    assert "to the bit" in session.obey("if seed=8 at 2", "0").said[0]
    assert len(session.obey("prompt").said) == 1 + 4
    assert any("pick TOKEN" in line for line in session.obey("help").said)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no verb"),
        ("stepp", "step is meant"),
        ("step x", "whole number"),
        ("pick", "whole number"),
        ("pick 5 99", "no such position"),
        ("pick 999999", "vocabulary|ids to send"),
        ("pick #99", "no such rank"),
        ('pick "ab ab"', "tokens"),
        ("edit 0", "no text"),
        ('send "', "cannot be read"),
        ("set", "nothing was said"),
        ("set num_beams=3", "cannot change"),
        ("set temperatur=3", "temperatur"),
        ("until", "whole number"),
        ("until low 2", "no share"),
        ("without", "no processor"),
        ("without TopP", "no processor"),
        ("run 7", "no run"),
        ("drop 0", "cannot be dropped"),
        ("undo", "nothing to undo"),
        ("if", "spelled wrong|no such|at 0"),
        ("why", "whole number"),
    ],
)
def test_lines_that_cannot_be_are_refused_and_change_nothing(
    line: str, says: str, session: LiveSession
) -> None:
    session.run.rewind(0)
    next(session.run)
    before = session.run.tokens, session.current
    if line == "if":
        assert session.obey(line).said
    else:
        with pytest.raises(EverystepError, match=says):
            session.obey(line)
    assert (session.run.tokens, session.current) == before


def test_a_search_is_stepped_and_not_changed(tmp_path: Path) -> None:
    given = {"max_new_tokens": 5, "num_beams": 3, "seed": 1}
    session = LiveSession.opened(MODEL, TOKENIZER, PROMPT, tmp_path / "a", "live", **given)
    say(session, "step 2")
    for line in ("pick 5 0", "send a", "set top_k=3", "without TopK"):
        with pytest.raises(RequestError, match=r"one sequence|no processor"):
            session.obey(line)
    session.obey("fork")
    assert say(session, "until done") == [
        *es.open(MODEL, TOKENIZER, PROMPT, **given).result().tokens
    ]


def test_a_session_keeps_so_many_runs(session: LiveSession) -> None:
    say(session, "step")
    for _ in range(MOST_RUNS - 1):
        session.obey("fork")
    with pytest.raises(RequestError, match="keeps"):
        session.obey("fork")
    session.obey("drop 5")
    session.obey("fork")
    assert session.current == str(MOST_RUNS)


# --- the gate -------------------------------------------------------------------------------------


@pytest.fixture
def served(session: LiveSession) -> Iterator[PageServer]:
    with PageServer(session) as page:
        yield page


def ask(
    page: PageServer, method: str, path: str, body: bytes | None = None, **headers: str | None
) -> tuple[int, Any]:
    own = {
        "Host": f"127.0.0.1:{page.port}",
        "Authorization": f"Bearer {page.token}",
        "Content-Type": "application/json" if body is not None else None,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in own.items():
        if value is not None:
            connection.putheader(name, value)
    if body is not None and "Content_Length" not in headers:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    data = answer.read()
    assert "require-trusted-types-for" in (answer.getheader("content-security-policy") or "")
    assert answer.getheader("access-control-allow-origin") is None
    connection.close()
    is_json = (answer.getheader("content-type") or "").startswith("application/json")
    return answer.status, json.loads(data) if is_json and data else data


STEP = b'{"line": "step"}'


def test_a_page_asks_and_is_answered(served: PageServer) -> None:
    assert ask(served, "GET", "/", Authorization=None)[0] == 200
    assert ask(served, "GET", "/page.js", Authorization=None)[0] == 200
    status, found = ask(served, "GET", "/document")
    assert status == 200 and found["runs"][0]["steps"] == 0 and found["live"]["current"] == "0"
    status, found = ask(served, "POST", "/obey", STEP)
    assert status == 200 and found["document"]["runs"][0]["steps"] == 1
    status, found = ask(served, "GET", "/steps?run=0&from=0&count=10")
    assert status == 200 and found[0]["rows"][0]["chosen"] == whole()[0]
    assert ask(served, "POST", "/obey", b'{"line": "nonsense"}')[0] == 400
    assert ask(served, "POST", "/halt", b"{}")[0] == 200
    assert ask(served, "GET", "/nowhere")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/", None, {"Host": "evil.example"}, 403),
        ("GET", "/page.js", None, {"Host": "evil.example:80"}, 403),
        ("GET", "/document", None, {"Host": "127.0.0.1"}, 403),
        ("GET", "/document", None, {"Host": "127.0.0.1:1"}, 403),
        ("GET", "/document", None, {"Host": None}, 403),
        ("POST", "/obey", STEP, {"Host": "evil.example"}, 403),
        ("POST", "/obey", STEP, {"Origin": "http://evil.example"}, 403),
        ("POST", "/obey", STEP, {"Origin": "null"}, 403),
        ("GET", "/", None, {"Sec_Fetch_Site": "cross-site"}, 403),
        ("GET", "/document", None, {"Sec_Fetch_Site": "same-site"}, 403),
        ("GET", "/document", None, {"Authorization": None}, 401),
        ("GET", "/document", None, {"Authorization": "Bearer wrong"}, 401),
        ("POST", "/obey", STEP, {"Authorization": "Bearer "}, 401),
        ("GET", "/steps?run=0&from=0&count=1", None, {"Authorization": None}, 401),
        ("POST", "/obey", STEP, {"Content_Type": "text/plain"}, 415),
        ("POST", "/obey", STEP, {"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/obey", STEP, {"Content_Type": None}, 415),
        ("POST", "/obey", STEP, {"Content_Length": str(MOST_BODY + 1)}, 413),
        ("POST", "/obey", b"[1]", {}, 400),
        ("POST", "/obey", b"[" * 5000, {}, 400),
        ("POST", "/obey", b'{"line": 5}', {}, 400),
        ("GET", "/obey", None, {}, 405),
        ("DELETE", "/document", None, {}, 405),
        ("GET", "/steps?run=0&from=-1&count=1", None, {}, 400),
        ("GET", "/steps?run=9&from=0&count=1", None, {}, 400),
        ("GET", "/steps?run=0&from=0&count=99999", None, {}, 400),
        ("GET", "/../sessions.py", None, {}, 404),
    ],
)
def test_whoever_should_not_ask_is_refused(
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str | None],
    status: int,
    served: PageServer,
) -> None:
    own = {"Host": f"127.0.0.1:{served.port}", **headers}
    if own["Host"] == "127.0.0.1:1" and served.port == 1:
        pytest.skip("that is our port")
    found, said = ask(served, method, path, body, **own)
    if headers.get("Host", "") is None:
        assert found in (400, 403)
        return
    assert found == status
    if status in (401, 403, 413, 415):
        assert "error" in said
    assert served.session.run.tokens == ()  # type: ignore[attr-defined]


def test_another_name_may_be_allowed(session: LiveSession) -> None:
    with PageServer(session, allow_hosts=["box.example:8000"]) as page:
        assert ask(page, "GET", "/document", Host="box.example:8000")[0] == 200
        assert ask(page, "GET", "/document", Host="box.example")[0] == 403
        with pytest.raises(RequestError, match="cannot be listened on"):
            PageServer(session, page.port)


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with Browser(tmp_path_factory.mktemp("profile"), rules) as one:
        yield one


OPEN = "document.getElementById('hands') !== null"


def tab_to(browser: Browser, id: str) -> None:
    """By keyboard alone."""
    for _ in range(60):
        if browser.value("document.activeElement.id") == id:
            return
        browser.press("Tab")
    raise AssertionError(f"{id} is not reached by Tab")


def said(browser: Browser) -> str:
    browser.until("!document.getElementById('page').hasAttribute('aria-busy')")
    return str(browser.value("document.getElementById('said').textContent"))


@needs_chromium
def test_a_run_is_driven_by_keyboard(browser: Browser, served: PageServer) -> None:
    session = served.session
    assert isinstance(session, LiveSession)
    ids = [*whole()]
    browser.visit(served.url, OPEN)
    assert "token" not in browser.value("location.href")
    tab_to(browser, "do-step")
    browser.press("Enter")
    assert "1 tokens" in said(browser) and browser.value("document.activeElement.id") == "do-step"
    tab_to(browser, "do-until")
    browser.type("5")
    browser.press("Enter")
    assert "6 tokens" in said(browser) and [*session.run.tokens] == ids[:6]
    assert browser.value("document.querySelectorAll('#tokens span').length") == 6
    tab_to(browser, "tokens")
    browser.press("Home", "ArrowRight", "ArrowRight", "c")
    browser.until("document.activeElement.classList.contains('wide')")
    pick = "document.activeElement.dataset.id"
    while browser.value(pick) in (None, str(ids[2])):
        browser.press("Tab")
    token = int(browser.value(pick))
    browser.press("Enter")
    assert "run 1: 3 tokens" in said(browser)
    assert [*session.run.tokens] == [*ids[:2], token]
    assert browser.value("document.querySelector('#tokens .given') !== null")
    tab_to(browser, "tokens")
    browser.press("u")
    assert "run 0: 6 tokens" in said(browser) and [*session.run.tokens] == ids[:6]
    for box, text in (("do-send", "xy"), ("do-set", "temperature=0.3"), ("do-edit", "q")):
        tab_to(browser, box)
        browser.type(text)
        browser.press("Enter")
        assert "tokens, open" in said(browser)
    assert session.current == "4" and session.run.given[-1] == len(session.run.tokens) - 1
    tab_to(browser, "do-set")
    browser.type("num_beams=4")
    browser.press("Enter")
    assert "cannot change" in said(browser)
    tab_to(browser, "do-end")
    browser.press("Enter")
    assert "over" in said(browser)
    assert browser.problems == [
        one for one in browser.problems if "400" in one and "obey" in one
    ]  # what was refused is told as such


PLAIN = {"top_k": None, "temperature": None, "seed": None}
GROWING: dict[str, dict[str, Any]] = {
    "sampled": {},
    "drafted": {"prompt_lookup_num_tokens": 3, "do_sample": False, **PLAIN},
    "held back": {"stop_strings": ["zzz never"], "trim_stop_strings": True},
}


@pytest.mark.parametrize("kind", GROWING)
def test_what_comes_to_a_long_run_is_what_the_document_has_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LONG", 2)
    session = opened(tmp_path / "a", max_new_tokens=20, eos_token_id=None, **GROWING[kind])
    tokens: list[Any] = []
    unseen: dict[Any, str] = {}
    texts: dict[str, str] = {}
    grew = 0
    while not session.run.done:
        known = Known(len(tokens), len(texts))
        answer: Any = session.answered("step 2" if grew % 2 else "step", None, known)
        whole: Any = session.document()
        (own,) = whole["runs"]
        if (found := answer["grown"]) is not None:
            assert answer["document"] is None and found["run"] == 0
            assert found["from"] == len(tokens) < len(own["sequences"]["0"])
            tokens, grew = tokens + found["tokens"], grew + 1
            unseen, texts = unseen | found["unseen"], texts | found["texts"]
        else:
            assert answer["document"] == whole
            tokens, unseen = [*own["sequences"]["0"]], dict(own["unseen"]["0"])
            texts = dict(whole["texts"][0])
        assert (tokens, unseen) == (own["sequences"]["0"], own["unseen"]["0"])
        assert texts == whole["texts"][0]
    assert grew > 3 and answer["document"] is not None, "the last answer says how it ended"


def test_what_is_no_growth_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LONG", 2)
    session = opened(tmp_path / "a")
    session.obey("step 4")
    for line in ("back 1", "step", "fork", "undo"):
        answer = session.answered(line, None, Known(len(session.run.tokens), 1))
        assert (answer["grown"] is not None) == (line == "step"), line
    beams = opened(tmp_path / "b", do_sample=False, num_beams=3, **PLAIN)
    beams.obey("step 4")
    assert beams.answered("step", None, Known(4, 1))["grown"] is None
    assert session.answered("step", None, Known(99, 1))["grown"] is None
    for value in (None, [1], [1, -1], [True, 2], "12", [1, 2, 3], {"tokens": 1}):
        assert Known.read(value) is None
    assert Known.read([3, 4]) == Known(3, 4)


@needs_chromium
def test_a_long_run_grows_on_the_page(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LONG", 5)
    session = opened(tmp_path / "a", max_new_tokens=40, eos_token_id=None)
    session.obey("step 6")
    shown = "document.querySelectorAll('#tokens span').length"
    with PageServer(session) as server:
        browser.visit(server.url, OPEN)
        before = len([one for one in browser.requests if one.endswith("/document")])
        assert browser.value("document.getElementById('older').hidden")
        for count in (7, 8, 9):
            tab_to(browser, "do-step")
            browser.press("Enter")
            assert f"{count} tokens" in said(browser) and browser.value(shown) == count
            here = browser.value("document.querySelector('#tokens .here').id")
            assert here == f"token-{count - 1}"
            browser.until("document.querySelector('#step tbody tr') !== null")
            last = "document.querySelector('#tokens').lastElementChild.textContent"
            assert browser.value(last) == views.spelled(session.record(), session.run.tokens[-1])
        assert browser.value("everystep.counts")["grown"] == 3
        assert "6 tokens" in browser.value("document.getElementById('older').textContent")
        tab_to(browser, "again")
        browser.press("Enter")
        browser.until("document.getElementById('older').hidden")
        after = len([one for one in browser.requests if one.endswith("/document")])
        assert after == before + 1 and browser.value(shown) == 9
    assert browser.problems == []


@needs_chromium
def test_what_if_is_asked_by_keyboard(browser: Browser, served: PageServer) -> None:
    served.session.obey("step 6")
    browser.visit(served.url, OPEN)
    tab_to(browser, "tokens")
    browser.press("Home", "ArrowRight", "ArrowRight", "ArrowRight")
    for kind, value, says in (
        ("without", "TopK", "without TopK, from token 3 on"),
        ("seed", "9", "seed=9, from token 3 on"),
        ("temperature", "0.2", "temperature=0.2, from token 3 on"),
        ("mask", "1:3", "prompt 1 to 2 masked"),
        ("why", "#2", "in place of"),
        ("prompt", "", "how much less likely"),
        ("lens", "", "the head after each layer, at token 3"),
        ("attention", "", "layer 1 head 3: "),
    ):
        tab_to(browser, "what-kind")
        browser.value("document.getElementById('what-kind').selectedIndex = 0")
        names = ("without", "seed", "temperature", "adapter", "mask", "why", "prompt")
        names = (*names, "lens", "attention")
        browser.press(*["ArrowDown"] * names.index(kind))
        assert browser.value("document.getElementById('what-kind').selectedIndex") == names.index(
            kind
        )
        tab_to(browser, "what-value")
        browser.value("document.getElementById('what-value').value = ''")
        browser.type(value)
        browser.press("Tab", "Enter")
        assert says in said(browser)
    assert browser.problems == []


@needs_chromium
def test_a_rebound_page_is_refused(browser: Browser, served: PageServer) -> None:
    browser.visit(f"http://evil.example:{served.port}/", "document.body !== null")
    assert "not called by that host" in browser.value("document.body.textContent")
    headers = f"{{'Content-Type': 'application/json', Authorization: 'Bearer {served.token}'}}"
    given = f"{{method: 'POST', headers: {headers}, body: '{STEP.decode()}'}}"
    asked = f"fetch('/obey', {given}).then((one) => one.status)"
    assert browser.later(asked) == 403
    assert served.session.run.tokens == ()  # type: ignore[attr-defined]


@needs_chromium
def test_a_form_of_another_page_is_refused(
    browser: Browser, served: PageServer, tmp_path: Path
) -> None:
    page = tmp_path / "form.html"
    page.write_text(
        f'<form method="post" enctype="text/plain" action="http://127.0.0.1:{served.port}/obey">'
        """<input name='{"line":"step","x":"' value='"}'></form>"""
    )
    browser.open(page, "document.forms.length === 1")
    browser.value("document.forms[0].submit()")
    browser.until("document.contentType === 'application/json'")
    assert "Another site asks" in browser.value("document.body.textContent")
    assert served.session.run.tokens == ()  # type: ignore[attr-defined]


@needs_chromium
def test_a_wrong_token_shows_nothing(browser: Browser, served: PageServer) -> None:
    served.session.obey("step 2")
    browser.visit(
        f"http://127.0.0.1:{served.port}/#token=wrong",
        "document.querySelector('[role=alert]') !== null",
    )
    assert "token is wrong" in browser.value("document.body.textContent")
    assert browser.value("document.querySelectorAll('#tokens span').length") == 0


@needs_chromium
def test_a_file_is_served_by_windows(browser: Browser, tmp_path: Path) -> None:
    es.generate(MODEL, TOKENIZER, PROMPT, **{**GIVEN, "max_new_tokens": 250, "eos_token_id": None},
                record=tmp_path / "a")  # fmt: skip
    with PageServer(Reading(("a", read_record(tmp_path / "a")))) as page:
        browser.visit(page.url, "document.querySelectorAll('#step td').length > 0")
        tab_to(browser, "tokens")
        browser.press("End")
        browser.until("document.querySelectorAll('#step td').length > 0")
        browser.press("ArrowLeft", "ArrowLeft")
        asked = [url for url in browser.requests if "/steps" in url]
        assert [url.partition("?")[2] for url in asked] == [
            "run=0&from=0&count=100",
            "run=0&from=200&count=100",
        ]
        assert browser.value("location.hash") == "#run=0&sequence=0&at=247"
        assert browser.value("document.getElementById('what').children.length") == 0
        browser.visit(
            f"{page.url}&run=0&at=120", "document.querySelectorAll('#step td').length > 0"
        )
        assert browser.value("document.querySelector('#step h2').textContent").startswith(
            "Token 120"
        )
    assert browser.problems == []
