"""Records without texts: nothing that somebody wrote is in them, and they can be looked at."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import FormatError, RequestError
from everystep.inspector import views
from everystep.inspector.counterfactuals import repeat
from everystep.inspector.page import page
from everystep.records import RecordWriter, read_record, redact_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.cli.conftest import call as call
from tests.cli.running import Caller

MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)
SECRET = "Zebra crossing"
LONG: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}


class Named(es.Hook):
    """Does nothing."""

    def __repr__(self) -> str:
        return SECRET


def odd(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of the caller's."""
    return scores


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.2},
    "sampled": {"do_sample": True, "top_k": 20, "seed": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "stops": {"stop_strings": [SECRET], "bad_words_ids": [[70, 71]]},
    "regex": {"regex": f"({SECRET}|a+)", "eos_token_id": 2},
    "choices": {"choices": [SECRET, "no"], "eos_token_id": 2},
    "schema": {"schema": {"const": SECRET}, "eos_token_id": 2},
    "drafted": {"prompt_lookup_num_tokens": 3},
    "hooks": {"hooks": [Named()], "logits_processor": [odd]},
    "allowed": {"allowed_sequences": [SECRET, "abc"], "eos_token_id": 2, "max_new_tokens": 20},
}


def texts_of(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_nothing_that_was_written_is_in_it(kind: str, suffix: str, tmp_path: Path) -> None:
    old, new = tmp_path / "a.jsonl", tmp_path / f"b.jsonl{suffix}"
    es.generate(MODEL, TOKENIZER, f"The {SECRET}", **{**LONG, **KINDS[kind]}, record=old)
    redact_record(old, new)
    said, before = texts_of(new), read_record(old)
    ids = json.dumps([*before.runs["0"].prompt], separators=(",", ":"))
    for one in (SECRET, "Zebra", "crossing", ids, '"spelling"', "texts", "base64"):
        assert one not in said
    if kind not in ("hooks",):
        assert SECRET in texts_of(old) or kind in (
            "greedy",
            "sampled",
            "beams",
            "drafted",
            "allowed",
        )
    after = read_record(new)
    assert after.texts == {} and after.header["redacted"] is True
    for name, run in before.runs.items():
        other = after.runs[name]
        assert other.tokens == run.tokens and len(other.steps) == len(run.steps)
        assert [one.rows for one in other.steps] == [one.rows for one in run.steps]
        assert [one.children for one in other.steps] == [one.children for one in run.steps]
        assert [one.kind for one in other.ends] == [one.kind for one in run.ends]
        assert views.tree(after, other) and views.heading(after, other)
    assert "<!doctype html>" in page(after, "redacted")
    with pytest.raises(RequestError, match="does not hold all of its prompt"):
        repeat(after, "0", MODEL, TOKENIZER)


@pytest.mark.parametrize("kind", ["sampled", "beams", "stops", "regex", "drafted"])
def test_texts_can_be_left_out_before_they_reach_the_disk(kind: str, tmp_path: Path) -> None:
    given = {**LONG, **KINDS[kind], "seed": 3}
    old, new, own = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    plain = es.generate(MODEL, TOKENIZER, f"The {SECRET}", **given, record=old)
    redact_record(old, new)
    writer = RecordWriter(own, redacted=True)
    assert es.generate(MODEL, TOKENIZER, f"The {SECRET}", **given, record=writer) == plain
    written, wanted = (
        [json.loads(one) for one in texts_of(file).splitlines()] for file in (own, new)
    )
    for line in (*written, *wanted):
        for name in line.get("seconds", {}):
            line["seconds"][name] = 0
    assert written == wanted and SECRET not in texts_of(own)


def test_what_was_done_to_a_run_stays_without_its_texts(tmp_path: Path) -> None:
    run = es.open(MODEL, TOKENIZER, "ab", **LONG, record=tmp_path / "a")
    next(run)
    run.send(SECRET)
    run.set(repetition_penalty=1.5, stop_strings=[SECRET])
    run.fork(seed=4).result()
    run.result()
    redact_record(tmp_path / "a", tmp_path / "b")
    assert SECRET not in texts_of(tmp_path / "b")
    before, after = read_record(tmp_path / "a"), read_record(tmp_path / "b")
    assert [*before.runs] == [*after.runs]
    assert before.runs["0"].given == after.runs["0"].given
    ((_, values), *_) = after.runs["0"].changes
    assert values["repetition_penalty"] == 1.5 and values["stop_strings"] == "(left out)"


def test_fields_that_nobody_knows_go(tmp_path: Path) -> None:
    es.generate(MODEL, TOKENIZER, "ab", **LONG, record=tmp_path / "a")
    lines = [json.loads(one) for one in texts_of(tmp_path / "a").splitlines()]
    for line in lines:
        line["note"] = SECRET
        for row in line.get("rows", []):
            row["note"] = SECRET
            row["origin"] = f"chosen {SECRET}"
        if line["type"] == "run":
            line["strategy"], line["hooks"] = f"Greedy({SECRET})", [f"{SECRET}()"]
    lines.append({"type": "comment", "text": SECRET})
    (tmp_path / "c").write_text("".join(json.dumps(one) + "\n" for one in lines))
    redact_record(tmp_path / "c", tmp_path / "d")
    assert SECRET not in texts_of(tmp_path / "d") and "Greedy" in texts_of(tmp_path / "d")


def test_it_is_asked_for_by_name(call: Caller, tmp_path: Path) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    es.generate(MODEL, TOKENIZER, f"The {SECRET}", **LONG, record=file)
    outcome = call("inspect", str(file), "--redact", str(out))
    assert outcome.code == 0 and "without texts" in outcome.err
    assert SECRET not in call("inspect", str(out)).out
    assert call("inspect", str(file), "--redact", str(out), "--tree").code == 2
    assert call("inspect", str(file), str(file), "--redact", str(out)).code == 2
    with pytest.raises(RequestError, match="its own place"):
        redact_record(file, file)
    (tmp_path / "text").write_text("text")
    with pytest.raises(FormatError):
        redact_record(tmp_path / "text", tmp_path / "e")
    assert not (tmp_path / "e").exists()
