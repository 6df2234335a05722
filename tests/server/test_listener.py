"""Sockets that listen: their connections send small pieces at once, however early they came."""

from __future__ import annotations

import asyncio
import http.client
import socket

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from everystep.errors import RequestError
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Reading
from everystep.records import Record
from everystep.server.listener import tcp_socket
from everystep.server.serving import listening_socket
from everystep.server.settings import ServeSettings


def delays(transport: asyncio.BaseTransport) -> bool:
    own = transport.get_extra_info("socket")
    return not own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def seen(listening: socket.socket) -> bool:
    """Whether a connection delays that was there before the server was."""
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.set_result(delays(writer.transport))
        writer.close()

    with socket.create_connection(listening.getsockname()[:2]):
        server = await asyncio.start_server(taken, sock=listening)
        async with server:
            return await found


def test_a_connection_sends_small_pieces_at_once() -> None:
    assert asyncio.run(seen(tcp_socket("127.0.0.1", 0))) is False
    assert asyncio.run(seen(listening_socket(ServeSettings(port=0)))) is False
    assert asyncio.run(seen(socket.create_server(("127.0.0.1", 0)))) is True, (
        "else it needs no care"
    )


def test_the_page_of_the_inspector_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    before = HttpToolsProtocol.connection_made

    def noted(self: HttpToolsProtocol, transport: asyncio.Transport) -> None:  # type: ignore[override]
        made.append(delays(transport))
        before(self, transport)

    monkeypatch.setattr(HttpToolsProtocol, "connection_made", noted)
    with PageServer(Reading(("empty", Record({})))) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("GET", "/page.css")
        assert connection.getresponse().read() and made == [False]
        connection.close()


def test_an_address_that_is_taken_is_an_error() -> None:
    with (
        tcp_socket("127.0.0.1", 0) as one,
        pytest.raises(RequestError, match="cannot be had"),
    ):
        listening_socket(ServeSettings(port=one.getsockname()[1]))
