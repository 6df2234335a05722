"""Processors that subtract from scores what the field's servers subtract: by id, and by how often
an id was generated.

They know ids and counts, no text. What they add to the reference's processors is public knowledge;
each names its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import NUMBER, PENALTY, integer
from everystep.processors.base import LogitsProcessor, remembers
from everystep.processors.bias import check_width
from everystep.processors.edits import Edit, Revision, Stretch, alike, places, stretches
from everystep.processors.memory import Occurrences, occurrences
from everystep.processors.stacking import Numbers, admit, require
from everystep.types import Rows

_ID = integer(0)


@dataclass(frozen=True)
class LogitBias(LogitsProcessor):
    """Adds its bias to every id of the table: ((id, bias), ...).

    RequestError where an id lies beyond the scores. Source: `logit_bias` of the OpenAI API.
    """

    table: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        valid = all(_ID.accepts(token) and NUMBER.accepts(bias) for token, bias in self.table)
        require(valid, "logit_bias", "pairs of a token id and a number", self.table)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """The scores of the table's ids, moved."""
        check_width(tuple(((token,), bias) for token, bias in self.table), scores.shape[-1], _BIAS)
        tokens = np.array([token for token, _ in self.table], dtype=np.int64)
        bias = torch.tensor([bias for _, bias in self.table], dtype=torch.float64).to(scores)
        index = places(scores, np.repeat(np.arange(len(rows)), len(tokens)), _tiled(tokens, rows))
        return Edit(index, scores.view(-1)[index] + bias.repeat(len(rows)))


_BIAS = "logit_bias"


def _tiled(tokens: np.ndarray, rows: Rows) -> np.ndarray:
    return np.tile(tokens, len(rows))


@dataclass(frozen=True)
class OccurrencePenalty(LogitsProcessor):
    """Generated ids lose `presence` once and `frequency` per occurrence; the prompt does not count.

    By hand every id counts. Negative values favour repetition. Source: `presence_penalty` and
    `frequency_penalty` of the OpenAI API, counted over generated ids as vLLM does.
    """

    presence: Numbers = 0.0
    frequency: Numbers = 0.0

    per_row = ("presence", "frequency")

    def __post_init__(self) -> None:
        admit(self, "presence", PENALTY, "presence_penalty")
        admit(self, "frequency", PENALTY, "frequency_penalty")

    def edit(self, rows: Rows, scores: Tensor) -> Revision:
        """The scores of the ids that were generated, lowered."""
        known = [_generated(rows, r, scores.shape[-1]) for r in range(len(rows))]
        times = [counts for _, counts in known]

        def revised(old: Any, stretch: Stretch) -> Any:
            count = alike(np.concatenate(times[stretch.rows]), old)
            each = stretch.own(self.frequency, old)
            return old - (each * count + stretch.own(self.presence, old))

        return Revision(stretches([tokens for tokens, _ in known], scores), revised)


def _generated(rows: Rows, r: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids below `size` that row r's sequence generated, each once, and how often: copies."""
    start = rows.sequences[r].request.prompt_visible
    if remembers(rows):
        memory = occurrences(rows, r, start)
    else:
        memory = Occurrences(start)
        memory.read(rows.table.data[rows.sequences[r].line], int(rows.lengths[r]))
    inside = memory.tokens < size
    return memory.tokens[inside], memory.counts[inside]
