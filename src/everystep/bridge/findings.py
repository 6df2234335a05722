"""What a module of another library can do, as far as the engine needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everystep.bridge.sheets import (
    across_of_cache,
    is_kept,
    is_linear,
    is_opaque,
    layers_of,
    window_of,
)
from everystep.nn.network import Cross, Full, State, Store, Window


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """`cache`: a cache object that the module has filled, of one row. `vocab_size`: the width of
    its logits. `ragged`: rows of different lengths may share a rectangle, padded on the left.
    `several`: a row goes on by several positions at once. `cuts`: a row can be cut back. `masks`:
    it takes a mask of its own for every position. `bare`: going on without
    a mask that hides nothing gives the same bits, and nothing looks through it at every step."""

    cache: Any
    vocab_size: int
    ragged: bool = False
    several: bool = False
    cuts: bool = False
    masks: bool = False
    bare: bool = False

    @property
    def linear(self) -> bool:
        """True if all layers hold states, so that nothing counts columns."""
        return all(is_linear(one) and not is_kept(one) for one in layers_of(self.cache))

    @property
    def forgets(self) -> bool:
        """True if a layer loses what a row held when it goes on."""
        return any(is_linear(one) or window_of(one) for one in layers_of(self.cache))

    @property
    def opaque(self) -> bool:
        """True if the cache object holds what is not known here: a row has one to itself."""
        return is_opaque(self.cache)

    @property
    def exports(self) -> bool:
        """True if a row can be shown as keys and values, alike in all layers."""
        if self.opaque:
            return False
        layers = layers_of(self.cache)
        shapes = {one.keys.shape[1::2] for one in layers if is_kept(one)}
        kept = all(is_kept(one) and not is_linear(one) for one in layers)
        return kept and len(shapes) == 1

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """The stores of each layer for a row, in the words of a network.

        They are states where the cache object cannot be shown as keys and values.
        """
        if not self.exports:
            return ((State(()),),)
        across = across_of_cache(self.cache)
        found: list[tuple[Store, ...]] = []
        for layer in layers_of(self.cache):
            sizes = (layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
            size = window_of(layer)
            own: Store = Full(*sizes) if size is None else Window(*sizes, size)
            found.append((own, Cross(*sizes)) if across else (own,))
        return tuple(found)
