"""The five generations that went wrong, as the guide makes them: what it says of each is found on
the page, by keyboard, and is so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from tests.docs.test_documents import blocks, run_python
from tests.inspector.answers import RawRecord
from tests.inspector.browser import Browser, needs_chromium
from tests.inspector.test_questions import (
    WHY,
    WITHOUT,
    Made,
    Screen,
    close,
    fate_of,
    numbers,
    read_tree,
)
from tests.reading import ROOT

pytestmark = pytest.mark.model
GUIDE = ROOT / "docs" / "guide" / "why-it-went-wrong.md"


@dataclass
class Cases:
    """What the guide's code has left: its records and its names."""

    names: dict[str, Any]

    @property
    def model(self) -> es.LanguageModel:
        found: es.LanguageModel = self.names["model"]
        return found

    @property
    def folder(self) -> Path:
        found: Path = self.names["folder"]
        return found

    def raw(self, name: str) -> RawRecord:
        return RawRecord.of(self.folder / f"{name}.jsonl")

    def logits(self, name: str) -> Tensor:
        """(T, V) for each token of an answer, by one forward over all that was read."""
        raw = self.raw(name)
        prompt, ids = raw.about()["prompt"], raw.tokens()
        with torch.no_grad():
            found: Tensor = self.model(torch.tensor([[*prompt, *ids]])).logits[0].double()
        return found[len(prompt) - 1 : -1]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    with chdir(tmp_path_factory.mktemp("guide")):
        code = blocks(GUIDE.read_text(encoding="utf-8"), "python")
        return Cases(run_python(GUIDE, code))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def cells(page: Screen, rows: str) -> list[list[str]]:
    """The texts of some rows of the step's table."""
    inner = "(one) => [...one.cells].map((cell) => cell.textContent)"
    found: list[list[str]] = page.value(
        f"[...document.querySelectorAll('#step {rows}')].map({inner})"
    )
    return found


@pytest.fixture
def page(cases: Cases, browser: Browser) -> Iterator[Screen]:
    made = Made(cases.folder / "none", cases.model, cases.names["tokenizer"], None, {})  # type: ignore[arg-type]
    screen = Screen(made, browser)
    yield screen
    screen.close()
    assert screen.problems == []


def test_its_code_runs(cases: Cases) -> None:
    kinds = ("template", "city", "name", "sea", "longer", "drafts")
    assert {one.stem for one in cases.folder.iterdir()} == {*kinds}


@needs_chromium
def test_a_prompt_without_its_end(cases: Cases, page: Screen) -> None:
    read = page.open("template").reach(".prompt")
    turn = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert read.endswith(es_marked(turn)) and read == es_marked(cases.names["prompt"])
    assert page.text("#tokens").startswith("<|im_start|>assistant⏎")
    assert cases.names["turn"][0]["content"] in read.replace("·", " ")


def es_marked(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "⏎")


@needs_chromium
def test_a_grammar_that_leaves_no_right_answer(cases: Cases, page: Screen) -> None:
    logits, ids = cases.logits("city"), cases.raw("city").tokens()
    spell = cases.names["tokenizer"].decode
    size = logits.shape[1]
    begin = {id for id in range(size) if (text := spell([id])) and (
        "Berlin".startswith(text) or "Rome".startswith(text))}  # fmt: skip
    page.open("city")
    for at, (id, row) in enumerate(zip(ids, logits, strict=True)):
        text = page.stand(at)
        rank = int((row > row[id]).sum())
        assert f"rank {rank} by the model's logits" in text, at
        (said,) = cells(page, "tbody tr:last-child")
        removed = sum(int(one) for one in said if one.isdigit())
        own = page.value(f"document.querySelector('#token-{at}').className").split()[1]
        assert (own == "forced") == (removed == size - 1), at
        if at == 0:
            assert len(begin) == 7 and removed == size - 7 and own == "chosen"
    ranks = [int((row > row[id]).sum()) for id, row in zip(ids, logits, strict=True)]
    assert sum(rank > 9 for rank in ranks) > len(ranks) / 2
    page.stand(0)
    text = page.ask(WHY, '"Paris"')
    paris = cases.names["tokenizer"].encode("Paris", add_special_tokens=False)
    (logit,) = numbers(r"Paris in place of \S+: logit (-?[\d.]+)", text)
    assert len(paris) == 1 and close(logit, float(logits[0, paris[0]]))
    out = r"Grammar\w*: -?[\d.]+ -> -inf, ruled out; it missed what was kept by (-?[\d.]+)"
    (missed,) = numbers(out, text)
    kept = min(float(logits[0, id]) for id in begin)
    assert close(missed, kept - float(logits[0, paris[0]]))


@needs_chromium
def test_a_penalty_that_kills_a_name(cases: Cases, page: Screen) -> None:
    raw, logits = cases.raw("name"), cases.logits("name")
    ids, prompt = raw.tokens(), raw.about()["prompt"]
    at = next(i for i, id in enumerate(ids) if int(logits[i].argmax()) != id)
    best = int(logits[at].argmax())
    share = float(logits[at].softmax(-1)[ids[at]])
    page.open("name").stand(0)
    assert page.key("b") == f"token {at}"
    text = page.stand(at)
    kind = page.value(f"document.querySelector('#token-{at}').className")
    assert kind.startswith(f"s{sum(share < edge for edge in (0.5, 0.1, 0.01, 0.001))} ")
    assert int(kind[1]) > 0 and f"rank {int((logits[at] > logits[at][ids[at]]).sum())}" in text
    lines = cells(page, "tr")
    column = lines[0].index("RepetitionPenalty")
    (line,) = (one for one in lines if one[0] == str(best))
    before = float(logits[at, best])
    assert best in prompt and before > 0
    assert close(line[2], before) and close(line[column], before / 1.3)
    found = page.ask(WITHOUT, "RepetitionPenalty")
    (otherwise,) = numbers(r"otherwise: (.*)", found)
    assert "Ottoline" in otherwise and otherwise == es_marked(cases.names["plain"])


@needs_chromium
def test_a_beam_that_ended_early(cases: Cases, page: Screen) -> None:
    raw = cases.raw("sea")
    (end,) = raw.ends()
    ids, tokenizer = raw.tokens(), cases.names["tokenizer"]
    page.open("sea")
    assert f"sequence 0 ended after {len(ids)} tokens: stop (token " in page.text("#ends")
    assert end["length"] == len(ids) < len(raw.steps()) <= 40
    fates = [fate_of(fate) for _, fate in read_tree(page.reach("#tree"))]
    (won,) = (one for one in fates if one[4])
    score = es.score(cases.model, tokenizer, ids, after=raw.about()["prompt"])
    total = math.fsum(map(float, score.logprobs))
    assert close(won[1], total) and close(won[2], total) and won[3] == len(ids)
    live = [one for one in fates if one[0] == "live"]
    last = [one for one in raw.steps()[-1]["children"] if one[4] is None or one[4] == "length"]
    others = live or [one for one in fates if one[0] == "length"]
    assert len(others) == len(last) > 0 and all(one[1] < won[1] for one in others)
    page.open("longer")
    (longer,) = cases.raw("longer").ends()
    assert f"ended after {longer['length']} tokens: " in page.text("#ends")
    assert longer["length"] > len(ids)


@needs_chromium
def test_a_draft_model_that_is_never_right(cases: Cases, page: Screen) -> None:
    raw, plain = cases.raw("drafts"), cases.logits("drafts").argmax(-1).tolist()
    assert raw.tokens() == plain  # the text is right
    steps = [(step, step.get("drafts", [])) for step in raw.steps()]
    made = sum(len(ids) for _, drafts in steps for _, ids, _ in drafts)
    said = page.open("drafts").text("#ends")
    assert f"drafts: 0 of {made} ids were right; {len(steps)} steps for {len(plain)} tokens" in said
    for step, drafts in steps[:4]:
        at = step["rows"][0]["at"]
        lines = [one for one in page.facts(page, at) if one.startswith("drafted")]
        assert len(lines) == len(drafts)
        for line, (_, ids, _) in zip(lines, drafts, strict=True):
            assert ids[0] != plain[at] and "; the first 0 were right" in line
            own, other = (raw.spell(one) for one in (plain[at], ids[0]))
            assert line.endswith(f"; then {own} in place of {other}")
    with_drafts, without = re.findall(r"took ([\d.]+) ms with drafts, ([\d.]+) ms without", said)[0]
    spent = {True: [], False: []}  # type: dict[bool, list[float]]
    for step, drafts in steps[1:]:
        own = sum(step["seconds"].values()) * 1e3 / sum(len(one[2]) for one in step["children"])
        spent[bool(drafts)].append(own)
    middle = [sorted(own)[len(own) // 2] for own in (spent[True], spent[False])]
    assert [float(with_drafts), float(without)] == pytest.approx(middle, abs=0.006)
