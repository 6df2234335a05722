"""The laws of the engine, asked of one mix of requests.

Every comparison is exact: tokens, scores, reasons and order of all hypotheses. What a check has put
the engine through is counted, so that a run can show that it was not vacuous. The executor is the
hash model's unless another is given; only the hash model has a textbook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace

from everystep.errors import InvariantError, message
from everystep.executors.base import Executor
from everystep.strategies import Beam
from everystep.testing.drive import Run, hash_executor, run_scheduled, run_together
from everystep.testing.hash_model import HashExecutor
from everystep.testing.requests import EMBED_DIM, Mix
from everystep.testing.textbook import Hypothesis, generate
from everystep.types import Request

LEAST_SCORE = -1.0e8

Results = dict[str, list[Hypothesis]]
Executors = Callable[[Mix, int | None], Executor]


@dataclass
class Coverage:
    """What some checks have exercised; the first group counts mixes, the second happenings."""

    mixes: int = 0
    beams: int = 0
    sampling: int = 0
    speculation: int = 0
    contrastive: int = 0
    guidance: int = 0
    diverse: int = 0
    draft_models: int = 0

    requests: int = 0
    forwards: int = 0
    preemptions_in_decode: int = 0
    forks: int = 0
    long_children: int = 0
    chunk_feeds: int = 0
    cancelled: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Coverage(**sums)

    def shortfalls(self, floors: Coverage) -> dict[str, tuple[float, float]]:
        """What lies under the floors, scaled to the number of mixes: name -> (got, wanted)."""
        scale = self.mixes / floors.mixes
        pairs = {name: (got, scale * asdict(floors)[name]) for name, got in asdict(self).items()}
        return {name: (got, floor) for name, (got, floor) in pairs.items() if got < floor}


FLOORS = Coverage(
    mixes=2_000,
    beams=400,
    sampling=400,
    speculation=400,
    contrastive=200,
    guidance=300,
    diverse=100,
    draft_models=100,
    preemptions_in_decode=500,
    forks=1_000,
    long_children=500,
    chunk_feeds=2_000,
    cancelled=100,
)


class Laws:
    """Checks mixes and remembers what that covered; a broken law is an `InvariantError`."""

    def __init__(self, executors: Executors = hash_executor) -> None:
        self.coverage = Coverage()
        self._executors = executors

    def check(self, mix: Mix) -> None:
        """All laws hold for the mix."""
        self._note(mix)
        together = self._together(mix.requests, mix)
        if self._executors is hash_executor:
            self._textbook(mix, together)
        self._alone(mix, together)
        self._scheduled(mix, together)
        self._speculation(mix, together)
        self._feeding(mix, together)

    def _textbook(self, mix: Mix, together: Results) -> None:
        """Every strategy equals its cacheless loop."""
        function = HashExecutor(mix.vocab_size, EMBED_DIM).function
        for request in mix.requests:
            name = request.request_id
            book = [_comparable(h, request) for h in generate(request, function)]
            ours = [_comparable(h, request) for h in together[name]]
            _compare("textbook", mix, request, {name: book}, {name: ours})

    def _alone(self, mix: Mix, together: Results) -> None:
        """A batch of N equals N batches of one."""
        for request in mix.requests:
            _compare("alone", mix, request, self._together([request], mix), together)

    def _scheduled(self, mix: Mix, together: Results) -> None:
        """Continuous equals lockstep; what was cancelled is the beginning of what it would be."""
        executor = self._executors(mix, mix.schedule.max_rows)
        run = run_scheduled(mix.requests, mix.schedule, executor)
        self._count(run, executor)
        for request in mix.requests:
            name = request.request_id
            if name in run.cancelled:
                self.coverage.cancelled += 1
                _compare_beginning(mix, request, run.results[name], together[name])
            else:
                _compare("scheduled", mix, request, run.results, together)

    def _speculation(self, mix: Mix, together: Results) -> None:
        """Drafts change how many steps it takes, not what comes out."""
        speculative = [request for request in mix.requests if request.drafter is not None]
        plain = [replace(request, drafter=None) for request in speculative]
        if plain:
            results = self._together(plain, mix)
            for request in speculative:
                _compare("without drafts", mix, request, results, together)

    def _feeding(self, mix: Mix, together: Results) -> None:
        """Neither chunks of prompts nor rows that linger after their end change anything."""
        lingering = [replace(request, linger=True) for request in mix.requests]
        results = self._together(lingering, mix, chunk=1 + mix.seed % 5)
        for request in mix.requests:
            _compare("lingering in chunks", mix, request, results, together)

    def _together(self, requests: Iterable[Request], mix: Mix, chunk: int | None = None) -> Results:
        executor = self._executors(mix, None)
        run = run_together(requests, executor, chunk)
        self._count(run, executor)
        return run.results

    def _note(self, mix: Mix) -> None:
        self.coverage.mixes += 1
        self.coverage.requests += len(mix.requests)
        for kind in mix.kinds:
            setattr(self.coverage, kind, getattr(self.coverage, kind) + 1)

    def _count(self, run: Run, executor: Executor) -> None:
        counts = run.engine.counts
        self.coverage += Coverage(
            forwards=counts.forwards,
            preemptions_in_decode=counts.preemptions_in_decode,
            forks=executor.counts.forks if isinstance(executor, HashExecutor) else 0,
            long_children=counts.long_children,
            chunk_feeds=counts.chunks,
        )


def _compare(law: str, mix: Mix, request: Request, one: Results, other: Results) -> None:
    name = request.request_id
    if one[name] != other[name]:
        what = f"{law} differs in mix {mix.seed}, {name}, {request.strategy}"
        raise InvariantError(message(what, wanted=one[name], got=other[name]))


def _comparable(hypothesis: Hypothesis, request: Request) -> Hypothesis:
    """What the textbook defines of it: only beams have scores, and what descends from a beam that
    never counted is as good as nothing, since all of that ties."""
    if not isinstance(request.strategy, Beam):
        return replace(hypothesis, score=0.0)
    return hypothesis if hypothesis.score > LEAST_SCORE else Hypothesis((), LEAST_SCORE, "none")


def _compare_beginning(
    mix: Mix, request: Request, cut: list[Hypothesis], whole: list[Hypothesis]
) -> None:
    if not request.strategy.streams:
        return  # the best of some unfinished beams need not be the beginning of a result
    for short, full in zip(cut, whole, strict=False):
        if short.tokens != full.tokens[: len(short.tokens)]:
            what = f"cancelling changed mix {mix.seed}, {request.request_id}"
            raise InvariantError(message(what, wanted=whole, got=cut))
