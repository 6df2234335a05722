"""What a record says in lines and tables: of texts, steps, ends, trees and pairs of records."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.inspector import views
from everystep.inspector.paths import Paths, rows_along
from everystep.records import read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)


def recorded(file: Path, **given: Any) -> es.Record:
    asked = {"max_new_tokens": 8, "eos_token_id": None, **given}
    es.generate(MODEL, TOKENIZER, "ab ab", **asked, record=file)
    return read_record(file)


def test_surprise_is_that_of_the_scorer(tmp_path: Path) -> None:
    record = recorded(tmp_path / "a", do_sample=True, top_k=5, seed=3)
    (run,) = record.runs.values()
    tokens = views.tokens_of(record, run)
    score = es.score(MODEL, TOKENIZER, run.tokens[0], after=[*run.prompt])
    for one, expected in zip(tokens, score.logprobs, strict=True):
        assert one.surprise == pytest.approx(-float(expected), abs=1e-4)
    assert [one.origin for one in tokens] == ["chosen"] * 8


@pytest.mark.parametrize("beams", [{"num_beams": 3}, {"num_beams": 4, "num_beam_groups": 2}])
def test_the_way_of_a_beam_is_followed(beams: dict[str, int], tmp_path: Path) -> None:
    several: dict[str, Any] = {"num_return_sequences": 2, **beams}
    if "num_beam_groups" in beams:
        several["diversity_penalty"] = 0.5
    record = recorded(tmp_path / "a", **several)
    (run,) = record.runs.values()
    for index, ids in run.tokens.items():
        rows = rows_along(run, index)
        assert [row.at if row else None for row in rows] == [*range(8)]
        score = es.score(MODEL, TOKENIZER, ids, after=[*run.prompt])
        for row, id, expected in zip(rows, ids, score.logprobs, strict=True):
            assert row is not None
            assert views.surprise_of(row, id) == pytest.approx(-float(expected), abs=1e-4)
    paths, lines = Paths.of(run), views.tree(record, run)
    assert len(paths.ended) >= 2 and sum("returned" in line for line in lines) == 2
    leaves = [line for line in lines if line.endswith("]")]
    assert len(leaves) == sum("dropped" in line or "length" in line for line in leaves)


@pytest.mark.parametrize("power", [1.0, 0.5, -0.5])
def test_a_hypothesis_that_ended_has_its_sum_and_its_score(power: float, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": power}
    asked["return_dict_in_generate"] = True
    ends: dict[str, Any] = {"eos_token_id": [*range(40, 80)], "max_new_tokens": 12}
    found = es.generate(MODEL, TOKENIZER, "ab ab", **asked, **ends, record=tmp_path / "a")
    record = read_record(tmp_path / "a")
    (run,) = record.runs.values()
    shown = []
    for line in views.tree(record, run):
        if "returned" in line:
            said = re.search(r"(-?[\d.]+) / (\d+)\^(-?[\d.]+) = (-?[\d.]+), returned", line)
            assert said is not None, line
            total, length, by, score = map(float, said.groups())
            assert by == power and score == pytest.approx(total / length**power, rel=2e-3)
            shown.append((length, score))
    scores = [(len(one.tokens), one.score) for one in found]
    assert sorted(shown) == [(n, pytest.approx(one, rel=1e-3)) for n, one in sorted(scores)]
    assert len(shown) == 4


def test_the_best_that_a_search_did_not_keep_are_named_beside_what_ended(tmp_path: Path) -> None:
    ends: dict[str, Any] = {"eos_token_id": [*range(40, 80)], "max_new_tokens": 12}
    record = recorded(tmp_path / "a", num_beams=4, **ends)
    (run,) = record.runs.values()
    beside = 0
    for step in run.steps[1:]:
        if not any(child.end is None for child in step.children):
            continue
        rows = [row for row in step.rows if row.score is not None]
        assert rows
        sums = {
            (row.of, id): row.score + score
            for row in rows
            for id, score in zip(row.ids, row.scores, strict=True)
            if score is not None and row.score is not None
        }
        kept = {(child.parent, child.ids[0]) for child in step.children}
        least = min(sums[child.parent, child.ids[0]] for child in step.children if not child.end)
        best = sorted((sums[place], place) for place in sums if place not in kept)[::-1][:3]
        found = views.lost(step)
        assert [(one.score, (one.of, one.id)) for one in found] == best
        assert found and all(one.least == pytest.approx(least, abs=1e-3) for one in found)
        # A token that ends a text is kept in the bank, or is not among as many as there are beams.
        assert all(one.score <= least + 1e-3 for one in found if not 40 <= one.id < 80)
        beside += any(child.end for child in step.children)
    assert beside > 1


def test_a_step_has_a_column_for_every_stage(tmp_path: Path) -> None:
    record = recorded(
        tmp_path / "a", do_sample=True, temperature=0.5, top_k=5, repetition_penalty=1.2, seed=3
    )
    (run,) = record.runs.values()
    row = run.steps[2].rows[0]
    head, lines = views.candidates(record, row)
    stages = ("RepetitionPenalty", "Temperature", "TopK")
    assert head == ("", "id", "token", "logit", *stages, "share")
    (chosen,) = [line for line in lines if line[0] == "*"]
    assert chosen[1] == str(run.tokens[0][2])
    shares = [float(line[-1].rstrip("%")) for line in lines if line[-1].endswith("%")]
    assert len(shares) == 5 and sum(shares) == pytest.approx(100, abs=0.1)
    assert shares == sorted(shares, reverse=True)
    assert lines[-1][-2] == str(320 - 5)
    said = "\n".join(views.about_choice(record, row))
    assert "drawn:" in said and "▲" in said
    head, lines = views.steps(record, run)
    assert len(lines) == 8 and all(len(line) == len(head) for line in lines)


def test_why_it_stopped(tmp_path: Path) -> None:
    record = recorded(tmp_path / "a", eos_token_id=[9, 10])
    (run,) = record.runs.values()
    ended, near = views.ends(record, run)
    assert ended == "sequence 0 ended after 8 tokens: length"
    found = views.nearest_end(run)
    assert found is not None and near.startswith(f"  closest to an end at token {found[0]}")
    shares = [
        math.exp(end.logit - row.totals[0])
        for row in run.rows().values()
        for end in row.ends
        if end.logit is not None and row.totals[0] is not None
    ]
    assert found[2] == pytest.approx(max(shares))
    first = run.tokens[0][2]
    stopped = recorded(tmp_path / "b", eos_token_id=first)
    (run,) = stopped.runs.values()
    assert views.ends(stopped, run) == [
        f"sequence 0 ended after 3 tokens: stop (token {views.spelled(stopped, first)})"
    ]


def test_the_first_difference_and_its_margin(tmp_path: Path) -> None:
    one = recorded(tmp_path / "a", do_sample=True, seed=1)
    other = recorded(tmp_path / "b", do_sample=True, seed=2)
    lines = list(views.comparison(one, other))
    first, second = one.runs["0"].tokens[0], other.runs["0"].tokens[0]
    at = next(i for i in range(8) if first[i] != second[i])
    assert any(f"the first other token is {at}" in line for line in lines)
    assert any("another seed" in line for line in lines)
    assert list(views.comparison(one, one)) == ["run 0: the same 8 tokens"]


@pytest.mark.parametrize(
    "text", ["\x1b[31m", "\u202eevil", "\x00\x07\x9b", "\u2028", "\ud800", "\U000e0001", "\r"]
)
def test_marks_take_the_place_of_what_obeys(text: str) -> None:
    shown = views.marked(f"a{text}b")
    assert not {*text} & {*shown} - {*"[31mevil"}
    assert shown.startswith("a") and shown.endswith("b")


def test_a_strip_has_the_highest_of_each_place() -> None:
    assert views.strip([0.0, 1.0, None, 2.0], 2) == "▄█"
    assert views.strip([None, math.inf]) == ""
    assert len(views.strip([1.0] * 1000, 60)) <= 60
    assert [views.level(-math.log(p)) for p in (0.6, 0.2, 0.05, 0.005, 0.0001)] == [0, 1, 2, 3, 4]


def test_it_is_said_whether_drafts_paid(tmp_path: Path) -> None:
    copying = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    record = recorded(tmp_path / "a", **copying, max_new_tokens=24, repetition_penalty=0.5)
    (run,) = record.runs.values()
    drafts = [draft for step in run.steps for draft in step.drafts]
    right, ids = sum(one.right for one in drafts), sum(len(one.ids) for one in drafts)
    assert drafts
    said = "\n".join(views.ends(record, run))
    assert f"drafts: {right} of {ids} ids were right" in said and "for 24 tokens" in said
    steps = [step for step in run.steps if step.rows][1:]  # without that of the prompt
    times: dict[bool, list[float]] = {True: [], False: []}
    for step in steps:
        spent = sum(step.seconds.values()) * 1e3
        times[bool(step.drafts)].append(spent / sum(len(one.ids) for one in step.children))
    drafted, plain = (sorted(own)[len(own) // 2] for own in (times[True], times[False]))
    assert f"a token took {drafted:.2f} ms with drafts, {plain:.2f} ms without" in said
    assert views.speculation(recorded(tmp_path / "b").runs["0"]) == []


def test_hypotheses_that_say_the_same_are_named(tmp_path: Path) -> None:
    record = recorded(tmp_path / "a", num_beams=3, num_return_sequences=2)
    (run,) = record.runs.values()
    assert not any("say the same" in line for line in views.tree(record, run))
    for id in record.texts:
        record.texts[id] = b"x"
    assert any("hypotheses say the same" in line for line in views.tree(record, run))


def test_the_time_of_tokens_is_a_series(tmp_path: Path) -> None:
    record = recorded(tmp_path / "a")
    (run,) = record.runs.values()
    tokens = views.tokens_of(record, run)
    spent = [sum(step.seconds.values()) * 1e3 for step in run.steps if step.rows]
    assert [one.milliseconds for one in tokens] == pytest.approx(spent)
    assert "milliseconds" in [name for name, _, _ in views.series(tokens)]
