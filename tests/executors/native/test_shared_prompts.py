"""What several answers to one prompt hold: the prompt's pages once, and their own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everystep.executors import choice
from everystep.executors.native import NativeExecutor
from everystep.executors.native.page_tables import PAGE
from everystep.testing.models import tiny_llama

pytestmark = pytest.mark.native
PROMPT, NEW, ANSWERS = 1000, 40, 8


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": ANSWERS},
        {"num_beams": ANSWERS, "num_return_sequences": ANSWERS},
        {"do_sample": True, "num_return_sequences": ANSWERS, "seed": 3},
        {"do_sample": True, "num_return_sequences": ANSWERS, "prefill_chunk_size": 100, "seed": 3},
    ],
)
def test_a_prompt_is_held_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[NativeExecutor] = []

    class Remembered(NativeExecutor):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            opened.append(self)

    monkeypatch.setattr(choice, "NativeExecutor", Remembered)
    model = tiny_llama(dtype=torch.float32, max_position_embeddings=2 * PROMPT)
    ids = torch.arange(PROMPT)[None] % 40 + 4
    found = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, **options)
    assert found.shape[1] == PROMPT + NEW
    (executor,) = opened
    assert executor.rows.pool.in_use == 0
    most = executor.rows.pool.counts.most_pages * PAGE
    assert PROMPT <= most <= 1.15 * PROMPT + ANSWERS * NEW
    # They went apart, so each had tokens of its own.
    assert executor.rows.pool.counts.copies >= ANSWERS - 1
