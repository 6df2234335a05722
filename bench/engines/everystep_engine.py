"""Answers of this library; a model called F32 runs in float32, others with their own blocks."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from protocol import Answer, check_counts, padded, serve

import everystep


class FirstToken(everystep.BaseStreamer):
    """Notes the time at which the first token of a call is reported."""

    seconds = 0.0

    def on_event(self, event: object) -> None:
        self.seconds = self.seconds or time.perf_counter()

    def put(self, value: object) -> None:
        """The prompt is nothing new."""

    def end(self) -> None:
        """The end is seen by whoever called."""


def load(path: str, threads: int) -> tuple[Answer, dict[str, object]]:
    """The native executor where there is one, as a user gets it."""
    torch.set_num_threads(threads)
    dtype = torch.float32 if Path(path).stem == "F32" else None
    model = everystep.load_model(path, dtype=dtype)
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        ids, mask = (torch.tensor(rows) for rows in padded(prompts, 0))
        clock = FirstToken()
        begin = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        end = time.perf_counter()
        check_counts(out[:, ids.shape[1] :].tolist(), prompts, tokens)
        return clock.seconds - begin, end - clock.seconds

    config = model.config.to_dict()
    return answer, {
        "runs_on": model.runs_on,
        "weight_bytes": sum(model.weight_bytes.values()),
        "position_bytes": position_bytes(config),
        "config": config,
    }


def position_bytes(config: dict[str, int]) -> int:
    """Bytes of keys and values of one position, in float32; none where there are no heads."""
    if "num_attention_heads" not in config:
        return 0
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head


serve(load)
