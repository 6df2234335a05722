"""Buttons and keys of the page whose answers are numbers: breakpoints, the search for tokens, the
text for an issue, another adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import LiveSession, Reading
from everystep.records import read_record
from tests.cli.tiny_model import write_tiny_model
from tests.inspector.answers import RawRecord, Textbook, texts_of_ids
from tests.inspector.browser import Browser, needs_chromium
from tests.inspector.test_live import OPEN, said, tab_to

pytestmark = needs_chromium
PROMPT = "ab ab ab"
FREE: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 3}
SHARE = 0.05


@dataclass
class Held:
    """A model, a textbook of it, and the ids of a text that it draws."""

    folder: Path
    model: es.LanguageModel
    tokenizer: Any
    book: Textbook
    ids: tuple[int, ...]
    adapter: dict[str, torch.Tensor]

    def live(self, **given: Any) -> LiveSession:
        asked = {**FREE, "max_new_tokens": 24, "eos_token_id": None, **given}
        file = self.folder.parent / "live.jsonl"
        return LiveSession.opened(self.model, self.tokenizer, PROMPT, file, "live", **asked)

    def shares(self, id: int) -> list[float]:
        """Of an id at every place, by the logits."""
        ids = self.ids
        return [float(self.book.logits(ids[:at]).softmax(-1)[id]) for at in range(len(ids))]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    folder = write_tiny_model(tmp_path_factory.mktemp("pressed") / "tiny")
    model, tokenizer = es.load(str(folder))
    own = model.add_adapter("tone", es.LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=6))
    torch.manual_seed(3)
    with torch.no_grad():
        for one in own.parameters():
            one.normal_(std=0.5)
    given = {**FREE, "max_new_tokens": 24, "eos_token_id": None}
    ids = es.open(model, tokenizer, PROMPT, **given).result().tokens
    book = Textbook.of(folder, tokenizer.encode(PROMPT))
    return Held(folder, model, tokenizer, book, ids, dict(own.named_parameters()))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def press(browser: Browser, id: str) -> str:
    tab_to(browser, id)
    browser.press("Enter")
    return said(browser)


def test_it_runs_to_a_low_share(held: Held, browser: Browser) -> None:
    """Each time to the next token whose share is below a tenth, at last to the end."""
    own = held.book.shares(held.ids)
    stops = [at + 1 for at, share in enumerate(own) if share < 0.1]
    assert len(stops) > 2 and stops[-1] < len(own)
    session = held.live()
    with PageServer(session) as server:
        browser.visit(server.url, OPEN)
        for count in [*stops[:2], *stops[2:][-1:]]:
            for _ in range(1 if count in stops[:2] else len(stops) - 2):
                found = press(browser, "do-low")
            assert f"run 0: {count} tokens, open" in found
            assert session.run.tokens == held.ids[:count]
            assert browser.value("document.querySelectorAll('#tokens span').length") == count
        assert f"run 0: {len(own)} tokens, over" in press(browser, "do-low")
    assert browser.problems == []


def test_it_runs_to_a_near_end(held: Held, browser: Browser) -> None:
    """To the next place where an end is as likely as one in twenty."""
    never = [id for id in range(256) if id not in held.ids]
    places = {id: [at for at, one in enumerate(held.shares(id)) if one >= SHARE] for id in never}
    end, stops = max(places.items(), key=lambda one: (one[1][:1] > [1], len(one[1])))
    assert stops[0] > 1
    session = held.live(eos_token_id=end)
    with PageServer(session) as server:
        browser.visit(server.url, OPEN)
        for at in stops:
            assert f"run 0: {at + 1} tokens, " in press(browser, "do-stop")
            assert session.run.tokens == held.ids[: at + 1]
        assert f"{len(held.ids)} tokens, over" in press(browser, "do-stop")
    assert browser.problems == []


def found_in(texts: list[str], wanted: str) -> list[int]:
    """The tokens in which a text begins."""
    whole = "".join(texts)
    owner = [at for at, text in enumerate(texts) for _ in text]
    starts = [at for at in range(len(whole)) if whole.startswith(wanted, at)]
    return [*dict.fromkeys(owner[at] for at in starts)]


def test_texts_and_ids_are_found(held: Held, browser: Browser, tmp_path: Path) -> None:
    text = "the cat sat on the mat, then that cat ate"
    given = {"max_new_tokens": 60, "choices": [text]}
    es.generate(held.model, held.tokenizer, PROMPT, **given, record=tmp_path / "a")
    record = read_record(tmp_path / "a")
    raw = RawRecord.of(tmp_path / "a")
    texts = [raw.spell(id) for id in raw.tokens()]
    with PageServer(Reading(("found", record))) as server:
        browser.visit(server.url, OPEN)
        for wanted in ("at", "the ", "cat", "t", "e"):
            places = found_in(texts, wanted.replace(" ", "·"))
            assert len(places) > 1
            tab_to(browser, "tokens")
            browser.press("Home", "/")
            assert browser.value("document.activeElement.id") == "find"
            browser.value("document.getElementById('find').value = ''")
            browser.type(wanted)
            after = [at for at in places if at > 0]
            for place in [*after, *places][:4]:
                browser.press("Enter")
                number = places.index(place) + 1
                line = browser.value("document.getElementById('found').textContent")
                assert line == f"{number} of {len(places)}: token {place}"
                assert browser.value("document.querySelector('#tokens .here').id") == (
                    f"token-{place}"
                )
                assert browser.value("document.querySelector('#step h2').textContent") == (
                    f"Token {place}: {texts[place]}"
                )
            before = [at for at in reversed(places) if at < place] or [places[-1]]
            browser.press("Shift+Enter")
            line = browser.value("document.getElementById('found').textContent")
            assert line.endswith(f": token {before[0]}")
            browser.press("Escape")
            assert browser.value("document.activeElement.id") == "tokens"
        browser.press("Home", "/")
        browser.value("document.getElementById('find').value = ''")
        id = raw.tokens()[4]
        places = [at for at, one in enumerate(raw.tokens()) if one == id]
        browser.type(f"#{id}")
        browser.press("Enter")
        line = browser.value("document.getElementById('found').textContent")
        first = next((at for at in places if at > 0), places[0])
        assert line == f"{places.index(first) + 1} of {len(places)}: token {first}"
        browser.type("999")
        browser.press("Enter")
        assert browser.value("document.getElementById('found').textContent") == "not found"
    assert browser.problems == []


def test_a_step_is_copied_as_text(held: Held, browser: Browser, tmp_path: Path) -> None:
    given = {**FREE, "max_new_tokens": 24, "eos_token_id": None, "top_k": 6, "top_p": 0.9}
    es.generate(held.model, held.tokenizer, PROMPT, **given, record=tmp_path / "a")
    raw, at = RawRecord.of(tmp_path / "a"), 3
    ids, row = raw.tokens(), raw.row(at)
    with PageServer(Reading(("copied", read_record(tmp_path / "a")))) as server:
        browser.visit(server.url, OPEN)
        tab_to(browser, "tokens")
        browser.press("Home", *["ArrowRight"] * at)
        browser.until("document.querySelector('#step tbody tr') !== null")
        tab_to(browser, "copy")
        browser.press("Enter")
        assert browser.value("document.activeElement.id") == "copied"
        copied = str(browser.value("document.activeElement.value"))
    lines = copied.splitlines()
    assert lines[0] == f"### copied, run 0, sequence 0, token {at}"
    assert "- seed: `3`" in lines and "- temperature: `1.5 (call)`" in lines
    assert f"text: `{raw.spell(*ids[: at + 6])}`".replace("|", "\\|") in lines
    assert f"Token {at}: {raw.spell(ids[at])}" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("| id | token | logit"))
    table = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines[start:] if line[:1] == "|"]
    assert table[0] == ["id", "token", "logit", "Temperature", "TopK", "TopP", "share"]
    assert lines[start + 1] == "|" + " --- |" * 7
    scores = held.book.sampled(ids[:at], top_k=6, top_p=0.9, temperature=1.5)
    logits, shares = held.book.logits(tuple(ids[:at])), scores.softmax(-1)
    assert len(table) - 3 == len(row["ids"])
    for cells in table[2:-1]:
        id = int(cells[0].removeprefix("▸ "))
        assert cells[0].startswith("▸") == (id == ids[at])
        assert cells[1] == shown(raw, id)
        assert float(cells[2]) == pytest.approx(float(logits[id]), rel=1e-3, abs=1e-3)
        assert float(cells[3]) == pytest.approx(float(logits[id]) / 1.5, rel=1e-3, abs=1e-3)
        if scores[id] == -math.inf:
            assert cells[5:] == ["–", "ruled out"]
        else:
            share = float(cells[-1].removesuffix(" %"))
            assert share == pytest.approx(float(shares[id]) * 100, abs=0.02)
    gone = int((scores == -math.inf).sum()) - (len(logits) - 6)
    assert table[-1][1:] == ["ruled out of all", "", "", str(len(logits) - 6), str(gone), ""]
    assert lines[-1] == "sequence 0 ended after 24 tokens: length"
    assert browser.problems == []


def shown(raw: RawRecord, id: int) -> str:
    """As a cell of Markdown has it."""
    return raw.spell(id).replace("|", "\\|").replace("`", "'")


def test_another_adapter_is_asked_for(held: Held, browser: Browser, tmp_path: Path) -> None:
    """Against the textbook's model with the adapter's product added to its weights."""
    given = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
    es.generate(held.model, held.tokenizer, PROMPT, **given, record=tmp_path / "a")
    raw, at = RawRecord.of(tmp_path / "a"), 2
    ids = raw.tokens()
    other = Textbook.of(held.folder, held.book.prompt)
    for number, layer in enumerate(other.model.model.layers):
        name = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_{{}}.weight"
        a, b = (held.adapter[name.format(one)].detach().double() for one in "AB")
        layer.self_attn.q_proj.weight.data += 6 / 2 * b @ a
    went = ids[:at]
    while len(went) < len(ids):
        went.append(int(other.logits(tuple(went)).argmax()))
    same = next(i for i, (one, two) in enumerate(zip(ids, went, strict=True)) if one != two)
    record = read_record(tmp_path / "a")
    with PageServer(Reading(("asked", record), None, held.model, held.tokenizer)) as server:
        browser.visit(server.url, OPEN)
        tab_to(browser, "tokens")
        browser.press("Home", *["ArrowRight"] * at)
        tab_to(browser, "what-kind")
        browser.press("ArrowDown", "ArrowDown", "ArrowDown")
        tab_to(browser, "what-value")
        browser.type("tone")
        text = press(browser, "what-ask")
    lines = text.splitlines()
    assert lines[0].startswith("adapters={'tone': 1.0}, from token 2 on") and "to the bit" in text
    shares = re.findall(r"share ([\d.]+)%, otherwise ([\d.]+)%", text)
    before = float(held.book.logits(tuple(ids[:at])).softmax(-1)[ids[at]])
    after = float(other.logits(tuple(ids[:at])).softmax(-1)[ids[at]])
    assert [float(one) for one in shares[0]] == pytest.approx([before * 100, after * 100], abs=0.02)
    assert f"  the first other token is {same}" in lines
    texts = texts_of_ids()
    said_ids = "".join(texts[id] for id in went[max(0, same - 8) :])
    assert lines[-1] == f"  otherwise: {said_ids}"
    assert browser.problems == []
