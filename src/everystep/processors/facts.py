"""What the processors of a request are made from: its configuration, and facts beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everystep.processors.base import Processor


@dataclass(frozen=True, eq=False)
class Facts:
    """What processors depend on beside the configuration.

    `prompt_length`, `max_length`: visible ids, pad prefix included. `encoder_ids`: the prompt of
    the encoder, or of a decoder alone; None if it was not given as ids. `beams`: how many
    hypotheses are searched together. `row` of `rows`: which prompt of the call it is.
    `first_row`: the call's row of the request's first sequence.
    `user`: callables of (input_ids, scores), instances of classes in `CANONICAL`, or `User`.
    `encode`: a text's ids without special ones; None without a tokenizer.
    """

    eos: tuple[int, ...] = ()
    prompt_length: int = 0
    max_length: int | None = None
    encoder_ids: tuple[int, ...] | None = None
    beams: int = 1
    vocab_size: int | None = None
    row: int = 0
    rows: int = 1
    first_row: int = 0
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None
    user: tuple[Any, ...] = ()
    encode: Callable[[str], Sequence[int]] | None = None

    @property
    def min_tokens_to_keep(self) -> int:
        """Beams need a token to go on with beside every one that ends them."""
        return max(len(self.eos), 1) + 1 if self.beams > 1 else 1


Values = Mapping[str, Any]
Maker = Callable[[Values, Facts], Processor | None]
