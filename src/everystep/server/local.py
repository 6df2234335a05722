"""A server inside of a program, for notebooks and tests: front and engine in threads of it.

Both exchange the messages of two processes, over a socket pair, so that nothing but the process
differs from `everystep serve`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from everystep.api.model import LanguageModel
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.exchange import FrontSettings
from everystep.server.host import EngineLimits, HostedModel
from everystep.server.link import EngineLink, QueueLimits, ThreadMooring
from everystep.server.listener import listener
from everystep.server.quotas import QuotaBook
from everystep.server.service import ServedBeside, Service
from everystep.text import Tokenizer


@contextmanager
def serving(
    models: Mapping[str, tuple[LanguageModel, Tokenizer]],
    *,
    settings: FrontSettings | None = None,
    limits: EngineLimits | None = None,
    queue: QueueLimits | None = None,
    quotas: QuotaBook | None = None,
    beside: ServedBeside | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Serve these models by name on this machine while the body runs; the value is the address.

    `beside`: what is served beside generating. `port`: 0 for any that is free.
    """
    own = limits or EngineLimits()

    def hosted() -> dict[str, HostedModel]:
        return {name: HostedModel(*one, own) for name, one in models.items()}

    fronts = {name: FrontModel(two, one.chat_defaults) for name, (one, two) in models.items()}
    link = EngineLink(ThreadMooring(hosted, own), queue, quotas)
    with listening(Front(link, fronts, settings), port, beside) as bound:
        yield f"http://127.0.0.1:{bound}"


@contextmanager
def listening(front: Front, port: int = 0, beside: ServedBeside | None = None) -> Iterator[int]:
    """Start the engine of a front and listen for it on loopback while the body runs; the value is
    the port. Nothing is left afterwards. `beside`: what is served beside generating."""
    service = Service(front, beside)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="everystep front", daemon=True)
    thread.start()
    own = {"host": "127.0.0.1", "port": port}
    bound = listener(front.application, front.settings, **own)

    async def start() -> asyncio.Task[None]:
        await service.start()
        task = asyncio.create_task(bound.serve())
        while not (bound.started or task.done()):
            await asyncio.sleep(0.005)
        return task

    async def stop(task: asyncio.Task[None]) -> None:
        bound.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        await service.close()

    try:
        task = asyncio.run_coroutine_threadsafe(start(), loop).result()
        try:
            yield bound.servers[0].sockets[0].getsockname()[1]
        finally:
            asyncio.run_coroutine_threadsafe(stop(task), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
