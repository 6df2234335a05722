"""What runs a `Work`: the protocol between the engine and everything that owns K/V storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from everystep.types import InputSpec, Past, StepOutput, Work


class Executor(Protocol):
    """Runs works against rows that it stores itself; never chooses, never schedules.

    One executor serves one engine. Row numbers come from the engine; a row that was freed may be
    allocated again. After `run`, row r of a feed holds exactly `starts + counts` positions.
    """

    vocab_size: int
    device: torch.device
    abilities: frozenset[str]
    """Of "truncate", "cut", "embeds", "positions", "mask", "hidden", "layers", "early",
    "attentions", "encoder", "past", "adapters" and "best", the names of the inputs that its model
    declares, what changes need that adapters make, and an `adapter_ability` for each adapter that
    it knows by name.

    "truncate": what the last feed of a row wanted logits of can be taken back, one position after
    another, and so can everything at once (to 0). To go back further, the row is freed and fed
    again: a window has dropped what lies before, and a recurrent state cannot be cut.
    "cut": rows can be cut back to any length.
    "best": to answer with the best logits of a row without the others; the engine asks for that
    where "truncate" allows it to read a row again."""
    inputs: Mapping[str, InputSpec]
    """The inputs that feeds may bring, in forms known before compute: what the model declares,
    "positions" with the shape (axes,), "mask" with the shape (heads,)."""
    host_threads: int | None
    """The number of threads that torch may use for the thread that steps; None: as many as before.
    An executor with threads of its own sets 1, since those of torch wait by spinning."""

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Turn ids (n,) into (n, E), what the model reads in their place; only for hooks."""
        ...

    def audit(self) -> dict[int, int]:
        """Return how many positions are cached in every row that is allocated."""
        ...


class Exporting(Executor, Protocol):
    """An executor with the ability "past": rows begin with a past and can be exported as one."""

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy, once its verbs were applied."""
        ...
