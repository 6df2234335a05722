"""What stop strings cost beside the reference: to set up, and per step, at two vocabularies.

Run: python bench/stops.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models

from everystep.stops.base import Candidates
from everystep.stops.strings import StopStrings
from everystep.text import Spelling, Tokenizer
from everystep.text.pieces import byte_alphabet

STRINGS = ["<|im_end|>", "\n\n", "Observation:", "日本"]
LENGTH, ROWS, STEPS = 4_000, 32, 60


def vocabulary(size: int) -> Tokenizer:
    """A byte-level tokenizer of the given size: bytes, then words of two to four letters."""
    letters = [*byte_alphabet().values()]
    words = ("".join(word) for n in (2, 3, 4) for word in product(letters[66:90], repeat=n))
    tokens = letters + [word for word, _ in zip(words, range(size - len(letters)), strict=False)]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def rectangles(size: int) -> list[torch.Tensor]:
    """What a batch of long rows looks like, step by step; ids are log-uniform, as in text."""
    drawn = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(0))
    ids = (size**drawn).long() - 1
    return [ids[:, : LENGTH - step] for step in range(STEPS)]


def ours(tokenizer: Tokenizer) -> tuple[float, float, float]:
    """As `theirs`, per step of the engine, which has its candidates already."""
    start = time.perf_counter()
    stop = StopStrings(tuple(STRINGS), Spelling.of(tokenizer))
    made = time.perf_counter() - start
    steps = [Candidates.of_rows(ids.numpy()) for ids in rectangles(len(tokenizer))]
    calls = [partial(stop, step) for step in steps]
    return made, mean_seconds(calls), mean_seconds(calls)


def theirs(tokenizer: Tokenizer) -> tuple[float, float, float]:
    """Seconds to set up, per step when ids are new, and per step when they were seen before."""
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    start = time.perf_counter()
    criterion = transformers.StopStringCriteria(fast, STRINGS)
    made = time.perf_counter() - start
    steps = rectangles(len(tokenizer))
    calls = [partial(criterion, ids, None) for ids in steps]
    return made, mean_seconds(calls), mean_seconds(calls)


def mean_seconds(calls: list[Callable[[], Any]]) -> float:
    """How long one of the calls takes; the first is not counted."""
    calls[0]()
    start = time.perf_counter()
    for call in calls[1:]:
        call()
    return (time.perf_counter() - start) / (len(calls) - 1)


def main() -> None:
    """One line per vocabulary and library."""
    print(f"{len(STRINGS)} strings, {ROWS} rows of {LENGTH} ids, milliseconds")
    print(f"{'vocabulary':>10}  {'library':10}  {'set up':>9}  {'new ids':>9}  {'known ids':>9}")
    for size in (49_152, 150_000):
        for name, measure in (("everystep", ours), ("reference", theirs)):
            figures = [f"{one * 1e3:>9.3f}" for one in measure(vocabulary(size))]
            print(f"{size:>10,}  {name:10}  {'  '.join(figures)}")


if __name__ == "__main__":
    main()
