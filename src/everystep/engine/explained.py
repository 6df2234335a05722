"""The reasons for what a sequence says: of a token logits, changes by stages, draw and rivals; of
the whole why it ended, and what each stage did.

All of it is worked out when somebody asks, from looks at steps that are taken once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from everystep.engine.sight import ScoreChange, Sight
from everystep.errors import shown
from everystep.shown import cut, table
from everystep.types import FinishReason

Spell = Callable[[list[int]], str | None]


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


class StageAccount(NamedTuple):
    """The sums of what one stage did in all steps of a sequence.

    `changed`: the steps in which it changed a score. `ruled_out`: the tokens that it made
    impossible, counted in each step. `turned`: the steps after which another token was the best.
    """

    name: str
    changed: int
    ruled_out: int
    turned: int


@dataclass(frozen=True)
class Account:
    """The reason why a sequence ended, and what each stage did on the way, in their order.

    `chosen`: how many of its tokens were chosen; those that were sent or edited in are not.
    """

    ended: str
    chosen: int
    stages: tuple[StageAccount, ...]

    def __str__(self) -> str:
        lines = [f"ended: {self.ended}", f"{self.chosen} tokens were chosen"]
        for one in self.stages:
            ruled = f", {one.ruled_out} tokens ruled out" if one.ruled_out else ""
            turned = f", another token was the best in {one.turned}" if one.turned else ""
            lines.append(f"  {one.name}: changed scores in {one.changed} steps{ruled}{turned}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return table(StageAccount._fields, self.stages, f"ended: {self.ended}")


def accounted(reason: FinishReason | None, steps: Iterable[Iterable[ScoreChange]]) -> Account:
    """Add up what each stage did, from its changes of the first row in each step."""
    stages: dict[tuple[str, int], list[int]] = {}
    chosen = 0
    for changes in steps:
        chosen += 1
        seen: list[str] = []
        for change in changes:
            before, after = change.before[0], change.after[0]
            ruled = torch.isneginf(after) & ~torch.isneginf(before)
            turned = bool(after.argmax() != before.argmax())
            did = bool((after != before).any()), int(ruled.sum()), turned
            place = change.name, seen.count(change.name)
            sums = stages.setdefault(place, [0, 0, 0])
            stages[place] = [old + new for old, new in zip(sums, did, strict=True)]
            seen.append(change.name)
    each = tuple(StageAccount(name, *sums) for (name, _), sums in stages.items())
    return Account(why_ended(reason), chosen, each)


def why_ended(reason: FinishReason | None) -> str:
    """Return the reason as a sentence."""
    if reason is None:
        return "it has not ended"
    matched, kind = reason.matched, reason.kind
    if kind == "stop":
        token = f"token {matched} ends a text"
        return f"the text {cut(shown(matched), 60)} ends it" if isinstance(matched, str) else token
    if kind == "error":
        return f"{type(matched).__name__}: {matched}"
    return {
        "length": "it has as many tokens as it may have",
        "time": "its time was over",
        "criteria": "a stopping criterion ended it",
        "cancelled": "it was cancelled",
    }[kind]


def _nothing() -> None:
    """Stand where an `Again` was, in a copy that another process reads."""


class Explaining(Protocol):
    """A thing that tells why its sequences are as they are, as a run does."""

    def index_of(self, tokens: tuple[int, ...]) -> int:
        """Return the index of the sequence with these ids."""
        ...

    def explain(self, position: int, rivals: int = 5, index: int = 0) -> Explanation:
        """Explain the token at a position."""
        ...

    def account(self, index: int = 0) -> Account:
        """Tell why a sequence ended, and what each stage did."""
        ...


class Again:
    """The way to take a sequence that has ended once more, by what `opened` returns.

    It refers to a model, so it is not copied with what it belongs to, and not pickled.
    """

    def __init__(self, opened: Callable[[], Explaining]) -> None:
        self._opened = opened

    def explain(
        self, tokens: tuple[int, ...], reason: FinishReason, position: int | None, rivals: int
    ) -> Account | Explanation:
        """Explain one of these tokens, or without a position all of them and their end."""
        taken = self._opened()
        index = taken.index_of(tokens)
        if position is not None:
            return taken.explain(position, rivals, index)
        return replace(taken.account(index), ended=why_ended(reason))

    def __deepcopy__(self, memo: object) -> Again:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()
