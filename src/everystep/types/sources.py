"""What the encoder of a model reads, before or after it has been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from everystep.types.ends import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class EncoderSource:
    """The encoder's side of a call: B prompts to encode, or B states (S, E) that are done.

    Where there are both, the states are those of the prompts, which further models may read.
    `assistant`: (B,) states of a draft model's encoder, empty where it makes them itself.
    `places`: (B,) where the states of each row stand in the rectangle that was passed, of `width`
    positions; empty until they are encoded where no ids are. `ids`: (B,) the rows of that
    rectangle, empty where ids are not known.
    """

    prompts: tuple[Prompt, ...] = ()
    states: tuple[Tensor, ...] = ()
    places: tuple[np.ndarray, ...] = ()
    width: int = 0
    ids: tuple[np.ndarray, ...] = ()
    assistant: tuple[Tensor, ...] = ()

    def placed(self, states: Sequence[Tensor], width: int) -> EncoderSource:
        """Return the same once it is known how many states there are, (B,) states (S, E), in a
        rectangle of this width."""
        return replace(self, places=tuple(np.arange(len(one)) for one in states), width=width)

    def held(self, states: tuple[Tensor, ...]) -> EncoderSource:
        """Return the same with (B,) states (S, E) that its encoder has made, for calls to come."""
        placed = self if self.places else self.placed(states, max(map(len, states)))
        return replace(placed, states=states)

    def repeated(self, rows: int) -> EncoderSource:
        """Return the source of one row as that of so many."""
        return EncoderSource(
            self.prompts * rows,
            self.states * rows,
            self.places * rows,
            self.width,
            self.ids * rows,
            self.assistant * rows,
        )
