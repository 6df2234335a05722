"""uvicorn's server, with signals left to whoever runs it, and bounded heads of requests."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from everystep.server.exchange import FrontSettings, HttpError, error_body
from everystep.server.request_log import RequestLine

log = logging.getLogger("everystep.server")

_BACKLOG = 512
"""Connections that wait to be taken, at most."""
_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


def tcp_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; OSError where it cannot be had.

    It names its protocol, since asyncio has connections of such a socket alone send small pieces at
    once: others hold the body of an answer back until its head is acknowledged, forty milliseconds
    later.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listening(found, (host, port))


def unix_socket(path: Path) -> socket.socket:
    """Return a socket that listens at a path, in place of one that was left there; OSError where it
    cannot be had, or another listens there."""
    with suppress(FileNotFoundError):
        if path.is_socket():
            _require_left(path)
            path.unlink()
    return _listening(socket.socket(socket.AF_UNIX), str(path))


def _require_left(path: Path) -> None:
    """Raise OSError if somebody listens at the socket of a path."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
        probe.setblocking(False)
        with suppress(BlockingIOError):  # there are more who wait for it than it takes
            probe.connect(str(path))
        raise OSError(errno.EADDRINUSE, "a server listens there")


def _listening(found: socket.socket, address: tuple[str, int] | str) -> socket.socket:
    """Return a socket that listens at its address and is no child's; it is closed where it
    cannot."""
    try:
        found.bind(address)
        found.listen(_BACKLOG)
    except BaseException:
        found.close()
        raise
    found.set_inheritable(False)
    return found


class Listener(uvicorn.Server):
    """A server of uvicorn without its handlers of signals, which says once a second at most that
    it has no descriptor for another connection."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        self._silent_until = 0.0
        asyncio.get_running_loop().set_exception_handler(self._fault)
        await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are."""
        yield

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take notice of a fault of the loop. Where descriptors run out, asyncio tells thousands at
        once, and listens again for each of them a second later, be the socket closed or not."""
        text = context["message"]
        if "socket.accept() out of system resource" in text:
            if loop.time() >= self._silent_until:
                self._silent_until = loop.time() + 1.0
                log.warning("no descriptor is left: clients wait until others have gone")
        elif not (self.should_exit and "._start_serving(" in text):
            loop.default_exception_handler(context)


class Doorkeeper(asyncio.Protocol):
    """A connection of uvicorn's whose client has so long, and so many bytes, for the head of a
    request; uvicorn itself would wait and read without end."""

    def __init__(self, *, settings: FrontSettings, _loop: Any = None, **own: Any) -> None:
        self._settings = settings
        self._loop = _loop or asyncio.get_running_loop()
        self._inner: Any = AutoHTTPProtocol(_loop=_loop, **own)  # type: ignore[call-arg]
        self._waiting: asyncio.TimerHandle | None = None
        self._size = 0  # of a head, so far

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._inner.connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Hand bytes on, unless they are too many for a head."""
        before = self._inner.cycle
        between = before is None or before.response_complete
        self._inner.data_received(data)
        if not between or self._transport.is_closing():
            return
        if self._inner.cycle is not before:
            self._stop_waiting()
            return
        self._wait()
        if before is None or not before.more_body:  # else it is the rest of what was refused
            self._size += len(data)
            if self._size > self._settings.head_bytes:
                most = f"The head of a request is longer than {self._settings.head_bytes} bytes."
                self._refuse(HttpError(431, most, code="long_head"))

    def eof_received(self) -> bool | None:
        """Let the connection end."""
        return cast("bool | None", self._inner.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Let writers wait."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Let writers go on."""
        self._inner.resume_writing()

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self._loop.call_later(self._settings.head_seconds, self._late)

    def _stop_waiting(self) -> None:
        self._size = 0
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _late(self) -> None:
        if self._size:
            self._refuse(
                HttpError(408, "The head of a request comes too slowly.", code="slow_head")
            )
        else:
            self._transport.close()

    def _refuse(self, error: HttpError) -> None:
        body = msgspec.json.encode(error_body(error))
        head = f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        RequestLine(status=error.status).write()
        self._transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self._transport.close()


def listener(application: ASGIApp, settings: FrontSettings, **own: Any) -> Listener:
    """Return what listens for an application; `own`: settings of uvicorn's."""
    config = uvicorn.Config(
        application,
        http=cast(Any, partial(Doorkeeper, settings=settings)),
        ws="none",
        log_config=None,
        lifespan="off",
        server_header=False,
        **own,
    )
    return Listener(config)
