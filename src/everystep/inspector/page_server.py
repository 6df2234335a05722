"""The page as a program on this machine serves it: for one browser, to nobody else.

Every request passes the same gates in the same order, before any route: the host that it names,
what the browser says of where it comes from, then the token, then the kind and the size of a body.
A page of another site whose name was rebound to this machine names its own host.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everystep.errors import EverystepError, RequestError
from everystep.inspector.page import asset
from everystep.inspector.sessions import InspectorSession, Known
from everystep.server.listener import Listener, tcp_socket
from everystep.server.page_headers import page_headers

MOST_BODY = 1 << 20
"""Bytes of a body at most."""
_OPEN = {
    "/": ("text/html", None),
    "/page.js": ("text/javascript", "page.js"),
    "/served.js": ("text/javascript", "served.js"),
    "/page.css": ("text/css", "page.css"),
}
"""What needs no token, as it says nothing: the type and the asset, by path."""
_HEADERS = page_headers("'self' data:", "no-store")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>everystep inspect</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
</head>
<body class="everystep">
<main id="page"><p id="state" role="status">Opening the record.</p></main>
<noscript><p>This page needs its script to show the record.</p></noscript>
<script src="page.js"></script>
<script src="served.js"></script>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Gate:
    """The checks that every request passes. `hosts`: what it may be called by, with the port."""

    inner: ASGIApp
    hosts: frozenset[str]
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or say why not."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._refused(scope)
        answer = self.inner if refused is None else _said(*refused)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        await answer(scope, receive, guarded)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason where a request is not handed on."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        host = headers.get("host", [])
        if len(host) != 1 or host[0].lower() not in self.hosts:
            return 403, "This page is not called by that host."
        origins = headers.get("origin", [])
        if headers.get("sec-fetch-site", ["none"]) not in (["same-origin"], ["none"]) or (
            origins and origins != [f"http://{host[0]}"]
        ):
            return 403, "Another site asks for this."
        if scope["path"] in _OPEN and scope["method"] in ("GET", "HEAD"):
            return None
        said = headers.get("authorization", [])
        wanted = f"Bearer {self.token}".encode()
        if len(said) != 1 or not hmac.compare_digest(said[0].encode("latin-1"), wanted):
            return 401, "The token is wrong; open the address that the program printed."
        if scope["method"] == "POST":
            if headers.get("content-type") != ["application/json"]:
                return 415, "A body has to be application/json."
            length = headers.get("content-length", [""])[0]
            if not re.fullmatch(r"\d{1,7}", length) or int(length) > MOST_BODY:
                return 413, f"A body says its length, at most {MOST_BODY} bytes."
        return None


def _said(status: int, text: str) -> Response:
    return _answer({"error": text}, status)


def _answer(value: object, status: int = 200) -> Response:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(body, status, media_type="application/json")


class PageServer:
    """A server of one session on loopback while its context is open; `url`: with the token."""

    def __init__(
        self, session: InspectorSession, port: int = 0, allow_hosts: Iterable[str] = ()
    ) -> None:
        self.session = session
        self._written: tuple[object, Response] | None = None
        self.token = secrets.token_urlsafe(32)
        try:
            self._socket = tcp_socket("127.0.0.1", port)
        except OSError as error:
            do = "Give another --port"
            raise RequestError(f"port {port} cannot be listened on", got=error, do=do) from error
        self.port = self._socket.getsockname()[1]
        names = {f"{host}:{self.port}" for host in ("127.0.0.1", "localhost", "[::1]")}
        hosts = frozenset({*names, *(one.lower() for one in allow_hosts)})
        self.application: ASGIApp = Gate(Starlette(routes=self._routes()), hosts, self.token)
        config = uvicorn.Config(
            self.application, log_config=None, lifespan="off", server_header=False, ws="none"
        )
        self._listener = Listener(config)
        self._thread = threading.Thread(target=self._serve, name="everystep page", daemon=True)

    @property
    def url(self) -> str:
        """The address to open; the token stands behind the #, which browsers send nowhere."""
        return f"http://127.0.0.1:{self.port}/#token={self.token}"

    def __enter__(self) -> PageServer:
        self._first()  # whoever opens the address does not wait for it
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.session.halt()
        self._listener.should_exit = True
        self._thread.join()
        self._socket.close()

    def wait(self) -> None:
        """Wait until the server ends."""
        self._thread.join()

    def _serve(self) -> None:
        asyncio.run(self._listener.serve(sockets=[self._socket]))

    # --- routes -----------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        return [
            *(Route(path, self._asset, methods=["GET"]) for path in _OPEN),
            Route("/document", self._document, methods=["GET"]),
            Route("/steps", self._steps, methods=["GET"]),
            Route("/obey", self._obey, methods=["POST"]),
            Route("/halt", self._halt, methods=["POST"]),
        ]

    async def _asset(self, request: Request) -> Response:
        kind, name = _OPEN[request.url.path]
        text = _PAGE if name is None else asset(name)
        return Response(text, media_type=f"{kind}; charset=utf-8")

    async def _document(self, request: Request) -> Response:
        return await asyncio.to_thread(self._first)

    def _first(self) -> Response:
        """Return the document, written out once as long as it is the same."""
        found = self.session.document()
        if self._written is None or self._written[0] is not found:
            self._written = found, _answer(found)
        return self._written[1]

    async def _steps(self, request: Request) -> Response:
        said = [request.query_params.get(name, "") for name in ("run", "from", "count")]
        if not all(re.fullmatch(r"\d{1,9}", one) for one in said):
            return _said(400, "run, from and count are whole numbers.")
        try:
            return _answer(await asyncio.to_thread(self.session.steps, *map(int, said)))
        except EverystepError as error:
            return _said(400, str(error))

    async def _obey(self, request: Request) -> Response:
        given = await _read(request)
        line, run = given.get("line"), given.get("run")
        if not isinstance(line, str) or not (run is None or isinstance(run, str)):
            return _said(400, "A line is a text.")
        known = Known.read(given.get("known"))
        try:
            return _answer(await asyncio.to_thread(self.session.answered, line, run, known))
        except EverystepError as error:
            return _said(400, str(error))

    async def _halt(self, request: Request) -> Response:
        self.session.halt()
        return _answer({"said": ["It halts after this step."]})


async def _read(request: Request) -> Mapping[str, object]:
    """Return the object of a body; empty where it holds none."""
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
