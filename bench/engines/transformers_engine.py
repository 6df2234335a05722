"""Answers of transformers with its dynamic cache, in float32 but for folders called bfloat16."""

from __future__ import annotations

import time

import torch
from protocol import Answer, check_counts, padded, serve
from transformers import AutoModelForCausalLM


def load(path: str, threads: int) -> tuple[Answer, dict[str, object]]:
    """A folder of safetensors."""
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if path.endswith("bfloat16") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        ids, mask = (torch.tensor(rows) for rows in padded(prompts, 0))
        ends: list[float] = []

        def clock(input_ids, scores, **_):  # type: ignore[no-untyped-def]
            ends.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        begin = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        check_counts(out[:, ids.shape[1] :].tolist(), prompts, tokens)
        return ends[0] - begin, ends[-1] - ends[0]

    return answer, {}


serve(load)
