"""A batch file, answered without a server: the same routes, asked from inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from everystep.files.atomic import require_writable
from everystep.server.application import Front
from everystep.server.asking import Caller
from everystep.server.batch_lines import BatchProgress, judged
from everystep.server.batch_run import BatchRun, asking, width
from everystep.server.exchange import FrontSettings
from everystep.server.link import EngineLink, Mooring, ProcessMooring, QueueLimits
from everystep.server.routes import BATCHED
from everystep.server.settings import ServeSettings, front_model

MOST_LINES = 1_000_000
UNBOUNDED = QueueLimits(1 << 30, 1 << 60)
"""Nobody else waits, and how many lines are asked at once is bounded."""


async def run_batch(
    source: Path,
    target: Path,
    settings: ServeSettings,
    *,
    mooring: Mooring | None = None,
    told: Callable[[BatchProgress, int], None] = lambda _, __: None,
) -> BatchProgress:
    """Answer every line of a batch file that has no row of results yet.

    The file is judged before a model is loaded. `told`: called with what there is and with the
    number of lines, after each row.
    """
    count = await asyncio.to_thread(judged, source, BATCHED, most=MOST_LINES)
    require_writable(target)
    sources = settings.sources()
    pictures = settings.pictures()
    fronts = {
        name: await asyncio.to_thread(front_model, one, pictures, offline=settings.offline)
        for name, one in sources.items()
    }
    link = EngineLink(mooring or ProcessMooring(settings.orders(sources)), UNBOUNDED)
    front = Front(link, fronts, FrontSettings())
    await link.start()
    try:
        work = BatchRun(
            source,
            target,
            asking(front.application, Caller()),
            lambda: width(link),
            lambda so_far: told(so_far, count),
        )
        return await work.run()
    finally:
        await link.close()
