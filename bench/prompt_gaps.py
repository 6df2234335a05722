"""How long does a neighbour wait for its next token while another client brings a prompt?

scripts/bench prompt_gaps [--tokens 400] [--out NAME]

One stream of `es.AsyncEngine` on the default model is read all the time. Meanwhile another client
brings what takes long to read: refused texts and ids, a schema, messages
whose template takes its whole allowance. For each the median gap between two tokens,
the largest one, and their ratio, which is wanted to be below 5.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import torch
from parts.models import Models
from parts.report import options, write

import everystep as es

SCHEMA = {
    "type": "object",
    "properties": {
        f"name {i}": {"type": "string", "enum": [f"{i} {j}" for j in range(8)]} for i in range(1500)
    },
}
ENDLESS = "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}"
CHAT = [{"role": "user", "content": "Hello."}]
BROUGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": (None, {}),
    "a text of 4 MB, refused": ("hello world " * 333_332, {}),
    "a text of 400 kB, refused": ("hello world " * 33_333, {}),
    "100,000 ids, refused": ([504] * 100_000, {}),
    "a schema of 200 kB": ("Data:", {"schema": SCHEMA}),
    "a template without an end": (CHAT, {"template": ENDLESS}),
}


async def gaps(model: Any, tokenizer: Any, what: str, tokens: int) -> tuple[list[float], float]:
    """Seconds between the tokens of a stream while this is brought, and how long that took."""
    prompt, given = BROUGHT[what]
    asked = {**given}
    template = asked.pop("template", None)
    async with es.AsyncEngine(model, tokenizer) as engine:
        found: list[float] = []
        stream = engine.stream("Once", max_new_tokens=1900, eos_token_id=None)
        await anext(stream)
        before, usual = time.perf_counter(), tokenizer.chat_template
        tokenizer.chat_template = template or usual
        brought = asyncio.ensure_future(_bring(engine, prompt, asked))
        begin = time.perf_counter()
        async for _ in stream:
            now = time.perf_counter()
            found.append(now - before)
            before = now
            if brought.done() and len(found) >= tokens:
                break
        await brought
        tokenizer.chat_template = usual
        return found, brought.result() - begin


async def _bring(engine: es.AsyncEngine, prompt: Any, given: dict[str, Any]) -> float:
    """When it was refused or its first tokens were there."""
    if prompt is not None:
        await asyncio.gather(
            engine.generate(prompt, max_new_tokens=1, **given), return_exceptions=True
        )
    return time.perf_counter()


def main() -> None:
    """A line per prompt, and a dated file."""
    parser = options(__doc__ or "", threads=1)
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = es.load(Models.default().gguf("Q4_1"))
    rows = []
    for what in BROUGHT:
        found, seconds = asyncio.run(gaps(model, tokenizer, what, args.tokens))
        median, most = statistics.median(found), max(found)
        print(
            f"{what:28} read in {seconds:6.2f} s; gaps: median {1e3 * median:6.2f} ms, "
            f"largest {1e3 * most:7.1f} ms, {most / median:5.1f} times"
        )
        rows.append({"brought": what, "seconds": seconds, "median": median, "largest": most})
    write("prompt-gaps", args, {"rows": rows})


if __name__ == "__main__":
    main()
