"""`everystep run-batch`: what it refuses before it loads anything."""

from __future__ import annotations

from pathlib import Path

from tests.cli.running import Caller


def test_a_file_is_judged_before_a_model_is_looked_for(call: Caller, tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.jsonl", tmp_path / "right.jsonl"
    wrong.write_text("no line\n")
    right.write_text('{"custom_id":"a","method":"POST","url":"/v1/completions","body":{}}\n')
    out = tmp_path / "out.jsonl"
    for given, said in (
        (tmp_path / "nowhere.jsonl", "nowhere.jsonl"),
        (wrong, "is no batch file"),
        (right, "nothing-here"),
    ):
        outcome = call("run-batch", str(given), "-o", str(out), "./nothing-here")
        assert outcome.code in (1, 2) and said in outcome.err, outcome.err
    assert not out.exists()
    outcome = call("run-batch", str(right), "-o", str(tmp_path / "no" / "out"), "./nothing-here")
    assert outcome.code == 1 and "does not exist" in outcome.err
    assert call("run-batch", str(right)).code == 2, "where to is asked for"
