"""The questions that people ask of a generation: each is answered of a record of the real engine,
on the page by keyboard alone and in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Reading
from everystep.inspector.views import marked, unseen
from everystep.records import Record, RecordedRow, RecordedRun, read_record
from tests.cli.conftest import call as call
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model
from tests.inspector.browser import Browser, needs_chromium
from tests.inspector.test_live import OPEN, said, tab_to
from tests.models.pictures import IMAGE, ROWS, model_of, prompt_of, reference_of

PROMPT = "ab ab ab"
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 1.3}
HIGH = list(range(94, 256))  # bytes that are not letters, digits and signs of ASCII
LONG: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": 256}


class Forcing(es.Hook):
    """Forces two tokens after the first."""

    def after_step(self, step: Any) -> Any:
        return es.Next(force=[97, 98]) if len(step.generated) == 1 else None


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {**LONG, "repetition_penalty": 1.2, "min_new_tokens": 4},
    "looping": {"max_new_tokens": 24, "eos_token_id": None},
    "sampled": {**LONG, **SAMPLED, "seed": 3, "min_new_tokens": 8},
    "other": {**LONG, **SAMPLED, "seed": 4, "min_new_tokens": 8},
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
    "agreed": {"max_new_tokens": 12, "eos_token_id": None},
    "grammar": {**LONG, "regex": "(yes|no|maybe) [ab]"},
    "stopped": {**LONG, "eos_token_id": None, "suppress_tokens": HIGH, "trim_stop_strings": True},
    "hooks": {**LONG, "hooks": [Forcing()]},
    "adapters": {**LONG, "adapters": {"tone": 1.0}},
}


@dataclass(frozen=True)
class Made:
    """The model, its folder, and a record of each kind."""

    folder: Path
    model: es.LanguageModel
    tokenizer: Any

    def file(self, kind: str) -> Path:
        return self.folder.parent / f"{kind}.jsonl"

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
    found = Made(folder, model, tokenizer)
    for kind, given in KINDS.items():
        given = dict(given)
        if kind == "agreed":
            given |= {"assistant_model": model, "assistant_tokenizer": tokenizer}
        if kind == "stopped":  # a text that begins as a stop string does, and goes on otherwise
            text = es.generate(model, tokenizer, PROMPT, **{**given, "trim_stop_strings": None})
            given["stop_strings"] = [text[2:4] + "!never"]
        es.generate(model, tokenizer, PROMPT, **given, record=found.file(kind))
    theirs = es.LanguageModel(model.core, model.generation_config, executor="torch")
    es.generate(theirs, tokenizer, PROMPT, **KINDS["greedy"], record=found.file("torch"))
    shown = model_of(reference_of("qwen3_vl", torch.float32))
    pictures = prompt_of(ROWS["two images"], dtype=torch.float32)
    shown.generate(**pictures, max_new_tokens=6, do_sample=False, record=found.file("pictures"))
    return found


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
        self.made, self._browser = made, browser
        self._open: list[PageServer] = []

    def open(self, kind: str, other: str | None = None) -> Screen:
        self.close()
        record, rival = self.made.record(kind), None
        if other is not None:
            rival = other, self.made.record(other)
        asks = (None, None) if other else (self.made.model, self.made.tokenizer)
        server = PageServer(Reading((kind, record), rival, *asks))
        self._open.append(server.__enter__())
        self._browser.visit(server.url, OPEN)
        return self

    def close(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def stand(self, at: int) -> str:
        """Walk to a token from the first one; what its step says."""
        tab_to(self._browser, "tokens")
        self._browser.press("Home", *["ArrowRight"] * at)
        self._browser.until("!document.querySelector('#step').textContent.includes('being read')")
        return self.text("#step")

    def press(self, id: str) -> str:
        tab_to(self._browser, id)
        self._browser.press("Enter")
        return self.text("#found")

    def key(self, key: str) -> str:
        tab_to(self._browser, "tokens")
        self._browser.press(key)
        return self.text("#found")

    def reach(self, selector: str) -> str:
        """Tab to a part of the page; what stands there."""
        for _ in range(80):
            if self._browser.value(f"document.activeElement.matches('{selector}')"):
                return self.text(selector)
            self._browser.press("Tab")
        raise AssertionError(f"{selector} is not reached by Tab")

    def ask(self, kind: int, value: str = "") -> str:
        tab_to(self._browser, "what-kind")
        self._browser.press(*["ArrowUp"] * 10, *["ArrowDown"] * kind)
        tab_to(self._browser, "what-value")
        self._browser.type(value)
        tab_to(self._browser, "what-ask")
        self._browser.press("Enter")
        return said(self._browser)

    def text(self, selector: str) -> str:
        return str(self._browser.value(f"document.querySelector('{selector}').textContent"))

    def value(self, expression: str) -> Any:
        return self._browser.value(expression)

    @property
    def problems(self) -> list[str]:
        return self._browser.problems


# --- the questions --------------------------------------------------------------------------------

Question = tuple[Callable[[Screen], None], Callable[[Shell], None]]
WITHOUT, SEED, ADAPTER, MASK, WHY, PARTS, LENS, ATTENTION = 0, 1, 3, 4, 5, 6, 7, 8


def removed_on_page(page: Screen) -> None:
    text, row = page.open("sampled").stand(3), page.made.row("sampled", 3)
    assert "ruled out of all" in text and "TopK" in text
    assert str(next(one.removed for one in row.stages if "TopK" in one.name)) in text
    assert "ruled out" in text.replace("ruled out of all", "")


def removed_in_terminal(shell: Shell) -> None:
    out, row = shell("sampled", "--step", "3"), shell.made.row("sampled", 3)
    (line,) = [one for one in out.splitlines() if "ruled out of all" in one]
    assert str(next(one.removed for one in row.stages if "TopK" in one.name)) in line.split("\t")


def without_on_page(page: Screen) -> None:
    page.open("sampled").stand(2)
    assert "without TopK, from token 2 on" in page.ask(WITHOUT, "TopK")


def without_in_terminal(shell: Shell) -> None:
    out = shell.ask("sampled", "--what-if", "without=TopK", "--at", "2")
    assert "to the bit" in out and ("otherwise: " in out or "the same" in out)


def draw_on_page(page: Screen) -> None:
    text, draw = page.open("sampled").stand(2), page.made.row("sampled", 2).draw
    assert draw is not None
    assert f"drawn: {draw.number:.4f} lies in {draw.low:.4f} to {draw.high:.4f}" in text
    assert page.value("document.querySelectorAll('#step .draw .number').length") == 1


def draw_in_terminal(shell: Shell) -> None:
    out, draw = shell("sampled", "--step", "2"), shell.made.row("sampled", 2).draw
    assert draw is not None and f"drawn: {draw.number:.4f} lies in" in out and "▲" in out


def sure_on_page(page: Screen) -> None:
    text, row = page.open("greedy").stand(4), page.made.row("greedy", 4)
    assert row.ranks is not None and f"rank {row.ranks[0]} by the model's logits" in text
    assert "entropy" in text and "ahead of the next best by" in text


def sure_in_terminal(shell: Shell) -> None:
    out = shell("greedy", "--step", "4")
    assert "ahead of the next best by" in out and "entropy" in out
    assert any(line.startswith("surprise") for line in shell("greedy").splitlines())


def wrong_on_page(page: Screen) -> None:
    lowest = page.open("sampled").press("lowest")
    assert re.fullmatch(r"token \d+", lowest)
    page.stand(0)
    assert re.fullmatch(r"token \d+|no token below 10 % follows", page.key("b"))


def wrong_in_terminal(shell: Shell) -> None:
    out = shell("sampled")
    assert "lowest share: token" in out and "the first below 10 %: token" in out


def stopped_on_page(page: Screen) -> None:
    run = page.made.run("grammar")
    text = page.open("grammar").text("#ends")
    assert f"ended after {run.ends[0].length} tokens: {run.ends[0].kind}" in text


def stopped_in_terminal(shell: Shell) -> None:
    for kind, end in (("grammar", "eos"), ("looping", "length")):
        found = shell.made.run(kind).ends[0].kind
        assert f"tokens: {found}" in shell(kind) and (kind == "grammar" or found == end)


def unstopped_on_page(page: Screen) -> None:
    text, row = page.open("sampled").stand(1), page.made.row("sampled", 1)
    (end,) = row.ends
    assert f"rank {end.rank}, ruled out" in text and "MinNewTokens" in text
    assert end.score is None
    assert f"rank {page.made.row('sampled', 9).ends[0].rank}, " in page.stand(9)


def unstopped_in_terminal(shell: Shell) -> None:
    if shell.made.run("sampled").ends[0].kind == "length":
        assert "closest to an end at token" in shell("sampled")
    assert "ruled out" in shell("sampled", "--step", "1").split("end ")[1].splitlines()[0]


def repeats_on_page(page: Screen) -> None:
    assert re.search(r"\d+ tokens stand there \d+ times", page.open("looping").press("repetition"))


def repeats_in_terminal(shell: Shell) -> None:
    assert re.search(r"\d+ tokens stand there \d+ times, first at \d+", shell("looping"))
    at = str(len(shell.made.run("looping").tokens[0]) - 1)
    assert "it would have needed" in shell.ask("looping", "--why", "#1", "--at", at)


def parted_on_page(page: Screen) -> None:
    tree = page.open("beams").reach("#tree")
    assert "├─" in tree and "dropped at step" in tree and "returned" in tree


def parted_in_terminal(shell: Shell) -> None:
    for kind in ("beams", "diverse", "constrained"):
        out = shell(kind, "--tree")
        assert "├─" in out and "returned" in out


def pruned_on_page(page: Screen) -> None:
    text = page.open("beams").stand(2)
    assert re.search(r"not kept: .* score -?[\d.]+; the worst that was kept has -?[\d.]+", text)


def pruned_in_terminal(shell: Shell) -> None:
    assert re.search(
        r"not kept: .* score .*; the worst that was kept", shell("beams", "--step", "2")
    )


def won_on_page(page: Screen) -> None:
    assert re.search(
        r"-?[\d.]+ / \d+\^1\.5 = -?[\d.]+, returned", page.open("beams").reach("#tree")
    )


def won_in_terminal(shell: Shell) -> None:
    assert re.search(r"-?[\d.]+ / \d+\^1\.5 = -?[\d.]+, returned", shell("beams", "--tree"))


def branches_of(made: Made) -> tuple[int, int]:
    """A token of a step with several drafts, of which not the first was right for longest."""
    for number, step in enumerate(one for one in made.run("branches").steps if one.rows):
        if len({draft.right for draft in step.drafts}) > 1 and step.drafts[0].right == 0:
            assert len({draft.ids[0] for draft in step.drafts}) == len(step.drafts) > 1
            return step.rows[0].at, number
    raise AssertionError("no second draft was right")


def drafts_of(made: Made) -> tuple[int, int]:
    """A token of a step whose draft was wrong somewhere, and the step's place."""
    steps = [one for one in made.run("drafted").steps if one.rows]
    for number, step in enumerate(steps):
        if step.drafts and step.drafts[0].right < len(step.drafts[0].ids):
            return step.rows[0].at, number
    raise AssertionError("no draft was wrong")


def drafts_on_page(page: Screen) -> None:
    text = page.open("drafted").stand(drafts_of(page.made)[0])
    assert re.search(r"drafted after sequence 0: .*; the first \d were right", text)
    assert "in place of" in text and "by " in text
    text = page.open("branches").stand(branches_of(page.made)[0])
    assert text.count("drafted after sequence 0: ") > 1
    assert "as another draft was right for longer" in text


def drafts_in_terminal(shell: Shell) -> None:
    out = shell("drafted", "--step", str(drafts_of(shell.made)[1]))
    assert re.search(
        r"drafted after sequence 0: .*; the first \d were right; then .* in place", out
    )
    out = shell("branches", "--step", str(branches_of(shell.made)[1]))
    assert re.search(r"(?s)the first 0 were right.*the first [12] were right", out)


def paid_on_page(page: Screen) -> None:
    assert re.search(r"drafts: \d+ of \d+ ids were right", page.open("drafted").text("#ends"))


def paid_in_terminal(shell: Shell) -> None:
    out = shell("drafted")
    assert re.search(r"drafts: \d+ of \d+ ids were right; \d+ steps for \d+ tokens", out)


def slow_on_page(page: Screen) -> None:
    assert re.search(r"step 3: \w+ [\d.]+ ms, ", page.open("greedy").stand(3))
    page.key("m"), page.key("m"), page.key("m")
    label = "document.querySelector('canvas').getAttribute('aria-label')"
    assert page.value(label).startswith("milliseconds")


def slow_in_terminal(shell: Shell) -> None:
    assert re.search(r"\w+ [\d.]+ ms, .*requests in the step", shell("greedy", "--step", "3"))
    assert any(one.startswith("milliseconds") for one in shell("greedy").splitlines())


def fed_on_page(page: Screen) -> None:
    count = len(page.made.run("greedy").prompt)
    assert f"fed {count} positions; 0 came from a cache" in page.open("greedy").stand(0)
    assert f"fed 1 positions; {count} came from a cache" in page.stand(1)


def fed_in_terminal(shell: Shell) -> None:
    count = len(shell.made.run("greedy").prompt)
    assert f"fed 1 positions; {count} came from a cache" in shell("greedy", "--step", "1")


def beside_on_page(page: Screen) -> None:
    assert "0 other requests in it" in page.open("greedy").stand(1)


def beside_in_terminal(shell: Shell) -> None:
    assert "0 other requests in the step" in shell("greedy", "--step", "1")


def cache_on_page(page: Screen) -> None:
    at, number = drafts_of(page.made)
    text = page.open("drafted").stand(at)
    assert re.search(r"its row holds \d+ after it, as \d of drafts were taken back", text)
    assert number >= 0


def cache_in_terminal(shell: Shell) -> None:
    out = shell("drafted", "--step", str(drafts_of(shell.made)[1]))
    assert re.search(r"its row holds \d+ after it, as \d of drafts were taken back", out)


def prompt_on_page(page: Screen) -> None:
    assert page.open("greedy").reach(".prompt") == marked(PROMPT)
    title = page.value("document.querySelector('.prompt span').title")
    assert title == f"position 0, id {page.made.run('greedy').prompt[0]}"
    text = page.open("pictures").reach(".prompt")
    assert text.count(f"<{IMAGE}>") == page.made.run("pictures").prompt.count(IMAGE) > 4
    assert "beside idspositions, pictures" in page.text("dl")


def prompt_in_terminal(shell: Shell) -> None:
    assert f"{len(PROMPT)} ids: {marked(PROMPT)}" in shell("greedy")
    out, run = shell("pictures"), shell.made.run("pictures")
    assert f"{len(run.prompt)} ids: " in out and f"<{IMAGE}><{IMAGE}>" in out
    assert "beside ids\tpositions, pictures" in out


def origin_on_page(page: Screen) -> None:
    page.open("hooks")
    kinds = page.value("[...document.querySelectorAll('#tokens span')].map((one) => one.className)")
    forced = page.made.run("hooks")
    origins = [forced.row_at(at).origin for at in range(4)]  # type: ignore[union-attr]
    assert [one.split(" ")[1] for one in kinds[:4]] == origins and len({*origins}) > 1
    assert "drafted" in page.open("agreed").value("document.querySelector('#tokens').innerHTML")


def origin_in_terminal(shell: Shell) -> None:
    for kind in ("hooks", "agreed", "grammar"):
        run = shell.made.run(kind)
        origins = {row.origin for step in run.steps for row in step.rows}
        lines = shell(kind, "--rows", "99").splitlines()
        assert origins <= {cell for line in lines for cell in line.split("\t")}


def grammar_on_page(page: Screen) -> None:
    text, row = page.open("grammar").stand(0), page.made.row("grammar", 0)
    stage = next(one for one in row.stages if one.removed)
    assert str(stage.removed) in text and "ruled out" in text
    whole = page.value("document.querySelector('dl').textContent")
    assert "(yes|no|maybe)·[ab]" in whole or "(yes|no|maybe) [ab]" in whole


def grammar_in_terminal(shell: Shell) -> None:
    assert "follows\tregex (yes|no|maybe) [ab]" in shell("grammar")
    out = shell("grammar", "--step", "0")
    allowed = [one for one in out.splitlines() if one.split("\t")[-1].endswith("%")]
    assert {one.split("\t")[2] for one in allowed} <= {"y", "n", "m"} and allowed


def other_on_page(page: Screen) -> None:
    page.open("sampled").stand(1)
    assert "seed=9, from token 1 on" in page.ask(SEED, "9")
    assert "aligned" in page.open("sampled", "other").text("#comparison h2")
    assert "the first other token is" in page.reach("#comparison pre")


def other_in_terminal(shell: Shell) -> None:
    out = shell("sampled", str(shell.made.file("other")))
    assert "another seed" in out and "the first other token is" in out and "margin" in out


def engines_on_page(page: Screen) -> None:
    assert "the same" in page.open("greedy", "torch").reach("#comparison pre")


def engines_in_terminal(shell: Shell) -> None:
    assert "run 0: the same 10 tokens" in shell("greedy", str(shell.made.file("torch")))


def inside_on_page(page: Screen) -> None:
    page.open("adapters").stand(2)
    text = page.ask(LENS)
    assert "the head after each layer, at token 2" in text and "layer" in text
    assert "layer 1 head 1:" in page.ask(ATTENTION)


def inside_in_terminal(shell: Shell) -> None:
    out = shell.ask("beams", "--lens", "--attention", "--at", "2", "--sequence", "1")
    assert "from layer" in out or "others had a higher logit" in out
    assert "all heads: " in out


def parts_on_page(page: Screen) -> None:
    page.open("greedy").stand(0)
    text = page.ask(PARTS)
    assert len(text.splitlines()) == 1 + len(PROMPT)
    assert "prompt 0 to 1 masked" in page.ask(MASK, "0:2")


def parts_in_terminal(shell: Shell) -> None:
    assert len(shell.ask("greedy", "--which-prompt").splitlines()) == 1 + len(PROMPT)


def shown_on_page(page: Screen) -> None:
    assert "did not have yet: " in page.open("stopped").stand(3)
    assert "had all of it after this step" in page.stand(9)


def shown_in_terminal(shell: Shell) -> None:
    assert "a reader of the stream did not have yet: " in shell("stopped", "--step", "3")
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
