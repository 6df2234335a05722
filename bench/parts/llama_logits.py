"""Logits of llama.cpp, asked by `quality.py` from an environment that has llama-cpp-python.

Arguments: model, threads, length of a window, a file. For each JSON list of ids on standard input
the file gets (tokens, vocabulary) float32 logits, and standard output a line with their shape.
"""

from __future__ import annotations

import json
import sys

from llama_cpp import Llama


def main() -> None:
    model, threads, window, target = sys.argv[1:]
    llama = Llama(
        model,
        n_ctx=int(window),
        n_batch=int(window),
        n_threads=int(threads),
        n_threads_batch=int(threads),
        logits_all=True,
        verbose=False,
    )
    for line in sys.stdin:
        ids = json.loads(line)
        llama.reset()
        llama.eval(ids)
        logits = llama.scores[: len(ids)].astype("float32")
        with open(target, "wb") as file:
            logits.tofile(file)
        print(json.dumps(logits.shape), flush=True)


main()
