"""Records that are read on while they grow: each byte once, and what a whole reading gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import FormatError
from everystep.inspector.sessions import LiveSession
from everystep.records import GrowingRecord, Record, read_record
from everystep.runs import run as run_module
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)
LONG: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}


def same(one: Record, other: Record) -> bool:
    return (one.header, one.runs, one.texts, one.others, one.cut) == (
        other.header,
        other.runs,
        other.texts,
        other.others,
        other.cut,
    )


@pytest.mark.parametrize("kind", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 3}])
def test_pieces_are_the_whole(kind: dict[str, Any], tmp_path: Path) -> None:
    es.generate(MODEL, TOKENIZER, "ab ab", **LONG, **kind, record=tmp_path / "a")
    data, file = (tmp_path / "a").read_bytes(), tmp_path / "b"
    file.write_bytes(b"")
    growing = GrowingRecord(file)
    assert growing.read() is None
    with pytest.raises(FormatError, match="no first line"):
        _ = growing.record
    for end in [*range(0, len(data), 977), len(data)]:
        file.write_bytes(data[:end])
        growing.read()
    assert same(growing.record, read_record(tmp_path / "a"))
    before = growing.bytes_read
    assert growing.read() is growing.record and growing.bytes_read == before
    file.write_bytes(data[:2000])  # another one in its place
    growing.read()
    assert len(growing.record.runs["0"].steps) < len(read_record(tmp_path / "a").runs["0"].steps)


@pytest.mark.parametrize("name", ["live.jsonl", "live.jsonl.gz"])
def test_a_live_session_reads_what_was_appended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = LiveSession.opened(MODEL, TOKENIZER, "ab ab", tmp_path / name, "live", **LONG)
    seen: list[GrowingRecord] = []
    read = GrowingRecord.read

    def counted(self: GrowingRecord, **how: Any) -> Record | None:
        seen.append(self)
        return read(self, **how)

    def whole(path: object) -> Record:
        raise AssertionError("the whole record is read again")

    monkeypatch.setattr(GrowingRecord, "read", counted)
    monkeypatch.setattr(run_module, "read_record", whole)
    for line in ("step", "step 3", "fork seed=5", "step", "pick #1 2", "until done", "undo"):
        session.obey(line)
        session.document()
        session.steps(0, 0, 5)
    assert len({id(one) for one in seen}) == 1 and len(seen) >= 7
    assert seen[0].bytes_read == (tmp_path / name).stat().st_size
    monkeypatch.undo()
    assert same(session.record(), read_record(tmp_path / name))
