"""Steps of a run, and the reasons for their choices: logits, changes by processors, draw, rivals.

A step keeps the logits that it chose from. The changes by processors are worked out when somebody
asks, by running them again, one at a time, on copies of the ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from everystep.engine.sight import Branch, ScoreChange, Sight
from everystep.shown import table
from everystep.streamers import LiveBeam
from everystep.types import Event, FinishReason

_SHOWN = 10
"""Candidates that a step shows of itself."""
Spell = Callable[[list[int]], str | None]


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


class Effect(NamedTuple):
    """The change of the explained token by one processor, and how many tokens that ruled out."""

    name: str
    before: float
    after: float
    ruled_out: int


class Rival(NamedTuple):
    """A token that might have been chosen: its logit, its score and its share of the draw."""

    token: int
    text: str | None
    logit: float
    score: float
    probability: float


class Draw(NamedTuple):
    """The number in (0, 1) that was drawn, and the part of it that leads to the token."""

    number: float
    low: float
    high: float


@dataclass(frozen=True)
class Explanation:
    """The reasons for which a token stands where it stands.

    `position` counts the ids after the prompt. `given`: it was not chosen, but sent or edited in.
    `chosen`: the token with its numbers. `effects`: processor by processor. `draw`: None where the
    best one is taken. `rivals`: the best scores there, the chosen one among them.
    """

    position: int
    given: bool
    chosen: Rival
    effects: tuple[Effect, ...]
    draw: Draw | None
    rivals: tuple[Rival, ...]

    def _repr_html_(self) -> str:
        named = f"position {self.position}: {_named(self.chosen)}"
        effects = table(Effect._fields, self.effects, named)
        return effects + table(Rival._fields, self.rivals, "the best scores there")

    def __str__(self) -> str:
        token = self.chosen
        lines = [f"position {self.position}: {_named(token)}, logit {token.logit:.4g}"]
        for effect in self.effects:
            ruled = f", rules {effect.ruled_out} tokens out" if effect.ruled_out else ""
            lines.append(f"  {effect.name}: {effect.before:.4g} -> {effect.after:.4g}{ruled}")
        if self.given:
            lines.append("  it was given, not chosen")
        elif self.draw is not None:
            low, high = self.draw.low, self.draw.high
            lines.append(f"  drawn: {self.draw.number:.4f} lies in {low:.4f} to {high:.4f}")
        for one in self.rivals:
            mark = "*" if one.token == token.token else " "
            lines.append(f"  {mark} {one.probability:7.2%} {_named(one)}, score {one.score:.4g}")
        return "\n".join(lines)


def _named(one: Rival) -> str:
    return str(one.token) if one.text is None else f"{one.token} {one.text!r}"


def explained(
    sight: Sight, position: int, token: int, spell: Spell, most: int, *, given: bool
) -> Explanation:
    """Explain the token that came out of this step by its first row, with `most` rivals."""
    logits, scores = sight.logits[0].cpu(), sight.scores[0].cpu()
    share = torch.softmax(scores.double(), dim=-1)

    def rival(one: int) -> Rival:
        return Rival(one, spell([one]), float(logits[one]), float(scores[one]), float(share[one]))

    effects = tuple(
        Effect(
            change.name,
            float(change.before[0, token]),
            float(change.after[0, token]),
            int((torch.isneginf(change.after[0]) & ~torch.isneginf(change.before[0])).sum()),
        )
        for change in sight.changes
    )
    number, draw = sight.number(), None
    if number is not None and not given:
        below = float(share[:token].sum())
        draw = Draw(number, below, below + float(share[token]))
    best = torch.topk(scores, min(most, len(scores))).indices.tolist()
    rivals = tuple(rival(one) for one in best if not torch.isneginf(scores[one]))
    return Explanation(position, given, rival(token), effects, draw, rivals)
