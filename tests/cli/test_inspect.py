"""`everystep generate --record` and `everystep inspect`, on a tiny model."""

from __future__ import annotations

import http.client
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from everystep.records import RecordWriter, read_record
from tests.cli.running import Caller, everystep, on_terminal
from tests.cli.tiny_model import write_tiny_model

HOSTILE = "\x1b]0;taken\x07\u202e"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
def record(folder: Path, call: Caller, tmp_path: Path) -> Path:
    file = tmp_path / "record.jsonl"
    options = ["--top-k", "5", "--seed", "1", "-n", "6", "--record", str(file)]
    assert call("generate", "ab", "--model", str(folder), *options).code == 0
    return file


def test_a_record_is_shown_plainly_in_a_pipe(record: Path, call: Caller) -> None:
    code, out, err = call("inspect", str(record))
    (run,) = read_record(record).runs.values()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "top_k\t5 (call)" in lines and "\x1b" not in out
    assert sum(line.split("\t")[0].isdigit() for line in lines) == len(run.steps)
    assert any(line.startswith("surprise") for line in lines)
    assert any(line.startswith("sequence 0 ended after") for line in lines)


def test_a_record_leaves_out_what_each_processor_did(
    folder: Path, call: Caller, tmp_path: Path
) -> None:
    file = tmp_path / "brief.jsonl"
    asked = ("generate", "ab", "--model", str(folder), "--top-k", "5", "-n", "3")
    assert call(*asked, "--record", str(file), "--no-record-stages").code == 0
    shown = call("inspect", str(file)).out
    assert "stages\tall of them together; what each did is not recorded" in shown
    table = call("inspect", str(file), "--step", "1").out
    assert re.search(r"\truled out of all\t\t\d+\t\n", table)  # a column for one stage
    alone = call(*asked, "--no-record-stages")
    assert alone.code == 2 and "give --record FILE" in alone.err


def test_a_step_and_a_tree(record: Path, call: Caller) -> None:
    out = call("inspect", str(record), "--step", "1").out
    assert "drawn:" in out and "ruled out of all" in out and "came from a cache" in out
    assert "returned" in call("inspect", str(record), "--tree").out
    assert call("inspect", str(record), str(record)).out.startswith("run 0: the same")


def test_what_is_not_there_is_said(record: Path, call: Caller, tmp_path: Path) -> None:
    for options, says in (
        (["--step", "99"], "no step 99"),
        (["--run", "9"], "no run '9'"),
        (["--sequence", "3"], "no sequence 3"),
    ):
        outcome = call("inspect", str(record), *options)
        assert outcome.code == 2 and says in outcome.err
    outcome = call("inspect", str(tmp_path / "none"))
    assert outcome.code == 1 and "does not exist" in outcome.err
    (tmp_path / "other").write_text("text")
    outcome = call("inspect", str(tmp_path / "other"))
    assert outcome.code == 1 and "is no record" in outcome.err


def test_a_page_is_written(record: Path, call: Caller, tmp_path: Path) -> None:
    outcome = call("inspect", str(record), "--export", str(tmp_path / "page.html"))
    assert outcome.code == 0 and "wrote" in outcome.err
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_no_text_of_a_record_is_obeyed(call: Caller, tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "a")
    writer.begin(HOSTILE, HOSTILE)
    run = {"type": "run", "run": HOSTILE, "prompt": [1], "strategy": HOSTILE, "seed": HOSTILE}
    tokens = {"type": "tokens", "run": HOSTILE, "index": 0, "at": 0, "ids": [1, 2]}
    end = {"type": "end", "run": HOSTILE, "index": 0, "kind": HOSTILE, "matched": HOSTILE}
    configuration = {"configuration": {HOSTILE: [HOSTILE, HOSTILE]}, "processors": [HOSTILE]}
    texts = {"type": "spelling", "texts": {"1": HOSTILE, "2": {"base64": "gxtb"}}}
    row = {"of": 0, "at": 0, "ids": [1], "logits": [1.0], "totals": [1.0, 1.0]}
    row |= {"entropies": [0.0, 0.0], "origin": HOSTILE, "chosen": 1}
    row["stages"] = [{"name": HOSTILE, "removed": 1, "values": [1.0]}]
    step = {"type": "step", "run": HOSTILE, "step": 1, "rows": [row], "seconds": {HOSTILE: 1.0}}
    writer.write([{**run, **configuration}, texts, step, tokens, {**end, "length": 2}])
    for options in ([], ["--step", "0"], ["--tree"], [str(tmp_path / "a")]):
        code, out, _ = call("inspect", str(tmp_path / "a"), *options)
        assert code == 0 and not {"\x1b", "\x07", "\u202e"} & {*out}, options


SHARES = {"sure": 0.9, "likely": 0.3, "doubted": 0.05, "strange": 0.005, "absurd": 0.0005}
ORIGINS = {"sent": "given", "only": "forced", "ahead": "drafted"}


def written(file: Path) -> Path:
    """A record whose tokens have these shares and origins."""
    row: dict[str, Any] = {"of": 0, "logits": [0.0], "totals": [0.0, 0.0], "entropies": [0.0, 0.0]}
    words = [*SHARES, *ORIGINS]
    lines: list[dict[str, Any]] = [
        {"type": "run", "run": "0", "prompt": [99]},
        {"type": "spelling", "texts": {str(at): f"{word} " for at, word in enumerate(words)}},
    ]
    for at, word in enumerate(words):
        surprise = -math.log(SHARES.get(word, 0.9))
        own = {"at": at, "ids": [at], "chosen": at, "surprise": surprise}
        own["origin"] = ORIGINS.get(word, "chosen")
        lines.append({"type": "step", "run": "0", "step": at + 1, "rows": [{**row, **own}]})
    ids, given = [*range(len(words))], [words.index("sent")]
    lines.append({"type": "edit", "run": "0", "at": 0, "ids": ids, "given": given})
    record = RecordWriter(file)
    record.begin("m", "t")
    record.write(lines)
    record.flush()
    return file


def styles(shown: str) -> list[tuple[str, str]]:
    """What was shown, cut where its style changes: style and text."""
    parts = re.split(r"\x1b\[([\d;]*)m", shown)
    return [
        *zip(["", *("" if one == "0" else one for one in parts[1::2])], parts[::2], strict=True)
    ]


def test_a_person_sees_surprise_in_colours(tmp_path: Path) -> None:
    """Each token has the style that the line below the text explains its share or origin by."""
    command = everystep("inspect", str(written(tmp_path / "a")))
    with on_terminal(command, columns=100, COLORTERM="truecolor") as terminal:
        terminal.until("nothing ended")
        shown = styles(terminal.shown)
    key = next(at for at, (_, text) in enumerate(shown) if "share of the token" in text)

    def style_of(text: str, parts: list[tuple[str, str]]) -> str:
        return next(style for style, own in parts if text in own)

    explained = (">50%", ">10%", ">1%", ">0.1%", "less")
    known = [style_of(name, shown[key:]) for name in explained]
    assert known == [style_of(word, shown[:key]) for word in SHARES]
    assert known[0] == "" and len({*known}) == len(known)
    origins = [style_of(name, shown[key:]) for name in ORIGINS.values()]
    assert origins == [style_of(word, shown[:key]) for word in ORIGINS]
    assert len({*known, *origins}) == len(known) + len(origins)


def test_arrows_walk_through_a_record_on_a_terminal(record: Path) -> None:
    ids = read_record(record).runs["0"].tokens[0]
    with on_terminal(everystep("inspect", str(record), "--tui"), columns=140) as terminal:
        terminal.until("sequence 0, token 0: entropy")
        last = len(ids) - 1
        assert last > 3
        for key, at in (("C", 1), ("C", 2), ("F", last), ("D", last - 1)):  # right, end and left
            terminal.type(f"\x1b[{key}")
            terminal.until(f"sequence 0, token {at}: entropy")
        assert re.search(rf"\*\s+{ids[1]}\s", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.shown))
        terminal.type("q")
        assert terminal.end() == 0


def test_a_text_is_found(record: Path, call: Caller) -> None:
    (run,) = read_record(record).runs.values()
    out = call("inspect", str(record), "--find", f"#{run.tokens[0][2]}").out
    assert any(line.split("\t")[:2] == ["2", str(run.tokens[0][2])] for line in out.splitlines())
    assert call("inspect", str(record), "--find", "not there").code == 2


def test_other_forms_are_written_by_the_ending(record: Path, call: Caller, tmp_path: Path) -> None:
    for name in ("a.csv", "a.parquet", "a.json", "a.html"):
        outcome = call("inspect", str(record), "--export", str(tmp_path / name))
        assert outcome.code == 0 and (tmp_path / name).stat().st_size > 100
    outcome = call("inspect", str(record), "--export", str(tmp_path / "a.xlsx"))
    assert outcome.code == 2 and ".parquet" in outcome.err
    two = (str(record), str(record), "--export")
    assert call("inspect", *two, str(tmp_path / "two.html")).code == 0
    assert call("inspect", *two, str(tmp_path / "two.csv")).code == 2
    assert not (tmp_path / "two.csv").exists()


def test_questions_are_asked_of_the_model(record: Path, folder: Path, call: Caller) -> None:
    asked = ("inspect", str(record), "--model", str(folder))
    out = call(*asked, "--what-if", "without=TopK", "--what-if", "seed=5", "--at", "2").out
    assert "without TopK, seed=5, from token 2 on" in out and "to the bit" in out
    (run,) = read_record(record).runs.values()
    # One of the two was not chosen, whatever the machine's random numbers made of the model.
    why = "".join(call(*asked, "--why", rank, "--at", "2").out for rank in ("#1", "#2"))
    assert "logit" in why
    assert len(call(*asked, "--which-prompt").out.splitlines()) == 1 + len(run.prompt)
    out = call(*asked, "--lens", "--attention", "--at", "2").out
    assert "the head after each layer, at token 2" in out and "layer 1 head 0" in out
    outcome = call(*asked, "--lens", "--at", "2", "--sequence", "4")
    assert outcome.code == 2 and "no such sequence" in outcome.err
    outcome = call(*asked, "--what-if", "seed")
    assert outcome.code == 2 and "NAME=VALUE" in outcome.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give FILE, or --prompt"),
        (["FILE", "--prompt", "ab"], "give FILE, or --prompt"),
        (["FILE", "--top-k", "5"], "--top-k belong to --prompt"),
        (["FILE", "--chat"], "--chat belong"),
        (["FILE", "--port", "80"], "--port belong to --web"),
        (["FILE", "--dtype", "float32"], "--dtype belong"),
        (["FILE", "--at", "3"], "--at belongs"),
        (["FILE", "--why", "#1", "--sequence", "1"], "--sequence is of --lens"),
        (["FILE", "--lens", "--sequence", "1"], "needs --at"),
        (["--prompt", "ab", "--lens"], "are for records"),
        (["FILE", "--tree", "--tui"], "are ways to show it"),
        (["FILE", "--why", "#1", "--tree"], "one at a time"),
        (["--prompt", "ab", "--step", "3"], "are for records"),
        (["--prompt", "ab", "--why", "3"], "are for records"),
    ],
)
def test_what_has_no_effect_is_refused(
    options: list[str], says: str, record: Path, call: Caller
) -> None:
    given = [str(record) if one == "FILE" else one for one in options]
    outcome = call("inspect", *given)
    assert outcome.code == 2 and says in outcome.err


LIVE = ("--top-k", "5", "--seed", "1", "-n", "6")


def test_a_run_is_driven_by_lines(folder: Path, record: Path, call: Caller, tmp_path: Path) -> None:
    kept = tmp_path / "live.jsonl"
    command = ("inspect", "--prompt", "ab", "--model", str(folder), "--record", str(kept), *LIVE)
    said = b"step 2\npick #1\nundo\nshow 1\ntext\ntree\nhelp\nif seed=9 at 1\nuntil done\nquit\n"
    outcome = call(*command, given=said)
    assert outcome.code == 0
    for text in ("run 1: 2 tokens", "run 0: 2 tokens", "drawn:", "ended,", "undo", "to the bit"):
        assert text in outcome.out
    (own,) = read_record(record).runs.values()
    assert read_record(kept).runs["0"].tokens[0] == own.tokens[0]
    outcome = call(*command, given=b"step\nnonsense\nstep\n")
    assert outcome.code == 2 and "no verb" in outcome.err


def test_a_run_is_driven_on_a_terminal(folder: Path) -> None:
    command = everystep("inspect", "--prompt", "ab", "--model", str(folder), *LIVE)
    with on_terminal(command, columns=100) as terminal:
        terminal.until("inspect> ")
        terminal.type("nonsense\r")
        terminal.until("no verb")
        terminal.type("step\r")
        terminal.until("run 0: 1 tokens")
        terminal.until("inspect> ", 3)
        terminal.type("\x04")
        assert terminal.end() == 0


def test_a_page_is_served_until_it_is_interrupted(record: Path) -> None:
    with on_terminal(everystep("inspect", str(record), "--web"), columns=150) as terminal:
        terminal.until("Ctrl-C ends the page")
        found = re.search(r"http://(127\.0\.0\.1:\d+)/#token=([\w-]{43})", terminal.shown)
        assert found is not None
        connection = http.client.HTTPConnection(found[1], timeout=30)
        connection.request("GET", "/document", headers={"Authorization": f"Bearer {found[2]}"})
        assert b'"runs"' in connection.getresponse().read()
        connection.close()
        terminal.type("\x03")
        assert terminal.end() == 130


def test_a_prompt_opens_a_live_page(folder: Path) -> None:
    command = everystep("inspect", "--prompt", "ab", "--web", "--model", str(folder), *LIVE)
    with on_terminal(command, columns=150) as terminal:
        terminal.until("Ctrl-C ends the page")
        found = re.search(r"http://(127\.0\.0\.1:\d+)/#token=([\w-]{43})", terminal.shown)
        assert found is not None
        connection = http.client.HTTPConnection(found[1], timeout=30)
        key = {"Authorization": f"Bearer {found[2]}", "Content-Type": "application/json"}

        def document() -> dict[str, Any]:
            connection.request("GET", "/document", headers=key)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer

        before = document()
        assert before["asks"] and not before["live"]["done"]
        connection.request("POST", "/obey", b'{"line": "step 2"}', key)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
        (run,) = document()["runs"]
        assert run["steps"] == 2 and len(run["sequences"]["0"]) == 2
        connection.close()
        terminal.type("\x03")
        assert terminal.end() == 130
