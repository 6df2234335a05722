"""Answers of OpenVINO GenAI, which reads GGUF files itself, without its cache of prefixes."""

from __future__ import annotations

import time

import numpy as np
import openvino_genai as og
from openvino import Tensor
from protocol import BY_DIFFERENCE, Answer, by_difference, check_counts, padded, serve


def load(path: str, threads: int) -> tuple[Answer, dict[str, object]]:
    """A GGUF file."""
    scheduler = og.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    settings = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": threads}
    pipeline = og.LLMPipeline(path, "CPU", **settings)
    options = {"ignore_eos": True, "do_sample": False, "apply_chat_template": False}

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        ids, mask = (Tensor(np.array(rows, np.int64)) for rows in padded(prompts, 0))
        begin = time.perf_counter()
        out = pipeline.generate(og.TokenizedInputs(ids, mask), max_new_tokens=tokens, **options)
        taken = time.perf_counter() - begin
        check_counts(out.tokens, prompts, tokens)
        return taken

    return by_difference(seconds), BY_DIFFERENCE


serve(load)
