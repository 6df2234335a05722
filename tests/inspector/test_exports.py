"""Records for other programs: series as CSV and Parquet, a trace of phases."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch

import everystep as es
from everystep.errors import RequestError
from everystep.inspector import views
from everystep.inspector.exports import COLUMNS, FORMS, export, rows
from everystep.records import Record, RecordedRun, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    model = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
    file = tmp_path_factory.mktemp("records") / "a"
    given = {"do_sample": True, "top_k": 20, "temperature": 0.7, "max_new_tokens": 6, "seed": 2}
    run = es.open(model, tiny_tokenizer(320), "ab ab", **given, record=file)
    next(run)
    run.send("xy")
    run.fork(seed=4).result()
    run.result()
    return read_record(file)


def written(record: Record, target: Path) -> bytes:
    export(record, target, "a")
    return target.read_bytes()


def test_the_series_has_every_token(record: Record, tmp_path: Path) -> None:
    data = written(record, tmp_path / "a.csv").decode()
    table = list(csv.DictReader(io.StringIO(data, newline="")))
    assert len(table) == sum(
        len(ids) for run in record.runs.values() for ids in run.tokens.values()
    )
    expected = [
        one
        for run in record.runs.values()
        for index in sorted(run.tokens)
        for one in views.tokens_of(record, run, index)
    ]
    for line, one in zip(table, expected, strict=True):
        assert int(line["id"]) == one.id and line["origin"] == one.origin
        assert json.loads(line["text"]) == record.spell(one.id)
        assert (line["surprise"] == "") == (one.surprise is None)
        if one.row is not None and one.surprise is not None:
            assert float(line["surprise"]) == pytest.approx(one.surprise)
            assert float(line["entropy"]) == one.row.entropies[0]
            assert int(line["ruled_out"]) == 300
            total = one.row.totals[0]
            assert total is not None
            ends = [math.exp(end.logit - total) for end in one.row.ends if end.logit is not None]
            assert float(line["end_share"]) == pytest.approx(sum(ends))


def test_parquet_has_what_csv_has(record: Record, tmp_path: Path) -> None:
    written(record, tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == [*COLUMNS]
    plain = [dict(zip(COLUMNS, row, strict=True)) for row in rows(record)]
    for found, row in zip(table.to_pylist(), plain, strict=True):
        assert found == row
    written(Record({}), tmp_path / "none.parquet")
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0


def test_a_trace_has_every_phase_once(record: Record, tmp_path: Path) -> None:
    found = json.loads(written(record, tmp_path / "a.json"))
    events = [one for one in found["traceEvents"] if one["ph"] == "X"]
    for track, run in enumerate(record.runs.values(), 1):
        own = [one for one in events if one["tid"] == track]
        phases = [one for one in own if one["cat"] == "phase"]
        spent = [seconds for step in run.steps for seconds in step.seconds.values()]
        assert [one["dur"] for one in phases] == pytest.approx([1e6 * one for one in spent])
        ends = [one["ts"] + one["dur"] for one in phases]
        assert [one["ts"] for one in phases[1:]] == pytest.approx(ends[:-1])
        assert len([one for one in own if one["cat"] == "step"]) == len(run.steps)


def test_texts_of_strangers_are_no_formulas(tmp_path: Path) -> None:
    texts = {0: b"=1+1", 1: b"@SUM(A1)", 2: b"\xff", 3: b'a"\n,b'}
    run = RecordedRun("=cmd", {}, (), tokens={0: [0, 1, 2, 3]})
    hostile = Record({}, {run.name: run}, texts)
    table = list(csv.reader(io.StringIO(written(hostile, tmp_path / "a.csv").decode(), newline="")))
    assert len(table) == 5
    assert not [cell for line in table for cell in line if cell.startswith(("=", "@", "+"))]
    export(hostile, tmp_path / "a.parquet", "a")
    export(hostile, tmp_path / "a.json", "a")


def test_another_ending_is_refused(record: Record, tmp_path: Path) -> None:
    for name in ("a", "a.txt", "a.html.gz"):
        with pytest.raises(RequestError, match=r"\.parquet") as error:
            export(record, tmp_path / name, "a")
        assert all(one in str(error.value) for one in FORMS)
        assert not (tmp_path / name).exists()
