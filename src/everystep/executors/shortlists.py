"""The best logits of rows whose vocabulary is shared out among processes: each finds those of its
part, and the first merges them, exactly."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.nn.split import Split
from everystep.types import Scores


def best_of_all(own: Tensor, most: Tensor, split: Split, vocabulary: int) -> Scores:
    """Return lists of the best of rows, of which `own` (R, n) are this process's part.

    `most`: (R,) how many each row wants. Best first, of equals the lowest id first, a nan above
    all. What other processes than the first return means nothing.
    """
    first, _ = split.own(vocabulary)
    own, longest = own.float(), int(most.max())
    values, places = best_of(own, min(longest, own.shape[1]))
    tokens = places + first
    missing = longest - values.shape[1]
    values = F.pad(values, (0, missing), value=-math.inf)
    # Behind all ids: what fills up is listed only where every token is ruled out.
    tokens = F.pad(tokens, (0, missing), value=vocabulary)
    width = split.count * longest
    values, tokens = (split.joined(one, 1, width) for one in (values, tokens))
    parts = split.joined(torch.logsumexp(own, dim=1, keepdim=True), 1, split.count)
    tokens, order = tokens.sort(dim=1, stable=True)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    values, tokens = values[:, :longest].cpu(), tokens.gather(1, order)[:, :longest].cpu()
    last = most[:, None] - 1
    rest = values.gather(1, last)
    beyond = torch.arange(longest) > last
    values = values.masked_fill(beyond, -math.inf)
    tokens = tokens.masked_fill(beyond | (tokens >= vocabulary), 0)
    return Scores(values, tokens, vocabulary, rest, torch.logsumexp(parts, dim=1).cpu())


def best_of(own: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (R, count) the best of rows (R, n) and their places; of equals the first ones."""
    values, places = torch.topk(own, count, dim=1)
    least = values[:, -1:]
    # Which of equals are among the best is not said by torch, nor in which order they are.
    equals = (own == least).sum(1) > (values == least).sum(1)
    for row in (equals | least[:, 0].isnan()).nonzero()[:, 0].tolist():
        ordered, order = own[row].sort(descending=True, stable=True)
        values[row], places[row] = ordered[:count], order[:count]
    return values, places
