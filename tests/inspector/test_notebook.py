"""In a notebook: runs, steps and records show themselves without a script, and live as a widget."""

from __future__ import annotations

import html.parser
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import RequestError
from everystep.inspector.widget import InspectorWidget, show
from everystep.records import Record, RecordedRun, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.inspector.browser import Browser, needs_chromium

MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)
GIVEN: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "top_k": 20, "seed": 3}
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"


class Tags(html.parser.HTMLParser):
    """Every tag of a text, with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attributes))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    names = {name for _, attributes in tags.found for name, _ in attributes}
    assert {tag for tag, _ in tags.found}.isdisjoint({"script", "img", "iframe", "link", "style"})
    assert names <= {"style", "title", "colspan"}
    return tags


def test_a_record_shows_its_texts(tmp_path: Path) -> None:
    es.generate(MODEL, TOKENIZER, "ab", **GIVEN, eos_token_id=None, record=tmp_path / "a")
    record = read_record(tmp_path / "a")
    (run,) = record.runs.values()
    tags = read(record._repr_html_())
    spans = [dict(attributes) for tag, attributes in tags.found if tag == "span"]
    assert [int((one["title"] or "").split("id ")[1].split(",")[0]) for one in spans] == run.tokens[
        0
    ]
    assert "length after 6" in tags.text
    assert "no run" in Record({})._repr_html_()


def test_no_text_of_a_record_is_markup() -> None:
    ids = [0] * 3000
    about = {"strategy": HOSTILE}
    runs = {HOSTILE + str(i): RecordedRun(HOSTILE, about, (), tokens={0: ids}) for i in range(9)}
    tags = read(Record({}, runs, {0: HOSTILE.encode()})._repr_html_())
    assert "\x1b" not in tags.text and "\u202e" not in tags.text and "1000 more" in tags.text


def test_steps_and_runs_show_themselves() -> None:
    run = es.open(MODEL, TOKENIZER, "ab", **GIVEN)
    step = next(run)
    tags = read(step._repr_html_())
    assert "chosen" in tags.text and "TopKLogitsWarper" in tags.text
    assert str(run.tokens[0]) in tags.text
    assert str(run.tokens[0]) in read(run._repr_html_()).text
    run.result()
    last = es.open(MODEL, TOKENIZER, "ab", **GIVEN)
    last.cancel()
    assert "cancelled" in read(next(last)._repr_html_()).text


def asked(widget: InspectorWidget, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What a widget answers to messages, one after another."""
    found: list[dict[str, Any]] = []
    for message in messages:
        came = threading.Event()
        widget.send = lambda content, came=came: (found.append(content), came.set())  # type: ignore[misc, method-assign, func-returns-value]
        widget._handle_custom_msg({"id": len(found), **message}, [])
        assert came.wait(30)
    return found


def test_a_widget_answers_what_the_page_asks(tmp_path: Path) -> None:
    run = es.open(MODEL, TOKENIZER, "ab", **GIVEN, record=tmp_path / "a")
    next(run)
    twin = run.fork(seed=9)
    widget = show(twin)
    answers = asked(
        widget,
        {"what": "document"},
        {"what": "obey", "line": "step", "run": None},
        {"what": "steps", "run": 1, "first": 0, "count": 5},
        {"what": "obey", "line": "nonsense"},
        {"what": "halt"},
        {"what": "steps", "run": "x", "first": 0, "count": 5},
        {"what": "other"},
    )
    assert answers[0]["value"]["live"]["current"] == "1" and len(answers[0]["value"]["runs"]) == 2
    assert len(twin.tokens) == 2 and len(run.tokens) == 1
    assert answers[1]["value"]["follows"] == "1"
    assert answers[2]["value"][0]["rows"][0]["chosen"] == twin.tokens[1]
    assert "no verb" in answers[3]["error"] and "whole numbers" in answers[5]["error"]
    assert "no such question" in answers[6]["error"]
    with pytest.raises(RequestError, match="keeps no record"):
        show(es.open(MODEL, TOKENIZER, "ab", **GIVEN))
    with pytest.raises(RequestError, match="has its model"):
        show(run, model=MODEL)


PAGE = """<!doctype html><html lang="en"><body><div id="cell"></div><script type="module">
{esm}
const widget = everystepWidget;
const answers = {answers};
const heard = [];
widget.render({{ el: document.getElementById("cell"), model: {{
  on: (name, act) => heard.push(act), off: () => {{}},
  send: (asked) => setTimeout(() => heard.forEach((act) =>
    act({{ ...answers[asked.what], id: asked.id }}))),
}} }});
</script></body></html>"""


@needs_chromium
def test_a_cell_has_the_page(tmp_path: Path) -> None:
    run = es.open(MODEL, TOKENIZER, "ab", **GIVEN, eos_token_id=None, record=tmp_path / "a")
    next(run), next(run)
    widget = show(run)
    messages: tuple[dict[str, Any], ...] = (
        {"what": "document"},
        {"what": "steps", "run": 0, "first": 0, "count": 100},
        {"what": "obey", "line": "step", "run": "0"},
    )
    found = asked(widget, *messages)
    answers = {one["what"]: answer for one, answer in zip(messages, found, strict=True)}
    esm = str(InspectorWidget._esm).replace("export default", "const everystepWidget =")
    page = tmp_path / "cell.html"
    data = json.dumps(answers).replace("<", "\\u003c")
    page.write_text(PAGE.format(esm=esm, answers=data))
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, "document.querySelectorAll('#cell #step td').length > 0")
        assert browser.value("document.querySelectorAll('#cell #tokens span').length") == 2
        browser.value("document.querySelector('#do-step').focus()")
        browser.press("Enter")
        browser.until("document.querySelectorAll('#cell #tokens span').length === 3")
        assert browser.value("document.activeElement.id") == "do-step"
        assert browser.value("location.hash") == "" and browser.problems == []
