"""Steps of a run, to be looked at.

A step keeps the logits that it chose from. The changes by processors are worked out when somebody
asks, by running them again, one at a time, on copies of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from everystep.engine.sight import Branch, ScoreChange, Sight
from everystep.shown import table
from everystep.streamers import LiveBeam
from everystep.types import Event, FinishReason

_SHOWN = 10
"""Candidates that a step shows of itself."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a run, to be looked at; it holds (R, V) logits for as long as it is kept.

    `number`: how many steps of the run came before. `events`: tokens that this step settled, and
    ends. `beams`: the live hypotheses of a search after it, best first; empty for strategies that
    settle tokens at once.
    """

    number: int
    events: tuple[Event, ...]
    beams: tuple[LiveBeam, ...]
    _sight: Sight | None = field(repr=False)

    def _own(self) -> list[Event]:
        return [event for event in self.events if event.index == 0]

    def _repr_html_(self) -> str:
        """Return the choice of the first row: the best candidates, a column for each stage."""
        logits, scores = self.logits, self.scores
        named = f"step {self.number}: {'' if self.text is None else repr(self.text)}"
        if logits is None or scores is None:
            return table(("token", "end"), [(self.tokens, self.finish)], named)
        chosen = self.branches[0].tokens[:1] if self.branches else ()
        best = torch.topk(scores[0], min(_SHOWN, scores.shape[1])).indices.tolist()
        ids = [*dict.fromkeys([*chosen, *best])]
        share, changes = torch.softmax(scores[0].double(), dim=-1), self.changes
        rows = (
            [
                "chosen" * (id in chosen),
                *(id, float(logits[0, id])),
                *(float(one.after[0, id]) for one in changes),
                f"{float(share[id]):.2%}",
            ]
            for id in ids
        )
        return table(("", "id", "logit", *(one.name for one in changes), "share"), rows, named)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids that were settled, of the first sequence; see `events` for several."""
        return tuple(event.token for event in self._own() if event.token >= 0)

    @property
    def text(self) -> str | None:
        """The text that became final; None without a tokenizer."""
        pieces = [event.text for event in self._own()]
        return None if None in pieces else "".join(piece for piece in pieces if piece)

    @property
    def finish(self) -> FinishReason | None:
        """The reason for which the first sequence ended, if it ended here."""
        return next((event.finish for event in self._own() if event.finish is not None), None)

    @property
    def logits(self) -> Tensor | None:
        """Logits (R, V), one row per live sequence, or per accepted draft; None where no choice was
        made, as when a run is cancelled."""
        return None if self._sight is None else self._sight.logits

    @property
    def scores(self) -> Tensor | None:
        """The scores (R, V) that the choice was made from: the logits after all processors."""
        return None if self._sight is None else self._sight.scores

    @property
    def changes(self) -> tuple[ScoreChange, ...]:
        """The scores before and after each processor."""
        return () if self._sight is None else self._sight.changes

    @property
    def drawn(self) -> float | None:
        """The number in (0, 1) that drew the token of the first row; None without a draw."""
        return None if self._sight is None else self._sight.number()

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The tree of this step: every hypothesis that came out of it, and whose it is."""
        return () if self._sight is None else self._sight.branches

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """Hidden states (T, E) of the positions fed, embeddings first, with
        `output_hidden_states=True`."""
        return None if self._sight is None else self._sight.layers("layers")

    @property
    def attentions(self) -> tuple[Tensor, ...] | None:
        """Attentions (H, T, S) of every layer, with `output_attentions=True`."""
        return None if self._sight is None else self._sight.layers("attentions")

    @property
    def cross_attentions(self) -> tuple[Tensor, ...] | None:
        """Attentions (H, T, S) of every layer over encoder states, with `output_attentions=True`;
        None without an encoder."""
        return None if self._sight is None else self._sight.layers("cross_attentions")
