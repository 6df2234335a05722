"""Rows side by side in one cache object of another library, padded on the left.

    columns   [ lead: nothing | the row's positions | what was cut off ]

A sheet is what one forward reads and extends. Rows that go on together stay on their sheet, and
nothing is copied; for other company a new sheet is assembled from where they lie. The cache object
is read by the names that its layers have: `keys` and `values` (R, K, S, D), where a window has
dropped the first columns; `conv_states` and `recurrent_states` (R, ...), which have no columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.bridge.own_inputs import Carried
from everystep.errors import InvariantError

_COLUMNS = ("keys", "values", "indexer_keys")
_STATES = ("conv_states", "recurrent_states")


@dataclass(slots=True, eq=False)
class Sheet:
    """`cache` holds `width` columns of R rows, each after `leads[r]` empty ones.

    `seen`: (R, at least width) int64, 0 where a column is empty. `encoded`: (R, S, E) encoder
    states and (R, S) which of them are real, for models that have them. `spare`: columns that
    windows keep beyond what they show, because they may be taken back.
    """

    cache: Any
    leads: np.ndarray
    width: int
    seen: Tensor
    encoded: tuple[Tensor, Tensor] | None = None
    spare: int = 0

    @property
    def bare(self) -> bool:
        """True if a forward that goes on from here needs no mask: no column of any row is empty.

        A forward that begins needs one, since without it positions that jump are read as other
        sequences.
        """
        return self.width > 0 and not self.leads.any()

    def shown(self, width: int) -> Tensor:
        """Return (R, width) int64: which columns are real; those to come are."""
        if self.seen.shape[1] < width:
            self.seen = F.pad(self.seen, (0, width), value=1)
        return self.seen[:, :width]


@dataclass(slots=True, eq=False)
class Place:
    """The place of a row: the row `index` of a sheet, of which `length` positions count.

    It is on no sheet while it is empty. `states`: (S, E) what its encoder read. `carried`: what the
    module's own preparation of inputs keeps of the row.
    """

    sheet: Sheet | None = None
    index: int = 0
    length: int = 0
    states: Tensor | None = None
    carried: Carried | None = None

    def forked(self) -> Place:
        """Return the place of a fork."""
        return replace(self, carried=None if self.carried is None else self.carried.copied())

    @property
    def on(self) -> Sheet:
        """The sheet of a row that is not empty."""
        if self.sheet is None:
            raise InvariantError("an empty row lies on no sheet")
        return self.sheet

    @property
    def source(self) -> Source:
        """The same for `assembled`."""
        lead = int(self.on.leads[self.index])
        return Source(self.on.cache, self.index, self.on.width, lead, self.length)


class Source(NamedTuple):
    """A row of a cache of `width` columns: `length` positions after `lead` empty columns."""

    cache: Any
    row: int
    width: int
    lead: int
    length: int

    @property
    def cut(self) -> int:
        """The number of columns that follow its last position."""
        return self.width - self.lead - self.length


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache, of a decoder's own where there are two."""
    return list(getattr(cache, "self_attention_cache", cache).layers)


def across_of_cache(cache: Any) -> list[Any]:
    """Return the layers that hold encoder states, if there are any."""
    return list(cache.cross_attention_cache.layers) if hasattr(cache, "is_updated") else []


def is_linear(layer: Any) -> bool:
    """Return whether a layer holds states, which cannot be cut."""
    return hasattr(layer, "recurrent_states")


def window_of(layer: Any) -> int | None:
    """Return how many columns a layer shows; None for all."""
    size: int | None = getattr(layer, "sliding_window", None)
    return size


def is_kept(layer: Any) -> bool:
    """Return whether a layer holds keys and values."""
    return isinstance(getattr(layer, "keys", None), Tensor)


def is_opaque(cache: Any) -> bool:
    """Return whether a cache object holds tensors that are neither columns nor known states.

    Its rows share no sheet, and go on from copies of the whole object.
    """
    layers = (*layers_of(cache), *across_of_cache(cache))
    own = (vars(one).items() for one in (cache, *layers))
    return any(
        name not in (*_COLUMNS, *_STATES) and _holds_tensors(value)
        for items in own
        for name, value in items
    )


def _holds_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor) and value.dim() > 0


# --- a new sheet ----------------------------------------------------------------------------------


def columns_across(cache: Any) -> int:
    """Return how many columns of encoder states a cache holds."""
    return max(
        (layer.keys.shape[-2] for layer in across_of_cache(cache) if is_kept(layer)), default=0
    )


def assembled(sources: Sequence[Source]) -> tuple[Any, int]:
    """Return a cache of these rows, the last position of each in its last column, and its width."""
    first = sources[0]
    alike = all(one.cache is first.cache and one.cut == first.cut for one in sources)
    width = max(one.length for one in sources)
    made = own_layers_of(first.cache)
    if alike:
        width = first.width - first.cut
        chosen = [one.row for one in sources]
        _fill(layers_of(made), width, lambda held: _selected(held, chosen, first.cut), chosen)
    else:
        parts = [layers_of(one.cache) for one in sources]
        for number, layer in enumerate(layers_of(made)):
            _gather(layer, [own[number] for own in parts], sources, width)
    if not all(is_kept(layer) for one in sources for layer in across_of_cache(one.cache)):
        return without_across(made), width
    for number, layer in enumerate(across_of_cache(made)):
        held = [(across_of_cache(one.cache)[number], one.row) for one in sources]
        for name in ("keys", "values"):
            rows = [getattr(own, name)[index] for own, index in held]
            setattr(layer, name, torch.stack(_grown(rows, right=True)))
    return made, width


def own_layers_of(cache: Any) -> Any:
    """Return a cache object with layer objects of its own, with the same tensors as `cache`."""
    made = copy.copy(cache)
    if hasattr(cache, "is_updated"):
        made.self_attention_cache = own_layers_of(cache.self_attention_cache)
        made.cross_attention_cache = own_layers_of(cache.cross_attention_cache)
        made.is_updated = dict(cache.is_updated)
        return made
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict | list):
                setattr(layer, name, copy.copy(value))
    return made


def _selected(held: Tensor, chosen: list[int], cut: int) -> Tensor:
    index = torch.tensor(chosen, device=held.device)
    return (held[..., : held.shape[-2] - cut, :] if cut else held).index_select(0, index)


def _fill(
    layers: list[Any], width: int, select: Callable[[Tensor], Tensor], chosen: list[int]
) -> None:
    for layer in layers:
        for name in _COLUMNS:
            if isinstance(held := getattr(layer, name, None), Tensor):
                setattr(layer, name, select(held))
        _set_width(layer, width)
        for (name, key), held in _states(layer):
            getattr(layer, name)[key] = _selected(held, chosen, 0)


def _gather(layer: Any, parts: list[Any], sources: Sequence[Source], width: int) -> None:
    """Gather into the layer the rows of the sources, which lie in `parts`."""
    for name in _COLUMNS:
        if not isinstance(getattr(layer, name, None), Tensor):
            continue
        rows = []
        for part, one in zip(parts, sources, strict=True):
            held = getattr(part, name)[one.row]
            end = held.shape[-2] - one.cut
            rows.append(held[..., max(0, end - one.length) : end, :])
        grown = torch.stack(_grown(rows, right=False))
        size = window_of(layer)
        if size is not None and width >= size:
            grown = grown[..., grown.shape[-2] - size + 1 :, :]
        setattr(layer, name, grown)
    _set_width(layer, width)
    for (name, key), _ in _states(layer):
        own = [getattr(part, name)[key][one.row] for part, one in zip(parts, sources, strict=True)]
        getattr(layer, name)[key] = torch.stack(own)


def _set_width(layer: Any, width: int) -> None:
    if isinstance(getattr(layer, "cumulative_length", None), int):
        layer.cumulative_length = width


def _states(layer: Any) -> list[tuple[tuple[str, Any], Tensor]]:
    """Return every state of a layer with the names of its holder and its place there."""
    return [
        ((name, key), held)
        for name in _STATES
        for key, held in dict(getattr(layer, name, None) or {}).items()
        if isinstance(held, Tensor)
    ]


def _grown(rows: list[Tensor], *, right: bool) -> list[Tensor]:
    """Pad (..., n, D) each to one n, filled up with zeros."""
    longest = max(row.shape[-2] for row in rows)
    return [_padded(row, longest - row.shape[-2], right=right) for row in rows]


def _padded(row: Tensor, count: int, *, right: bool) -> Tensor:
    return F.pad(row, (0, 0, 0, count) if right else (0, 0, count, 0)) if count else row


def without_across(cache: Any) -> Any:
    """Return the cache object without encoder states; the module is yet to add its own."""
    cache.cross_attention_cache.reset()
    cache.is_updated = dict.fromkeys(cache.is_updated, False)
    return cache


def emptied(form: Any) -> Any:
    """Return a cache object like `form` that holds nothing."""
    made = own_layers_of(form)
    for layer in (*layers_of(made), *across_of_cache(made)):
        for name, key in [place for place, _ in _states(layer)]:
            getattr(layer, name)[key] = getattr(layer, name)[key].clone()
    made.reset()
    return made


def put_keys(layer: Any, keys: Tensor, values: Tensor, width: int) -> None:
    """Put keys and values (R, K, S, D) of `width` columns into the layer.

    It holds the last of them where a window shows no more.
    """
    size = window_of(layer)
    first = max(0, keys.shape[-2] - (size - 1)) if size is not None else 0
    layer.keys, layer.values = keys[..., first:, :], values[..., first:, :]
    _set_width(layer, width)


# --- windows --------------------------------------------------------------------------------------


def keep_spare(sheet: Sheet, spare: int) -> None:
    """Let the next forward leave `spare` columns that windows could have dropped."""
    if not (spare or sheet.spare):
        return
    for layer in layers_of(sheet.cache):
        size = window_of(layer)
        if size is None or not hasattr(layer, "record_past"):
            continue
        layer.record_past = spare > 0
        if sheet.spare and is_kept(layer) and layer.keys.shape[-2] >= size:
            layer.keys = layer.keys[..., 1 - size :, :]
            layer.values = layer.values[..., 1 - size :, :]
    sheet.spare = spare
