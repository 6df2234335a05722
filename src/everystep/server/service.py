"""A server as a whole: the front with its engine, and what is served beside generating."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from everystep.server.application import Front
from everystep.server.asking import Caller
from everystep.server.batch_desk import BatchDesk
from everystep.server.batch_routes import BatchRoutes
from everystep.server.batch_run import AskLine, asking, width
from everystep.server.file_store import FileStore
from everystep.server.live_runs import RunLimits
from everystep.server.routes import BATCHED
from everystep.server.run_routes import RunRoutes
from everystep.server.transcriptions import MOST_SECONDS, TranscriptionRoutes


@dataclass(frozen=True, slots=True)
class ServedBeside:
    """The settings of what is served beside generating.

    `files`: where batch files are kept, None for nowhere. `runs`: how many may be open.
    `sound_seconds`: of a sound that is written down, at most.
    """

    files: Path | None = None
    runs: RunLimits = field(default_factory=RunLimits)
    sound_seconds: float = MOST_SECONDS


class Service:
    """A front with everything beside it, from its start to its end."""

    def __init__(self, front: Front, beside: ServedBeside | None = None) -> None:
        own = beside or ServedBeside()
        self.front = front
        self.batches = None if own.files is None else self._desk(own.files)
        self.runs = RunRoutes(front, own.runs)
        heard = TranscriptionRoutes(front, own.sound_seconds).routes()
        front.add([*BatchRoutes(front, self.batches).routes(), *self.runs.routes(), *heard])

    def _desk(self, folder: Path) -> BatchDesk:
        front = self.front

        def ask(owner: str | None) -> AskLine:
            return asking(front.application, Caller(owner, background=True))

        return BatchDesk(folder, FileStore(folder), ask, lambda: width(front.link), BATCHED)

    async def start(self) -> None:
        """Start the engine, and go on with what an earlier server left."""
        await self.front.link.start()
        self.runs.start()
        if self.batches is not None:
            self.batches.resume()

    async def close(self) -> None:
        """Stop the work on batches, and then the engine."""
        await self.pause()
        await self.front.link.close()
        if self.batches is not None:
            self.batches.files.close()
        if self.front.settings.tracing is not None:
            await asyncio.to_thread(self.front.settings.tracing.close)

    async def pause(self) -> None:
        """Stop what nobody waits for, so that a drained server has nothing under way."""
        await self.runs.close()
        if self.batches is not None:
            await self.batches.close()
