"""A process's part of what a step brings: of masks, pasts and adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from everystep.adapters import (
    AFTER,
    Adapter,
    AdapterChange,
    Delta,
    Dense,
    InputScaling,
    Magnitude,
    OutputScaling,
)
from everystep.errors import UnsupportedError
from everystep.models.spec import DecoderSpec
from everystep.models.splitting import Range, own_columns, own_rows, within
from everystep.nn.split import Split
from everystep.types import Extra, Past, Work


def own_work(
    work: Work, spec: DecoderSpec, split: Split, adapter: Callable[[Adapter], Adapter]
) -> Work:
    """Return a work as a process runs it; `adapter`: its part of one."""
    if not work.extras and not work.pasts:
        return work
    heads, kv_heads = split.own(spec.attention.heads), split.own(spec.attention.kv_heads)
    extras = {feed: _own_extra(one, heads, adapter) for feed, one in work.extras.items()}
    pasts = {row: _own_past(past, kv_heads) for row, past in work.pasts.items()}
    return replace(work, extras=extras, pasts=pasts)


def _own_extra(extra: Extra, heads: Range, adapter: Callable[[Adapter], Adapter]) -> Extra:
    mask = extra.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask[heads[0] : heads[1]]
    own = tuple(adapter(one) for one in extra.resolved if isinstance(one, Adapter))
    return replace(extra, mask=mask, resolved=own)


def _own_past(past: Past, heads: Range) -> Past:
    """Return the past with keys and values (K, n, D) of the heads of a process."""
    first, end = heads
    return Past(past.length, tuple(tuple(x[first:end] for x in layer) for layer in past.layers))


def own_adapter(adapter: Adapter, spec: DecoderSpec, split: Split) -> Adapter:
    """Return the part of an adapter that changes a process's part of each map.

    Raise UnsupportedError for a change that has no parts.
    """
    targets: Mapping[str, tuple[AdapterChange, ...]] = {
        key: tuple(
            found for one in changes if (found := _own_change(key, one, spec, split)) is not None
        )
        for key, changes in adapter.targets.items()
    }
    return Adapter(targets, adapter.norms)


def _own_change(
    key: str, change: AdapterChange, spec: DecoderSpec, split: Split
) -> AdapterChange | None:
    if key.startswith(AFTER):  # what is added to hidden states, which are whole everywhere
        return change
    name = f"{key}."
    if ".qkv." in name or ".up." in name:
        ranges = own_rows(name, spec, split)
        own = within(ranges, change.start, change.start + change.rows)
        before = sum(end - first for first, end in within(ranges, 0, change.start))
        return _of_rows(change, own, before) if own else None
    return _of_columns(change, own_columns(name, spec, split), split)


def _of_rows(change: AdapterChange, own: tuple[Range, ...], start: int) -> AdapterChange:
    def rows(x: Tensor) -> Tensor:
        return torch.cat([x[first:end] for first, end in own])

    if isinstance(change, Delta):
        shift = None if change.shift is None else rows(change.shift)
        return replace(change, b=rows(change.b), shift=shift, start=start)
    if isinstance(change, Dense):
        return Dense(rows(change.matrix), start)
    if isinstance(change, OutputScaling):
        return OutputScaling(rows(change.factors), start)
    if isinstance(change, InputScaling):
        return replace(change, height=sum(end - first for first, end in own), start=start)
    raise _has_no_parts(change)


def _of_columns(change: AdapterChange, own: Range, split: Split) -> AdapterChange:
    """Return the change of a map of which each process computes a part of a sum."""
    first, end = own
    if isinstance(change, Delta):
        shift = change.shift if split.is_first else None
        return replace(change, a=change.a[:, first:end].contiguous(), shift=shift)
    if isinstance(change, Dense):
        return replace(change, matrix=change.matrix[:, first:end].contiguous())
    if isinstance(change, OutputScaling):
        return change
    if isinstance(change, InputScaling):
        return replace(change, factors=change.factors[first:end])
    raise _has_no_parts(change)


def _has_no_parts(change: AdapterChange) -> UnsupportedError:
    what = "DoRA" if isinstance(change, Magnitude) else type(change).__name__
    return UnsupportedError(
        f"an adapter of this kind has no parts for several processes: {what}",
        wanted="LoRA, LoHa, SHiRA, IA3 or steering",
        do="Load the model without parallel, or merge the adapter into a folder that you load",
    )
