"""How fast are several threads with a prompt each, beside one call with all of the prompts?

scripts/bench threads [--prompts 8] [--tokens 64] [--turns 7] [--out NAME]

The ways take turns on the same prompts: one call of `es.generate` with all of them, a thread for
each, a task of `es.AsyncEngine` for each, and one call after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from parts.clock import medians
from parts.models import Models
from parts.report import options, write

import everystep as es

TOPICS = ("sun", "sea", "wind", "rain", "moon", "snow", "sand", "tide", "fog", "ice", "hail", "dew")


def ways_of(file: Path, prompts: list[str], tokens: int) -> dict[str, Callable[[], object]]:
    """What to time, by name."""
    model, tokenizer = es.load(file)
    asked: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "do_sample": False}

    def one(prompt: str) -> str:
        return es.generate(model, tokenizer, prompt, **asked)

    async def tasks() -> None:
        async with es.AsyncEngine(model, tokenizer) as engine:
            await asyncio.gather(*(engine.generate(prompt, **asked) for prompt in prompts))

    return {
        "one call": lambda: es.generate(model, tokenizer, prompts, **asked),
        "threads": lambda: in_threads(one, prompts),
        "tasks": lambda: asyncio.run(tasks()),
        "in turn": lambda: [one(prompt) for prompt in prompts],
    }


def in_threads(call: Callable[[str], object], prompts: list[str]) -> list[object]:
    """What each call returns, in a thread of its own."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(call, prompts))


def main() -> None:
    """A line per format and way, and a dated file."""
    parser = options(__doc__ or "", threads=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = [f"A short story about the {topic}:" for topic in TOPICS[: args.prompts]]
    models, rows = Models.default(), []
    for kind, file in (("Q4_1", models.gguf("Q4_1")), ("float32", models.float32())):
        ways = ways_of(file, prompts, args.tokens)
        found = medians(*([call] * (args.turns + 1) for call in ways.values()))
        for way, seconds in zip(ways, found, strict=True):
            print(f"{kind:8} {way:24} {seconds:7.3f} s  {seconds / found[0]:5.2f} x one call")
            rows.append({"format": kind, "way": way, "seconds": seconds})
    write("threads", args, {"rows": rows})


if __name__ == "__main__":
    main()
