"""The owner of a Ray cluster for tests, which prints its address and then answers lines of JSON.

It is a program of its own, so that Ray's threads and warnings are not those of the tests.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import ray
from ray import serve

from everystep.server.link import Mooring
from everystep.server.messages import Ask, Over, ReplicaState, Tokens
from everystep.server.ray.cluster import cluster
from everystep.server.ray.deployment import ServedReplicas, deployment_options
from everystep.server.ray.fan import ReplicaFan, session_of
from everystep.server.ray.orders import replica_orders
from everystep.server.ray.parts import read_part
from everystep.server.settings import ServeSettings
from tests.server.serving import served
from tests.server.watched import DRAIN_SECONDS, Departure, WatchedReplica

WATCHED = "watched"


async def loads(application: str) -> dict[int, list[int]]:
    """Asks and tokens of each replica, by process; asked until each has answered."""
    handle = serve.get_app_handle(application)
    found: dict[int, list[int]] = {}
    status = serve.status().applications[application].deployments["EngineReplica"]
    count = sum(n for state, n in status.replica_states.items() if state == "RUNNING")
    tries = 0
    while len(found) < count and tries < 64:
        tries += 1
        told = await handle.options(session_id=str(tries)).state.remote()
        one = msgspec.msgpack.decode(told, type=ReplicaState)
        found[one.process] = [one.running + one.waiting, one.generated_tokens]
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


class ServedFan(Mooring):
    """A fan over replicas of this cluster, in a thread."""

    def __init__(self, replicas: ServedReplicas) -> None:
        self._replicas = replicas

    def start(self) -> socket.socket:
        ours, theirs = socket.socketpair()

        def work() -> None:
            asyncio.run(ReplicaFan(self._replicas, 32).serve(theirs))

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return ours

    def end(self) -> None:
        self._thread.join()

    def kill(self) -> None:
        raise AssertionError("a fan does not hang")


@contextmanager
def watching(folder: str) -> Iterator[str]:
    """The address of a front over a replica that tells of those who leave."""
    more = {"drain_seconds": DRAIN_SECONDS, "deadline": 300.0}
    settings = ServeSettings(model=folder, replicas=1, threads=1, max_rows=16, **more)
    orders = replica_orders(settings)
    own = serve.deployment(name="EngineReplica", **deployment_options(orders))(WatchedReplica)
    bound = own.bind(orders.engine, orders.merge_seconds, orders.hang_seconds)
    handle = serve.run(bound, name=WATCHED, route_prefix=None)
    try:
        with served(ServedFan(ServedReplicas(handle, WATCHED))) as one:
            yield one.url
    finally:
        serve.delete(WATCHED)


async def told() -> list[Departure]:
    """What became of those who left the watched replica."""
    found: list[Departure] = await serve.get_app_handle(WATCHED).departures.remote()
    return found


async def drained(length: int) -> list[Any]:
    """What becomes of two answers of so many tokens whose replica is told to end in their middle:
    tokens of each until then and at the end, whether it is over; the seconds that took, errors,
    and whether the replica is there after all."""
    replicas = ServedReplicas(serve.get_app_handle(WATCHED), WATCHED)
    begun, found = asyncio.Event(), [[0, 0, False] for _ in range(2)]

    async def follow(number: int) -> None:
        keywords = {"max_new_tokens": length, "min_new_tokens": length, "seed": number}
        ask = Ask(number, "tiny", [5, 6, 7 + number], keywords, streams=True)
        async for part in replicas.follow(msgspec.msgpack.encode(ask), None):
            for one in read_part(part):
                found[number][1] += len(one.rows) if isinstance(one, Tokens) else 0
                found[number][2] = isinstance(one, Over)
            if all(tokens for _, tokens, _ in found):
                begun.set()

    following = [asyncio.create_task(follow(number)) for number in range(2)]
    await asyncio.wait_for(begun.wait(), 120)
    for one in found:
        one[0] = one[1]
    began = time.monotonic()
    serve.delete(WATCHED, _blocking=False)
    ends = await asyncio.gather(*following, return_exceptions=True)
    seconds = time.monotonic() - began
    until = time.monotonic() + 60
    while (there := WATCHED in serve.status().applications) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return [*found, seconds, [repr(one) for one in ends], there]


async def main() -> None:
    loop = asyncio.get_running_loop()
    stack = ExitStack()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        verb, name, *given = json.loads(line)
        answer: Any = None
        if verb == "watch":
            answer = await asyncio.to_thread(stack.enter_context, watching(*given))
        elif verb == "unwatch":
            await asyncio.to_thread(stack.close)
        elif verb == "departures":
            answer = await told()
        elif verb == "drained":
            answer = await drained(*given)
        else:
            known = name or next(iter(serve.status().applications))
            answer = await (loads(known) if verb == "loads" else cached(known, *given))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with cluster(None, 4):
        sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
        sys.stdout.flush()
        asyncio.run(main())
