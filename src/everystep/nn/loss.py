"""How far hidden states are from predicting labels, without all logits at once.

Logits are made of some positions at a time, so no tensor has a value for each position and each id.
Where a head learns they are made again when gradients pass; else the gradient of the states is made
beside the loss, as it is but scaled by what comes from above. Positions without a label are left
out before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

NO_LABEL = -100
_AT_ONCE = 1 << 24
"""Logits at a time: 64 MB of float32. A packed head is taken apart once for each so many, and once
more for their gradient."""

Head = Callable[[Tensor, Tensor], Tensor]
"""Hidden states (n, E), and which (n,) of N they are -> logits (n, V)."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelLosses:
    """Sums over the positions that have a label.

    `nll`: () of the negative logarithms of the labels' probabilities. `mean_nll`: () of the same of
    all ids on average, for label smoothing; None where nobody asked. `count`: how many there are.
    """

    nll: Tensor
    mean_nll: Tensor | None
    count: int

    def smoothed(self, factor: float) -> Tensor:
        """Return the () sum with so much of each label spread over all ids.

        Source: Szegedy et al. 2015."""
        if self.mean_nll is None:
            return self.nll
        return (1 - factor) * self.nll + factor * self.mean_nll


def label_losses(
    head: Head, hidden: Tensor, labels: Tensor, vocab_size: int, *, smooths: bool = False
) -> LabelLosses:
    """Return the losses of labels (N,), NO_LABEL for none, under hidden states (N, E).

    `smooths`: whether the average over all ids is computed too. Computed in float32, or the type of
    the states where that is wider.
    """
    places = (labels != NO_LABEL).nonzero().squeeze(1)
    hidden, labels = hidden[places], labels[places]
    sums = _sums_again if _learns(head, hidden, places) else _sums_and_gradients
    parts = [sums(head, *one, smooths) for one in _stretches(hidden, places, labels, vocab_size)]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    # Without a label there is still a graph, so that nobody's backward fails.
    nothing = hidden.sum(dtype=wide) * 0
    nll = sum((one for one, _ in parts), nothing)
    mean = sum((one for _, one in parts), nothing) if smooths else None
    return LabelLosses(nll, mean, len(labels))


def label_logprobs(head: Head, hidden: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Return (N,) the logarithm of each label's probability under hidden states (N, E), 0 for
    NO_LABEL; as `label_losses`."""
    places = (labels != NO_LABEL).nonzero().squeeze(1)
    parts = [
        checkpoint(_logprobs, head, *one, use_reentrant=False, preserve_rng_state=False)
        for one in _stretches(hidden[places], places, labels[places], vocab_size)
    ]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    found = torch.cat([hidden.new_empty(0, dtype=wide), *parts])
    return found.new_zeros(len(labels)).index_copy(0, places, found)


def _stretches(
    hidden: Tensor, places: Tensor, labels: Tensor, vocab_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    size = max(1, _AT_ONCE // vocab_size)
    # Without a label the head reads nothing, but is part of the graph: other processes may wait for
    # its gradient.
    for start in range(0, max(1, len(labels)), size):
        own = slice(start, start + size)
        yield hidden[own], places[own], labels[own]


def _learns(head: Head, hidden: Tensor, places: Tensor) -> bool:
    """Return whether a gradient passes to tensors of the head itself."""
    return head(hidden[:0].detach(), places[:0]).requires_grad


def _sums_again(
    head: Head, hidden: Tensor, places: Tensor, labels: Tensor, smooths: bool
) -> tuple[Tensor, Tensor]:
    """Return `_sums`, which are made again on the way back."""
    given = head, hidden, places, labels, smooths
    found: tuple[Tensor, Tensor] = checkpoint(
        _sums, *given, use_reentrant=False, preserve_rng_state=False
    )
    return found


def _sums_and_gradients(
    head: Head, hidden: Tensor, places: Tensor, labels: Tensor, smooths: bool
) -> tuple[Tensor, Tensor]:
    """Return `_sums` of a head that is frozen."""
    if not (torch.is_grad_enabled() and hidden.requires_grad):
        return _sums(head, hidden, places, labels, smooths)
    given = hidden, head, places, labels, smooths
    found: tuple[Tensor, Tensor] = _SumsOfFrozen.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _SumsOfFrozen(torch.autograd.Function):
    """The sums under a frozen head, whose gradients are made while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, places: Tensor, labels: Tensor, smooths: bool
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            own = hidden.detach().requires_grad_()
            sums = _sums(head, own, places, labels, smooths)
            grads = [*torch.autograd.grad(sums[0], own, retain_graph=smooths)]
            if smooths:
                grads += torch.autograd.grad(sums[1], own)
        ctx.save_for_backward(*grads)
        return sums[0].detach(), sums[1].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        found = above[0] * grads[0]
        if len(grads) > 1:
            found = found + above[1] * grads[1]
        return found, None, None, None, None


def _sums(
    head: Head, hidden: Tensor, places: Tensor, labels: Tensor, smooths: bool
) -> tuple[Tensor, Tensor]:
    logits = _wide_logits(head, hidden, places)
    nll = F.cross_entropy(logits, labels, reduction="sum")
    return nll, -F.log_softmax(logits, dim=-1).mean(-1).sum() if smooths else nll.new_zeros(())


def _logprobs(head: Head, hidden: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(_wide_logits(head, hidden, places), labels, reduction="none")


def _wide_logits(head: Head, hidden: Tensor, places: Tensor) -> Tensor:
    logits = head(hidden, places)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
