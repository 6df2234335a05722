"""Answers of llama.cpp through the C interface of llama-cpp-python: all prompts at once."""

from __future__ import annotations

import time

import llama_cpp as ll
import numpy as np
from protocol import Answer, check_counts, serve

PIECE = 512  # how many tokens are fed at once


def load(path: str, threads: int) -> tuple[Answer, dict[str, object]]:
    """A GGUF file."""
    ll.llama_log_set(_silent, None)
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        context = _context(model, threads, len(prompts), sum(map(len, prompts)), tokens)
        begin = time.perf_counter()
        rows = [[token] for token in _read(context, prompts)]
        first = time.perf_counter() - begin
        for step in range(tokens - 1):
            feed = [(r, len(ids) + step, rows[r][-1]) for r, ids in enumerate(prompts)]
            for row, token in _decode(context, feed, [True] * len(feed)):
                rows[row].append(token)
        rest = time.perf_counter() - begin - first
        ll.llama_free(context)
        check_counts(rows, prompts, tokens)
        return first, rest

    return answer, {}


@ll.llama_log_callback
def _silent(level, text, data):  # type: ignore[no-untyped-def]
    pass


def _context(model, threads: int, rows: int, length: int, tokens: int):  # type: ignore[no-untyped-def]
    options = ll.llama_context_default_params()
    options.n_ctx = length + rows * (tokens + 8)
    options.n_batch = options.n_ubatch = PIECE
    options.n_seq_max = rows
    options.kv_unified = True
    options.n_threads = options.n_threads_batch = threads
    return ll.llama_init_from_model(model, options)


def _read(context, prompts: list[list[int]]) -> list[int]:  # type: ignore[no-untyped-def]
    """Feeds the prompts; the best next token of each."""
    feed = [(row, p, token) for row, ids in enumerate(prompts) for p, token in enumerate(ids)]
    last = [p == len(prompts[row]) - 1 for row, p, _ in feed]
    found: dict[int, int] = {}
    for start in range(0, len(feed), PIECE):
        piece = slice(start, start + PIECE)
        found |= dict(_decode(context, feed[piece], last[piece]))
    return [found[row] for row in range(len(prompts))]


def _decode(context, feed: list[tuple[int, int, int]], wanted: list[bool]):  # type: ignore[no-untyped-def]
    """Runs (row, position, token) triples; (row, best next token) of those that are wanted."""
    batch = ll.llama_batch_init(len(feed), 0, 1)
    batch.n_tokens = len(feed)
    for i, (row, position, token) in enumerate(feed):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        batch.logits[i] = wanted[i]
    if ll.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    width = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(ll.llama_get_model(context)))
    found = []
    for i, (row, _, _) in enumerate(feed):
        if wanted[i]:
            logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (width,))
            found.append((row, int(logits.argmax())))
    ll.llama_batch_free(batch)
    return found


serve(load)
