"""Cache objects under transformers' names: what callers pass as `past_key_values` and get back.

A cache is one layer object per layer of the model. The engine never computes with these: a cache
that is passed in is imported into rows, and rows are exported into one when a call is over. What a
cache can do ("grow", "fork", "truncate") is what its layers can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everystep.cache.cache_config import (
    layer_windows,
    layers_of,
    read_quantization,
    refuse_quantized_windows,
)
from everystep.cache.layers import (
    ALL_ABILITIES,
    CacheLayer,
    Change,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    briefly,
)
from everystep.errors import RequestError, UnsupportedError, shown

Pair = tuple[Tensor, Tensor]


class Cache:
    """Keys and values of every layer, (B, K, S, D) each.

    Made from `layers`, or from a class of layers, of which one is added whenever a layer is first
    updated. `pads`: (B,) how many places before each row hold nothing, where a call of `generate`
    has filled it; `shifts`: (B,) what the position id of what comes next is above its place in the
    row, where pictures say so. Source: transformers' `Cache`.
    """

    def __init__(
        self,
        layers: Iterable[CacheLayer] | None = None,
        layer_class_to_replicate: type[DynamicLayer] | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        if offloading:
            raise UnsupportedError(
                "a cache is not offloaded: rows stay where the model computes",
                wanted="a cache on the model's device",
                got="offloading=True",
                do="Use a DynamicCache; a QuantizedCache, or cache_dtype, saves memory",
            )
        if (layers is None) == (layer_class_to_replicate is None):
            raise RequestError(
                "a cache is made from layers, or from a class of them",
                wanted="layers or layer_class_to_replicate",
                got="both" if layers is not None else "neither",
            )
        self.layers: list[CacheLayer] = list(layers or ())
        self.layer_class_to_replicate = layer_class_to_replicate
        self.pads: Tensor | None = None
        self.shifts: Tensor | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({briefly(self.layers)})"

    def __len__(self) -> int:
        """Return the number of layers; those that are added on demand count once they exist."""
        return len(self.layers)

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """Yield keys, values and the window (None for all positions) of every layer."""
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window)

    def __getitem__(self, layer_idx: int) -> tuple[Tensor | None, Tensor | None]:
        """Return keys and values of a layer."""
        layer = self.layers[layer_idx]
        return layer.keys, layer.values

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: Mapping[str, Any] | None = None,
    ) -> Pair:
        """Store (B, K, T, D) in a layer and return what the new positions may see, S >= T.

        `cache_kwargs`: not read; positions follow from what is stored.
        """
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class_to_replicate())
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many positions a layer was given; 0 for one that does not exist yet."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return how many positions fit into a layer, or into the largest; -1 without a limit."""
        if layer_idx is None:
            return max((layer.get_max_length() for layer in self.layers), default=-1)
        return self.layers[layer_idx].get_max_length() if layer_idx < len(self.layers) else -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return how many positions fit into a layer; -1 without a limit."""
        return self.get_max_length(layer_idx)

    def reset(self) -> None:
        """Drop everything that is stored; room made before stays."""
        self.pads = self.shifts = None
        for layer in self.layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` positions of every layer."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put into row b what row `beam_idx[b]` held."""
        rows = self._rows(beam_idx)
        self._change(lambda x: x[rows.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, its copies side by side."""
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep only the given rows, in their order."""
        rows = self._rows(indices)
        self._change(lambda x: x[rows.to(x.device)])

    def activate_past_recording(self) -> None:
        """Let sliding layers keep, until the next `crop`, what they need to go back."""
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()

    def to_legacy_cache(self) -> tuple[Pair, ...]:
        """Return (keys, values) of every layer, as releases before caches were objects had them."""
        return tuple(layer.whole() for layer in self.layers)

    @property
    def abilities(self) -> frozenset[str]:
        """The abilities, of "grow", "fork" and "truncate", that all layers have."""
        return ALL_ABILITIES.intersection(*(layer.abilities for layer in self.layers))

    @property
    def batch_size(self) -> int:
        """The number of rows that are stored; -1 before the first update."""
        return self.layers[0].batch_size if self.layers else -1

    @property
    def is_initialized(self) -> bool:
        """True if every layer was updated."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def is_croppable(self) -> bool:
        """True if `crop` leaves it as if the positions had never been."""
        return "truncate" in self.abilities

    @property
    def is_compileable(self) -> bool:
        """True if its memory stays where it is."""
        return bool(self.layers) and all(layer.is_compileable for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """One flag per layer: it keeps a window only."""
        return [layer.is_sliding for layer in self.layers]

    def _change(self, change: Change) -> None:
        for layer in self.layers:
            layer.change_rows(change)
        if self.pads is not None:
            self.pads = change(self.pads)
        if self.shifts is not None:
            self.shifts = change(self.shifts)

    def _rows(self, indices: Any) -> Tensor:
        """Return (n,) numbers of rows, or one bool per row.

        Raise RequestError for anything else.
        """
        try:
            rows = torch.as_tensor(indices)
        except (TypeError, ValueError, RuntimeError):
            rows = torch.empty(0)
        stored = self.batch_size
        fits = rows.dim() == 1 and rows.dtype in (torch.int64, torch.int32, torch.bool)
        if fits and stored >= 0 and len(rows):
            if rows.dtype == torch.bool:
                fits = len(rows) == stored
            else:
                fits = -stored <= int(rows.min()) and int(rows.max()) < stored
        if not fits:
            raise RequestError(
                "these are no rows of the cache",
                wanted=f"a list of integers below {stored}" if stored >= 0 else "integers",
                got=shown(indices),
            )
        return rows if rows.dtype == torch.bool else rows.long()


class DynamicCache(Cache):
    """Grows with what is stored; layers with a window keep the window.

    `ddp_cache_data`: (keys, values) per layer to begin with. `config`: the model's configuration,
    which gives the windows, or a list of them; without it every layer keeps everything.
    """

    def __init__(
        self,
        ddp_cache_data: Iterable[Sequence[Any]] | None = None,
        config: Any = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        given = layers_of(ddp_cache_data)
        windows = [_window(one) for one in given] if config is None else layer_windows(config)
        layers = [
            DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
            for window in windows
        ]
        lazily = None if layers else DynamicLayer
        super().__init__(layers or None, lazily, offloading, offload_only_non_sliding)
        for index, one in enumerate(given):
            if one[0] is not None:
                self.update(one[0], one[1], index)

    @classmethod
    def from_legacy_cache(cls, past_key_values: Iterable[Sequence[Any]] | None) -> DynamicCache:
        """Return a cache that holds (keys, values) of every layer."""
        return cls(past_key_values)


class StaticCache(Cache):
    """Has room for `max_cache_len` positions from the first update on, and never more."""

    def __init__(
        self,
        config: Any,
        max_cache_len: int,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        if (
            isinstance(max_cache_len, bool)
            or not isinstance(max_cache_len, int)
            or max_cache_len < 1
        ):
            raise RequestError(
                "max_cache_len is impossible", wanted="at least 1", got=shown(max_cache_len)
            )
        layers = [
            StaticLayer(max_cache_len)
            if window is None
            else StaticSlidingWindowLayer(max_cache_len, window)
            for window in layer_windows(config)
        ]
        super().__init__(layers, None, offloading, offload_only_non_sliding)
        self.max_cache_len = max_cache_len


SlidingWindowCache = StaticCache
"""transformers' old name: windows follow from the model's configuration."""


class QuantizedCache(Cache):
    """Keeps all but the last `residual_length` positions as integers of 8 or 4 bits.

    Keys share a step per channel over `q_group_size` positions, values per position over up to as
    many channels. `backend`: "everystep", the library's own code, whose grouping has no axes to
    choose. For models without windows.
    """

    def __init__(
        self,
        backend: str,
        config: Any,
        nbits: int | None = None,
        axis_key: int | None = None,
        axis_value: int | None = None,
        q_group_size: int | None = None,
        residual_length: int | None = None,
    ) -> None:
        how = read_quantization(
            {
                "backend": backend,
                "nbits": nbits,
                "axis_key": axis_key,
                "axis_value": axis_value,
                "q_group_size": q_group_size,
                "residual_length": residual_length,
            }
        )
        windows = layer_windows(config)
        refuse_quantized_windows(windows)
        super().__init__([QuantizedLayer(how) for _ in windows])


class EncoderDecoderCache(Cache):
    """The cache of a decoder: its own positions, and keys and values of the encoder's states.

    `is_updated`: per layer, whether the latter are stored. One argument: per layer a tuple (own
    keys, own values, encoder keys, encoder values).
    """

    def __init__(self, *caches: Any) -> None:
        own, across = _halves(caches)
        self.self_attention_cache: Cache = own
        self.cross_attention_cache: Cache = across
        # The decoder's own layers are these layers, and grow in one list.
        self.layers = own.layers
        self.pads = self.shifts = None
        self.layer_class_to_replicate = own.layer_class_to_replicate
        self.is_updated = {
            index: across.get_seq_length(index) > 0 for index in range(len(across.layers))
        }

    def __repr__(self) -> str:
        return f"EncoderDecoderCache({self.self_attention_cache}, {self.cross_attention_cache})"

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """Yield own keys, values and window, then the encoder's, of every layer."""
        for own, across in zip(self.self_attention_cache, self.cross_attention_cache, strict=False):
            yield (*own, *across)

    def reset(self) -> None:
        """Drop everything that is stored, of either half."""
        self.self_attention_cache.reset()
        self.cross_attention_cache.reset()
        self.is_updated = dict.fromkeys(self.is_updated, False)

    def to_legacy_cache(self) -> tuple[tuple[Tensor, ...], ...]:  # type: ignore[override]
        """Return (own keys, own values, encoder keys, encoder values) of every layer."""
        own = self.self_attention_cache.to_legacy_cache()
        across = self.cross_attention_cache.to_legacy_cache()
        return tuple((*one, *other) for one, other in zip(own, across, strict=True))

    @classmethod
    def from_legacy_cache(
        cls, past_key_values: Iterable[Sequence[Any]] | None
    ) -> EncoderDecoderCache:
        """Return a cache that holds the four tensors of every layer."""
        return cls(past_key_values or ())

    def _change(self, change: Change) -> None:
        self.self_attention_cache._change(change)
        self.cross_attention_cache._change(change)


def own_half(cache: Cache) -> Cache:
    """Return the half of the decoder's own positions, which is a plain cache itself."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


class OffloadedCache(Cache):
    """Refused: keys and values that wait in the memory of the host, layer by layer."""

    def __init__(self) -> None:
        super().__init__(offloading=True)


OffloadedStaticCache = OffloadedCache
"""The same of a static cache."""


def _window(data: tuple[Any, ...]) -> int | None:
    return None if len(data) < 3 or data[2] is None else int(data[2])


def _halves(caches: tuple[Any, ...]) -> tuple[Cache, Cache]:
    if len(caches) == 2 and all(isinstance(one, Cache) for one in caches):
        return caches[0], caches[1]
    if len(caches) != 1:
        raise RequestError(
            "an EncoderDecoderCache has two halves",
            wanted="two caches, or one sequence of tuples",
            got=[type(one).__name__ for one in caches],
        )
    data = layers_of(caches[0])
    wrong = [len(one) for one in data if len(one) not in (4, 6)]
    if wrong:
        raise RequestError(
            "a layer's tuple has the wrong length", wanted="4 or 6 tensors", got=wrong[0]
        )
    half = [len(one) // 2 for one in data]
    own = DynamicCache(one[:n] for one, n in zip(data, half, strict=True))
    return own, DynamicCache(one[n:] for one, n in zip(data, half, strict=True))
