"""The default model in float32: the reference's tokens on the same weights and ids.

Both read the same prompts alone, left-padded in one batch, and with four beams. Tokens may differ
first where the reference's own two best scores are closer than a float32 sum can decide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es

MARGIN = 1e-3
PROMPTS = (
    "The capital of France is",
    "Why is the sky blue?",
    "def fibonacci(n):",
    "Once upon a time, there was",
    "The three laws of thermodynamics are",
    "To make a good cup of tea,",
    "In 1969, the first",
    "Water boils at a temperature of",
    "The largest planet of the solar system",
    "Photosynthesis is the process by which",
    "A list of prime numbers: 2, 3, 5,",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "import numpy as np\n",
    "Shakespeare wrote",
    "The difference between a virus and a bacterium is",
    "My favourite season is autumn, because",
    "E = mc^2 means that",
    "Once the bread has risen,",
    "The Pacific Ocean is",
)


@pytest.fixture(scope="module")
def sides(model_path: Path) -> tuple[Any, Any, Any]:
    """Our model, the reference with our weights, and the tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, tokenizer = es.load(model_path, dtype=torch.float32)
    values = {k: v for k, v in model.config.to_dict().items() if k != "model_type"}
    reference = LlamaForCausalLM(LlamaConfig(**values)).eval()
    weights = model.state_dict()
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    reference.load_state_dict(weights)
    reference.generation_config.pad_token_id = 2
    reference.generation_config.eos_token_id = 2
    return model, reference, tokenizer


def margins(reference: Any, ids: Tensor, mask: Tensor, beams: int, new: int) -> tuple[Tensor, Any]:
    out = reference.generate(
        input_ids=ids,
        attention_mask=mask,
        num_beams=beams,
        do_sample=False,
        max_new_tokens=new,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return out.sequences, out


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare(sides: tuple[Any, Any, Any], prompts: list[str], beams: int, new: int) -> None:
    model, reference, tokenizer = sides
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ours = model.generate(
        input_ids=ids, attention_mask=mask, num_beams=beams, max_new_tokens=new, pad_token_id=2
    )
    theirs, out = margins(reference, ids, mask, beams, new)
    for row, prompt in enumerate(prompts):
        width = ids.shape[1]
        mine, other = ours[row, width:].tolist(), theirs[row, width:].tolist()
        place = first_difference(mine, other)
        if place is None:
            continue
        score = out.scores[place].reshape(len(prompts), -1)[row].topk(2).values
        margin = float(score[0] - score[1])
        print(f"{prompt!r}: first different at {place}, the reference's margin {margin:.2e}")
        assert margin < MARGIN


@pytest.mark.model
def test_greedy_in_one_padded_batch(sides: tuple[Any, Any, Any]) -> None:
    compare(sides, list(PROMPTS[:4]), beams=1, new=16)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
def test_all_prompts_in_one_padded_batch(sides: tuple[Any, Any, Any], beams: int) -> None:
    compare(sides, list(PROMPTS), beams, new=64)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_prompt_alone(sides: tuple[Any, Any, Any], prompt: str) -> None:
    compare(sides, [prompt], beams=1, new=64)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_prompt_with_beams(sides: tuple[Any, Any, Any], prompt: str) -> None:
    compare(sides, [prompt], beams=4, new=64)
