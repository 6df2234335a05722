"""The lines of a batch file, answered side by side, and their rows, written in order.

A row is written with one call, so a process that is killed leaves whole rows and at most the
beginning of one, which is cut off where the work goes on.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.types import ASGIApp

from everystep.errors import RequestError
from everystep.server.asking import Caller
from everystep.server.batch_lines import (
    BatchLine,
    BatchProgress,
    is_answer,
    progress,
    read_line,
    row_of,
    row_without_answer,
)
from everystep.server.exchange import HttpError, error_body
from everystep.server.fields import Json
from everystep.server.inside import InnerReply, ask_inside
from everystep.server.link import EngineLink
from everystep.server.raw_lines import raw_lines

log = logging.getLogger("everystep.server")

_WAITING_ROWS = 1024
_WAITING_BYTES = 64 << 20
"""Rows, and bytes of them, that may wait for an earlier one to be written."""
_COMES_AGAIN = ("queue_full", "engine_starting", "draining", "quota")
"""Codes of refusals for load, after which a line is asked again."""
_NO_BODY = msgspec.Raw(b"{}")
AskLine = Callable[[BatchLine], Awaitable[InnerReply]]


def asking(application: ASGIApp, caller: Caller) -> AskLine:
    """Return what answers a line of this caller's as an application does over HTTP."""

    async def ask(line: BatchLine) -> InnerReply:
        return await ask_inside(application, line.url, bytes(line.body), caller)

    return ask


def width(link: EngineLink) -> int:
    """Return how many lines are asked at once: enough that no row waits for one to be read."""
    return 2 * link.rows + 2


@contextmanager
def results_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file of results to add to, which no other process adds to meanwhile."""
    with path.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            do = "Wait for it, or name another file"
            raise RequestError(f"another process writes {path}", do=do) from error
        yield file


class OrderedRows:
    """The rows of a file of results, written when their turn comes.

    `told`: called with what there is after each written row. `waiting`: how many rows wait for an
    earlier one, and `waiting_bytes`: how long these are together.
    """

    def __init__(
        self, source: Path, target: Path, told: Callable[[BatchProgress], None] = lambda _: None
    ) -> None:
        self._source, self._target, self._told = source, target, told
        self._ready: dict[int, bytes] = {}
        self.progress = BatchProgress()

    @property
    def waiting(self) -> int:
        return len(self._ready)

    @property
    def waiting_bytes(self) -> int:
        return sum(map(len, self._ready.values()))

    def begin(self) -> None:
        """Find out how far an earlier run came, and cut off the row that it was writing."""
        self._ready.clear()
        self.progress = progress(self._source, self._target)
        if self.progress.rows:
            self._told(self.progress)
        if self._target.exists() and self._target.stat().st_size > self.progress.size:
            with results_file(self._target):
                os.truncate(self._target, self.progress.size)

    def add(self, number: int, row: bytes, out: BinaryIO) -> None:
        """Take the row of this line, and write the rows whose turn it is."""
        self._ready[number] = row
        before = self.progress
        while (ready := self._ready.pop(before.rows, None)) is not None:
            view = memoryview(ready)
            while view:
                view = view[out.write(view) :]
            failed = before.failed + (not is_answer(ready))
            before = BatchProgress(before.rows + 1, failed, before.size + len(ready))
            self.progress = before
            self._told(before)


class BatchRun:
    """The work on a batch file, which was judged before.

    `ask`: what answers a line. `width`: how many lines are asked at once. `told`: called with what
    there is after each written row.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        ask: AskLine,
        width: Callable[[], int],
        told: Callable[[BatchProgress], None] = lambda _: None,
    ) -> None:
        self._source, self._target, self._ask, self._width = source, target, ask, width
        self._rows = OrderedRows(source, target, told)

    @property
    def progress(self) -> BatchProgress:
        """The rows that there are so far."""
        return self._rows.progress

    async def run(self) -> BatchProgress:
        """Answer what is not answered yet, and return what there is then."""
        await asyncio.to_thread(self._rows.begin)
        with results_file(self._target) as out, self._source.open("rb") as asked:
            lines = enumerate(raw_lines(asked))
            for _ in range(self.progress.rows):
                next(lines)
            running: dict[asyncio.Task[bytes], int] = {}
            try:
                while True:
                    while self._has_room(len(running)) and (one := next(lines, None)) is not None:
                        work = answered(read_line(one[1]), self._ask)
                        running[asyncio.create_task(work)] = one[0]
                    if not running:
                        return self.progress
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        self._rows.add(running.pop(task), task.result(), out)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def give_up(self, code: str, text: str) -> None:
        """Write rows without an answer for all lines that have none yet."""
        self._rows.begin()
        with results_file(self._target) as out, self._source.open("rb") as asked:
            for number, raw in enumerate(raw_lines(asked)):
                if number >= self.progress.rows:
                    self._rows.add(number, row_without_answer(read_line(raw), code, text), out)

    def _has_room(self, running: int) -> bool:
        """Return whether a further line may be asked."""
        rows = self._rows
        few = rows.waiting + running < _WAITING_ROWS and rows.waiting_bytes < _WAITING_BYTES
        return few and running < self._width()


async def answered(line: BatchLine, ask: AskLine) -> bytes:
    """Return the row of a line, which is asked again where it was refused for load."""
    if _streams(line):
        text = "A line of a batch file has no stream. Leave stream out."
        error = error_body(HttpError(400, text, param="stream"))
        return row_of(line, InnerReply(400, secrets.token_hex(12), error))
    while True:
        reply = await ask(line)
        if _code(reply.body) not in _COMES_AGAIN:
            return row_of(line, reply)
        await asyncio.sleep(min(reply.retry or 1, 10))


async def rows_of_lines(
    lines: Sequence[bytes | str | None],
    urls: Collection[str],
    ask: AskLine,
    width: Callable[[], int],
) -> list[bytes]:
    """Return the row of each line, whatever the line is; so many are asked at once.

    Nothing is raised: a line that cannot be read, or asked at one of these urls, has a row that
    says so.
    """
    rows = [b""] * len(lines)
    left = iter(enumerate(lines))

    async def work() -> None:
        for number, line in left:
            rows[number] = await _row_of_any(number, line, urls, ask)

    await asyncio.gather(*(work() for _ in range(min(len(lines), width()))))
    return rows


async def _row_of_any(
    number: int, raw: bytes | str | None, urls: Collection[str], ask: AskLine
) -> bytes:
    """Return the row of a line that nobody has judged."""
    line: BatchLine | None = None
    try:
        line = read_line(raw.encode() if isinstance(raw, str) else raw or b"")
        if line.method != "POST" or line.url not in urls:
            wanted = ", ".join(urls)
            text = f"{line.method[:20]} {line.url[:80]!r} cannot be asked; wanted POST to {wanted}"
            return row_without_answer(line, "invalid_url", text)
        return await answered(line, ask)
    except Exception as error:
        known = line or BatchLine(f"line-{number}", "POST", "", _NO_BODY)
        log.error("a line of a batch has no answer", exc_info=error)
        code = "invalid_json_line" if line is None else "server_error"
        text = f"this cannot be read: {str(error)[:120]}" if line is None else "the server failed"
        return row_without_answer(known, code, text)


class _Streamed(msgspec.Struct):
    stream: Json = None


_streamed = msgspec.json.Decoder(_Streamed)


def _streams(line: BatchLine) -> bool:
    return _streamed.decode(line.body).stream is True


def _code(body: Json) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    return error.get("code") if isinstance(error, dict) else None
