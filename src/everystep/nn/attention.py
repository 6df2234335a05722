"""Attention over keys and values that are stored elsewhere.

Query heads that share a key head are folded into the query axis, so that keys and values are read
once per key head and never repeated. Masks are additive, and `View` alone makes them. A rectangle
of queries may look at several stores at once: their scores are concatenated before one softmax.
Nothing here knows rows or caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.devices import on_device

_FEW_QUERIES = 16


@dataclass(frozen=True)
class Rule:
    """The way a layer attends: the factor on scores, the cap on them, the window.

    `window`: key j is seen from position i iff i - window < j <= i.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """T5's bias: one learned number per head and bucket of distances, `table` (buckets, H).

    Half of the buckets are exact distances, the rest grow as logarithms. `both_ways`: keys after
    the query have buckets of their own, as in an encoder. Source: Raffel et al. 2020;
    transformers' `T5Attention._relative_position_bucket`.
    """

    table: Tensor
    max_distance: int
    both_ways: bool

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return biases (..., H, T, S) for query positions (..., T) and key positions (..., S)."""
        distance = keys[..., None, :] - queries[..., :, None]
        return F.embedding(self.bucket(distance), self.table).movedim(-1, -3)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the buckets of key minus query positions, of the same shape."""
        buckets, offset = self.table.shape[0], torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            offset = (distance > 0) * buckets
        away = distance.abs() if self.both_ways else -distance.clamp(max=0)
        exact = buckets // 2
        growth = torch.log(away.float() / exact) / math.log(self.max_distance / exact)
        # Distance 0 has the logarithm minus infinity, which no integer is; it is exact anyway.
        far = exact + (growth.clamp(min=0) * (buckets - exact)).long()
        return offset + torch.where(away < exact, away, far.clamp(max=buckets - 1))


Places = np.ndarray | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The part of the keys that queries may see; its masks are made once per window and bias.

    `queries` (..., T) and `keys` (..., S): where they stand in their rows. `seen`: which keys are
    seen, as far as that is not said by places, (..., 1 or H, 1 or T, S), or None for all. `causal`:
    no query sees a key after it. `aligned`: the queries are the keys, all of them, in order.
    """

    queries: Places
    keys: Places
    seen: Places | None = None
    causal: bool = True
    aligned: bool = False
    _masks: dict[object, Tensor | None] = field(default_factory=dict)

    def mask(
        self, rule: Rule, bias: RelativeBias | None, q: Tensor, kv_heads: int
    ) -> Tensor | None:
        """Return the mask (..., 1 or K, T * H/K, S) for queries q (R, T, H, D), or None."""
        key = (rule.window, id(bias))
        if key not in self._masks:
            self._masks[key] = self._make(rule, bias, q, kv_heads)
        return self._masks[key]

    def is_plain(self, rule: Rule, bias: RelativeBias | None) -> bool:
        """Return whether position i sees the keys j <= i of its own row and no more is asked."""
        plain = rule.window is None and rule.softcap is None and bias is None
        return plain and self.aligned and self.causal and self.seen is None

    def _make(
        self, rule: Rule, bias: RelativeBias | None, q: Tensor, kv_heads: int
    ) -> Tensor | None:
        window = rule.window if self._exceeds(rule.window) else None
        if not self.causal and self.seen is None and window is None and bias is None:
            return None
        queries, keys = (on_device(q.device, x) for x in (self.queries, self.keys))
        if self.causal or window is not None:
            shown = visible(queries, keys, window, causal=self.causal)[..., None, :, :]
        else:
            shown = torch.ones(1, 1, 1, dtype=torch.bool, device=q.device)
        if self.seen is not None:
            shown = shown & on_device(q.device, self.seen)
        mask = additive(shown, q.dtype)
        return _folded(mask if bias is None else mask + bias(queries, keys), q, kv_heads)

    def _exceeds(self, window: int | None) -> bool:
        """Return whether a query may stand further from a key than a window reaches."""
        if window is None or isinstance(self.queries, Tensor) or isinstance(self.keys, Tensor):
            return window is not None
        return bool(self.queries.max() - self.keys.min() >= window)


def _folded(mask: Tensor, q: Tensor, kv_heads: int) -> Tensor:
    """Fold (..., 1 or H, 1 or T, S) -> (..., 1 or K, 1 or T * H/K, S), as `fold_heads` does."""
    *lead, heads, length, keys = mask.shape
    groups = q.shape[2] // kv_heads
    if heads > 1:
        apart = mask.reshape(*lead, kv_heads, groups, length, keys).transpose(-2, -3)
        if length < q.shape[1]:
            apart = apart.expand(*lead, kv_heads, q.shape[1], groups, keys)
        return apart.reshape(*lead, kv_heads, -1, keys)
    # Each position's query heads lie side by side in the folded axis.
    return mask if length == 1 else mask.repeat_interleave(groups, dim=-2)


def look(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View, bias: RelativeBias | None = None
) -> Tensor:
    """Attend with queries (R, T, H, D) to keys and values (R, K, S, D) -> (R * T, H * D)."""
    if view.is_plain(rule, bias):
        return (
            attend_causally(q.transpose(1, 2), k, v, rule).transpose(1, 2).flatten(0, 1).flatten(1)
        )
    out = attend(fold_heads(q, k.shape[1]), k, v, rule, view.mask(rule, bias, q, k.shape[1]))
    return unfold_heads(out, q.shape[1])


def look_and_weigh(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View, bias: RelativeBias | None = None
) -> tuple[Tensor, Tensor]:
    """Do as `look`, and return the (R, H, T, S) weights too."""
    folded, mask = fold_heads(q, k.shape[1]), view.mask(rule, bias, q, k.shape[1])
    weights = probabilities(folded @ k.transpose(-1, -2), rule, mask)
    rows, length = q.shape[:2]
    apart = weights.view(rows, k.shape[1], length, -1, k.shape[2]).transpose(2, 3)
    return unfold_heads(weights @ v, length), apart.flatten(1, 2)


def fold_heads(q: Tensor, kv_heads: int) -> Tensor:
    """Fold (R, T, H, D) -> (R, K, T * H/K, D), the queries by key head, positions outermost."""
    rows, length, heads, dim = q.shape
    grouped = q.view(rows, length, kv_heads, heads // kv_heads, dim)
    if length == 1:
        return grouped.view(rows, kv_heads, heads // kv_heads, dim)
    return grouped.transpose(1, 2).reshape(rows, kv_heads, -1, dim)


def unfold_heads(out: Tensor, length: int) -> Tensor:
    """Undo `fold_heads`: (R, K, T * H/K, D) -> (R * T, H * D)."""
    rows, kv_heads, folded, dim = out.shape
    if length == 1:
        return out.reshape(rows, kv_heads * folded * dim)
    grouped = out.view(rows, kv_heads, length, folded // length, dim).transpose(1, 2)
    return grouped.reshape(rows * length, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, mask: Tensor | None) -> Tensor:
    """Attend with (R, K, q, D) to (R, K, S, D) -> (R, K, q, D), with a `mask` for (R, K, q, S)."""
    # For a few queries of many rows the fused kernel of the CPU costs up to twice as much. Under
    # autocast it alone keeps scores in float32.
    few = q.device.type == "cpu" and q.shape[2] <= _FEW_QUERIES
    few = few and not torch.is_autocast_enabled("cpu")
    if rule.softcap is None and not few:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    return probabilities(q @ k.transpose(-1, -2), rule, mask) @ v


def attend_causally(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """Attend with (R, H, T, D) to (R, K, T, D) -> (R, H, T, D): position i sees the keys j <= i."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def probabilities(scores: Tensor, rule: Rule, mask: Tensor | None) -> Tensor:
    """Turn raw scores (..., q, S) into weights (..., q, S) that sum to one."""
    scores = scores * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    exact = scores.dtype if scores.dtype.itemsize >= 4 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=exact).to(scores.dtype)


def visible(queries: Tensor, keys: Tensor, window: int | None, *, causal: bool = True) -> Tensor:
    """Return (..., T, S): which keys at (..., S) the queries at (..., T) see."""
    i, j = queries[..., :, None], keys[..., None, :]
    if window is None:
        return j <= i
    inside = j > i - window
    return inside & (j <= i) if causal else inside


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a key is seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, float("-inf")
    )
