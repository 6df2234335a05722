"""On a GPU a step waits for the device once, for what was picked."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from everystep.testing.models import tiny_llama

pytestmark = pytest.mark.cuda

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "seed": 1},
    "sample as transformers draws": {"do_sample": True, "top_k": 20},
    "min_p and typical": {"do_sample": True, "min_p": 0.05, "typical_p": 0.9, "seed": 1},
    "cut off": {"do_sample": True, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "seed": 1},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 20},
    "biases": {"sequence_bias": [[[5], 2.0], [[6, 7], -1.0]], "bad_words_ids": [[9], [10, 11]]},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "seed": 1},
    "guidance": {"guidance_scale": 1.5},
}


def waits(rows: int, tokens: int, **options: Any) -> int:
    """How often a call of so many tokens waited."""
    model = tiny_llama(vocab_size=90).to("cuda")
    ids = torch.arange(1, 1 + 6 * rows, device="cuda").view(rows, 6)
    call = {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0, **options}
    model.generate(ids, **call)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            model.generate(ids, **call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in told)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_waits_once(name: str) -> None:
    """What a call does once is in the shorter one too, and what a process does once before both."""
    options = STRATEGIES[name]
    waits(2, 20, **options)
    assert waits(2, 40, **options) - waits(2, 20, **options) <= 20
