"""What processors can find out without scores, found out by a second thread while the model
computes.

The masks of a grammar depend on the ids so far, which are known before the forward. The thread
writes to the memories of the sequences that choose, and nobody else does until it is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from everystep.engine.feed import NO_IDS, Feeds
from everystep.processors.base import LogitsProcessor
from everystep.types import Sequence, StepOutput

Task = tuple[LogitsProcessor, Sequence]


@dataclass(slots=True)
class Ahead:
    """The thread of an engine, which begins with the first work for it, and what it does now.

    `process`: where it runs; a forked child has none of its parent's threads.
    """

    pool: ThreadPoolExecutor | None = None
    job: Future[None] | None = None
    process: int = 0

    def during(self, feeds: Feeds, compute: Callable[[], StepOutput]) -> StepOutput:
        """What `compute` returns; meanwhile processors foresee what they can for the sequences that
        choose, which is over when this returns or raises."""
        tasks = [
            (processor, sequence)
            for group in feeds.ready
            for processor in group.request.processors
            if isinstance(processor, LogitsProcessor) and processor.foresees
            for sequence in group.live
            if sequence.finish is None
        ]
        if not tasks:
            return compute()
        self.job = self._begun(tasks, feeds)
        try:
            return compute()
        finally:
            self.settle()

    def settle(self) -> None:
        """Nothing is at work any more, as it may be where an interrupt came while this waited."""
        if self.job is not None and self.process == os.getpid() and not self.job.cancel():
            wait([self.job])
        self.job = None

    def _begun(self, tasks: list[Task], feeds: Feeds) -> Future[None] | None:
        if self.pool is None or self.process != os.getpid():
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="everystep-ahead")
            self.process = os.getpid()
        try:
            return self.pool.submit(_foresee, tasks, feeds)
        except RuntimeError:  # the interpreter is ending: what was not foreseen is found out later
            return None


def _foresee(tasks: list[Task], feeds: Feeds) -> None:
    for processor, sequence in tasks:
        drafted = len(feeds.drafts.get(id(sequence), NO_IDS))
        lengths = range(sequence.visible, sequence.visible + drafted + 1)
        try:
            processor.foresee(sequence, feeds.table.data[sequence.line], lengths)
        except Exception:
            continue  # it is raised again where the scores are processed
