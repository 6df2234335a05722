"""How likely each token was: the chosen one and the k best, kept at a cost of O(k) per position.

Read where the logits of a step are at hand: the natural logarithm of softmax(logits), before any
processor, temperature or guidance. What is known of a sequence is a chain in its memory, which
forks share; what is known of a prompt belongs to the group. It knows no model and no strategy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.outputs import TokenLogprobs
from everystep.types import Children, Group, Sequence
from everystep.types.stored import Chain, remembered, stored


@stored("likelihood")
class Likelihood(NamedTuple):
    """One token with its logprob, and the k best: (k,) ids and (k,) logprobs, best first."""

    token: int
    logprob: float
    top_tokens: np.ndarray
    top_logprobs: np.ndarray

    def cut(self, best: int) -> Likelihood:
        """The same with the `best` best alone."""
        return self._replace(
            top_tokens=self.top_tokens[:best], top_logprobs=self.top_logprobs[:best]
        )


_CHOICES = remembered("logprobs", Annotated[Chain, Likelihood])


def likelihoods(logits: Tensor, tokens: np.ndarray, best: int) -> list[Likelihood]:
    """(R, V) logits and the (R,) tokens that followed -> one likelihood per row.

    A prompt's ids beyond the vocabulary are impossible, and of -1, for none, nothing is known.
    """
    logits = logits.to(torch.float32)
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    given = on_device(logits.device, torch.tensor(tokens))[:, None]
    known = (logits.gather(1, given.clamp(0, logits.shape[1] - 1)) - total)[:, 0]
    known = known.where(given[:, 0] < logits.shape[1], -torch.inf)
    chosen = known.where(given[:, 0] >= 0, torch.nan).tolist()
    top = torch.topk(logits, min(best, logits.shape[1]))
    values, ids = (top.values - total).cpu().numpy(), top.indices.cpu().numpy()
    return [Likelihood(*row) for row in zip(tokens.tolist(), chosen, ids, values, strict=True)]


def note_choices(
    sequences: list[Sequence], first: list[int], children: Children, logits: Tensor
) -> tuple[Children, bool]:
    """The children with values that hold how likely their tokens were, and whether any does.

    Token j of a child was chosen from row `first` + j of its parent; (R, V) `logits`.
    """
    asked = [None if s.finish is not None else s.request.wants.logprobs for s in sequences]
    best = [asked[parent] for parent in children.parent]
    counts = np.where([k is None for k in best], 0, children.counts)
    if not counts.any():
        return children, False
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.array(first)[children.parent[owner]] + place
    widest = max(k for k in best if k is not None)
    chosen = logits[on_device(logits.device, rows)]
    found = likelihoods(chosen, children.tokens[owner, place], widest)
    memo = list(children.memo or [None] * len(counts))
    for child, likelihood in zip(owner.tolist(), found, strict=True):
        own = memo[child] or {}
        parent = sequences[children.parent[child]]
        earlier = own.get(_CHOICES, parent.memo.get(_CHOICES))
        memo[child] = {**own, _CHOICES: Chain(likelihood.cut(best[child] or 0), earlier)}
    return replace(children, memo=memo), True


def prompt_rows(group: Group, start: int, count: int) -> range:
    """The prompt positions of a feed of [start, start + count) that say how likely the next id is,
    where that is wanted and not known yet."""
    request = group.request
    if request.wants.prompt_logprobs is None:
        return range(0)
    known = request.prompt.start + len(group.prompt_known or ())
    return range(max(start, known), min(start + count, request.prompt.length - 1))


def with_prompt(group: Group, positions: range, logits: Tensor) -> tuple[Likelihood, ...]:
    """Add to what is known of the group's prompt how likely the ids after these positions are; (R,
    V) `logits` of the positions. A prompt of embeddings has no ids."""
    ids, best = group.request.prompt.ids, group.request.wants.prompt_logprobs or 0
    followed = np.full(len(positions), -1)
    if ids is not None:
        followed = ids[positions.start + 1 : positions.stop + 1]
    return (*(group.prompt_known or ()), *likelihoods(logits, followed, best))


def last_choices(memo: Mapping[str, Any], length: int) -> list[Likelihood]:
    """The likelihoods of the last `length` tokens of a sequence's memory, first one first."""
    chain: Chain | None = memo.get(_CHOICES)
    found: list[Likelihood] = []
    while chain is not None and len(found) < length:
        found.append(chain.last)
        chain = chain.earlier
    return found[::-1]


def with_given(memo: Mapping[str, Any], kept: int, given: list[int], best: int) -> dict[str, Any]:
    """Keep what is known of the first `kept` choices of a sequence with this memo, and add ids that
    were given: of these nothing is known, which is nan."""
    chain: Chain | None = memo.get(_CHOICES)
    known = [] if chain is None else chain.values()[:kept]
    ids, nothing = np.zeros(best, np.int64), np.full(best, np.nan, np.float32)
    known += [Likelihood(token, math.nan, ids, nothing) for token in given]
    chain = None
    for one in known:
        chain = Chain(one, chain)
    return {} if chain is None else {_CHOICES: chain}


def choice_logprobs(memo: Mapping[str, Any], length: int) -> TokenLogprobs:
    """Return what is known of the first `length` tokens; provisional ones beyond them are left
    out."""
    chain: Chain | None = memo.get(_CHOICES)
    return _table(chain.values()[:length] if chain else [])


def prompt_logprobs(group: Group) -> TokenLogprobs:
    """Return what is known of a group's prompt."""
    return _table(group.prompt_known or ())


def _table(found: Items[Likelihood]) -> TokenLogprobs:
    """(T,) and (T, k) tensors of T likelihoods."""
    best = len(found[0].top_tokens) if found else 0

    def stacked(rows: list[np.ndarray], dtype: type) -> Tensor:
        return torch.from_numpy(np.array(rows, dtype=dtype).reshape(len(found), best))

    return TokenLogprobs(
        tokens=torch.tensor([one.token for one in found], dtype=torch.int64),
        logprobs=torch.tensor([one.logprob for one in found], dtype=torch.float32),
        top_tokens=stacked([one.top_tokens for one in found], np.int64),
        top_logprobs=stacked([one.top_logprobs for one in found], np.float32),
    )
