"""Answers of CTranslate2; it takes words, so ids go through the model's list of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import ctranslate2
from protocol import BY_DIFFERENCE, Answer, by_difference, check_counts, serve


def load(path: str, threads: int) -> tuple[Answer, dict[str, object]]:
    """A folder that its converter wrote, in the type that it was converted to."""
    words = json.loads((Path(path) / "vocabulary.json").read_text(encoding="utf-8"))
    generator = ctranslate2.Generator(path, intra_threads=threads, compute_type="default")

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        asked = [[words[id] for id in ids] for ids in prompts]
        begin = time.perf_counter()
        results = generator.generate_batch(
            asked, max_length=tokens, min_length=tokens, include_prompt_in_result=False
        )
        taken = time.perf_counter() - begin
        check_counts([result.sequences_ids[0] for result in results], prompts, tokens)
        return taken

    return by_difference(seconds), BY_DIFFERENCE


serve(load)
