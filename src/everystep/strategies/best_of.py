"""Best of several samples: the likeliest, the one that a caller scores highest, or one of those
that give the answer of the majority.

Samples of a prompt take their steps together and share the rows of the prompt. What a caller's
function says of one is asked once, when it ends, and kept with it. Where a majority can no longer
change, the samples that are still at work are cancelled. Sources: Wang et al. 2023,
"Self-Consistency Improves Chain of Thought Reasoning in Language Models"; Stiennon et al. 2020 for
best of n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from everystep.errors import RequestError, shown
from everystep.strategies.base import Batch, Reads, strategy
from everystep.strategies.single import Picked, continue_each
from everystep.types import Children, Finished, FinishReason, Group, Scores, Sequence

VERDICT = "verdict"
_LIKELIHOODS = "logprobs"  # what the engine notes of every token where a request wants that


@strategy("best_of")
@dataclass(frozen=True)
class BestOf:
    """`width` samples, of which the `returns` best are the result.

    `by`: what makes one the best: the mean log-probability of its tokens under the model, before
    any processor, which its request has to want; the score that `judge` gives it; or how many
    samples have its answer, which `judge` finds in it. `judge`: a function of ids, (n,) int64. A
    sample whose answer is None has no vote. Of equals the sample of the lowest number comes first;
    the score of a result is what it was judged by.
    """

    width: int
    returns: int = 1
    by: Literal["likelihood", "score", "majority"] = "likelihood"
    judge: Callable[[np.ndarray], Any] | None = field(default=None, repr=False)
    streams: ClassVar[bool] = False
    reads: ClassVar[Reads] = Reads(shortlists=True, number=True)
    rounds: ClassVar[int] = 1

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Choose for every row, (S,)."""
        return (batch.draws.choose(scores, batch.places()),)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Return one child each; judge what ends, and end what no longer matters."""
        children = continue_each(batch, picked[0][0])
        if self.judge is None:
            return children
        memo: list[dict[str, Any] | None] = [None] * len(batch)
        for s, reason in enumerate(children.finish):
            sequence = batch.sequences[s]
            if reason is not None and sequence.finish is None and reason.kind != "error":
                ids = _own(batch, sequence)
                memo[s] = {VERDICT: self._judged(np.append(ids, children.tokens[s, 0]))}
        finish = list(children.finish)
        if self.by == "majority":
            for g, group in enumerate(batch.groups):
                members = (batch.group_of == g).nonzero()[0].tolist()
                going = [s for s in members if finish[s] is None]
                news = [(memo[s] or {}).get(VERDICT) for s in members]
                if going and _decided([*_answers(group.done), *news], len(going)):
                    for s in going:
                        finish[s] = FinishReason("cancelled")
        return replace(children, finish=finish, memo=memo)

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """Return all of them: the last sample to end may be the best."""
        return group.live, group.done

    def finish(self, group: Group) -> list[Finished]:
        """Return the `returns` best; those that were cut off come last."""
        if self.by == "majority":
            votes = Counter(one for one in _answers(group.done) if one is not None)
            rated = [replace(one, score=float(votes[_answer(one)])) for one in group.done]
            first = {_answer(one): one.index for one in sorted(rated, key=_number)[::-1]}
            rated.sort(key=lambda one: (-one.score, first[_answer(one)], one.index))
        else:
            rated = [replace(one, score=self._rating(one)) for one in group.done]
            rated.sort(key=lambda one: (-one.score, one.index))
        rated.sort(key=lambda one: one.reason.kind in ("cancelled", "error"))
        return rated[: self.returns]

    def _judged(self, ids: np.ndarray) -> Any:
        """Return what the judge says of a sample: a number where it is one that scores."""
        found: Any = self.judge(ids)  # type: ignore[misc]
        if self.by != "score":
            return found
        try:
            score = float(found)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            score = math.nan
        if math.isnan(score):
            raise RequestError(
                "scorer returned something else",
                wanted="a number for each sample, higher for a better one",
                got=shown(found),
                do="Let it return a float",
            )
        return score

    def _rating(self, done: Finished) -> float:
        if self.by == "score":
            value = float(done.memo.get(VERDICT, -math.inf))
            return -math.inf if math.isnan(value) else value
        chain = done.memo.get(_LIKELIHOODS)
        known = [] if chain is None else [one.logprob for one in chain.values()]
        return math.fsum(known) / len(known) if known else -math.inf


def _own(batch: Batch, sequence: Sequence) -> np.ndarray:
    """Return what a sequence has generated."""
    first = sequence.request.prompt_visible
    ids: np.ndarray = batch.table.data[sequence.line, first : sequence.visible]
    return ids


def _number(done: Finished) -> int:
    return done.index


def _answer(done: Finished) -> Any:
    return done.memo.get(VERDICT)


def _answers(done: Iterable[Finished]) -> list[Any]:
    return [_answer(one) for one in done]


def _decided(answers: list[Any], going: int) -> bool:
    """Return whether `going` further votes cannot take the majority from the answer that leads."""
    ranked = Counter(one for one in answers if one is not None).most_common(2)
    if not ranked:
        return False
    behind = ranked[1][1] if len(ranked) > 1 else 0
    return ranked[0][1] > behind + going
