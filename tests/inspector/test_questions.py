"""The questions that people ask of a generation: each is answered of a record of the real engine,
on the page by keyboard alone and in the terminal."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import everystep as es
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Reading
from everystep.inspector.views import marked, unseen
from everystep.records import Record, RecordedRow, RecordedRun, read_record
from tests.cli.conftest import call as call
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model
from tests.inspector.answers import (
    END,
    RawRecord,
    Textbook,
    entropy,
    leaves,
    margin,
    repeated,
    texts_of_ids,
)
from tests.inspector.browser import Browser, needs_chromium
from tests.inspector.test_live import OPEN, said, tab_to
from tests.models.pictures import IMAGE, ROWS, model_of, prompt_of, reference_of

PROMPT = "ab ab ab"
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 1.3}
VOCABULARY = 259
BARS = "▁▂▃▄▅▆▇█"
Scores = tuple[Callable[[Sequence[int]], Tensor], Callable[[Sequence[int]], Tensor]]
HIGH = list(range(94, 256))  # bytes that are not letters, digits and signs of ASCII
LONG: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": 256}


def tied(ids: Tensor, scores: Tensor) -> Tensor:
    """Leaves two tokens that are equally good."""
    left = torch.full_like(scores, -math.inf)
    left[:, [97, 98]] = 1.0
    return left


class Forcing(es.Hook):
    """Forces two tokens after the first."""

    def after_step(self, step: Any) -> Any:
        return es.Next(force=[97, 98]) if len(step.generated) == 1 else None


FREE: dict[str, Any] = {
    "max_new_tokens": 16,
    "eos_token_id": None,
    "do_sample": True,
    "temperature": 1.5,
    "top_k": 0,
    "seed": 3,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {**LONG, "repetition_penalty": 1.2, "min_new_tokens": 4},
    "looping": {"max_new_tokens": 24, "eos_token_id": None},
    "sampled": {**LONG, **SAMPLED, "seed": 3, "min_new_tokens": 8},
    "other": {**LONG, **SAMPLED, "seed": 4, "min_new_tokens": 8},
    "ninth": {**LONG, **SAMPLED, "seed": 9, "min_new_tokens": 8},
    "narrow": {
        "max_new_tokens": 10,
        "eos_token_id": None,
        "do_sample": True,
        "seed": 5,
        "top_k": 2,
        "top_p": 0.95,
        "temperature": 2.0,
    },
    "beams": {**LONG, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.5},
    "diverse": {**LONG, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained": {**LONG, "num_beams": 3, "force_words_ids": [[99, 100]]},
    "drafted": {"max_new_tokens": 24, "eos_token_id": None, "assistant_early_exit": 1},
    "branches": {
        "max_new_tokens": 24,
        "eos_token_id": None,
        "num_drafts": 3,
        "assistant_early_exit": 1,
        "num_assistant_tokens": 2,
        "num_assistant_tokens_schedule": "constant",
    },
    "circling": {"max_new_tokens": 20, "choices": ["xyabxyqxy"]},
    "free": FREE,
    "agreed": {"max_new_tokens": 12, "eos_token_id": None},
    "grammar": {**LONG, "regex": "(yes|no|maybe) [ab]"},
    "stopped": {**LONG, "eos_token_id": None, "suppress_tokens": HIGH, "trim_stop_strings": True},
    "ended": {"max_new_tokens": 24, "eos_token_id": None},
    "token end": {"max_new_tokens": 24},
    "hooks": {**LONG, "hooks": [Forcing()]},
    "tied": {**LONG, "do_sample": True, "logits_processor": [tied], "seed": 3},
    "tied other": {**LONG, "do_sample": True, "logits_processor": [tied], "seed": 4},
    "adapters": {**LONG, "adapters": {"tone": 1.0}},
}


@dataclass
class Made:
    """The model, its folder, and a record of each kind."""

    folder: Path
    model: es.LanguageModel
    tokenizer: Any
    book: Textbook
    asked: dict[str, dict[str, Any]]

    def given(self, kind: str) -> dict[str, Any]:
        """What the call was given."""
        return self.asked[kind]

    def file(self, kind: str) -> Path:
        return self.folder.parent / f"{kind}.jsonl"

    def raw(self, kind: str) -> RawRecord:
        return RawRecord.of(self.file(kind))

    def spell(self, *ids: int) -> str:
        """The texts of bytes, with marks, and those of special tokens."""
        texts = texts_of_ids()
        return "".join(texts[id] for id in ids)

    def record(self, kind: str) -> Record:
        return read_record(self.file(kind))

    def run(self, kind: str) -> RecordedRun:
        return next(iter(self.record(kind).runs.values()))

    def row(self, kind: str, at: int) -> RecordedRow:
        found = self.run(kind).row_at(at)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = write_tiny_model(tmp_path_factory.mktemp("asked") / "tiny")
    model, tokenizer = es.load(str(folder))
    own = model.add_adapter("tone", es.LoraConfig(r=2, target_modules=["q_proj"]))
    torch.manual_seed(3)
    with torch.no_grad():
        for one in own.parameters():
            one.normal_(std=0.5)
    book = Textbook.of(folder, tokenizer.encode(PROMPT))
    found = Made(folder, model, tokenizer, book, {})
    plain = es.open(model, tokenizer, PROMPT, **KINDS["looping"]).result()
    for kind, given in KINDS.items():
        given = dict(given)
        if kind == "agreed":
            given |= {"assistant_model": model, "assistant_tokenizer": tokenizer}
        if kind == "stopped":  # a text that begins as a stop string does, and goes on otherwise
            text = es.generate(model, tokenizer, PROMPT, **{**given, "trim_stop_strings": None})
            given["stop_strings"] = [text[2:4] + "!never"]
        if kind == "ended":
            given["stop_strings"] = [plain.text[3:5]]
        if kind == "token end":
            given["eos_token_id"] = plain.tokens[4]
        found.asked[kind] = given
        es.generate(model, tokenizer, PROMPT, **given, record=found.file(kind))
    theirs = es.LanguageModel(model.core, model.generation_config, executor="torch")
    es.generate(theirs, tokenizer, PROMPT, **KINDS["greedy"], record=found.file("torch"))
    rounded, _ = es.load(str(folder), dtype=torch.bfloat16)
    es.generate(rounded, tokenizer, PROMPT, **FREE, record=found.file("rounded"))
    for kind, dtype in (("wrapped", torch.float32), ("wrapped rounded", torch.bfloat16)):
        foreign = es.wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
        given = KINDS["greedy"] if kind == "wrapped" else FREE
        es.generate(foreign, tokenizer, PROMPT, **given, record=found.file(kind))
    es.generate(model, tokenizer, f"{PROMPT}c", **LONG, record=found.file("longer prompt"))
    after = {"prefix": es.prefill(model, tokenizer, PROMPT), **LONG}
    es.generate(model, tokenizer, " ba", **after, record=found.file("prefix"))
    shared = [f"{PROMPT} {PROMPT} {end}" for end in ("xyz", "b")]
    es.generate(model, tokenizer, shared, **LONG, record=found.file("shared"))
    asyncio.run(crowded(found))
    run = es.open(model, tokenizer, PROMPT, **LONG, record=found.file("sent"))
    next(run)
    run.send("xyw")
    next(run), run.send("z"), next(run), run.cancel()
    together = [PROMPT, "b", "xyz"]
    es.generate(model, tokenizer, together, max_new_tokens=16, eos_token_id=plain.tokens[4],
                record=found.file("together"))  # fmt: skip
    shown = model_of(reference_of("qwen3_vl", torch.float32))
    pictures = prompt_of(ROWS["two images"], dtype=torch.float32)
    shown.generate(**pictures, max_new_tokens=6, do_sample=False, record=found.file("pictures"))
    return found


async def crowded(made: Made) -> None:
    """Two prompts of an engine that has no room for both: one gives its positions up."""
    given = {"max_new_tokens": 300, "eos_token_id": None, "record": made.file("crowded")}
    async with es.AsyncEngine(made.model, made.tokenizer, max_positions=330) as engine:
        await asyncio.gather(*(engine.generate(one, **given) for one in (PROMPT, "xyz xyz")))


class Shell:
    """The terminal: what `everystep inspect` says of the record of a kind."""

    def __init__(self, made: Made, call: Caller) -> None:
        self.made, self._call = made, call

    def __call__(self, kind: str, *options: str) -> str:
        code, out, err = self._call("inspect", str(self.made.file(kind)), *options)
        assert code == 0, err
        return str(out)

    def ask(self, kind: str, *options: str) -> str:
        return self(kind, "--model", str(self.made.folder), *options)


class Screen:
    """The page of the record of a kind, by keys alone."""

    def __init__(self, made: Made, browser: Browser) -> None:
        self.made, self.browser = made, browser
        self._open: list[PageServer] = []

    def open(self, kind: str, other: str | None = None) -> Screen:
        self.close()
        record, rival = self.made.record(kind), None
        if other is not None:
            rival = other, self.made.record(other)
        asks = (None, None) if other else (self.made.model, self.made.tokenizer)
        server = PageServer(Reading((kind, record), rival, *asks))
        self._open.append(server.__enter__())
        self.browser.visit(server.url, OPEN)
        return self

    def close(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def stand(self, at: int) -> str:
        """Walk to a token from the first one; what its step says."""
        tab_to(self.browser, "tokens")
        self.browser.press("Home", *["ArrowRight"] * at)
        self.browser.until("!document.querySelector('#step').textContent.includes('being read')")
        return self.text("#step")

    def facts(self, page: Screen, at: int) -> list[str]:
        """Walk to a token; the lines below its candidates."""
        page.stand(at)
        lines = "[...document.querySelectorAll('#step > .quiet')].map((one) => one.textContent)"
        found: list[str] = self.value(lines)
        return found

    def press(self, id: str) -> str:
        tab_to(self.browser, id)
        self.browser.press("Enter")
        return self.text("#found")

    def key(self, key: str) -> str:
        tab_to(self.browser, "tokens")
        self.browser.press(key)
        return self.text("#found")

    def reach(self, selector: str) -> str:
        """Tab to a part of the page; what stands there."""
        for _ in range(80):
            if self.browser.value(f"document.activeElement.matches('{selector}')"):
                return self.text(selector)
            self.browser.press("Tab")
        raise AssertionError(f"{selector} is not reached by Tab")

    def ask(self, kind: int, value: str = "") -> str:
        tab_to(self.browser, "what-kind")
        self.browser.press(*["ArrowUp"] * 10, *["ArrowDown"] * kind)
        tab_to(self.browser, "what-value")
        self.browser.type(value)
        tab_to(self.browser, "what-ask")
        self.browser.press("Enter")
        return said(self.browser)

    def text(self, selector: str) -> str:
        return str(self.browser.value(f"document.querySelector('{selector}').textContent"))

    def value(self, expression: str) -> Any:
        return self.browser.value(expression)

    @property
    def problems(self) -> list[str]:
        return self.browser.problems


# --- the questions --------------------------------------------------------------------------------

Question = tuple[Callable[[Screen], None], Callable[[Shell], None]]
WITHOUT, SEED, ADAPTER, MASK, WHY, PARTS, LENS, ATTENTION = 0, 1, 3, 4, 5, 6, 7, 8


def close(said: str | float, wanted: float) -> bool:
    """Of numbers in four digits, computed in float32."""
    return float(said) == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def percent(said: str, share: float, places: int = 2) -> bool:
    assert said.endswith("%")
    return abs(float(said.rstrip(" %")) - share * 100) < 0.02 + 0.51 * 10**-places


def numbers(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that the text has."""
    found = re.search(pattern, text)
    assert found is not None, (pattern, text)
    return found.groups()


def removed_of(made: Made, at: int) -> tuple[int, int]:
    """How many TopK and TopP ruled out at a token, by the textbook."""
    ids = made.raw("sampled").tokens()[:at]
    least = {"temperature": 1.3, "min_new_tokens": 8}
    both = made.book.sampled(ids, top_k=9, top_p=0.9, **least)
    return VOCABULARY - 1 - 9, 9 - int((both > -math.inf).sum())


def removed_on_page(page: Screen) -> None:
    page.open("sampled").stand(3)
    cells = "[...document.querySelectorAll('#step tbody tr')].map((one) => [...one.cells].map"
    lines = page.value(f"{cells}((cell) => [cell.textContent, cell.className]))")
    top_k, top_p = removed_of(page.made, 3)
    said = [text for text, _ in lines[-1]]
    assert said == ["", "ruled out of all", "", "1", "", str(top_k), str(top_p), ""]
    ids = page.made.raw("sampled").tokens()[:3]
    least = {"temperature": 1.3, "min_new_tokens": 8}
    for top_k_too, column in ((9, 6), (None, 5)):
        scores = page.made.book.sampled(ids, top_k=9, top_p=0.9 if top_k_too else 1.0, **least)
        for line in lines[:-1]:
            id = int(line[0][0].removeprefix("▸ "))
            assert (line[column][1] == "gone") == (float(scores[id]) == -math.inf)


def removed_in_terminal(shell: Shell) -> None:
    (line,) = [
        one for one in shell("sampled", "--step", "3").splitlines() if "ruled out of all" in one
    ]
    top_k, top_p = map(str, removed_of(shell.made, 3))
    assert line.split("\t") == ["", "", "ruled out of all", "", "1", "", top_k, top_p, ""]


def check_outcome(made: Made, kind: str, text: str, at: int, scores: Scores, draws: str) -> None:
    """What is said of a run that goes on otherwise: by textbook scores and the recorded numbers.

    `scores`: those that were drawn from, and those that are otherwise. `draws`: whose numbers.
    """
    raw, drawn = made.raw(kind), made.raw(draws)
    ids, before, after = raw.tokens(), *scores
    other = ids[:at]
    while len(other) < len(ids):
        other.append(made.book.drawn(after(other), drawn.row(len(other))["draw"][0]))
    assert "to the bit" in text
    shares = numbers(r": share ([\d.]+%), otherwise ([\d.]+%)", text)
    for share, own in zip(shares, (before, after), strict=True):
        assert percent(share, float(own(ids[:at]).softmax(-1)[ids[at]]))
    same = next(i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b)
    assert f"the first other token is {same}\n" in f"{text}\n"
    begin = max(0, same - 8)
    assert f"recorded:  {raw.spell(*ids[begin:])}\n" in text
    assert text.rstrip("\n").endswith(f"otherwise: {made.spell(*other[begin:])}")


def check_without(made: Made, text: str) -> None:
    given = {"temperature": 2.0, "top_p": 0.95}
    scores = (
        lambda ids: made.book.sampled(ids, top_k=2, **given),
        lambda ids: made.book.sampled(ids, top_k=None, **given),
    )
    assert text.startswith("without TopK, from token 2 on")
    check_outcome(made, "narrow", text, 2, scores, "narrow")


def without_on_page(page: Screen) -> None:
    page.open("narrow").stand(2)
    check_without(page.made, page.ask(WITHOUT, "TopK"))


def without_in_terminal(shell: Shell) -> None:
    check_without(shell.made, shell.ask("narrow", "--what-if", "without=TopK", "--at", "2"))


def check_draw(made: Made, text: str) -> None:
    raw = made.raw("sampled")
    ids, number = raw.tokens(), raw.row(2)["draw"][0]
    scores = made.book.sampled(ids[:2], top_k=9, top_p=0.9, temperature=1.3, min_new_tokens=8)
    mass = scores.softmax(-1).cumsum(-1)
    said = numbers(r"drawn: ([\d.]+) lies in ([\d.]+) to ([\d.]+)", text)
    wanted = (number, float(mass[ids[2] - 1]), float(mass[ids[2]]))
    assert [*map(float, said)] == pytest.approx(wanted, abs=2e-4)
    assert wanted[1] < number < wanted[2] and ids[2] == made.book.drawn(scores, number)


def draw_on_page(page: Screen) -> None:
    check_draw(page.made, page.open("sampled").stand(2))
    number, low, high = page.made.raw("sampled").row(2)["draw"]
    style = "(({style}) => [style.left, style.width])(document.querySelector('#step .draw .%s'))"
    left, width = (float(one.rstrip("%")) for one in page.value(style % "part"))
    assert (left, width) == pytest.approx((low * 100, (high - low) * 100), abs=1e-3)
    assert close(numbers(r"calc\(([\d.]+)%", page.value(style % "number")[0])[0], number * 100)


def draw_in_terminal(shell: Shell) -> None:
    out = shell("sampled", "--step", "2")
    check_draw(shell.made, out)
    number, low, high = shell.made.raw("sampled").row(3)["draw"]
    out = shell("sampled", "--step", "3")
    assert low + 0.1 < number < high - 0.1
    (bar,) = (line for line in out.splitlines() if "▲" in line)
    assert abs(bar.index("▲") - 2 - number * 49) <= 1 and len(bar) == 54
    marks = [at - 2 for at, one in enumerate(bar) if one in "━▲"]
    assert abs(marks[0] - low * 49) <= 1 and abs(marks[-1] - high * 49) <= 1


def check_sureness(made: Made, text: str, at: int) -> None:
    ids = made.raw("greedy").tokens()
    scores = made.book.penalised(ids[:at], 1.2, 4)
    before, after = numbers(r"entropy ([\d.e-]+) before.*? ([\d.e-]+) after", text)
    assert close(before, entropy(made.book.logits(tuple(ids[:at]))))
    assert close(after, entropy(scores))
    (ahead,) = numbers(r"ahead of the next best by ([\d.e-]+)", text)
    assert close(ahead, margin(scores, ids[at]))


def sure_on_page(page: Screen) -> None:
    ids = page.made.raw("greedy").tokens()
    page.open("greedy")
    for at in (4, 7):
        text = page.stand(at)
        check_sureness(page.made, text, at)
        assert f"rank {page.made.book.ranks(ids)[at]} by the model's logits" in text
    for place, own in enumerate(series_of(page.made, "greedy")[:3]):
        label = page.value("document.querySelector('canvas').getAttribute('aria-label')")
        name, most = numbers(r"(\w+) of every token, up to ([\d.e-]+)", label)
        assert name == ("surprise", "entropy", "rank")[place] and close(most, max(own))
        page.key("m")


def series_of(made: Made, kind: str) -> tuple[list[float], list[float], list[float]]:
    """Surprise, entropy and rank of every token by the textbook."""
    ids = made.raw(kind).tokens()
    surprise = [-math.log(share) for share in made.book.shares(ids)]
    return surprise, made.book.entropies(ids), [float(one) for one in made.book.ranks(ids)]


def sure_in_terminal(shell: Shell) -> None:
    for at in (4, 7):
        check_sureness(shell.made, shell("greedy", "--step", str(at)), at)
    out = shell("greedy")
    for name, own in zip(
        ("surprise", "entropy", "rank"), series_of(shell.made, "greedy"), strict=True
    ):
        bars, least, most = numbers(rf"(?m)^{name} +([▁-█]+)  (\S+) to (\S+)$", out)
        # Of a bar, the eighth that its value reaches; the longest has the highest value.
        assert [BARS.index(one) for one in bars] == [int(one / max(own) * 7.999) for one in own]
        assert float(least) == pytest.approx(min(own), rel=6e-3, abs=1e-3)
        assert float(most) == pytest.approx(max(own), rel=6e-3)


def wrong_on_page(page: Screen) -> None:
    shares = page.made.book.shares(page.made.raw("sampled").tokens())
    entropies = page.made.book.entropies(page.made.raw("sampled").tokens())
    assert page.open("sampled").press("lowest") == f"token {shares.index(min(shares))}"
    assert page.press("unsure") == f"token {entropies.index(max(entropies))}"
    page.stand(0)
    for at in [at for at, share in enumerate(shares) if share < 0.1 and at > 0]:
        assert page.key("b") == f"token {at}"
        assert page.text("#tokens .here") == page.made.spell(page.made.raw("sampled").tokens()[at])
    assert page.key("b") == "no token below 10 % follows"
    kinds = page.value("[...document.querySelectorAll('#tokens span')].map((one) => one.className)")
    assert [int(one[1]) for one in kinds] == [*map(level_of, shares)]


def level_of(share: float) -> int:
    return sum(share < edge for edge in (0.5, 0.1, 0.01, 0.001))


def wrong_in_terminal(shell: Shell) -> None:
    out, ids = shell("sampled"), shell.made.raw("sampled").tokens()
    shares = shell.made.book.shares(ids)
    at = shares.index(min(shares))
    first = next(at for at, share in enumerate(shares) if share < 0.1)
    spell = shell.made.spell
    (said,) = numbers(rf"lowest share: token {at} \({re.escape(spell(ids[at]))}\), ([\d.]+%)", out)
    assert percent(said, shares[at])
    assert f"the first below 10 %: token {first} ({spell(ids[first])})" in out


def ends_of(made: Made, kind: str) -> list[str]:
    """Why a sequence ended, as its run says: the same call, without a record."""
    given = {name: value for name, value in made.given(kind).items() if name != "record"}
    run = es.open(made.model, made.tokenizer, PROMPT, **given)
    found = run.result()
    kind_of = found.finish_reason.kind
    why = f"sequence 0 ended after {len(found.tokens)} tokens: {kind_of}"
    if kind == "ended":
        assert kind_of == "stop" and len(found.tokens) == 5
        return [f"{why} ({marked(given['stop_strings'][0], spaces=False)})"]
    if kind_of == "stop":
        return [f"{why} (token {made.spell(found.tokens[-1])})"]
    return [why]


def nearest_of(made: Made) -> tuple[int, float, int]:
    """Where the end was likeliest in a sampled text that ran to its length: the place, its share
    by the logits, and how many tokens had a higher score."""
    ids = made.raw("sampled").tokens()
    shares = [float(made.book.logits(tuple(ids[:at])).softmax(-1)[END]) for at in range(len(ids))]
    at = shares.index(max(shares))
    scores = made.book.sampled(ids[:at], top_k=9, top_p=0.9, temperature=1.3, min_new_tokens=8)
    return at, shares[at], int((scores > scores[END]).sum())


def check_ends(made: Made, said: Callable[[str], str]) -> None:
    kinds = ("grammar", "looping", "ended", "token end", "sampled")
    for kind in kinds:
        for line in ends_of(made, kind):
            assert line in said(kind).splitlines(), kind
    at, share, rank = nearest_of(made)
    near = rf"closest to an end at token {at}: ([\d.]+%) by the model's own logits, (.*)"
    text, left = numbers(near, said("sampled"))
    score = made.raw("sampled").row(at)["ends"][0][2]
    assert left == ("ruled out there" if score is None else f"rank {rank} by the scores")
    assert percent(text, share)
    assert made.raw("sampled").row(at)["ends"][0][3] == rank


def stopped_on_page(page: Screen) -> None:
    lines = (
        "[...document.querySelectorAll('#ends > div')].map((one) => one.textContent).join('\\n')"
    )
    check_ends(page.made, lambda kind: str(page.open(kind).value(lines)))


def stopped_in_terminal(shell: Shell) -> None:
    check_ends(shell.made, lambda kind: shell(kind))


def end_at(made: Made, at: int) -> tuple[int, float]:
    """How many tokens had a higher score than the end, and its score."""
    ids = made.raw("sampled").tokens()[:at]
    scores = made.book.sampled(ids, top_k=9, top_p=0.9, temperature=1.3, min_new_tokens=8)
    return int((scores > scores[END]).sum()), float(scores[END])


BANS = (
    ("sampled", 1, "MinNewTokensLength"),
    ("greedy", 2, "MinNewTokensLength"),
    ("grammar", 1, "GrammarMask"),
)
"""Places where the end was banned, and by what."""


def check_ban(made: Made, kind: str, at: int, stage: str, text: str) -> None:
    """What the end would have needed: one stage ruled it out, and it says which."""
    ids = made.raw(kind).tokens()
    (logit,) = numbers(
        rf"<\|end\|> in place of {re.escape(made.spell(ids[at]))}: logit (-?[\d.]+)", text
    )
    assert close(logit, float(made.book.logits(tuple(ids[:at]))[END]))
    lines = text.rstrip("\n").splitlines()
    banned = [line.partition(":")[0].strip() for line in lines if "-> -inf, ruled out" in line]
    assert banned == [stage] and lines[-1].endswith(f", and to pass {stage}")


def unstopped_on_page(page: Screen) -> None:
    rank, score = end_at(page.made, 1)
    assert f"end <|end|>: rank {rank}, ruled out" in page.open("sampled").stand(1)
    assert score == -math.inf
    ids = page.made.raw("greedy").tokens()
    text = page.open("greedy").stand(6)
    scores = page.made.book.penalised(ids[:6], 1.2, 4)
    rank, said = numbers(r"end <\|end\|>: rank (\d+), score (-?[\d.]+)", text)  # type: ignore[assignment]
    assert int(rank) == int((scores > scores[END]).sum()) and close(said, float(scores[END]))
    for kind, at, stage in BANS:
        page.open(kind).stand(at)
        check_ban(page.made, kind, at, stage, page.ask(WHY, str(END)))


def unstopped_in_terminal(shell: Shell) -> None:
    rank, score = end_at(shell.made, 1)
    assert score == -math.inf
    assert f"end <|end|>: rank {rank}, ruled out\n" in shell("sampled", "--step", "1")
    ids = shell.made.raw("greedy").tokens()
    scores = shell.made.book.penalised(ids[:6], 1.2, 4)
    said = numbers(r"end <\|end\|>: rank (\d+), score (-?[\d.]+)", shell("greedy", "--step", "6"))
    assert int(said[0]) == int((scores > scores[END]).sum())
    assert close(said[1], float(scores[END]))
    for kind, at, stage in BANS:
        out = shell.ask(kind, "--why", str(END), "--at", str(at))
        check_ban(shell.made, kind, at, stage, out)


def repetition_of(made: Made) -> str:
    ids = made.raw("circling").tokens()
    found = repeated(ids)
    assert found == (2, 3, 0, 4)
    size, count, first, again = found
    text = made.spell(*ids[first : first + size])
    return f"{size} tokens stand there {count} times, first at {first}, again at {again}: {text}"


def check_second(made: Made, text: str) -> None:
    """What the second best token would have needed at the last place."""
    ids = made.raw("looping").tokens()
    logits = made.book.logits(tuple(ids[:-1]))
    own, second = logits.topk(2).indices.tolist()
    assert own == ids[-1]
    begin = re.escape(f"{made.spell(second)} in place of {made.spell(own)}: logit ")
    needed = r"it would have needed ([\d.e-]+) more to be the highest"
    logit, more = numbers(rf"{begin}(-?[\d.]+), rank 1 in the end\s+{needed}", text)
    assert close(logit, float(logits[second])) and close(more, float(logits[own] - logits[second]))


def repeats_on_page(page: Screen) -> None:
    assert page.open("circling").press("repetition") == repetition_of(page.made)
    again = int(numbers(r"again at (\d+)", repetition_of(page.made))[0])
    assert page.value("document.querySelector('#tokens .here').id") == f"token-{again}"
    page.open("looping")
    tab_to(page.browser, "tokens")
    page.browser.press("End")
    check_second(page.made, page.ask(WHY, "#1"))


def repeats_in_terminal(shell: Shell) -> None:
    assert repetition_of(shell.made) in shell("circling").splitlines()
    at = str(len(shell.made.raw("looping").tokens()) - 1)
    check_second(shell.made, shell.ask("looping", "--why", "#1", "--at", at))


def read_tree(text: str) -> list[tuple[str, str]]:
    """The whole text of each hypothesis at whose end something is said, and that."""
    found, way = [], list[str]()
    for line in text.splitlines():
        place = max(line.find("├─"), line.find("└─"))
        if place < 0:
            continue
        said, _, fate = line[place + 3 :].partition(" [")
        way = [*way[: place // 3], said]
        if fate:
            found.append(("".join(way), fate.removesuffix("]")))
    return found


def fate_of(said: str) -> tuple[str, float, float, int, bool]:
    """A fate as read: what, the score, the sum, length or step, and whether it was returned."""
    if said.startswith("live "):
        return "live", float(said[5:]), 0.0, 0, False
    if said.startswith("dropped"):
        pattern = r"^dropped at step (\d+): its score (-?[\d.e+]+) was not among the best$"
        step, score = numbers(pattern, said)
        return "dropped", float(score), 0.0, int(step), False
    pattern = r"^(\w+) (-?[\d.]+) / (\d+)\^\S+ = (-?[\d.]+)(, returned)?$"
    kind, whole, length, score, won = numbers(pattern, said)
    return kind, float(score), float(whole), int(length), won is not None


def check_tree(made: Made, kind: str, text: str) -> None:
    """Every hypothesis is there, with its end, and no other."""
    raw, power = made.raw(kind), 1.5 if kind == "beams" else 1.0
    own, found = leaves(raw), [(said, fate_of(fate)) for said, fate in read_tree(text)]
    assert "…" not in text
    count = sum(one.fate not in ("live", "dropped") for one in own)
    live = sum(one.fate == "live" for one in own)
    assert f"run 0: {count} ended, {live} live" in text
    returned = {tuple(raw.tokens(index)) for index in range(raw.about()["returns"])}
    wanted = []
    for leaf in own:
        score, length, ended = (
            leaf.score or 0.0,
            len(leaf.ids),
            leaf.fate not in ("live", "dropped"),
        )
        place = length if ended else max(leaf.step, 0)
        whole = score * length**power if ended else 0.0
        fate = leaf.fate, score, whole, place, ended and leaf.ids in returned
        wanted.append((made.spell(*leaf.ids), fate))
    for one, other in zip(sorted(found), sorted(wanted), strict=True):
        assert one[0] == other[0] and one[1][0] == other[1][0] and one[1][3:] == other[1][3:]
        assert close(one[1][1], other[1][1]) and close(one[1][2], other[1][2])


def parted_on_page(page: Screen) -> None:
    for kind in ("beams", "diverse", "constrained"):
        check_tree(page.made, kind, page.open(kind).reach("#tree"))


def parted_in_terminal(shell: Shell) -> None:
    for kind in ("beams", "diverse", "constrained"):
        check_tree(shell.made, kind, shell(kind, "--tree"))


def check_pruned(made: Made, text: str) -> None:
    """Against a beam search of the textbook: its best candidates beyond those that it kept."""
    live = made.book.beams(3, 2)
    ways = made.book.continued(live)
    kept = [one for one in ways if one[0][-1] != END][:3]
    ended = [one for one in ways[:6] if one[0][-1] == END]
    left = [one for one in ways if one not in kept and one not in ended][:3]
    least = r"the worst that was kept has (-?[\d.]+)"
    line = rf"not kept: (.*?) after sequence (\d), score (-?[\d.]+); {least}"
    said = re.findall(line, text)
    assert len(said) == 3
    for (token, of, score, kept_least), (way, total) in zip(said, left, strict=True):
        assert token == made.spell(way[-1]) and live[int(of)] == way[:-1]
        assert close(score, total) and close(kept_least, kept[-1][1])


def pruned_on_page(page: Screen) -> None:
    check_pruned(page.made, "\n".join(page.facts(page.open("beams"), 2)))


def pruned_in_terminal(shell: Shell) -> None:
    check_pruned(shell.made, shell("beams", "--step", "2"))


def check_won(made: Made, text: str) -> None:
    """The sums and their quotients by the textbook's shares; the best of all comes first."""
    raw, best = made.raw("beams"), []
    for index in (0, 1):
        ids = raw.tokens(index)
        total, found = made.book.sum(ids), dict(read_tree(text))[made.spell(*ids)]
        whole, length, score = numbers(r"(-?[\d.]+) / (\d+)\^1\.5 = (-?[\d.]+), returned", found)
        assert int(length) == len(ids) and close(whole, total)
        assert close(score, total / len(ids) ** 1.5)
        best.append(total / len(ids) ** 1.5)
    over = [one.ids for one in leaves(raw) if one.fate not in ("live", "dropped")]
    ended = [made.book.sum(ids) / len(ids) ** 1.5 for ids in over]
    assert sorted(ended)[-2:] == pytest.approx(sorted(best), abs=1e-4) and best[0] >= best[1]


def won_on_page(page: Screen) -> None:
    check_won(page.made, page.open("beams").reach("#tree"))


def won_in_terminal(shell: Shell) -> None:
    check_won(shell.made, shell("beams", "--tree"))


def same_of(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = [a == b for a, b in zip(ids, others, strict=False)]
    return [*pairs, False].index(False)


def drafts_of(made: Made, kind: str) -> list[tuple[int, int, list[str], list[int]]]:
    """Of every step with drafts that were not right to their ends: the token it begins with, its
    number, what is to be said of each draft, and how many ids of each were right.

    What is right is what the call without drafts says.
    """
    raw, truth, found = made.raw(kind), made.raw("looping").tokens(), []
    assert raw.tokens() == truth
    for number, step in enumerate(raw.steps()):
        at, lines, rights = step["rows"][0]["at"], [], []
        for _, ids, _ in step.get("drafts", ()):
            pairs = zip(ids, truth[at:], strict=False)
            right = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(truth) - at)
            )
            line = f"drafted after sequence 0: {made.spell(*ids)}; the first {right} were right"
            if right < len(ids) and at + right < len(truth):
                wrong, own = made.spell(ids[right]), made.spell(truth[at + right])
                line += f"; then {own} in place of {wrong}"
            lines.append(line)
            rights.append(right)
        if lines:
            found.append((at, number, lines, rights))
    return found


def failing(made: Made) -> tuple[int, int, list[str], list[int]]:
    """The first step whose draft was wrong somewhere."""
    return next(one for one in drafts_of(made, "drafted") if "place" in one[2][0])


def branching(made: Made) -> tuple[int, int, list[str], list[int]]:
    """The first step of which not the first draft was right for longest."""
    return next(one for one in drafts_of(made, "branches") if one[3][0] < max(one[3]))


def drafts_on_page(page: Screen) -> None:
    for kind, (at, _, lines, _) in (
        ("drafted", failing(page.made)),
        ("branches", branching(page.made)),
    ):
        said = page.facts(page.open(kind), at)
        assert [one for one in said if one.startswith("drafted")] == lines
    assert len(lines) > 1


def drafts_in_terminal(shell: Shell) -> None:
    for kind in ("drafted", "branches"):
        own = [*drafts_of(shell.made, kind)[:3], *([branching(shell.made)] * (kind == "branches"))]
        for _, number, lines, _ in own:
            out = shell(kind, "--step", str(number)).splitlines()
            assert [one for one in out if one.startswith("drafted")] == lines


def check_paid(made: Made, text: str) -> None:
    found, raw = drafts_of(made, "drafted"), made.raw("drafted")
    right = sum(sum(rights) for *_, rights in found)
    ids = sum(len(own) for step in raw.steps() for _, own, _ in step.get("drafts", ()))
    steps = raw.steps()
    assert f"drafts: {right} of {ids} ids were right; {len(steps)} steps for 24 tokens" in text


def paid_on_page(page: Screen) -> None:
    check_paid(page.made, page.open("drafted").text("#ends"))


def paid_in_terminal(shell: Shell) -> None:
    check_paid(shell.made, shell("drafted"))


def spent_of(made: Made, kind: str = "greedy") -> list[float]:
    """Milliseconds of each step, by its line."""
    return [sum(step["seconds"].values()) * 1e3 for step in made.raw(kind).steps()]


def phases_of(made: Made, number: int) -> str:
    """What is said of the times of a step."""
    seconds = made.raw("greedy").steps()[number]["seconds"]
    assert {"forward", "choose"} <= seconds.keys()
    return ", ".join(f"{name} {one * 1e3:.2f} ms" for name, one in seconds.items())


RATIOS = 1 - 1 / 72, 1 - 3 / 72
"""Heights of bars that certainly reach the second row, and of those that may."""


def slow_on_page(page: Screen) -> None:
    spent = spent_of(page.made)
    page.open("greedy")
    for at in (0, 3, 9):
        page.stand(at)
        assert (
            page.facts(page, at)[-1]
            == f"step {at}: {phases_of(page.made, at)}; 0 other requests in it"
        )
    page.key("m"), page.key("m"), page.key("m")
    label = page.value("document.querySelector('canvas').getAttribute('aria-label')")
    assert close(numbers(r"^milliseconds of every token, up to ([\d.]+)$", label)[0], max(spent))
    strip = "document.querySelector('canvas')"
    lit = f"[...{strip}.getContext('2d').getImageData(0, 1, {strip}.width, 1).data]"
    lit = f"{lit}.map((one, i) => i % 4 === 3 ? one : 0)"
    bars = [x // 4 // 12 for x, one in enumerate(page.value(lit)) if one]
    # The second row of 72 pixels: bars that nearly reach the top, and the mark of the token.
    high, near = ({i for i, one in enumerate(spent) if one > part * max(spent)} for part in RATIOS)
    assert high | {9} <= {*bars} <= near | {9}


def slow_in_terminal(shell: Shell) -> None:
    for number in (0, 3):
        last = shell("greedy", "--step", str(number)).rstrip("\n").splitlines()[-1]
        assert last == f"{phases_of(shell.made, number)}; 0 other requests in the step"
    spent, out = spent_of(shell.made), shell("greedy")
    bars, least, most = numbers(r"(?m)^milliseconds +([▁-█]+)  (\S+) to (\S+)$", out)
    assert [BARS.index(one) for one in bars] == [int(one / max(spent) * 7.999) for one in spent]
    assert (least, most) == (f"{min(spent):.3g}", f"{max(spent):.3g}")


def fed_in(kind: str, made: Made) -> list[str]:
    """What is fed in each step: the prompt, then the last token and what was drafted after it."""
    found, known = [], 0
    prompt = len(made.tokenizer.encode(PROMPT))
    for step in made.raw(kind).steps():
        drafts = sum(len(tokens) for _, tokens, _ in step.get("drafts", ()))
        fed = drafts + (1 if known else prompt)
        found.append(f"fed {fed} positions; {known} came from a cache")
        known = (known + 1 if known else prompt) + len(step["rows"]) - 1
    return found


def hits(made: Made) -> dict[tuple[str, str], tuple[int, int]]:
    """Of runs whose prompt was there in part: how much of it was fed, and how much was not."""
    size = len(PROMPT)
    common = 2 * (size + 1)
    return {
        ("prefix", "0"): (3, size),
        ("shared", "0"): (common + 3, 0),
        ("shared", "1"): (1, common),
    }


def fed_again(made: Made) -> tuple[str, int, int]:
    """Of the run that had given its positions up: its name, the step in which it had room again,
    and how many positions it has to feed there: all of them."""
    raw = made.raw("crowded")
    run, number = next(
        (run, number)
        for run in ("0", "1")
        for number, step in enumerate(raw.steps(run))
        if number and step["fed"][0][2] > 1
    )
    return run, number, len(raw.about(run)["prompt"]) + number


def fed_on_page(page: Screen) -> None:
    page.open("greedy")
    for at, fed in enumerate(fed_in("greedy", page.made)):
        assert fed in page.stand(at)
    for (kind, run), (fed, known) in hits(page.made).items():
        page.open(kind)
        if run != "0":
            page.reach("select")
            page.browser.press("ArrowDown")
        assert f"fed {fed} positions; {known} came from a cache" in page.stand(0)
        assert f"fed 1 positions; {fed + known} came from a cache" in page.stand(1)
    run, at, count = fed_again(page.made)
    page.open("crowded").reach("select")
    page.browser.press(*["ArrowDown"] * int(run))
    assert f"fed {count} positions; 0 came from a cache" in page.stand(at)


def fed_in_terminal(shell: Shell) -> None:
    for kind in ("greedy", "agreed", "grammar"):
        for number, fed in enumerate(fed_in(kind, shell.made)):
            assert fed in shell(kind, "--step", str(number)), (kind, number)
    for (kind, run), (count, known) in hits(shell.made).items():
        said = [shell(kind, "--run", run, "--step", str(number)) for number in (0, 1)]
        assert f"fed {count} positions; {known} came from a cache" in said[0], (kind, run)
        assert f"fed 1 positions; {count + known} came from a cache" in said[1], (kind, run)
    run, number, count = fed_again(shell.made)
    out = shell("crowded", "--run", run, "--step", str(number))
    assert f"fed {count} positions; 0 came from a cache" in out
    assert f"cached\t{len(PROMPT)} positions came with the prompt's cache" in shell("prefix")


def beside_of(made: Made) -> list[int]:
    """How many others are still there in each step of the longest of three requests."""
    raw = made.raw("together")
    lengths = [len(raw.steps(name)) for name in ("0", "1", "2")]
    assert len({*lengths}) == 3, lengths
    whole = max(lengths)
    assert len(raw.tokens(0, str(lengths.index(whole)))) == whole
    return [sum(one > number for one in lengths) - 1 for number in range(whole)]


def beside_on_page(page: Screen) -> None:
    others = beside_of(page.made)
    page.open("together")
    tab_to_longest(page, page.made.raw("together"))
    for at, count in enumerate(others):
        said = page.facts(page, at)[-1]
        assert said.endswith(f"; {count} other requests in it")


def tab_to_longest(page: Screen, raw: RawRecord) -> None:
    """Choose the longest run in the list of runs."""
    lengths = [len(raw.steps(name)) for name in ("0", "1", "2")]
    page.reach("select")
    page.browser.press(*["ArrowDown"] * lengths.index(max(lengths)))


def beside_in_terminal(shell: Shell) -> None:
    raw, others = shell.made.raw("together"), beside_of(shell.made)
    lengths = [len(raw.steps(name)) for name in ("0", "1", "2")]
    name = str(lengths.index(max(lengths)))
    for number in (0, lengths[0] - 1, lengths[0], max(lengths) - 1):
        if number < len(others):
            out = shell("together", "--run", name, "--step", str(number))
            assert f"; {others[number]} other requests in the step" in out


def check_cache(made: Made, kind: str, number: int, said: list[str]) -> None:
    """A row holds what the next step finds there: the prompt and what was chosen, but for the last
    id, which is not fed yet."""
    raw = made.raw(kind)
    truth, steps = raw.tokens(), raw.steps()
    before = sum(len(child[2]) for step in steps[:number] for child in step["children"])
    chosen = sum(len(child[2]) for child in steps[number]["children"])
    fed = len(steps[number].get("drafts", [[0, []]])[0][1]) + (1 if number else len(PROMPT))
    start = len(PROMPT) + before - 1 if number else 0
    holds = len(PROMPT) + before + chosen - 1
    assert before + chosen <= len(truth)
    line = (
        f"sequence 0 fed {fed} positions; {start} came from a cache; its row holds {holds} after it"
    )
    drafts = [ids for _, ids, _ in steps[number].get("drafts", ())]
    rights = [same_of(ids, truth[before:]) for ids in drafts]
    if drafts and rights[0] < max(rights):
        line += ", as another draft was right for longer"
    elif drafts and max(rights) < len(drafts[0]):
        line += f", as {len(drafts[0]) - max(rights)} of drafts were taken back"
    assert [one for one in said if one.startswith("sequence 0 fed")] == [line]


def cache_on_page(page: Screen) -> None:
    for kind, (at, number, *_) in (
        ("drafted", failing(page.made)),
        ("branches", branching(page.made)),
    ):
        check_cache(page.made, kind, number, page.facts(page.open(kind), at))
    check_cache(page.made, "greedy", 0, page.facts(page.open("greedy"), 0))
    check_cache(page.made, "greedy", 5, page.facts(page, 5))


def cache_in_terminal(shell: Shell) -> None:
    for kind in ("drafted", "branches", "greedy"):
        for number in range(len(shell.made.raw(kind).steps())):
            out = shell(kind, "--step", str(number)).splitlines()
            check_cache(shell.made, kind, number, out)


def prompt_on_page(page: Screen) -> None:
    assert page.open("greedy").reach(".prompt") == marked(PROMPT)
    titles = page.value("[...document.querySelectorAll('.prompt span')].map((one) => one.title)")
    ids = page.made.tokenizer.encode(PROMPT)
    assert titles == [f"position {place}, id {id}" for place, id in enumerate(ids)]
    text = page.open("pictures").reach(".prompt")
    assert text.count(f"<{IMAGE}>") == page.made.run("pictures").prompt.count(IMAGE) > 4
    assert "beside idspositions, pictures" in page.text("dl")


def prompt_in_terminal(shell: Shell) -> None:
    assert f"{len(PROMPT)} ids: {marked(PROMPT)}" in shell("greedy")
    out, run = shell("pictures"), shell.made.run("pictures")
    assert f"{len(run.prompt)} ids: " in out and f"<{IMAGE}><{IMAGE}>" in out
    assert "beside ids\tpositions, pictures" in out


def origins_of(kind: str, made: Made) -> list[str]:
    """Where the tokens of a run come from, by how it was asked for: a hook forces the second and
    the third, a grammar what has no rival, and the model drafts for itself, which is all right;
    what was sent after the first and the fifth was given."""
    raw = made.raw(kind)
    if kind == "sent":
        return ["chosen", *["given"] * 3, "chosen", "given", "chosen"]
    size = len(raw.tokens())
    if kind == "hooks":
        return ["chosen", "forced", "forced", *["chosen"] * (size - 3)]
    if kind == "grammar":
        return ["forced" if len(one) == 1 else "chosen" for one in allowed_in(made)]
    return [
        "drafted" if number + 1 < len(step["rows"]) else "chosen"
        for step in raw.steps()
        for number in range(len(step["rows"]))
    ]


def origin_on_page(page: Screen) -> None:
    kinds = "[...document.querySelectorAll('#tokens span')].map((one) => one.className)"
    for kind in ("hooks", "agreed", "grammar", "sent"):
        wanted = origins_of(kind, page.made)
        assert len({*wanted}) > 1
        found = page.open(kind).value(kinds)
        assert [one.split(" ")[1] for one in found[: len(wanted)]] == wanted


def origin_in_terminal(shell: Shell) -> None:
    for kind in ("hooks", "agreed", "grammar"):
        wanted = origins_of(kind, shell.made)
        cells = [line.split("\t") for line in shell(kind, "--rows", "99").splitlines()]
        found = {int(one[2]): one[4] for one in cells if len(one) > 5 and one[2].isdecimal()}
        assert [found[at] for at in range(len(wanted))] == wanted, kind
    wanted = origins_of("sent", shell.made)
    cells = [line.split("\t") for line in shell("sent", "--rows", "99").splitlines()]
    found = {int(one[2]): one[4] for one in cells if len(one) > 5 and one[2].isdecimal()}
    assert found == {at: one for at, one in enumerate(wanted) if one != "given"}
    assert "given, not chosen: tokens 1 to 3, 5" in shell("sent").splitlines()


GRAMMAR_TEXTS = [f"{word} {letter}" for word in ("yes", "no", "maybe") for letter in "ab"]


def allowed_in(made: Made) -> list[set[str]]:
    """What may follow before each token of the run with the grammar, as it is spelled: by the
    texts that the grammar has."""
    found, text = [], ""
    for id in made.raw("grammar").tokens():
        rest = [one[len(text) :] for one in GRAMMAR_TEXTS if one.startswith(text)]
        found.append({marked(one[0]) if one else "<|end|>" for one in rest})
        text += made.spell(id).replace("·", " ")
    return found


def grammar_on_page(page: Screen) -> None:
    page.open("grammar")
    for at, allowed in enumerate(allowed_in(page.made)):
        (count,) = numbers(r"ruled out of all(\d+)end", page.stand(at))
        assert int(count) == VOCABULARY - len(allowed)
    whole = page.value("document.querySelector('dl').textContent")
    assert "(yes|no|maybe)·[ab]" in whole or "(yes|no|maybe) [ab]" in whole


def grammar_in_terminal(shell: Shell) -> None:
    assert "follows\tregex (yes|no|maybe) [ab]" in shell("grammar")
    count = len(shell.made.raw("grammar").steps())
    out = "\n".join(shell("grammar", "--step", str(number)) for number in range(count))
    parts = re.split(r"^sequence 0, token \d+: entropy", out, flags=re.MULTILINE)[1:]
    for part, allowed in zip(parts, allowed_in(shell.made), strict=True):
        lines = [line.split("\t") for line in part.splitlines()]
        assert {one[2] for one in lines if one[-1].endswith("%")} == allowed
        ruled_out = [one for one in lines if "ruled out of all" in one]
        assert [int(one[-2]) for one in ruled_out] == [VOCABULARY - len(allowed)]


def check_seed(made: Made, text: str) -> None:
    given = {"top_k": 9, "top_p": 0.9, "temperature": 1.3, "min_new_tokens": 8}
    scores = (lambda ids: made.book.sampled(ids, **given),) * 2
    assert text.startswith("seed=9, from token 1 on")
    check_outcome(made, "sampled", text, 1, scores, "ninth")


def check_seeds(made: Made, lines: list[str]) -> None:
    """The first other token of two seeds, and by how much each was ahead of the other there."""
    one, two = made.raw("sampled").tokens(), made.raw("other").tokens()
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    pair = f"{made.spell(one[at])} and {made.spell(two[at])}"
    assert f"run 0: the first other token is {at}: {pair}" in lines
    assert "run 0: another seed: 3" in lines and "                     4" in lines
    scores = made.book.sampled(one[:at], top_k=9, top_p=0.9, temperature=1.3, min_new_tokens=8)
    begin = lines.index(f"run 0: the first other token is {at}: {pair}")
    for line, (own, rival) in zip(lines[begin + 1 :], ((one, two), (two, one)), strict=True):
        check_margin(line, float(scores[own[at]]), float(scores[rival[at]]))


def check_prompts(lines: list[str]) -> None:
    assert f"run 0: the prompts differ from id {len(PROMPT)} on" in lines


def check_margin(line: str, own: float, rival: float) -> None:
    said = numbers(r"^  score (-?[\d.]+), the other one's (-?[\d.]+): a margin of (-?[\d.]+)", line)
    assert close(said[0], own) and close(said[1], rival) and close(said[2], own - rival)


def other_on_page(page: Screen) -> None:
    page.open("sampled").stand(1)
    check_seed(page.made, page.ask(SEED, "9"))
    page.open("sampled", "other")
    check_seeds(page.made, page.reach("#comparison pre").splitlines())
    one, two = page.made.raw("sampled").tokens(), page.made.raw("other").tokens()
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    cells = (
        "[...document.querySelector('#comparison tr.chosen').cells].map((one) => one.textContent)"
    )
    place, *sides = page.value(cells)
    assert place == str(at)
    for text, ids in zip(sides, (one, two), strict=True):
        share = text.removeprefix(f"{page.made.spell(ids[at])} ")
        assert percent(share, page.made.book.shares(ids)[at])
    check_prompts(page.open("ended", "longer prompt").reach("#comparison pre").splitlines())


def other_in_terminal(shell: Shell) -> None:
    check_seed(shell.made, shell.ask("sampled", "--what-if", "seed=9", "--at", "1"))
    out = shell("sampled", str(shell.made.file("other")))
    check_seeds(shell.made, out.rstrip("\n").splitlines())
    check_prompts(shell("ended", str(shell.made.file("longer prompt"))).splitlines())


def check_engines(made: Made, kind: str, lines: list[str]) -> None:
    """Two engines of which one computes in sixteen bits: where they part, and by which margins."""
    one, two = made.raw("free"), made.raw(kind)
    first, second = one.tokens(), two.tokens()
    at = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    pair = f"{made.spell(first[at])} and {made.spell(second[at])}"
    assert lines[0].startswith("another model: ") and "seed" not in "".join(lines)
    begin = lines.index(f"run 0: the first other token is {at}: {pair}")
    exact = made.book.logits(tuple(first[:at])) / 1.5
    check_margin(lines[begin + 1], float(exact[first[at]]), float(exact[second[at]]))
    row = two.row(at)
    rounded = dict(zip(row["ids"], row["logits"], strict=True))
    if first[at] in rounded:
        check_margin(lines[begin + 2], rounded[second[at]] / 1.5, rounded[first[at]] / 1.5)
    else:
        left = "the other one was ruled out, or not among the candidates"
        assert lines[begin + 2].strip() == left
    assert not any("a tie" in line for line in lines)


def check_same(made: Made, kind: str, lines: list[str]) -> None:
    """An engine that chose the same; of a wrapped model, the model is said to be another one."""
    count = len(made.raw(kind).tokens())
    assert lines[-1] == f"run 0: the same {count} tokens"
    assert made.raw(kind).tokens() == made.raw("greedy").tokens()
    assert len(lines) == (2 if kind == "wrapped" else 1)
    assert kind != "wrapped" or lines[0].startswith("another model: ")


def check_tie(made: Made, lines: list[str]) -> None:
    """Two draws among two tokens that are equally good: a margin of nothing, on both sides."""
    one, two = made.raw("tied").tokens(), made.raw("tied other").tokens()
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    assert {one[at], two[at]} == {97, 98}
    tie = "  score 1, the other one's 1: a margin of 0, a tie"
    assert lines[-2:] == [tie, tie]
    assert lines[-3].startswith(f"run 0: the first other token is {at}: ")


def engines_on_page(page: Screen) -> None:
    def compared(one: str, other: str) -> list[str]:
        return page.open(one, other).reach("#comparison pre").splitlines()

    for kind in ("torch", "wrapped"):
        check_same(page.made, kind, compared("greedy", kind))
    for kind in ("rounded", "wrapped rounded"):
        check_engines(page.made, kind, compared("free", kind))
    check_tie(page.made, compared("tied", "tied other"))
    assert "ahead of the next best by 0, a tie" in page.open("tied").stand(0)


def engines_in_terminal(shell: Shell) -> None:
    def compared(one: str, other: str) -> list[str]:
        return shell(one, str(shell.made.file(other))).splitlines()

    for kind in ("torch", "wrapped"):
        check_same(shell.made, kind, compared("greedy", kind))
    for kind in ("rounded", "wrapped rounded"):
        check_engines(shell.made, kind, compared("free", kind))
    check_tie(shell.made, compared("tied", "tied other"))
    assert "ahead of the next best by 0, a tie" in shell("tied", "--step", "0")


def check_lens(made: Made, text: str) -> None:
    """Rank, share and entropy of the token after each layer, and the best there."""
    ids = made.raw("greedy").tokens()
    layers = made.book.layers(ids[:2])
    lines = [line for line in text.splitlines() if re.match(r" +\d+ ", line)]
    assert len(lines) == len(layers) == 3
    for number, (line, logits) in enumerate(zip(lines, layers, strict=True)):
        layer, rank, share, spread = line.split()[:4]
        assert (int(layer), int(rank)) == (number, int((logits > logits[ids[2]]).sum()))
        assert percent(share, float(logits.softmax(-1)[ids[2]])) and close(spread, entropy(logits))
        best = int(logits.argmax())
        assert line.split("  ")[-1].startswith(f"{made.spell(best)} ")


def check_looks(made: Made, text: str) -> None:
    """What all heads looked at most, and what each did."""
    ids = made.raw("greedy").tokens()
    weights = made.book.looks(ids[:2])
    whole = [*made.book.prompt, *ids[:2]]
    lines = text.splitlines()
    heads = {f"layer {i} head {j}": weights[i, j] for i in range(2) for j in range(2)}
    for name, own in {"all heads": weights.mean((0, 1)), **heads}.items():
        (line,) = [one for one in lines if one.startswith(f"{name}: ")]
        said = re.findall(r"(\d+) (\S+) ([\d.]+%)(?:, |$)", line.partition(": ")[2])
        places = own.topk(len(said)).indices.tolist()
        assert [int(place) for place, _, _ in said] == places
        for place, token, share in said:
            assert token == made.spell(whole[int(place)])
            assert percent(share, float(own[int(place)]), 1)


def inside_on_page(page: Screen) -> None:
    page.open("greedy").stand(2)
    check_lens(page.made, page.ask(LENS))
    check_looks(page.made, page.ask(ATTENTION))
    page.open("adapters").stand(2)
    text = page.ask(LENS)
    assert "the head after each layer, at token 2" in text and "to the bit" in text


def inside_in_terminal(shell: Shell) -> None:
    check_lens(shell.made, shell.ask("greedy", "--lens", "--at", "2"))
    check_looks(shell.made, shell.ask("greedy", "--attention", "--at", "2"))
    out = shell.ask("beams", "--lens", "--attention", "--at", "2", "--sequence", "1")
    assert "from layer" in out or "others had a higher logit" in out
    assert "all heads: " in out


def check_parts(made: Made, text: str) -> None:
    """By how much the answer is less likely without each id of the prompt, most first."""
    ids = made.raw("greedy").tokens()
    losses = [made.book.masked_loss(ids, at, at + 1) for at in range(len(PROMPT))]
    lines = [line.split() for line in text.splitlines()[1:] if line]
    assert len(lines) == len(PROMPT)
    said = [float(loss) for _, loss, _ in lines]
    assert said == sorted(said, reverse=True)
    for span, loss, token in lines:
        first, end = map(int, span.split(":"))
        assert end == first + 1 and token == marked(PROMPT[first])
        assert float(loss) == pytest.approx(losses[first], abs=2e-3)


def parts_on_page(page: Screen) -> None:
    page.open("greedy").stand(0)
    check_parts(page.made, page.ask(PARTS))
    assert "prompt 0 to 1 masked" in page.ask(MASK, "0:2")


def parts_in_terminal(shell: Shell) -> None:
    check_parts(shell.made, shell.ask("greedy", "--which-prompt"))


def held_back(made: Made) -> str:
    """The third and the fourth token, with which the stop string begins, as they are spelled."""
    return made.spell(*made.raw("stopped").tokens()[2:4])


def shown_on_page(page: Screen) -> None:
    said = page.open("stopped").stand(3)
    assert re.search(rf"did not have yet: {re.escape(held_back(page.made))}(step|$)", said), said
    assert "had all of it after this step" in page.stand(9)


def shown_in_terminal(shell: Shell) -> None:
    said = f"a reader of the stream did not have yet: {held_back(shell.made)}"
    assert said in shell("stopped", "--step", "3").splitlines()[-3]
    assert "did not have yet: " in shell("beams", "--step", "1")


QUESTIONS: dict[str, Question] = {
    "1 which processor ruled this token out, and how many others": (
        removed_on_page,
        removed_in_terminal,
    ),
    "2 what would have been chosen without it": (without_on_page, without_in_terminal),
    "3 by chance or by score, and where did the number fall": (draw_on_page, draw_in_terminal),
    "4 how sure was it": (sure_on_page, sure_in_terminal),
    "5 where did it begin to go wrong": (wrong_on_page, wrong_in_terminal),
    "6 why did it stop": (stopped_on_page, stopped_in_terminal),
    "7 why did it not stop": (unstopped_on_page, unstopped_in_terminal),
    "8 why does it repeat": (repeats_on_page, repeats_in_terminal),
    "9 where did the beams part, and merge": (parted_on_page, parted_in_terminal),
    "10 which hypothesis was dropped, and how close was it": (pruned_on_page, pruned_in_terminal),
    "11 why did this hypothesis win": (won_on_page, won_in_terminal),
    "12 which drafts were right, and where did they fail": (drafts_on_page, drafts_in_terminal),
    "13 did drafts pay": (paid_on_page, paid_in_terminal),
    "14 why is it slow here": (slow_on_page, slow_in_terminal),
    "15 what was fed": (fed_on_page, fed_in_terminal),
    "16 who shared the step": (beside_on_page, beside_in_terminal),
    "17 what does the cache hold": (cache_on_page, cache_in_terminal),
    "18 what does the model really read": (prompt_on_page, prompt_in_terminal),
    "19 which text came from whom": (origin_on_page, origin_in_terminal),
    "20 what does the grammar allow here": (grammar_on_page, grammar_in_terminal),
    "21 what changes with another value": (other_on_page, other_in_terminal),
    "22 where do two engines part": (engines_on_page, engines_in_terminal),
    "23 what happened inside the model": (inside_on_page, inside_in_terminal),
    "24 which part of the prompt mattered": (parts_on_page, parts_in_terminal),
    "25 what did the reader see at that moment": (shown_on_page, shown_in_terminal),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@needs_chromium
@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_answered_on_the_page(question: str, made: Made, browser: Browser) -> None:
    page = Screen(made, browser)
    try:
        QUESTIONS[question][0](page)
        assert page.problems == []
    finally:
        page.close()


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_answered_in_the_terminal(question: str, made: Made, call: Caller) -> None:
    QUESTIONS[question][1](Shell(made, call))


STREAMS: dict[str, dict[str, Any]] = {
    "stop strings": {"max_new_tokens": 10, "eos_token_id": None, "suppress_tokens": HIGH},
    "half characters": {"choices": ["aé€😀b"], "max_new_tokens": 20},
}


@pytest.mark.parametrize("kind", STREAMS)
def test_what_was_not_shown_yet_is_what_a_stream_held_back(kind: str, made: Made) -> None:
    """Against the events of a stream, step by step."""
    given = STREAMS[kind]
    if kind == "stop strings":
        text = es.generate(made.model, made.tokenizer, PROMPT, **given)
        strings = [text[2:4] + "!never", text[5:7] + "?"]
        given = {**given, "stop_strings": strings, "trim_stop_strings": True}
    file = made.folder.parent / "streamed.jsonl"
    events = es.stream(made.model, made.tokenizer, PROMPT, **given, record=file)
    pieces = [event.text or "" for event in events if event.token >= 0]
    record = read_record(file)
    (run,) = record.runs.values()
    late = unseen(record, run)
    assert late
    for at in range(len(pieces) - 1):
        had = "".join(pieces[: at + 1]).encode()
        upto = b"".join(record.texts.get(one, b"") for one in run.tokens[0][: at + 1])
        assert upto.startswith(had)
        assert marked(upto[len(had) :].decode(errors="backslashreplace")) == late.get(at, "")
