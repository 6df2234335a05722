"""The engine without HTTP: answers requests for streams on sockets that it inherits.

Arguments: model, threads, numbers of sockets. A line of JSON on a socket, {"prompt": text,
"max_tokens": n}, is answered with an event for each token, written as a server of OpenAI's wire
writes one, and a last one that says [DONE]. A line on standard output tells when it is loaded.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

import torch

import everystep as es


async def answer(engine: es.AsyncEngine, number: int) -> None:
    """Answers the requests of a socket, one after another, until it is closed."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=number))
    while line := await reader.readline():
        asked = json.loads(line)
        options = {"max_new_tokens": asked["max_tokens"], "eos_token_id": None}
        async for event in engine.stream(asked["prompt"], do_sample=False, **options):
            writer.write(b"data: " + json.dumps({"text": event.text}).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()


async def serve(model: str, numbers: list[int]) -> None:
    """Answers on all sockets at once."""
    async with es.AsyncEngine(*es.load(model)) as engine:
        print("loaded", flush=True)
        await asyncio.gather(*(answer(engine, number) for number in numbers))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    asyncio.run(serve(sys.argv[1], [int(one) for one in sys.argv[3:]]))
