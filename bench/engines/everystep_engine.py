"""Answers of this library; a model called F32 runs in float32, others with their own blocks."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from protocol import Answer, check_counts, padded, serve

import everystep


def load(path: str, threads: int) -> tuple[Answer, dict[str, object]]:
    """The native executor where there is one, as a user gets it."""
    torch.set_num_threads(threads)
    dtype = torch.float32 if Path(path).stem == "F32" else None
    model = everystep.load_model(path, dtype=dtype)
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        ids, mask = (torch.tensor(rows) for rows in padded(prompts, 0))
        begin = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        whole, rest = time.perf_counter() - begin, out.timings["decode_seconds"]
        check_counts(out.new_tokens, prompts, tokens)
        return whole - rest, rest

    config = model.config.to_dict()
    return answer, {
        "runs_on": model.runs_on,
        "weight_bytes": sum(model.weight_bytes.values()),
        "position_bytes": position_bytes(config),
        "config": config,
    }


def position_bytes(config: dict[str, int]) -> int:
    """Bytes of keys and values of one position, in float32."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head


serve(load)
