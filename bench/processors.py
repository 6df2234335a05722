"""What does each processor cost in a step, compared with transformers' class?

    scripts/bench processors [--runs 30] [--batches 1 32] [--out NAME]

Every class runs on the same scores of a vocabulary of 150,000 and on prefixes of 4,000 ids, of
which one is new since the last call, as in a long generation. Ids are distributed like words of a
text, the r-th most frequent in proportion to 1 / r. Both run as their `generate` calls them: ours
in the pipeline, on scores that it may change, with its memory of the sequences, and may return a
shortlist; transformers' in its list of processors, on the rectangle of ids. The calls alternate.
Prints, and writes to bench/results/, medians in microseconds, and how many times faster ours is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from parts.clock import Calls, medians
from parts.report import options, write
from torch import Tensor
from transformers.generation import logits_process as reference

import everystep
from everystep.processors.pipeline import apply
from everystep.types import Prompt, Request, Rows, Scores, Sequence, TokenTable

VOCABULARY, LENGTH, WARM_UP = 150_000, 4_000, 3
EOS = [2, 7]
WORDS = [[11, 12], [13], [14, 15, 16], [17, 18]]
AT_LEAST = {
    "RepetitionPenaltyLogitsProcessor": 5.0,
    "NoRepeatNGramLogitsProcessor": 5.0,
    "MinLengthLogitsProcessor": 5.0,
}


def cases(encoder: Tensor) -> list[tuple[str, tuple[Any, ...]]]:
    """Class and arguments, each in a state in which it has something to do."""
    return [
        ("SequenceBiasLogitsProcessor", ({tuple(word): -1.5 for word in WORDS},)),
        ("EncoderRepetitionPenaltyLogitsProcessor", (1.2, encoder)),
        ("RepetitionPenaltyLogitsProcessor", (1.2,)),
        ("NoRepeatNGramLogitsProcessor", (3,)),
        ("EncoderNoRepeatNGramLogitsProcessor", (3, encoder)),
        ("NoBadWordsLogitsProcessor", (WORDS,)),
        ("MinLengthLogitsProcessor", (2 * LENGTH, EOS)),
        ("MinNewTokensLengthLogitsProcessor", (10, 2 * LENGTH, EOS)),
        ("PrefixConstrainedLogitsProcessor", (lambda batch_id, ids: [3, 4, 5], 1)),
        ("ForcedBOSTokenLogitsProcessor", (1,)),
        ("ForcedEOSTokenLogitsProcessor", (LENGTH + 1, EOS)),
        ("InfNanRemoveLogitsProcessor", ()),
        ("ExponentialDecayLengthPenalty", ((100, 1.0001), EOS, 10)),
        ("SuppressTokensLogitsProcessor", ([3, 4, 5],)),
        ("SuppressTokensAtBeginLogitsProcessor", ([3, 4, 5], LENGTH)),
        ("TemperatureLogitsWarper", (0.7,)),
        ("TopHLogitsWarper", (0.4,)),
        ("TopKLogitsWarper", (50,)),
        ("TopPLogitsWarper", (0.9,)),
        ("MinPLogitsWarper", (0.05,)),
        ("TypicalLogitsWarper", (0.9,)),
        ("EpsilonLogitsWarper", (3e-4,)),
        ("EtaLogitsWarper", (3e-4,)),
        ("LogitNormalization", ()),
        ("BarkEosPrioritizerLogitsProcessor", (EOS, 0.5)),
        ("AlternatingCodebooksLogitsProcessor", (10, 10_000, 1_024)),
    ]


class Steps:
    """Rows that grow by one id at every call, and go back when they have grown enough."""

    def __init__(self, ids: np.ndarray, processor: Any) -> None:
        self.table = TokenTable(len(ids), ids.shape[1])
        self.ids = ids
        request = Request("r", Prompt(ids=ids[0, :1]), None, None, processors=(processor,))
        lines = [self.table.open(row) for row in ids]
        self.sequences = [Sequence(request, line, LENGTH, index=i) for i, line in enumerate(lines)]

    def rows(self) -> Rows:
        """Prefixes of LENGTH ids, the last of which nobody remembers yet."""
        for sequence in self.sequences:
            for memory in sequence.memo.values():
                memory.rewind(LENGTH - 1)
        return Rows(self.table, self.sequences, np.full(len(self.ids), LENGTH))

    def calls(self, scores: Tensor, count: int) -> Calls:
        """The processor on scores that belong to the step, as often as asked."""
        for _ in range(count):
            yield partial(apply, self.rows(), Scores.of(scores.clone()), owned=True)


def measure(
    name: str, arguments: tuple[Any, ...], ids: np.ndarray, runs: int
) -> tuple[float, float]:
    """Median microseconds of ours and of transformers'."""
    ours = Steps(ids, getattr(everystep, name)(*arguments))
    theirs = reference.LogitsProcessorList([getattr(reference, name)(*arguments)])
    scores, rectangle = torch.randn(len(ids), VOCABULARY), torch.from_numpy(ids)
    calls = ours.calls(scores, WARM_UP + runs)
    others = [partial(theirs, rectangle, scores)] * (WARM_UP + runs)
    mine, other = medians(calls, others, warm_up=WARM_UP)
    return mine * 1e6, other * 1e6


def drawn_ids(rows: int) -> np.ndarray:
    """(R, LENGTH) ids, the r-th most frequent in proportion to 1 / r."""
    ranks = np.random.default_rng(0).random((rows, LENGTH))
    return np.floor(VOCABULARY**ranks).astype(np.int64) - 1


def main() -> None:
    """Measures every class and writes a dated file."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    for batch in args.batches:
        ids = drawn_ids(batch)
        for name, arguments in cases(torch.from_numpy(ids[:1])):
            if args.only not in name:
                continue
            ours, theirs = measure(name, arguments, ids, args.runs)
            rows.append(_row(name, batch, ours, theirs))
    size = {"vocabulary": VOCABULARY, "length": LENGTH}
    write("processors", args, {**size, "rows": rows}, packages=("transformers",))


def _row(name: str, batch: int, ours: float, theirs: float) -> dict[str, Any]:
    ratio, wanted = theirs / ours, AT_LEAST.get(name, 1.0)
    print(
        f"{batch:3} {name:40} ours {ours:9.1f} us  reference {theirs:9.1f} us  "
        f"{ratio:7.2f} x{'' if ratio >= wanted else f'  (wanted {wanted})'}",
        flush=True,
    )
    return {"batch": batch, "class": name, "ours_us": ours, "reference_us": theirs, "ratio": ratio}


if __name__ == "__main__":
    main()
