"""`everystep generate --record` and `everystep inspect`, on a tiny model."""

from __future__ import annotations

from pathlib import Path

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


def test_a_person_sees_surprise_in_colours(record: Path) -> None:
    with on_terminal(everystep("inspect", str(record)), columns=100) as terminal:
        shown = terminal.until("ended after")
        assert "share of the token" in shown and "\x1b[" in shown
