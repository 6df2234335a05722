"""Batches on a server: files of lines that are answered beside what people wait for.

What is known of a batch stands in a file, and its rows in another, so that a server that is started
again goes on with every batch where the last one stopped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from everystep.errors import CapacityError, EverystepError, RequestError
from everystep.files.atomic import write_atomic
from everystep.server.batch_lines import (
    BatchProgress,
    FaultyFileError,
    FaultyLine,
    is_answer,
    judged,
)
from everystep.server.batch_run import AskLine, BatchRun
from everystep.server.fields import Json
from everystep.server.file_store import FileStore

log = logging.getLogger("everystep.server")

MOST_LINES = 50_000
"""Lines of a batch at most, as OpenAI has it."""
_MOST_OPEN = 64
"""Batches of one key that are not over, at most."""
_MOST_KEPT = 1000
_AT_ONCE = 4
"""Batches that are worked on at once, one of each key."""
_WINDOW = 24 * 3600
Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
_OVER = ("completed", "failed", "expired", "cancelled")


class UnknownBatchError(RequestError):
    """The caller has no batch of this id."""


class BatchState(msgspec.Struct):
    """The state of a batch. `moments`: when it came to each status, in seconds."""

    id: str
    owner: str | None
    endpoint: str
    input_file: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    moments: dict[str, int] = {}
    faults: list[FaultyLine] = []
    output_file: str | None = None
    error_file: str | None = None
    total: int = 0
    rows: int = 0
    failed: int = 0

    @property
    def over(self) -> bool:
        """True when nothing more is done for it."""
        return self.status in _OVER

    def shown(self) -> dict[str, Json]:
        """Return it as OpenAI's clients read it."""
        errors = {"object": "list", "data": [msgspec.to_builtins(one) for one in self.faults]}
        named = (*_OVER, "in_progress", "finalizing", "cancelling")
        counts = {"completed": self.rows - self.failed, "failed": self.failed}
        about: dict[str, Json] = {"id": self.id, "object": "batch", "endpoint": self.endpoint}
        about |= {"input_file_id": self.input_file, "completion_window": "24h"}
        made = {"output_file_id": self.output_file, "error_file_id": self.error_file}
        moments: dict[str, Json] = {f"{name}_at": self.moments.get(name) for name in named}
        moments |= {"created_at": self.created_at, "expires_at": self.created_at + _WINDOW}
        state: dict[str, Json] = {"status": self.status, "errors": errors if self.faults else None}
        state |= {"request_counts": {"total": self.total, **counts}, "metadata": self.metadata}
        return {**about, **state, **made, **moments}


class BatchDesk:
    """The batches of a server, in a folder beside its files.

    `ask`: makes what answers a line of a batch of this owner's. `width`: how many lines of a batch
    are asked at once. `urls`: the routes that lines may ask.
    """

    def __init__(
        self,
        folder: Path,
        files: FileStore,
        ask: Callable[[str | None], AskLine],
        width: Callable[[], int],
        urls: Collection[str],
    ) -> None:
        self._folder, self.files = folder / "batches", files
        self._ask, self._width, self.urls = ask, width, urls
        self._folder.mkdir(parents=True, exist_ok=True)
        read = msgspec.json.Decoder(BatchState).decode
        found = [read(path.read_bytes()) for path in self._folder.glob("*.json")]
        self._batches = {one.id: one for one in sorted(found, key=lambda one: one.created_at)}
        self._working: dict[str, asyncio.Task[None]] = {}

    # --- asking -----------------------------------------------------------------------------------

    def create(
        self, owner: str | None, file: str, endpoint: str, metadata: dict[str, str] | None
    ) -> BatchState:
        """Begin a batch of the lines of this file; CapacityError if the caller has too many."""
        self.files.find(owner, file)
        own = [one for one in self._batches.values() if one.owner == owner]
        if sum(not one.over for one in own) >= _MOST_OPEN:
            wanted = f"at most {_MOST_OPEN}"
            raise CapacityError("too many batches are not over", wanted=wanted, do="Come again")
        for one in [one for one in own if one.over][: max(0, len(own) + 1 - _MOST_KEPT)]:
            self._path(one).unlink(missing_ok=True)
            del self._batches[one.id]
        id = f"batch_{secrets.token_hex(12)}"
        state = BatchState(id, owner, endpoint, file, int(time.time()), metadata)
        self._save(state)
        self._batches[id] = state
        self.resume()
        return state

    def find(self, owner: str | None, id: str) -> BatchState:
        """Return the batch of this id; UnknownBatchError unless the caller has it."""
        found = self._batches.get(id)
        if found is None or found.owner != owner:
            raise UnknownBatchError(f"there is no batch {id[:80]!r}", do="Ask GET /v1/batches")
        return found

    def listed(self, owner: str | None) -> list[BatchState]:
        """Return the caller's batches, the newest first."""
        return [one for one in reversed(self._batches.values()) if one.owner == owner]

    def cancel(self, state: BatchState) -> BatchState:
        """End a batch; what is answered by then stays."""
        if state.over or state.status == "finalizing":
            raise RequestError("the batch is over", got=state.status, do="Leave it")
        self._become(state, "cancelling")
        if (task := self._working.get(state.id)) is not None:
            task.cancel()
        self.resume()
        return state

    def is_read(self, file: str) -> bool:
        """Return whether a batch that is not over reads this file."""
        return any(one.input_file == file and not one.over for one in self._batches.values())

    # --- working ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Work on the batches that are not over, as many as may be worked on at once."""
        busy = {self._batches[id].owner for id in self._working}
        for state in self._batches.values():
            if len(self._working) >= _AT_ONCE:
                return
            if not state.over and state.id not in self._working and state.owner not in busy:
                busy.add(state.owner)
                self._working[state.id] = asyncio.create_task(self._work(state))

    async def close(self) -> None:
        """Stop working; what is done by now is done, and the rest is done by the next server."""
        tasks = list(self._working.values())
        self._working = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, state: BatchState) -> None:
        try:
            with suppress(asyncio.CancelledError):
                if state.status != "cancelling":
                    await self._answer(state)
            if state.status == "cancelling":
                await asyncio.to_thread(self._finish, state, "cancelled")
        except (EverystepError, OSError) as error:
            log.exception("batch %s fails", state.id)
            state.faults = [FaultyLine("failed", str(error)[:500])]
            self._become(state, "failed")
        finally:
            if self._working.pop(state.id, None) is not None:  # else the server is being closed
                self.resume()

    async def _answer(self, state: BatchState) -> None:
        """Answer the lines of a batch, and finish it."""
        file = self.files.find(state.owner, state.input_file)
        source, target = self.files.path(file), self._rows(state)
        urls = (state.endpoint,)
        try:
            state.total = await asyncio.to_thread(
                judged, source, urls, most=MOST_LINES, name=file.id
            )
        except FaultyFileError as error:
            state.faults = error.faults
            self._become(state, "failed")
            return
        if state.status != "in_progress":
            self._become(state, "in_progress")

        def told(so_far: BatchProgress) -> None:
            state.rows, state.failed = so_far.rows, so_far.failed

        run = BatchRun(source, target, self._ask(state.owner), self._width, told)
        left = state.created_at + _WINDOW - time.time()
        status: Status = "completed"
        try:
            async with asyncio.timeout(max(left, 0)):
                await run.run()
        except TimeoutError:
            status = "expired"
            text = "The batch was not over in its completion window."
            await asyncio.to_thread(run.give_up, "batch_expired", text)
        self._become(state, "finalizing")
        await asyncio.to_thread(self._finish, state, status)

    def _finish(self, state: BatchState, status: Status) -> None:
        """Make files of the rows: one of answers, one of what failed."""
        rows = self._rows(state)
        if rows.exists():
            state.output_file = self._keep(state, rows, "output", answers=True)
            state.error_file = self._keep(state, rows, "error", answers=False)
        self._become(state, status)
        rows.unlink(missing_ok=True)

    def _keep(self, state: BatchState, rows: Path, name: str, *, answers: bool) -> str | None:
        """Keep the rows of one kind as a file, and return its id; None where there are none."""

        def write(file: BinaryIO) -> None:
            with rows.open("rb") as every:
                for raw in every:
                    if raw.endswith(b"\n") and is_answer(raw) == answers:
                        file.write(raw)

        id = f"file-{name}-{state.id.removeprefix('batch_')}"  # again, if a kill came between
        title = f"{state.id}_{name}.jsonl"
        file = self.files.add(state.owner, title, "batch_output", write, id=id)
        if file.size:
            return file.id
        self.files.remove(file)
        return None

    # --- what stands in files ---------------------------------------------------------------------

    def _become(self, state: BatchState, status: Status) -> None:
        state.status = status
        state.moments = {**state.moments, status: int(time.time())}
        self._save(state)

    def _save(self, state: BatchState) -> None:
        write_atomic(self._path(state), msgspec.json.encode(state))

    def _path(self, state: BatchState) -> Path:
        return self._folder / f"{state.id}.json"

    def _rows(self, state: BatchState) -> Path:
        return self._folder / f"{state.id}.rows"
