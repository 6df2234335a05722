"""How fast llama.cpp answers, asked by `peers.py` from an environment that has llama-cpp-python.

Arguments: model, threads. For each JSON object {"prompts": [[ids]], "tokens": n} on standard
input, standard output gets {"first": seconds, "rest": seconds}: greedy, all prompts, which have one
length, at once.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp as ll
import numpy as np


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    ll.llama_log_set(_silent, None)
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    for line in sys.stdin:
        print(json.dumps(answer(model, threads, **json.loads(line))), flush=True)


@ll.llama_log_callback
def _silent(level, text, data):  # type: ignore[no-untyped-def]
    pass


def answer(model, threads: int, prompts: list[list[int]], tokens: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    rows, length = len(prompts), len(prompts[0])
    options = ll.llama_context_default_params()
    options.n_ctx = rows * (length + tokens + 8)
    options.n_batch = options.n_ubatch = 512
    options.n_seq_max = rows
    options.kv_unified = True
    options.n_threads = options.n_threads_batch = threads
    context = ll.llama_init_from_model(model, options)
    width = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    begin = time.perf_counter()
    chosen = np.zeros(rows, int)
    fed = [(row, p, ids[p]) for row, ids in enumerate(prompts) for p in range(length)]
    for start in range(0, len(fed), 512):
        for row, token in decode(context, fed[start : start + 512], length - 1, width):
            chosen[row] = token
    first = time.perf_counter() - begin
    for step in range(tokens - 1):
        feed = [(row, length + step, int(chosen[row])) for row in range(rows)]
        for row, token in decode(context, feed, length + step, width):
            chosen[row] = token
    rest = time.perf_counter() - begin - first
    ll.llama_free(context)
    return {"first": first, "rest": rest}


def decode(context, feed, last: int, width: int):  # type: ignore[no-untyped-def]
    """Runs (row, position, token) triples; the best next token of each row at position `last`."""
    batch = ll.llama_batch_init(len(feed), 0, 1)
    batch.n_tokens = len(feed)
    for i, (row, position, token) in enumerate(feed):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        batch.logits[i] = position == last
    if ll.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    found = []
    for i, (row, position, _) in enumerate(feed):
        if position == last:
            logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (width,))
            found.append((row, int(logits.argmax())))
    ll.llama_batch_free(batch)
    return found


main()
