"""Answers of ONNX Runtime GenAI."""

from __future__ import annotations

import json
import time

import numpy as np
import onnxruntime_genai as og
from protocol import Answer, check_counts, padded, serve

PAD = 0


def load(path: str, threads: int) -> tuple[Answer, dict[str, object]]:
    """A folder that its model builder wrote."""
    options = {"session_options": {"intra_op_num_threads": threads}}
    config = og.Config(path)
    config.overlay(json.dumps({"model": {"pad_token_id": PAD, "decoder": options}}))
    model = og.Model(config)

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        ids = np.array(padded(prompts, PAD)[0], np.int32)
        length = ids.shape[1] + tokens
        asked = og.GeneratorParams(model)
        asked.set_search_options(
            batch_size=len(ids), max_length=length, min_length=length, do_sample=False
        )
        begin = time.perf_counter()
        generator = og.Generator(model, asked)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = time.perf_counter() - begin
        while not generator.is_done():
            generator.generate_next_token()
        rest = time.perf_counter() - begin - first
        new = [generator.get_sequence(row)[ids.shape[1] :] for row in range(len(ids))]
        check_counts(new, prompts, tokens)
        return first, rest

    return answer, {}


serve(load)
