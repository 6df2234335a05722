"""The log of requests: one line for each when it is over, as text or as an object of JSON.

A line has nothing that a client wrote. It names the route as the server knows it and not the path,
and has no header, no text and no key.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("everystep.server.requests")

LINE = "everystep.line"
"""The name in a scope under which the line of its request stands; no client can set it."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")
_STANDARD_ERROR = 2
UNKNOWN = "(unknown)"
"""The name of a method or a route that the server does not have."""


@dataclass(slots=True)
class RequestLine:
    """The line of a request, as far as it is known.

    `status`: 499 where the client left first. `ended_with`: the status of the error that a stream
    ended with. `batch`: true for a line of a batch file. Tokens are None where none were counted.
    """

    method: str = UNKNOWN
    route: str = UNKNOWN
    status: int = 0
    seconds: float = 0.0
    request_id: str = ""
    ended_with: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    batch: bool = False

    def shown(self) -> dict[str, Any]:
        """Return it as an object of JSON, without what is not known."""
        found: dict[str, Any] = {"method": self.method, "route": self.route, "status": self.status}
        found["seconds"] = round(self.seconds, 6)
        if self.request_id:
            found["request_id"] = self.request_id
        for name in ("ended_with", "prompt_tokens", "cached_tokens", "completion_tokens"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return {**found, "batch": True} if self.batch else found

    def __str__(self) -> str:
        end = "" if self.ended_with is None else f" ended with {self.ended_with}"
        return f"{self.request_id or '-'} {self.route} {self.status} {self.seconds:.3f}s{end}"

    def write(self, level: int = logging.INFO) -> None:
        """Write it into the log."""
        log.log(level, "%s", self, extra={"request": self})


class RequestLog:
    """The outermost layer of an application, which writes the line of each request.

    `often`: routes that pages ask for again and again, whose lines are for who looks for them.
    """

    def __init__(self, app: ASGIApp, often: Collection[str] = ()) -> None:
        self._app, self._often = app, often

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        line = scope[LINE] = RequestLine(method if method in METHODS else UNKNOWN)
        began = time.monotonic()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            line.seconds = time.monotonic() - began
            line.write(logging.DEBUG if line.route in self._often else logging.INFO)


class LogObjects(logging.Formatter):
    """Records of the log as JSON, an object for each."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object of a record, in one line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        shown: dict[str, Any] = {"time": at, "level": record.levelname.lower()}
        line = getattr(record, "request", None)
        if isinstance(line, RequestLine):
            return json.dumps(shown | line.shown())
        shown |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            shown["traceback"] = self.formatException(record.exc_info)
        return json.dumps(shown)


class LogWriter(logging.Handler):
    """A handler whose lines a thread writes: a reader who takes none keeps nobody waiting.

    `stream`: or the descriptor of one. `most`: lines that may wait. `lost`: those that came when so
    many did; where lines are taken again, one says how many are missing.
    """

    def __init__(self, stream: TextIO | int, most: int = 10_000) -> None:
        super().__init__()
        self._stream, self.lost = stream, 0
        self._told = 0
        self._waiting: queue.Queue[str] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self._descriptor = stream if isinstance(stream, int) else _descriptor_of(stream)

    def emit(self, record: logging.LogRecord) -> None:
        """Put the line of a record in line, or count it as lost."""
        if self._thread is None:  # one caller at a time is in here
            self._thread = threading.Thread(target=self._run, name="everystep log", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self.lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Return when all lines are written, or after two seconds."""
        deadline = time.monotonic() + 2.0
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        """Write what waits, if somebody takes it."""
        self.flush()
        super().close()

    def _run(self) -> None:
        while True:
            line = self._waiting.get()
            try:
                self._write(self._missing() + line + "\n")
            except (OSError, ValueError):  # nobody will read it any more
                self.lost += 1
            finally:
                self._waiting.task_done()

    def _write(self, text: str) -> None:
        if self._descriptor is None:
            if not isinstance(self._stream, int):
                self._stream.write(text)
                self._stream.flush()
            return
        left = text.encode(errors="replace")
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _missing(self) -> str:
        """Return a line that says how many are missing, where that is news."""
        if (lost := self.lost) == self._told:
            return ""
        text = f"{lost - self._told} lines of the log are missing: nobody took them"
        self._told = lost
        made = logging.LogRecord(log.name, logging.WARNING, "", 0, text, None, None)
        return self.format(made) + "\n"


def _descriptor_of(stream: TextIO) -> int | None:
    """Return where a stream writes to, None where that is no file: writing there needs no lock of
    the stream, which the end of the program would wait for."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def lost_lines() -> int:
    """Return how many lines of the log of this process were lost."""
    return sum(one.lost for one in logging.getLogger().handlers if isinstance(one, LogWriter))


def write_log(stream: TextIO, *, as_json: bool) -> None:
    """Write the log to a stream from now on: as text, without what pages ask for again and again,
    or as an object of JSON for each request and whatever else there is to say."""
    handler = LogWriter(stream)
    if as_json:
        handler.setFormatter(LogObjects())
        logging.getLogger("everystep").setLevel(logging.INFO)
        log.setLevel(logging.DEBUG)
    level = logging.WARNING if as_json else logging.INFO  # of libraries
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])


def write_warnings() -> None:
    """Write what goes wrong in this process to its standard error from now on, as text."""
    handlers = [LogWriter(_STANDARD_ERROR)]
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=handlers)
