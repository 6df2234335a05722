"""What hooks say to the choices of a step: what follows from a token, and what is forced.

A hook is asked about a token as soon as its strategy considers it, because a search has to know
which candidates end. Its answer is a value, which the child takes along. A draft is taken only as
long as its positions were given what hooks give after the tokens before them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from everystep.engine.feed import Feeds
from everystep.engine.hooks import HOOKED, nonsense
from everystep.errors import NOBODYS, RequestError, shown
from everystep.types import (
    AfterStep,
    Children,
    FinishReason,
    Hooked,
    Next,
    Scores,
    Sequence,
    StepOutput,
)
from everystep.types.hooks import UNCHANGED, Hook
from everystep.types.stored import Chain


@dataclass(slots=True, eq=False)
class Sequels:
    """The answers of hooks about every token that may follow one of R rows.

    `follow`: (R,) sequences, each as it is at its row; `sources`: those that were fed; `place`: how
    many drafted tokens of the source a row follows. `states`: what hooks know there, None where
    there are none. `holds`: whether a row was given what follows from the tokens before it.
    """

    feeds: Feeds
    output: StepOutput
    follow: list[Sequence]
    sources: list[Sequence]
    place: list[int]
    logits: Tensor
    scores: Scores
    states: list[Hooked | None] = field(default_factory=list)
    holds: list[bool] = field(default_factory=list)
    known: dict[tuple[int, int], Hooked] = field(default_factory=dict)

    def settle(self) -> Scores:
        """The scores, in which forced tokens stand alone, with 0."""
        values: Tensor | None = None
        for r, source in enumerate(self.sources):
            state = self._arrived(r, source)
            self.states.append(state)
            plain = self.place[r] == 0 or not source.request.hooks
            self.holds.append(plain or state is not None)
            if state is not None and state.forced:
                if values is None:
                    values = self.scores.whole().values.clone()
                    self.scores = Scores.of(values)
                self.force(values, r)
        return self.scores

    def force(self, values: Tensor, row: int) -> None:
        """Lets a forced token stand alone in its row of the (R, V) scores, with 0."""
        state = self.states[row]
        if state is not None and state.forced:
            values[row] = -torch.inf
            values[row, state.forced[0]] = 0.0

    def ended(
        self, parents: np.ndarray, tokens: np.ndarray, reasons: list[FinishReason | None]
    ) -> list[FinishReason | None]:
        """Why (C,) tokens after (C,) rows end there, by hooks where nothing else says so."""
        found = list(reasons)
        for c, (r, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
            state = self.states[r]
            if found[c] is not None or token < 0 or state is None or not self.holds[r]:
                continue
            try:
                stop = (state if self.follow[r].provisional else self.after(r, token)).stop
            except NOBODYS:
                raise
            except Exception:
                if self.place[r] == 0:
                    raise
                self.holds[r] = False  # it is asked again if the drafts before it are right
                continue
            if stop is not None:
                found[c] = FinishReason("criteria", None if stop is True else stop)
        return found

    def noted(self, children: Children, rows: Items[int]) -> Children:
        """The children with what hooks know of them; `rows`: (C,) where each chose last."""
        memo = list(children.memo or [None] * len(rows))
        tokens, provisional = children.tokens, children.provisional
        for c, (r, count) in enumerate(zip(rows, children.counts.tolist(), strict=True)):
            state = self.states[r]
            if state is None or count == 0 or tokens[c, count - 1] < 0:
                continue
            if state.forced and provisional is not None and provisional[c]:
                tokens = tokens.copy()
                tokens[c, count - 1] = state.forced[0]  # whatever its rivals are
            memo[c] = {**(memo[c] or {}), HOOKED: self.after(r, int(tokens[c, count - 1]))}
        # `dataclasses.replace` takes several times as long.
        return Children(
            children.parent, tokens, children.counts, children.score, children.finish, provisional,
            memo, children.index, children.serial, children.lingers, children.settled,
            children.states, children.held,
        )  # fmt: skip

    def after(self, row: int, token: int) -> Hooked:
        """Return what hooks know when the token follows the row."""
        found = self.known.get((row, token))
        if found is None:
            state = cast(Hooked, self.states[row])
            found = self.known[row, token] = self._asked(row, token, state)
        return found

    def _asked(self, row: int, token: int, state: Hooked) -> Hooked:
        sequence, before = self.follow[row], state.memories
        request, position = sequence.request, sequence.length
        line, reading = self.feeds.table.shown(sequence.line), partial(self._reading, row)
        memories, forced, stop, changed = [*before], state.forced[1:], None, False
        forcing: Hook | None = None
        for h, hook in enumerate(request.hooks):
            if type(hook).after_step is Hook.after_step:  # nothing follows
                continue
            step = AfterStep(request, token, position, before[h], hook.reads, reading, line)
            then = hook.after_step(step)
            if then is None:
                continue
            if not isinstance(then, Next):
                raise nonsense(hook, "after_step", "everystep.Next, or None", then)
            if then.memory is not UNCHANGED and then.memory is not before[h]:
                memories[h], changed = then.memory, True
            if then.force is not None:
                own = _forced(hook, then.force, self.scores.vocabulary)
                if forcing is not None and own != forced:
                    raise RequestError(
                        f"{type(forcing).__name__} and {type(hook).__name__} force other tokens",
                        wanted="one of them",
                        got=f"{forced} and {own}",
                        do="Let one hook force tokens at a time",
                    )
                forcing, forced = hook, own
            if then.stop is not False and stop is None:
                stop = then.stop
        marks = Chain((position, tuple(memories)), state.marks) if changed else state.marks
        return Hooked(marks, position + 1, forced, stop)

    def _arrived(self, r: int, source: Sequence) -> Hooked | None:
        """Return what hooks know at a row; None where there are none, or where drafts before it
        were given something else than they have to be."""
        state: Hooked | None = source.memo.get(HOOKED)
        place = self.place[r]
        if state is None or source.finish is not None or place == 0:
            return None if source.finish is not None else state
        if self.states[r - 1] is None:
            return None
        added = self.feeds.added_to(source)
        assert added.agrees is not None, "hooks were asked about every drafted position"
        try:
            now = self.after(r - 1, int(added.draft[place - 1]))
            holds = now.marks is state.marks or added.agrees(place, now)
        except NOBODYS:
            raise
        except Exception:
            return None  # it is asked again if the drafts before it are right
        return now if holds else None

    def _reading(self, row: int, name: str) -> Tensor:
        if name == "logits":
            return self.logits[row]
        if name == "scores":
            self.scores = self.scores.whole()
            return self.scores.values[row]
        source = self.sources[row]
        feed = self.feeds.feed_of[id(source)]
        drafted = len(self.feeds.added_to(source).draft)
        hidden = cast(Tensor, self.output.answers[feed].hidden)
        return hidden[len(hidden) - 1 - drafted + self.place[row]]


def _forced(hook: Hook, force: Any, vocabulary: int) -> tuple[int, ...]:
    """The ids as plain numbers, if they are some of the vocabulary."""
    try:
        given = np.asarray(force)
    except (TypeError, ValueError, RuntimeError):
        given = np.empty((0, 0))
    numbers = given.ndim == 1 and (given.dtype.kind in "iu" or not len(given))
    if not numbers or not bool(((given >= 0) & (given < vocabulary)).all()):
        wanted = f"a list of ids from 0 to {vocabulary - 1}"
        raise nonsense(hook, "Next.force", wanted, shown(force))
    return tuple(int(token) for token in given)
