"""What does a watermark cost per step compared with transformers'?

    scripts/bench watermarks [--out NAME]

Measured at batch 32 with a vocabulary of 150,000. Ids are either new in every step, so that no
green list occurs twice ("worst"), or follow Zipf's law after a text of 6,000 such ids, whose lists
may be remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from parts.clock import Calls, medians
from parts.report import options, write
from torch import Tensor

from everystep.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from everystep.processors.watermark import WatermarkLogitsProcessor

ROWS, VOCABULARY, STEPS, TEXT = 32, 150_000, 3, 6_000
KEYS = [654, 400, 836, 123, 340, 443, 597, 160, 57]
SYNTHID = {
    "ngram_len": 5, "keys": KEYS, "sampling_table_size": 2**16, "sampling_table_seed": 0,
    "context_history_size": 1024, "device": "cpu",
}  # fmt: skip


def steps(processor: Callable[[Tensor, Tensor], Tensor], ids: Tensor) -> Calls:
    """Calls of a step, each with ids and scores that were not seen before."""
    for step in range(5, 6 + STEPS):
        scores = torch.randn(ROWS, VOCABULARY)  # other candidates, which nobody remembers
        yield partial(processor, ids[:, :step], scores)


def zipf_ids(count: int) -> Tensor:
    """Ids of which the r-th most frequent comes in proportion to 1 / r."""
    return (VOCABULARY ** torch.rand(count, dtype=torch.float64)).long() - 1


def pairs() -> dict[str, tuple[Any, Any, Tensor]]:
    """Name -> ours, transformers', and the ids."""
    worst = torch.randperm(VOCABULARY)[: ROWS * 12].reshape(ROWS, 12)
    zipf = zipf_ids(ROWS * 12).reshape(ROWS, 12)
    green = {"vocab_size": VOCABULARY, "device": "cpu"}
    own = {**green, "seeding_scheme": "selfhash"}
    ours, theirs = WatermarkLogitsProcessor, transformers.WatermarkLogitsProcessor
    warm = ours(**green)
    for token in zipf_ids(TEXT).tolist():
        warm._bits(token)
    return {
        "lefthash, worst": (ours(**green), theirs(**green), worst),
        "lefthash, Zipf": (warm, theirs(**green), zipf),
        "selfhash": (ours(**own), theirs(**own), worst),
        "synthid, 9 layers": (
            SynthIDTextWatermarkLogitsProcessor(**SYNTHID),
            transformers.SynthIDTextWatermarkLogitsProcessor(**SYNTHID),
            worst,
        ),
    }


def main() -> None:
    """Prints a line per watermark and writes a dated file."""
    args = options(__doc__, threads=1).parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name, (ours, theirs, ids) in pairs().items():
        own, other = medians(steps(ours, ids), steps(theirs, ids))
        print(f"{name:20} {own * 1e3:8.1f} ms   {other * 1e3:8.1f} ms   {other / own:5.1f} x")
        rows.append({"watermark": name, "ours_s": own, "reference_s": other})
    write("watermarks", args, {"rows": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
