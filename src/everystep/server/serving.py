"""Serving until somebody says stop: the listener, the engine's process, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from everystep.errors import RequestError
from everystep.server.application import Front
from everystep.server.interpreter import take_short_turns
from everystep.server.link import EngineLink, ProcessMooring
from everystep.server.listener import listener, tcp_socket, unix_socket
from everystep.server.service import Service
from everystep.server.settings import ServeSettings, front_model

log = logging.getLogger("everystep.server")

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays: longer than proxies keep theirs."""
_LAST_WORDS = 2.0
"""Seconds for telling those who are still there that the server ends."""


def listening_socket(settings: ServeSettings) -> socket.socket:
    """Return the listening socket; RequestError where the address cannot be had."""
    address = settings.uds or f"{settings.host}:{settings.port}"
    try:
        if settings.uds is None:
            return tcp_socket(settings.host, settings.port)
        return unix_socket(Path(settings.uds))
    except OSError as error:
        do = "Give another --port, or end what uses it"
        raise RequestError("the address cannot be had", got=f"{address}: {error}", do=do) from error


def mooring_of(settings: ServeSettings) -> ProcessMooring:
    """Return what starts the engine: a process of its own, or one that has replicas on Ray."""
    if settings.replicas is None:
        return ProcessMooring(settings.orders(settings.sources()))
    from everystep.server.ray.orders import replica_orders

    orders = replica_orders(settings)
    patience = orders.drain_seconds + 60
    return ProcessMooring(orders, "everystep.server.ray.fan_process", patience)


async def serve(
    settings: ServeSettings, listening: socket.socket, tell: Callable[[str, str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then take nothing new, wait for what is under way, and end.

    `listening`: the socket of `listening_socket`, which is closed at the end. `tell`: called with
    the address and the first model's name once requests are taken.
    """
    take_short_turns()
    front_settings = replace(settings.front(), tracing=settings.tracing())
    sources, pictures = settings.sources(), settings.pictures()
    fronts = {
        name: await asyncio.to_thread(front_model, source, pictures, offline=settings.offline)
        for name, source in sources.items()
    }
    link = EngineLink(
        mooring_of(settings),
        settings.queue(),
        settings.book(),
        hang_seconds=settings.hang_seconds,
        idle=settings.idle(),
    )
    front = Front(link, fronts, front_settings)
    service = Service(front, settings.beside())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, _stop, stopping, front)
    try:
        starting = asyncio.ensure_future(service.start())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        await starting
        await _listen(settings, service, listening, stopping, tell)
    finally:
        listening.close()
        await service.close()


async def _listen(
    settings: ServeSettings,
    service: Service,
    listening: socket.socket,
    stopping: asyncio.Event,
    tell: Callable[[str, str], None],
) -> None:
    front = service.front
    bound = listener(
        front.application,
        front.settings,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=5,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    running = asyncio.create_task(bound.serve([listening]))
    while not bound.started and not running.done():
        await asyncio.sleep(0.01)
    tell(address(settings, listening), next(iter(front.link.models)))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
    await service.pause()
    with suppress(TimeoutError):
        async with asyncio.timeout(settings.drain_seconds):
            while front.open:
                await asyncio.sleep(0.02)
    front.link.give_up()  # those whom nobody waits for any longer are told so
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS):
            while front.open:
                await asyncio.sleep(0.02)
    bound.should_exit = True
    await running


def address(settings: ServeSettings, listening: socket.socket) -> str:
    """Return where the server is reached."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _stop(stopping: asyncio.Event, front: Front) -> None:
    """Begin the end; a second signal ends at once, by the signal's own default."""
    front.draining = True
    stopping.set()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(one)
