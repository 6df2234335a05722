"""The owner of a Ray cluster for tests, which prints its address and then answers lines of JSON.

It is a program of its own, so that Ray's threads and warnings are not those of the tests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import msgspec
import ray
from ray import serve

from everystep.server.messages import Ask
from everystep.server.ray.cluster import cluster
from everystep.server.ray.deployment import ServedReplicas
from everystep.server.ray.fan import session_of
from everystep.server.ray.parts import read_part


async def loads(application: str) -> dict[int, list[int]]:
    """Asks and tokens of each replica, by process; asked until each has answered."""
    handle = serve.get_app_handle(application)
    found: dict[int, list[int]] = {}
    status = serve.status().applications[application].deployments["EngineReplica"]
    count = sum(n for state, n in status.replica_states.items() if state == "RUNNING")
    tries = 0
    while len(found) < count and tries < 64:
        tries += 1
        pid, asks, tokens = await handle.options(session_id=str(tries)).load.remote()
        found[pid] = [asks, tokens]
    return found


async def cached(application: str, first: int, prompts: list[list[int]]) -> int:
    """Cached tokens of these prompts, asked one after another, with the session of so many ids."""
    own = ServedReplicas(serve.get_app_handle(application), application)
    found = 0
    for number, ids in enumerate(prompts):
        ask = Ask(number, "tiny", ids, {"max_new_tokens": 1, "seed": 0})
        async for part in own.follow(msgspec.msgpack.encode(ask), session_of(ask, first)):
            for one in read_part(part):
                found += sum(e.cached_tokens for e in getattr(one, "results", ()))
    return found


async def main() -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        verb, name, *given = json.loads(line)
        given = [name or next(iter(serve.status().applications)), *given]
        answer: Any = None
        if verb == "loads":
            answer = await loads(*given)
        elif verb == "cached":
            answer = await cached(*given)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with cluster(None, 4):
        sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
        sys.stdout.flush()
        asyncio.run(main())
