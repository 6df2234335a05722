"""Runs works on torch operators, with keys and values in cache rows of its own.

A work becomes one forward of the network over all fed positions, packed; logits are computed only
where they are wanted. The executor chooses nothing and waits for the device nowhere.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from everystep.cache import RowCache
from everystep.cache.context import Context
from everystep.cache.formats import CacheDtype, Quantization
from everystep.executors.positions import (
    check_positions,
    row_lengths,
    row_positions,
    wanted_places,
)
from everystep.nn.network import Full, Inputs, Network, Window
from everystep.types import Past, StepOutput, Work


class Runnable(Protocol):
    """Whatever has a network."""

    @property
    def network(self) -> Network: ...


class TorchExecutor:
    """One engine's executor on a model of this library.

    `quantization`: how rows keep what they hold, None for full precision, which is `cache_dtype`
    or, without it, the type of the model.
    """

    max_rows: int | None = None
    host_threads: int | None = None

    def __init__(
        self,
        model: Runnable,
        quantization: Quantization | None = None,
        cache_dtype: CacheDtype | None = None,
    ) -> None:
        network = model.network
        self._network = network
        self.vocab_size: int = network.spec.vocab_size
        self.device: torch.device = network.device
        # Models with an encoder have relative positions only, recurrent layers none at all.
        special = {"attentions", "encoder" if network.encodes else "positions"}
        attends = any(isinstance(one, Full | Window) for layer in network.stores for one in layer)
        self.abilities = frozenset({"embeds", "layers", "past", "truncate", "columns"})
        self.abilities |= special if attends else set()
        across = network.across if network.encodes else None
        layout = (network.stores, network.dtype, network.device, network.spec.width, across)
        self.cache = RowCache(*layout, quantization or cache_dtype)

    @torch.inference_mode()
    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want.

        `logits` are float64 for a float64 model and float32 otherwise.
        """
        check_positions(work)
        self.cache.apply(work)
        if not len(work.rows):
            return StepOutput(self._no_logits())
        context = self.cache.begin(work, weights=range(len(work.rows)) if work.attentions else ())
        context.kept = [] if work.layers else None
        hidden = self._network.forward(self._inputs(work, context.order), context)
        return self._output(work, context, hidden)

    @torch.inference_mode()
    def export(self, row: int) -> Past:
        """What the row holds, as a copy."""
        return self.cache.export(row)

    def audit(self) -> dict[int, int]:
        """Row -> cached positions, for every row that is allocated."""
        return self.cache.lengths()

    def _inputs(self, work: Work, order: np.ndarray | None) -> Inputs:
        """What the network reads, in packed order."""
        own = work.positions
        positions = torch.from_numpy(row_positions(work)) if own is None else own
        lengths = torch.from_numpy(np.repeat(row_lengths(work), work.counts))
        chosen = slice(None) if order is None else torch.from_numpy(order)
        return Inputs(
            self._hidden(work)[chosen],
            positions.flatten()[chosen].to(self.device),
            lengths[chosen],
        )

    def _hidden(self, work: Work) -> Tensor:
        """(N, E) embeddings in feed order."""
        if not work.embeds:
            return self._network.embed(torch.from_numpy(work.tokens).to(self.device))
        hidden = self._network.embed(torch.from_numpy(work.tokens.clip(min=0)).to(self.device))
        for offset, embeds in work.embeds:
            hidden[offset : offset + len(embeds)] = embeds.to(hidden)
        return hidden

    def _output(self, work: Work, context: Context, hidden: Tensor) -> StepOutput:
        back = _inverse(context.order)
        columns = self.cache.columns()
        if columns or work.layers:
            hidden = self._network.finish(hidden if back is None else hidden[back])
            self._extend_columns(work, hidden)
            logits = self._logits(hidden, _wanted(work, None))
        else:
            logits = self._logits(hidden, _wanted(work, back), normed=False)
        return StepOutput(
            logits,
            columns=self.cache.columns() if columns else {},
            layers=None if context.kept is None else _layers(context.kept, back, hidden),
            attentions=_tuples(context.attentions) if work.attentions else None,
            cross_attentions=_tuples(context.cross_attentions)
            if work.attentions and self._network.encodes
            else None,
        )

    def _logits(self, hidden: Tensor, wanted: Tensor | None, *, normed: bool = True) -> Tensor:
        """(R, V) of the wanted places; None stands for all of them."""
        if wanted is not None:
            if not len(wanted):
                return self._no_logits()
            hidden = hidden[wanted.to(self.device)]
        logits = self._network.logits(hidden if normed else self._network.finish(hidden))
        return logits if logits.dtype.itemsize >= 4 else logits.float()

    def _extend_columns(self, work: Work, hidden: Tensor) -> None:
        ends = np.cumsum(work.counts)
        for row, end, count in zip(work.rows.tolist(), ends, work.counts, strict=True):
            self.cache.extend_columns(row, hidden[end - count : end])

    def _no_logits(self) -> Tensor:
        wide = self._network.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return torch.empty(0, self.vocab_size, dtype=dtype, device=self.device)


def _wanted(work: Work, back: Tensor | None) -> Tensor | None:
    """Packed places whose logits are wanted, in feed order; None where that is all of them."""
    if back is None and np.array_equal(work.counts, work.logits):
        return None
    places = torch.from_numpy(wanted_places(work))
    return places if back is None else back[places]


def _inverse(order: np.ndarray | None) -> Tensor | None:
    """Feed-order place -> packed place."""
    if order is None:
        return None
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return torch.from_numpy(back)


def _layers(kept: list[Tensor], back: Tensor | None, last: Tensor) -> tuple[Tensor, ...]:
    """Embeddings first; the last entry is the normalised one, as in the reference."""
    inner = kept[:-1]
    return (*(inner if back is None else [one[back] for one in inner]), last)


def _tuples(by_feed: dict[int, list[Tensor]]) -> tuple[tuple[Tensor, ...], ...]:
    return tuple(tuple(by_feed[feed]) for feed in range(len(by_feed)))
