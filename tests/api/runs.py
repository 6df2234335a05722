"""Runs of every strategy on one prompt, for tests that hold them in their hands."""

from __future__ import annotations

from itertools import islice
from typing import Any

import everystep as es
from everystep.api.model import LanguageModel
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
PROMPT = "the tool was"
PLAIN: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
SAMPLED = {
    **PLAIN, "do_sample": True, "temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2,
}  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": PLAIN,
    "sampled": SAMPLED,
    "mirostat": {**PLAIN, "do_sample": True, "mirostat_tau": 3.0},
    "contrastive": {**PLAIN, "penalty_alpha": 0.6, "top_k": 4},
    "lookup": {**PLAIN, "prompt_lookup_num_tokens": 3, "repetition_penalty": 0.8},
    "guided": {**SAMPLED, "guidance_scale": 1.5},
    "several": {**SAMPLED, "num_return_sequences": 3},
    "beams": {**PLAIN, "num_beams": 3, "num_return_sequences": 2},
}
SINGLE = [name for name in STRATEGIES if name not in ("several", "beams")]


def opened(model: LanguageModel, name: str, **more: Any) -> es.Run:
    return es.open(model, TOKENIZER, PROMPT, seed=3, **{**STRATEGIES[name], **more})


def take(run: es.Run, count: int) -> list[es.Step]:
    return list(islice(run, count))


def engine_of(run: es.Run) -> Any:
    return run._hands.engine
