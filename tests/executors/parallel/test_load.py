"""A folder that is loaded onto several processes, with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import everystep as es
from everystep.testing.models import tiny_llama
from tests.cli.tiny_model import write_tiny_model
from tests.executors.parallel.children import children


def test_a_folder_loads_onto_two_processes_and_says_the_same(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    tiny_llama(vocab_size=259, num_key_value_heads=4).save_pretrained(folder)
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    before = len(children())
    model, tokenizer = es.load(folder, parallel=2)
    try:
        assert len(children()) == before + 1
        found = es.generate(model, tokenizer, "the cat sat", **asked)
    finally:
        model.close()
    assert len(children()) == before
    assert found == es.generate(*es.load(folder), "the cat sat", **asked)
