"""`everystep transcribe` writes what `es.transcribe` returns."""

from __future__ import annotations

import json
from pathlib import Path

from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.test_transcribe import WORDS, heard, sound, whisper, written
from tests.cli.running import Caller


def test_the_command_writes_texts_and_documents(call: Caller, tmp_path: Path) -> None:
    folder = tmp_path / "whisper"
    whisper().save_pretrained(folder)
    tiny_tokenizer(WORDS).save_pretrained(folder)
    values = {"feature_size": 5, "hop_length": 500, "chunk_length": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    files = [written(sound(0.5), tmp_path / "a.wav"), written(sound(1.9), tmp_path / "b.wav")]
    expected = [heard(one, language="de", timestamps=True) for one in files]
    line = ["transcribe", *map(str, files), "-m", str(folder), "--language", "de", "--timestamps"]
    status, said, _ = call(*line)
    assert status == 0
    assert said.splitlines()[0] == f"{files[0]}:"
    assert said.count("\n[") == sum(len(one.segments) for one in expected)
    status, said, _ = call(*line, "--json")
    document = json.loads(said)
    assert [one["text"] for one in document["sounds"]] == [one.text for one in expected]
    assert [one["language"] for one in document["sounds"]] == ["de", "de"]
    status, _, told = call("transcribe", str(files[0]), "-m", str(folder), "--language", "xx")
    assert status == 2
    assert "does not know the language" in told
