"""What does a step cost apart from its forward?

    scripts/bench engine_overhead [--steps 300] [--threads 1] [--out NAME]

The executor returns logits that were made beforehand, or the best of them, so that all the time is
the engine's: planning, feeding, scoring, selecting, applying. Measures greedy, sampling, sampling
with processors, and four beams, at two sizes of vocabulary and three batch sizes. Prints, and
writes to bench/results/, the median microseconds of steps in which every sequence feeds one token,
without the executor's own time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import numpy as np
import torch
from parts.report import options, write
from parts.steps import WARPERS, Kind

from everystep.engine import Engine, Lockstep
from everystep.processors.repetition import RepetitionPenaltyLogitsProcessor
from everystep.strategies import Beam, Greedy, Sample
from everystep.types import MOST_BEST, InputSpec, Scores, StepOutput, Work

PROMPT = 16
WARM_UP = 20
END = 0
VOCABULARIES = (1_000, 49_152)
BATCHES = (1, 8, 32)
PENALTY = RepetitionPenaltyLogitsProcessor(1.1)
KINDS = (
    Kind("greedy", Greedy(), listed=False),
    Kind("sample", Sample(), listed=False),
    Kind("sample, 4 processors", Sample(), (PENALTY, *WARPERS), listed=False),
    Kind("sample, 3 processors", Sample(), WARPERS, listed=False),
    Kind("sample, 3, listed", Sample(), WARPERS),
    Kind("4 beams", Beam(4), listed=False),
)


class ReadyExecutor:
    """Answers with logits that it has, in different order from step to step; keeps no rows."""

    device = torch.device("cpu")
    inputs: Mapping[str, InputSpec] = {}
    host_threads: int | None = None

    def __init__(self, vocab_size: int, rows: int, listed: bool) -> None:
        self.vocab_size = vocab_size
        self.abilities = frozenset({"best"} if listed else ())
        self.seconds = 0.0
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(2 * rows, vocab_size, generator=generator)
        self._logits[:, END] = -100.0  # nothing ends before its length
        values, tokens = torch.topk(self._logits, MOST_BEST)
        read = self._logits.__getitem__
        self._best = Scores(values, tokens, vocab_size, values[:, -1:], read=read)
        self._rows = rows
        self._step = 0

    def run(self, work: Work) -> StepOutput:
        """As many rows of logits as are wanted, or of the best of them."""
        start = time.perf_counter()
        self._step += 1
        first = self._step % self._rows
        rows = slice(first, first + int(work.logits.sum()))
        if work.best is None:
            output = StepOutput(self._logits[rows])
        else:
            best = self._best.select(torch.arange(rows.start, rows.stop))
            output = StepOutput(self._logits[:0], best=best)
        self.seconds += time.perf_counter() - start
        return output

    def audit(self) -> dict[int, int]:
        """Nothing is stored."""
        return {}


def measure(kind: Kind, vocab_size: int, batch: int, steps: int) -> float:
    """Median microseconds of a step, less what the executor took."""
    executor = ReadyExecutor(vocab_size, batch * kind.strategy.width, kind.listed)
    engine = Engine(executor, Lockstep())
    for i in range(batch):
        ids = np.arange(1, PROMPT + 1)
        engine.submit(kind.request(i, ids, WARM_UP + steps + 1, END))
    taken = []
    for _ in range(WARM_UP + steps):
        start, before = time.perf_counter(), executor.seconds
        engine.step()
        taken.append(time.perf_counter() - start - (executor.seconds - before))
    return statistics.median(taken[WARM_UP:]) * 1e6


def main() -> None:
    """Measures every case and writes a dated file."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for vocab_size in VOCABULARIES:
        for kind in KINDS:
            medians = [measure(kind, vocab_size, batch, args.steps) for batch in BATCHES]
            more = (medians[-1] - medians[0]) / (BATCHES[-1] - BATCHES[0])
            row = dict(zip(map(str, BATCHES), medians, strict=True))
            rows.append({"vocabulary": vocab_size, "kind": kind.name, "step_us": row})
            cells = "  ".join(
                f"batch {b}: {m:8.1f} us" for b, m in zip(BATCHES, medians, strict=True)
            )
            print(f"{vocab_size:6,} {kind.name:22} {cells}  {more:6.1f} us more per request")
    write("engine-overhead", args, {"rows": rows})


if __name__ == "__main__":
    main()
