"""The laws hold where an executor reports the best of a row instead of all of it.

Greedy choices and beams then cost no row of logits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.engine import Engine, Lockstep
from everystep.engine.watching import StepRecord
from everystep.executors.base import Executor
from everystep.strategies import Beam, Greedy
from everystep.testing.hash_model import ABILITIES, HashExecutor
from everystep.types import Request, Scores, StepOutput, Work
from tests.judges.dice import EMBED_DIM
from tests.judges.drive import Drive, hash_executor, run_together
from tests.judges.laws import Laws
from tests.judges.mixes import Mix, random_mix


class BestExecutor(HashExecutor):
    """The hash model, which reports the best where they are wanted, and counts whole rows."""

    def __init__(self, vocab_size: int, max_rows: int | None = None) -> None:
        abilities = ABILITIES | {"best"}
        super().__init__(vocab_size, EMBED_DIM, max_rows=max_rows, abilities=abilities)
        self.whole = self.listed = self.read = 0

    def logits_of(self, output: StepOutput) -> StepOutput:
        """What it says of every token, before the best are taken from that."""
        return output

    def run(self, work: Work) -> StepOutput:
        output = self.logits_of(super().run(work))
        if "best" not in self.abilities:
            return output
        wanted = np.zeros_like(work.logits) if work.best is None else work.best
        most = torch.from_numpy(np.repeat(wanted, work.logits))
        # Row by row, so that no sum depends on how many rows there are.
        totals = torch.tensor([float(torch.logsumexp(row, 0)) for row in output.logits])
        rows = output.logits[most > 0]
        if not len(rows):
            return replace(output, totals=totals)
        values, tokens = torch.sort(rows, dim=-1, descending=True, stable=True)
        count = min(int(wanted.max(initial=0)), self.vocab_size)
        self.whole += len(most) - len(rows)
        self.listed += len(rows)
        return replace(
            output,
            logits=output.logits[most == 0],
            totals=totals[most == 0],
            best=self._listed(
                rows, values[:, :count], tokens[:, :count], most[most > 0], totals[most > 0]
            ),
        )

    def _listed(
        self, rows: Tensor, values: Tensor, tokens: Tensor, own: Tensor, totals: Tensor
    ) -> Scores:
        """The best of (R, V) rows, of each as many as it wants, (R,)."""
        own = own.clamp(max=values.shape[1])[:, None]
        rest, beyond = values.gather(1, own - 1), torch.arange(values.shape[1]) >= own
        kept = values.masked_fill(beyond, -torch.inf)

        def read(some: Tensor) -> Tensor:
            self.read += len(some)
            return rows[some]

        return Scores(kept, tokens, rows.shape[1], rest, totals, read)


def best_executor(mix: Mix, max_rows: int | None) -> Executor:
    return BestExecutor(mix.vocab_size, max_rows)


def reads_best(request: Request) -> bool:
    """A plain request whose strategy ranks a few scores."""
    plain = not (request.processors or request.hooks) and request.readout is None
    few = isinstance(request.strategy, Greedy) or (
        isinstance(request.strategy, Beam) and not request.strategy.sampled
    )
    return plain and few and request.strategy.reads.best > 0


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (50, 100, 150))]
)
def test_the_laws_hold(first: int) -> None:
    laws = Laws(best_executor)
    for seed in range(first, first + 50):
        laws.check(random_mix(seed))
    assert all(laws.coverage[name] for name in ("beams", "speculation", "forks"))


def test_no_whole_row_is_reported_where_the_best_are_enough() -> None:
    seen = set()
    for seed in range(120):
        mix = random_mix(seed)
        for request in filter(reads_best, mix.requests):
            executor = BestExecutor(mix.vocab_size)
            ours = run_together([request], executor).results
            assert executor.whole == 0 and executor.listed > 0
            seen.add(type(request.strategy))
            if isinstance(request.strategy, Greedy):
                assert ours == run_together([request], hash_executor(mix)).results
    assert seen == {Greedy, Beam}


def test_whole_rows_are_reported_where_observers_watch() -> None:
    for mix in map(random_mix, range(60)):
        requests = [request for request in mix.requests if reads_best(request)]
        executor, shown = BestExecutor(mix.vocab_size), Shown()
        run = Drive(Engine(executor, Lockstep(), [shown]))
        for request in requests:
            run.submit(request)
        results = run.finish().results
        assert executor.listed == 0 and shown.widths <= {mix.vocab_size}
        assert results == run_together(requests, BestExecutor(mix.vocab_size)).results


class Shown:
    """Watches how wide the scores are."""

    def __init__(self) -> None:
        self.widths: set[int] = set()

    def __call__(self, record: StepRecord) -> None:
        self.widths.add(record.scored.scores.whole().values.shape[1])
