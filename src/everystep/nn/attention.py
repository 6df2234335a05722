"""Attention over keys and values that somebody else stores.

Query heads that share a key head are folded into the query axis, so that keys and values are read
once per key head and never repeated. Masks are additive. A rectangle of queries may look at several
stores at once: their scores are concatenated before one softmax. Nothing here knows rows or caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_QUERIES = 16


@dataclass(frozen=True)
class Rule:
    """How a layer attends: the factor on scores, the cap on them, the window.

    `window`: key j is seen from position i iff i - window < j <= i.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None


def fold_heads(q: Tensor, kv_heads: int) -> Tensor:
    """(R, T, H, D) -> (R, K, T * H/K, D): the queries of each key head, positions outermost."""
    rows, length, heads, dim = q.shape
    grouped = q.view(rows, length, kv_heads, heads // kv_heads, dim)
    if length == 1:
        return grouped.view(rows, kv_heads, heads // kv_heads, dim)
    return grouped.transpose(1, 2).reshape(rows, kv_heads, -1, dim)


def unfold_heads(out: Tensor, length: int) -> Tensor:
    """(R, K, T * H/K, D) -> (R * T, H * D), the inverse of `fold_heads`."""
    rows, kv_heads, folded, dim = out.shape
    if length == 1:
        return out.reshape(rows, kv_heads * folded * dim)
    grouped = out.view(rows, kv_heads, length, folded // length, dim).transpose(1, 2)
    return grouped.reshape(rows * length, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, mask: Tensor | None) -> Tensor:
    """(R, K, q, D) over (R, K, S, D) -> (R, K, q, D); `mask` broadcasts to (R, K, q, S)."""
    # For a few queries of many rows the fused kernel of the CPU costs up to twice as much.
    few = q.device.type == "cpu" and q.shape[2] <= _FEW_QUERIES
    if rule.softcap is None and not few:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    return probabilities(q @ k.transpose(-1, -2), rule, mask) @ v


def attend_causally(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """(R, H, T, D) over (R, K, T, D) -> (R, H, T, D): position i sees the keys j <= i."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def probabilities(scores: Tensor, rule: Rule, mask: Tensor | None) -> Tensor:
    """Raw scores (..., q, S) -> weights (..., q, S) that sum to one."""
    scores = scores * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    exact = scores.dtype if scores.dtype.itemsize >= 4 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=exact).to(scores.dtype)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions (..., S) are seen from which query positions (..., T): (..., T, S)."""
    i, j = queries[..., :, None], keys[..., None, :]
    seen = j <= i
    return seen if window is None else seen & (j > i - window)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, float("-inf")
    )
