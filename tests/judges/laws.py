"""The laws of the engine, asked of one mix of requests.

Every comparison is exact: tokens, scores, reasons and order of all hypotheses. What a check has put
the engine through is counted, so that a run can show that it was not vacuous. The executor is the
hash model's unless another is given; only the hash model has a textbook.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from everystep.errors import InvariantError
from everystep.executors.base import Executor
from everystep.strategies import Beam
from everystep.testing.hash_function import HashFunction
from everystep.testing.strict import StrictExecutor
from everystep.types import Request
from tests.judges.dice import EMBED_DIM
from tests.judges.drive import Drive, hash_executor, run_scheduled, run_together
from tests.judges.mixes import Mix, kinds
from tests.judges.textbook import Hypothesis, generate

LEAST_SCORE = -1.0e8

Results = dict[str, list[Hypothesis]]
Executors = Callable[[Mix, int | None], Executor]


# The first eighteen count mixes, the others happenings.
FLOORS = {
    "mixes": 2_000,
    "beams": 400,
    "sampling": 400,
    "speculation": 400,
    "contrastive": 200,
    "guidance": 300,
    "diverse": 100,
    "constrained": 60,
    "dola": 200,
    "draft_models": 100,
    "other_words": 30,
    "corpora": 60,
    "trees": 400,
    "hooks": 400,
    "best_of": 200,
    "n_best": 150,
    "allowed": 200,
    "contrast": 100,
    "preemptions_in_decode": 500,
    "forks": 1_000,
    "long_children": 500,
    "alternatives": 500,
    "chunk_feeds": 2_000,
    "cancelled": 100,
    "reused": 1_000,
}


def shortfalls(
    found: Mapping[str, int], floors: Mapping[str, int] = FLOORS
) -> dict[str, tuple[int, float]]:
    """What lies under the floors, scaled to the number of mixes: name -> (got, wanted)."""
    scale = found["mixes"] / floors["mixes"]
    wanted = {name: scale * floor for name, floor in floors.items()}
    return {name: (found[name], floor) for name, floor in wanted.items() if found[name] < floor}


class Laws:
    """Checks mixes; a broken law is an `InvariantError`.

    `coverage`: how many mixes there were, how many of every kind, and what happened in them.
    `error`: by how much equal scores may differ.
    """

    def __init__(self, executors: Executors = hash_executor, error: float = 0.0) -> None:
        self.coverage: Counter[str] = Counter()
        self._executors = executors
        self._error = error

    def check(self, mix: Mix) -> None:
        """All laws hold for the mix."""
        found = {kind for request in mix.requests for kind in kinds(request)}
        self.coverage.update(["mixes", *found], requests=len(mix.requests))
        together = self._together(mix.requests, mix)
        if self._executors is hash_executor:
            self._textbook(mix, together)
        self._alone(mix, together)
        self._scheduled(mix, together)
        self._speculation(mix, together)
        self._feeding(mix, together)

    def _textbook(self, mix: Mix, together: Results) -> None:
        """Every strategy equals its cacheless loop."""
        function = HashFunction(mix.vocab_size, EMBED_DIM)
        for request in mix.requests:
            name = request.request_id
            book = [_comparable(h, request) for h in generate(request, function)]
            ours = [_comparable(h, request) for h in together[name]]
            self._compare("textbook", mix, request, {name: book}, {name: ours})

    def _alone(self, mix: Mix, together: Results) -> None:
        """A batch of N equals N batches of one."""
        for request in mix.requests:
            self._compare("alone", mix, request, self._together([request], mix), together)

    def _scheduled(self, mix: Mix, together: Results) -> None:
        """Continuous equals lockstep; what was cancelled is the beginning of what it would be."""
        executor = self._executors(mix, mix.schedule.max_rows)
        run = run_scheduled(mix.requests, mix.schedule, executor)
        self._count(run, executor)
        for request in mix.requests:
            name = request.request_id
            if name in run.cancelled:
                self.coverage["cancelled"] += 1
                _compare_beginning(mix, request, run.results[name], together[name])
            else:
                self._compare("scheduled", mix, request, run.results, together)

    def _speculation(self, mix: Mix, together: Results) -> None:
        """Drafts change how many steps it takes, not what comes out."""
        speculative = [request for request in mix.requests if request.drafter is not None]
        plain = [replace(request, drafter=None) for request in speculative]
        if plain:
            results = self._together(plain, mix)
            for request in speculative:
                self._compare("without drafts", mix, request, results, together)

    def _feeding(self, mix: Mix, together: Results) -> None:
        """Neither chunks of prompts nor rows that linger after their end change anything."""
        lingering = [replace(request, linger=True) for request in mix.requests]
        results = self._together(lingering, mix, chunk=1 + mix.seed % 5)
        for request in mix.requests:
            self._compare("lingering in chunks", mix, request, results, together)

    def _together(self, requests: Iterable[Request], mix: Mix, chunk: int | None = None) -> Results:
        executor = self._executors(mix, None)
        run = run_together(requests, executor, chunk)
        self._count(run, executor)
        return run.results

    def _count(self, run: Drive, executor: Executor) -> None:
        counts = run.engine.counts
        self.coverage.update(
            forwards=counts.forwards,
            preemptions_in_decode=counts.preemptions_in_decode,
            forks=executor.counts["fork"] if isinstance(executor, StrictExecutor) else 0,
            long_children=counts.long_children,
            alternatives=counts.alternatives,
            chunk_feeds=counts.chunks,
            reused=counts.forked,
        )

    def _compare(self, law: str, mix: Mix, request: Request, one: Results, other: Results) -> None:
        name = request.request_id
        if not _near(one[name], other[name], self._error):
            what = f"{law} differs in mix {mix.seed}, {name}, {request.strategy}"
            raise InvariantError(what, wanted=one[name], got=other[name])


def _near(one: list[Hypothesis], other: list[Hypothesis], error: float) -> bool:
    """Whether both are equal but for an error of their scores."""
    if not error or len(one) != len(other):
        return one == other
    pairs = list(zip(one, other, strict=True))
    close = all(math.isclose(a.score, b.score, rel_tol=error, abs_tol=error) for a, b in pairs)
    return close and all(a == replace(b, score=a.score) for a, b in pairs)


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
            raise InvariantError(what, wanted=whole, got=cut)
