"""The lines of batch files, answered by several engines on Ray Data.

An actor has an engine, and answers whole batches of lines side by side. Its call raises nothing: a
line that cannot be answered has a row that says why, as with one engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import ray.data

from everystep.errors import CapacityError, RequestError
from everystep.files.atomic import require_writable
from everystep.server.application import Front
from everystep.server.asking import Caller
from everystep.server.batch_lines import BatchProgress, judged
from everystep.server.batch_run import OrderedRows, asking, results_file, rows_of_lines, width
from everystep.server.exchange import FrontSettings
from everystep.server.link import EngineLink, ProcessMooring
from everystep.server.offline import MOST_LINES, UNBOUNDED
from everystep.server.ray.cluster import cluster
from everystep.server.ray.orders import sharing
from everystep.server.ray.spans import BATCH_LINES, lines_of_spans, spans_of
from everystep.server.routes import BATCHED
from everystep.server.settings import ServeSettings, front_model

_MOST_BLOCKS = 1000


class LineAnswers:
    """The class that Ray Data calls with batches: Arrow tables with a column `line`.

    It adds a column `row`, the lines' rows of results. Other columns stay as they are.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="everystep front", daemon=True).start()
        sources, pictures = settings.sources(), settings.pictures()
        fronts = {
            name: front_model(one, pictures, offline=settings.offline)
            for name, one in sources.items()
        }
        self._link = EngineLink(ProcessMooring(settings.orders(sources)), UNBOUNDED)
        front = Front(self._link, fronts, FrontSettings())
        self._ask = asking(front.application, Caller())
        asyncio.run_coroutine_threadsafe(self._link.start(), self._loop).result()

    def __call__(self, batch: pa.Table) -> pa.Table:
        lines = batch.column("line").to_pylist()
        work = rows_of_lines(lines, BATCHED, self._ask, lambda: width(self._link))
        rows = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return batch.append_column("row", pa.array(rows, pa.large_binary()))


def answer_lines(
    lines: ray.data.Dataset,
    settings: ServeSettings,
    *,
    replicas: int = 1,
    batch_lines: int = BATCH_LINES,
) -> ray.data.Dataset:
    """Return a data set of lines with a column `row` beside `line`: what became of each.

    Lines are in the form of batch files, as bytes or texts. So many actors answer them, each with
    an engine of its own, and the rows keep the order of the lines.
    """
    found = lines.map_batches(
        LineAnswers,
        fn_constructor_args=(settings,),
        batch_format="pyarrow",
        batch_size=batch_lines,
        compute=ray.data.ActorPoolStrategy(size=replicas),
        num_cpus=settings.threads or 1,
    )
    found.context.execution_options.preserve_order = True
    return found


def run_batch_on_replicas(
    source: Path,
    target: Path,
    settings: ServeSettings,
    *,
    replicas: int,
    told: Callable[[BatchProgress, int], None] = lambda _, __: None,
) -> BatchProgress:
    """Answer every line of a batch file that has no row of results yet, by so many engines.

    The nodes of a cluster that is there have to have the file at the same path. `told`: called with
    what there is and with the number of lines, after each row.
    """
    count = judged(source, BATCHED, most=MOST_LINES)
    require_writable(target)
    for one in settings.sources().values():  # or the actors would find out
        front_model(one, settings.pictures(), offline=settings.offline)
    rows = OrderedRows(source, target, lambda so_far: told(so_far, count))
    rows.begin()
    spans = list(spans_of(source.resolve(), rows.progress.rows))
    if not spans:
        return rows.progress
    own = sharing(settings, replicas)
    cpus = replicas * (own.threads or 1)
    with results_file(target) as out, cluster(settings.ray_address, cpus):
        for number, row in _answered_spans(spans, own, replicas):
            rows.add(number, row, out)
    if rows.progress.rows < count:
        raise CapacityError(
            "the cluster lost lines",
            wanted=count,
            got=rows.progress.rows,
            do="Give the command again: it goes on after the rows that there are",
        )
    return rows.progress


def _answered_spans(
    spans: list[dict[str, Any]], settings: ServeSettings, replicas: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the row of each line of these spans."""
    quiet = ray.data.DataContext.get_current()
    quiet.enable_progress_bars = quiet.print_on_execution_start = False
    blocks = min(len(spans), _MOST_BLOCKS)  # else few actors had all, and rows came at the end
    read = ray.data.from_items(spans, override_num_blocks=blocks).map_batches(
        lines_of_spans, batch_format="pyarrow", batch_size=1, num_cpus=0
    )
    found = answer_lines(read, settings, replicas=replicas).drop_columns(["line"], num_cpus=0)
    tables: Any = found.iter_batches(batch_format="pyarrow", batch_size=None)
    try:
        for table in tables:
            yield from zip(
                table.column("number").to_pylist(), table.column("row").to_pylist(), strict=True
            )
    except ray.exceptions.RayError as error:
        raise RequestError(
            "the cluster could not go on",
            got=str(error)[-600:],
            do="Give the command again: it goes on after the rows that there are",
        ) from error
