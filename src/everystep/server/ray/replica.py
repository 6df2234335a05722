"""An engine as a replica of Ray Serve: asks come in by its handle, and news go out in parts."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from everystep.server.engine_process import EngineOrders, hosted
from everystep.server.interpreter import take_short_turns
from everystep.server.link import EngineGone, EngineLink, ThreadMooring
from everystep.server.messages import (
    OF_FRONT,
    Bring,
    Leave,
    Over,
    PutAway,
    Quit,
    Ready,
    ReplicaState,
    Taken,
)
from everystep.server.offline import UNBOUNDED
from everystep.server.ray.parts import gathered, packed_part


class EngineReplica:
    """An engine in a thread of the replica's process.

    `merge_seconds`: for which tokens of a stream are gathered. `hang_seconds`: of a step, after
    which the replica says that it is not well.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, orders: EngineOrders, merge_seconds: float, hang_seconds: float
    ) -> None:
        take_short_turns()
        if orders.threads is not None:
            import torch

            torch.set_num_threads(orders.threads)
        loaded = [await asyncio.to_thread(hosted, orders)]
        mooring = ThreadMooring(lambda: loaded.pop() if loaded else hosted(orders), orders.limits())
        self._link = EngineLink(mooring, UNBOUNDED, hang_seconds=hang_seconds)
        self._merge_seconds = merge_seconds
        self._prompt_tokens = self._cached_tokens = 0
        await self._link.start()
        self._began = time.monotonic()

    def check_health(self) -> None:
        """Raise EngineGone once the engine has hung or died: a new replica is better then."""
        if self._link.restarts or not self._link.ready:
            raise EngineGone("the engine of the replica has died")

    async def facts(self) -> bytes:
        """Return the `Ready` of the engine."""
        link = self._link
        models = list(link.models.values())
        return msgspec.msgpack.encode(Ready(models, link.rows, os.getpid(), link.positions))

    async def state(self) -> bytes:
        """Return the `ReplicaState` of this replica."""
        link = self._link
        state = ReplicaState(
            node=socket.gethostname(),
            process=os.getpid(),
            age_seconds=time.monotonic() - self._began,
            models={name: one.executor for name, one in link.models.items()},
            running=link.running,
            waiting=link.waiting,
            rows=link.rows,
            generated_tokens=link.tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            engine_restarts=link.restarts,
        )
        return msgspec.msgpack.encode(state)

    async def follow(self, asked: bytes) -> AsyncGenerator[bytes, None]:
        """Yield what becomes of an ask, in parts. Leaving the iterator ends it."""
        ask = OF_FRONT.decode(asked)
        if isinstance(ask, Leave | Taken | PutAway | Bring | Quit):
            return
        # Several fronts may have given the same number.
        own = msgspec.structs.replace(ask, id=self._link.next_number())
        async with (
            aclosing(self._link.follow(own)) as news,
            aclosing(gathered(news, self._merge_seconds)) as parts,
        ):
            async for part in parts:
                for one in part:
                    if isinstance(one, Over) and one.results:  # which have one prompt
                        self._prompt_tokens += one.results[0].prompt_tokens
                        self._cached_tokens += one.results[0].cached_tokens
                yield packed_part(part)
