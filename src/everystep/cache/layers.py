"""One layer of a cache object: keys and values (B, K, S, D) as callers of a model see them.

Names and meaning are those of transformers' cache layers (transformers 5.23, `cache_utils`). A
layer knows neither models nor the rows in which the engine keeps keys and values while it works.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everystep.cache.formats import Codes, Quantization
from everystep.errors import RequestError, UnsupportedError
from everystep.memory import require_memory

ALL_ABILITIES = frozenset({"grow", "fork", "truncate"})
Change = Callable[[Tensor], Tensor]


class CacheLayer(ABC):
    """A layer of a cache, with what every kind of it can do.

    `keys`, `values`: what is stored, (B, K, S, D), or None before the first update. `abilities`:
    of "grow" (beyond a size fixed before), "fork" (rows may be copied) and "truncate".
    """

    is_sliding = False
    is_compileable = False
    abilities = ALL_ABILITIES

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._length = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.get_seq_length()})"

    @abstractmethod
    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, D) after what there is; return all that the new positions may see."""

    @abstractmethod
    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` positions; the number is negative or 0."""

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return (B, K, S, D) keys and values as they are stored.

        Raise RequestError where nothing is.
        """
        if self.keys is None or self.values is None:
            raise RequestError("a layer of the cache is empty", do="Update it first")
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return how many positions were stored, those that a window has dropped included."""
        return self._length

    def get_max_length(self) -> int:
        """Return how many positions it can hold at most; -1 without a limit."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """True if the size of a row is known: something was stored."""
        return self.keys is not None

    @property
    def is_croppable(self) -> bool:
        """True if `crop` leaves it as if the positions had never been."""
        return "truncate" in self.abilities

    @property
    def batch_size(self) -> int:
        """The number of rows that are stored; -1 before the first update."""
        return -1 if self.keys is None else self.keys.shape[0]

    def reset(self) -> None:
        """Drop everything that is stored."""
        self.keys = self.values = None
        self._length = 0

    def change_rows(self, change: Change) -> None:
        """Replace every stored tensor by what `change` makes of its rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        count = keys.shape[-2]
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=-2)
            values = torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values
        self._length += count


class DynamicLayer(CacheLayer):
    """Grows with every update."""

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, D) after what there is, and return everything."""
        self._append(key_states, value_states)
        return self.whole()

    def crop(self, tokens_to_remove: int) -> None:
        count = _removed(tokens_to_remove, self._length)
        if count:
            self.change_rows(lambda x: x[..., :-count, :])
            self._length -= count


class DynamicSlidingWindowLayer(DynamicLayer):
    """Grows up to the positions that a window of `sliding_window` can still see: one less."""

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self._keeps_past = False

    def get_max_length(self) -> int:
        return self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep everything until the next `crop`, which may then go back."""
        self._keeps_past = True

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, D); return these and what the first of them can see before it."""
        keys, values = super().update(key_states, value_states)
        if self._keeps_past:
            seen = self.sliding_window - 1 + key_states.shape[-2]
            return keys[..., -seen:, :], values[..., -seen:, :]
        self.change_rows(self._last)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last positions, and what the window no longer sees."""
        full = self._length >= self.sliding_window
        if full and not self._keeps_past:
            raise UnsupportedError(
                "a sliding layer cannot go back: what its window had left behind is gone",
                wanted=f"fewer than {self.sliding_window} positions, or a recorded past",
                got=f"{self._length} positions",
                do="Call activate_past_recording before the positions are stored",
            )
        super().crop(tokens_to_remove)
        if full:
            self.change_rows(self._last)

    def _last(self, x: Tensor) -> Tensor:
        """Return the positions that the next one can see; -0 would be all of them."""
        return x[..., max(x.shape[-2] - self.sliding_window + 1, 0) :, :]


class StaticLayer(CacheLayer):
    """Has room for `max_cache_len` positions from the first update on; the rest of it is 0."""

    is_compileable = True
    abilities = frozenset({"fork"})

    def __init__(self, max_cache_len: int) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len

    def get_max_length(self) -> int:
        return self.max_cache_len

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, D) after what there is; return the whole room."""
        end = self._length + key_states.shape[-2]
        if end > self.max_cache_len:
            raise RequestError(
                "the static cache is too small",
                wanted=f"room for {end} positions",
                got=f"max_cache_len={self.max_cache_len}",
                do="Make it with a larger max_cache_len",
            )
        held = self._keep(key_states, value_states, self._length)
        self._length = end
        return held

    def _keep(self, keys: Tensor, values: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return the room, with (B, K, T, D) written into it from `start` on."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._room(keys), self._room(values)
        for room, new in ((self.keys, keys), (self.values, values)):
            room[..., start : start + new.shape[-2], :] = new
        return self.keys, self.values

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return (B, K, S, D) keys and values, without the room that is left."""
        keys, values = super().whole()
        kept = min(self._length, self.max_cache_len)
        return keys[..., :kept, :], values[..., :kept, :]

    def _room(self, like: Tensor) -> Tensor:
        batch, heads, _, dim = like.shape
        shape = (batch, heads, self.max_cache_len, dim)
        what, do = f"a static cache of {shape}", "Make it with a smaller max_cache_len"
        require_memory(2 * math.prod(shape) * like.itemsize, what, do, like.device)
        return like.new_zeros(shape)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: positions of a static cache are never taken back."""
        _removed(tokens_to_remove, self._length)
        raise UnsupportedError(
            "a static cache cannot be cropped", wanted="a DynamicCache", do="Use a DynamicCache"
        )

    def reset(self) -> None:
        """Fill the room, which stays, with zeros."""
        self.change_rows(Tensor.zero_)
        self._length = 0


class StaticSlidingWindowLayer(StaticLayer):
    """Has room for the last positions that a window sees, at most `max_cache_len`."""

    is_sliding = True

    def __init__(self, max_cache_len: int, sliding_window: int) -> None:
        super().__init__(min(max_cache_len, sliding_window))

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, D), of which the last that fit stay; return what the first sees."""
        end = self._length + key_states.shape[-2]
        if end <= self.max_cache_len:
            return super().update(key_states, value_states)
        keys, values = self._joined(self.keys, key_states), self._joined(self.values, value_states)
        self._keep(keys[..., -self.max_cache_len :, :], values[..., -self.max_cache_len :, :])
        self._length = end
        return keys, values

    def _joined(self, held: Tensor | None, new: Tensor) -> Tensor:
        if held is None:
            return new
        # The first new position no longer sees the oldest of a full window.
        first = 1 if self._length >= self.max_cache_len else 0
        return torch.cat([held[..., first : min(self._length, self.max_cache_len), :], new], dim=-2)


class QuantizedLayer(CacheLayer):
    """Keeps all but the last positions as integers of 8 or 4 bits.

    `keys`, `values` hold the positions in full precision; older ones are groups of codes. It can be
    cropped, but what was packed stays rounded, so it is not as if the positions had never been.
    """

    abilities = frozenset({"grow", "fork"})

    def __init__(self, quantization: Quantization) -> None:
        super().__init__()
        self.quantization = quantization
        self._groups: list[tuple[Codes, Codes]] = []

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, D); return everything, what was stored before as it is stored."""
        self._append(key_states, value_states)
        everything = self.whole()
        self._pack()
        return everything

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return (B, K, S, D) keys and values of all positions."""
        own = super().whole()
        coded = [self.quantization.decode(*one, own[0].dtype) for one in self._groups]
        keys, values = zip(*coded, own, strict=True)
        return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last positions; the rest of a group that is cut stays as it was stored."""
        count = _removed(tokens_to_remove, self._length)
        if not count:
            return
        length, group = self._length - count, self.quantization.group
        keys, values = self.whole()
        del self._groups[length // group :]
        first = len(self._groups) * group
        self.keys, self.values = keys[..., first:length, :], values[..., first:length, :]
        self._length = length

    def reset(self) -> None:
        super().reset()
        self._groups.clear()

    def change_rows(self, change: Change) -> None:
        """Change rows, with their codes as they are."""
        super().change_rows(change)
        self._groups = [
            (Codes(*map(change, keys)), Codes(*map(change, values)))
            for keys, values in self._groups
        ]

    @property
    def stored_bytes(self) -> int:
        """The size of keys and values."""
        parts = [part for pair in self._groups for one in pair for part in one]
        full = [one for one in (self.keys, self.values) if one is not None]
        return sum(part.numel() * part.element_size() for part in [*parts, *full])

    def _pack(self) -> None:
        keys, values = super().whole()
        how, done = self.quantization, len(self._groups) * self.quantization.group
        ready = how.packed(self._length) - done
        for start in range(0, ready, how.group):
            span = slice(start, start + how.group)
            self._groups.append(how.encode(keys[..., span, :], values[..., span, :]))
        if ready > 0:
            # Without a copy the full precision of what was packed would stay in memory.
            self.keys, self.values = keys[..., ready:, :].clone(), values[..., ready:, :].clone()


def _removed(tokens_to_remove: int, length: int) -> int:
    """Return how many positions a crop takes away."""
    if tokens_to_remove > 0:
        raise RequestError(
            "crop takes the number of positions to remove, as a negative number",
            wanted="0 or less",
            got=tokens_to_remove,
            do="To keep the first n of a cache, pass n - cache.get_seq_length()",
        )
    return min(-tokens_to_remove, length)


def briefly(layers: Sequence[CacheLayer]) -> str:
    """Return how many layers there are of which kind and length, of three kinds at most."""
    kinds = Counter(map(repr, layers))
    shown = [f"{n} x {kind}" if n > 1 else kind for kind, n in kinds.most_common(3)]
    return ", ".join([*shown, "..."] if len(kinds) > 3 else shown) or "empty"
