"""One step's view of the cache: stores new keys and values, and lets queries look at their rows.

The layout comes from the plan; masks are made at the first layer that needs them and kept for the
others. The usual step is one scatter and one attention per layer. A feed that wants attention
weights or brings a mask is computed by itself over all its keys, and no other one is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from everystep.cache.plan import Feed, Plan, Rectangle, Span, make_plan
from everystep.cache.rows import Row, Rows
from everystep.errors import InvariantError, message
from everystep.nn.attention import (
    Rule,
    additive,
    attend,
    attend_causally,
    fold_heads,
    probabilities,
    unfold_heads,
    visible,
)
from everystep.nn.relative_bias import RelativeBias
from everystep.types import Extra

Mask = Tensor | None


class Context:
    """What the layers of a network see of the rows in one step."""

    def __init__(
        self,
        rows: Rows,
        feeds: Sequence[Feed],
        device: torch.device,
        extras: Mapping[int, Extra],
    ) -> None:
        self._rows = rows
        self._device = device
        self._extras = extras
        lone = {f for f, extra in extras.items() if extra.attentions or extra.mask is not None}
        self.plan: Plan = make_plan(feeds, device, lone)
        self._masks: dict[object, Mask] = {}
        self.attentions: dict[int, list[Tensor]] = {f: [] for f in lone}
        self.cross_attentions: dict[int, list[Tensor]] = {f: [] for f in lone}
        self.kept: list[Tensor] | None = None

    @property
    def order(self) -> np.ndarray | None:
        """The feed-order place of each packed position, None if they are the same."""
        return self.plan.order

    def keep(self, hidden: Tensor) -> None:
        """Remembers (N, E) hidden states if somebody asked for layers."""
        if self.kept is not None:
            self.kept.append(hidden)

    def segments(self, layer: int, row: Row) -> list[Tensor]:
        """The keys and values of a row, (2, K, n, D), one after another."""
        shelf, tails = self._rows.shelf.pool.layer(layer), self._rows.tails.layer(layer)
        parts = [shelf[:, link.segment.slot, :, : link.length] for link in row.chain]
        if row.tail:
            parts.append(tails[:, row.slot, :, : row.tail])
        return [*map(self._rows.format.unpacked, parts)]

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        """Stores kv (N, 2, K, D), lets q (N, H, D) look at its rows, returns (N, H * D)."""
        plan, kept = self.plan, self._rows.format.packed(kv)
        # Indices on both sides of a slice: the result's first dimension is theirs, (N, 2, K, D).
        self._rows.tails.layer(layer)[:, plan.slots, :, plan.places] = kept
        kv = self._rows.format.unpacked(kept)
        parts = []
        if plan.rectangle is not None:
            parts.append(self._rectangle(layer, q, plan.rectangle, rule, bias))
        parts += [self._span(layer, q, kv, span, rule, bias) for span in plan.spans]
        stop = len(q) - sum(feed.count for feed in plan.alone)
        for feed in plan.alone:
            start, stop = stop, stop + feed.count
            parts.append(self._alone(layer, q[start:stop], feed, rule, bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_across(self, layer: int, q: Tensor, rule: Rule) -> Tensor:
        """Lets q (N, H, D) look at the encoder states of its rows, returns (N, H * D)."""
        plan = self.plan
        parts = []
        if plan.rectangle is not None:
            parts.append(self._rectangle_across(layer, q, plan.rectangle, rule))
        for span in plan.spans:
            for index, feed in enumerate(span.feeds):
                start = span.offset + index * span.count
                k, v = self._across(layer, feed.row)
                folded = fold_heads(q[None, start : start + span.count], k.shape[0])
                parts.append(unfold_heads(attend(folded, k[None], v[None], rule, None), span.count))
        stop = len(q) - sum(feed.count for feed in plan.alone)
        for feed in plan.alone:
            start, stop = stop, stop + feed.count
            k, v = self._across(layer, feed.row)
            kept = self.cross_attentions[feed.index]
            parts.append(_weighed(q[start:stop], k, v, rule, None, kept))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # --- rectangles -------------------------------------------------------------------------------

    def _rectangle(
        self, layer: int, q: Tensor, box: Rectangle, rule: Rule, bias: RelativeBias | None
    ) -> Tensor:
        tails = self._rows.tails.layer(layer)
        k, v = self._rows.format.unpacked(tails[:, : box.rows, :, : box.tail])
        folded = fold_heads(_filled(q, box), k.shape[1])
        mask = self._box_mask(box, rule, bias, folded.shape[2])
        if box.levels:
            out = self._chained(layer, folded, k, v, box, rule, mask)
        else:
            out = attend(folded, k, v, rule, mask)
        return _packed(unfold_heads(out, box.length), box)

    def _chained(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, box: Rectangle, rule: Rule, mask: Mask
    ) -> Tensor:
        """One softmax over the scores of every level of segments and of the tails."""
        shelf = self._rows.shelf.pool.layer(layer)
        held = [shelf[:, one.first : one.last, :, : one.length] for one in box.levels]
        stores = map(self._rows.format.unpacked, held)
        pairs = list(zip(box.levels, stores, strict=True))
        scores = [level.scores(q, store[0]) for level, store in pairs]
        weights = probabilities(torch.cat([*scores, q @ k.transpose(-1, -2)], -1), rule, mask)
        lengths = [*(level.length for level in box.levels), box.tail]
        *shared, own = torch.split(weights, lengths, dim=-1)
        out = own @ v
        for (level, store), part in zip(pairs, shared, strict=True):
            out = out + level.mix(part, store[1])
        return out

    def _rectangle_across(self, layer: int, q: Tensor, box: Rectangle, rule: Rule) -> Tensor:
        level = box.across
        if level is None:
            raise InvariantError(message("rows of a model with an encoder have no encoder states"))
        k, v = self._rows.across.pool.layer(layer)[:, level.first : level.last, :, : level.length]
        folded = fold_heads(_filled(q, box), k.shape[1])
        weights = probabilities(level.scores(folded, k), rule, self._across_mask(box, q.dtype))
        return _packed(unfold_heads(level.mix(weights, v), box.length), box)

    def _box_mask(self, box: Rectangle, rule: Rule, bias: RelativeBias | None, folded: int) -> Mask:
        """(R, 1 or H, 1 or T * H/K, S), or None where everything is seen."""
        key = ("box", rule.window, id(bias))
        if key not in self._masks:
            self._masks[key] = self._make_box_mask(box, rule, bias, folded)
        return self._masks[key]

    def _make_box_mask(
        self, box: Rectangle, rule: Rule, bias: RelativeBias | None, folded: int
    ) -> Mask:
        if box.even and rule.window is None and bias is None:
            return None
        queries, keys = self._tensor(box.queries), self._tensor(box.keys)
        seen = visible(queries, keys, rule.window) & self._tensor(box.held)[:, None]
        mask = additive(seen, self._rows.dtype)[:, None]
        if bias is not None:
            return mask + bias(queries, keys)
        # Each position's query heads lie side by side in the folded axis.
        return mask if box.length == 1 else mask.repeat_interleave(folded // box.length, dim=2)

    def _across_mask(self, box: Rectangle, dtype: torch.dtype) -> Mask:
        if "across" not in self._masks:
            held = self._tensor(box.across_held)
            full = bool(box.across_held.all())
            self._masks["across"] = None if full else additive(held, dtype)[:, None, None]
        return self._masks["across"]

    # --- spans ------------------------------------------------------------------------------------

    def _span(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        span: Span,
        rule: Rule,
        bias: RelativeBias | None,
    ) -> Tensor:
        shape = (len(span.feeds), span.count)
        own = q[span.offset : span.stop].view(*shape, *q.shape[1:])
        if not span.fresh:
            k, v = torch.cat(self.segments(layer, span.feeds[0].row), dim=2)[:, None]
        else:
            blocks = kv[span.offset : span.stop].view(*shape, *kv.shape[1:])
            k, v = blocks.permute(2, 0, 3, 1, 4)
            if rule.window is None and rule.softcap is None and bias is None:
                out = attend_causally(own.transpose(1, 2), k, v, rule)
                return out.transpose(1, 2).reshape(span.stop - span.offset, -1)
        folded = fold_heads(own, k.shape[1])
        mask = self._span_mask(span, rule, bias, folded.shape[2])
        return unfold_heads(attend(folded, k, v, rule, mask), span.count)

    def _span_mask(self, span: Span, rule: Rule, bias: RelativeBias | None, folded: int) -> Tensor:
        """(H or 1, T * H/K, S)."""
        key = (span.offset, rule.window, id(bias))
        mask = self._masks.get(key)
        if mask is None:
            mask = self._feed_mask(span.feeds[0], rule, bias, folded)
            self._masks[key] = mask
        return mask

    def _feed_mask(self, feed: Feed, rule: Rule, bias: RelativeBias | None, folded: int) -> Tensor:
        keys = torch.arange(feed.start + feed.count, device=self._device)
        queries = keys[feed.start :]
        mask = additive(visible(queries, keys, rule.window), self._rows.dtype)[None]
        if bias is not None:
            return mask + bias(queries, keys)
        return mask.repeat_interleave(folded // feed.count, dim=1)

    # --- feeds by themselves ----------------------------------------------------------------------

    def _alone(
        self, layer: int, q: Tensor, feed: Feed, rule: Rule, bias: RelativeBias | None
    ) -> Tensor:
        """(T, H * D) of one feed over all its keys."""
        k, v = torch.cat(self.segments(layer, feed.row), dim=2)
        key = ("alone", feed.index, rule.window, id(bias))
        if key not in self._masks:
            self._masks[key] = self._lone_mask(feed, rule, bias, q.shape[1] // k.shape[0])
        return _weighed(q, k, v, rule, self._masks[key], self.attentions[feed.index])

    def _lone_mask(self, feed: Feed, rule: Rule, bias: RelativeBias | None, shared: int) -> Tensor:
        """(1 or K, T * H/K, S); `shared`: how many heads look at one key head."""
        mask = self._feed_mask(feed, rule, bias, shared * feed.count)
        given = self._extras[feed.index].mask
        if given is None:
            return mask
        heads = given.to(self._device).expand(max(len(given), shared), -1, -1).contiguous()
        seen = heads.view(-1, shared, *heads.shape[1:]).transpose(1, 2).flatten(1, 2)
        return mask + additive(seen, self._rows.dtype)

    def _across(self, layer: int, row: Row) -> Tensor:
        """(2, K, S, D)."""
        if row.across is None:
            raise InvariantError(message("a row of a model with an encoder has no encoder states"))
        return self._rows.across.pool.layer(layer)[:, row.across.slot, :, : row.across.length]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _filled(q: Tensor, box: Rectangle) -> Tensor:
    """Packed queries (N, H, D) -> (rows, length, H, D)."""
    chosen = q[: box.packed] if box.gather is None else q[box.gather]
    return chosen.view(box.rows, box.length, *q.shape[1:])


def _packed(out: Tensor, box: Rectangle) -> Tensor:
    """(rows * length, x) -> (n, x)."""
    return out if box.scatter is None else out[box.scatter]


def _weighed(q: Tensor, k: Tensor, v: Tensor, rule: Rule, mask: Mask, kept: list[Tensor]) -> Tensor:
    """(T, H * D) of one feed's queries (T, H, D) on (K, S, D); its weights are added to `kept`."""
    folded = fold_heads(q[None], k.shape[0])
    weights = probabilities(folded @ k.transpose(-1, -2), rule, mask)
    kept.append(_per_head(weights[0], len(q)))
    return unfold_heads(weights @ v, len(q))


def _per_head(weights: Tensor, length: int) -> Tensor:
    """(K, T * H/K, S) -> (H, T, S)."""
    apart = weights.view(weights.shape[0], length, -1, weights.shape[2])
    return apart.transpose(1, 2).flatten(0, 1)
