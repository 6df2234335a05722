"""What runs a `Work`: the protocol between the engine and everything that owns K/V storage."""

from __future__ import annotations

from typing import Protocol

import torch

from everystep.types import Past, StepOutput, Work


class Executor(Protocol):
    """Runs works against rows that it stores itself; never chooses, never schedules.

    One executor serves one engine. Row numbers come from the engine; a row that was freed may be
    allocated again. After `run`, row r of a feed holds exactly `starts + counts` positions.
    """

    vocab_size: int
    device: torch.device
    abilities: frozenset[str]
    """Of "truncate", "embeds", "positions", "columns", "layers", "attentions", "encoder", "past"
    and "best".

    "truncate": what the last feed of a row wanted logits of can be taken back, one position after
    another, and so can everything at once (to 0). Whoever wants to go back further frees the row
    and feeds it again: a window has dropped what lies before, a recurrent state cannot be cut.
    "best": to tell the best logits of a row without the others; the engine asks for that where
    "truncate" allows it to read a row again."""
    max_rows: int | None
    """How many rows it can hold at once; None: as many as memory allows."""
    host_threads: int | None
    """How many threads torch may use around `run`, where it has threads of its own; None: any."""

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want."""
        ...

    def audit(self) -> dict[int, int]:
        """Row -> cached positions, for every row that is allocated."""
        ...


class Exporting(Executor, Protocol):
    """An executor with the ability "past": rows begin with a past and can be exported as one."""

    def export(self, row: int) -> Past:
        """What the row holds, as a copy, once its verbs were applied."""
        ...
