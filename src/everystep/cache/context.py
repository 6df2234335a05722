"""One step's view of the cache: stores new keys and values, and lets queries look at their rows.

The layout comes from the plan; masks are made at the first layer that needs them and kept for the
others. The usual step is one scatter and one attention per layer. A span looks at what its row held
before and at its own keys and values, which need not be stored for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from everystep.cache.bank import Bank, BankPart
from everystep.cache.plan import Box, Plan, PlannedFeed, PlannedSpan, Rectangle, Writes, make_plan
from everystep.cache.rows import CacheRow, CacheRows
from everystep.errors import InvariantError, message
from everystep.nn.attention import (
    RelativeBias,
    Rule,
    Sight,
    fold_heads,
    look,
    look_and_weigh,
    probabilities,
    unfold_heads,
)
from everystep.nn.ragged import Ragged

_EVERYTHING = Sight(np.empty(0), np.empty(0), causal=False)


class CacheContext:
    """What the layers of a network see of the rows in one step.

    `attentions`, `cross_attentions`: by the index of each feed that wants weights, (H, count, S) of
    one layer after another.
    """

    def __init__(self, rows: CacheRows, feeds: Sequence[PlannedFeed], device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self.plan: Plan = make_plan(feeds, rows.banks, device)
        self._sights: dict[tuple[int, int], Sight] = {}
        self.attentions: dict[int, list[Tensor]] = {f.index: [] for f in feeds if f.weights}
        self.cross_attentions: dict[int, list[Tensor]] = {i: [] for i in self.attentions}
        self.kept: list[Tensor] | None = None

    @property
    def order(self) -> np.ndarray | None:
        """The feed-order place of each packed position, None if they are the same."""
        return self.plan.order

    def keep(self, hidden: Tensor) -> None:
        """Remembers (N, E) hidden states if a feed asks for layers."""
        if self.kept is not None:
            self.kept.append(hidden)

    # --- recurrent layers -------------------------------------------------------------------------

    def feeds(self) -> Ragged:
        """The step as a recurrent layer reads it."""
        return self._rows.recurrence.feeds

    def recall(self, layer: int) -> tuple[Tensor, ...]:
        """(R, *shape) of each shape: the layer's states before the feeds."""
        return self._rows.recurrence.recall(self._rows.recurrent[layer])

    def remember(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """Keeps (M, *shape) of each shape: the layer's states where the feeds say."""
        self._rows.recurrence.remember(states)

    # --- attention --------------------------------------------------------------------------------

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        """Stores kv (N, 2, K, D), lets q (N, H, D) look at its rows, returns (N, H * D)."""
        place, index = self._rows.place[layer]
        bank, plan = self._rows.banks[place], self.plan
        kept = bank.format.packed(kv)
        kv = bank.format.unpacked(kept)
        # Spans come first: what is written may take the place of what they still look at.
        parts = [self._span(place, index, q, kv, span, rule, bias) for span in plan.spans]
        if bank.coding is None:
            _write(bank.tails.layer(index), plan.writes[place], kept)
        if plan.rectangle is not None:
            box = plan.rectangle.boxes[place]
            parts.insert(0, self._rectangle(bank, index, q, plan.rectangle, box, rule, bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_across(self, layer: int, q: Tensor, rule: Rule) -> Tensor:
        """Lets q (N, H, D) look at the encoder states of its rows, returns (N, H * D)."""
        index, plan = self._rows.crossed[layer], self.plan
        parts = []
        if plan.rectangle is not None:
            parts.append(self._rectangle_across(index, q, plan.rectangle, rule))
        for span in plan.spans:
            for number, feed in enumerate(span.feeds):
                start = span.offset + number * span.count
                own = q[None, start : start + span.count]
                kv = self._across(index, feed.row)[:, None]
                parts.append(_seen(own, kv, rule, _EVERYTHING, None, feed, self.cross_attentions))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # --- rectangles -------------------------------------------------------------------------------

    def _rectangle(
        self,
        bank: Bank,
        index: int,
        q: Tensor,
        shape: Rectangle,
        box: Box,
        rule: Rule,
        bias: RelativeBias | None,
    ) -> Tensor:
        tails = bank.tails.layer(index)
        k, v = bank.format.unpacked(tails[:, : shape.rows, :, : box.tail])
        own = _filled(q, shape)
        if not box.levels:
            return _packed(look(own, k, v, rule, box.sight, bias), shape)
        mask = box.sight.mask(rule, bias, own, k.shape[1])
        out = _chained(bank, index, fold_heads(own, k.shape[1]), k, v, box, rule, mask)
        return _packed(unfold_heads(out, shape.length), shape)

    def _rectangle_across(self, index: int, q: Tensor, shape: Rectangle, rule: Rule) -> Tensor:
        level = shape.across
        if level is None:
            raise InvariantError(message("rows of a model with an encoder have no encoder states"))
        pool = self._rows.across.pool.layer(index)
        k, v = pool[:, level.first : level.last, :, : level.length]
        own = _filled(q, shape)
        mask = shape.across_seen.mask(rule, None, own, k.shape[1])
        weights = probabilities(level.scores(fold_heads(own, k.shape[1]), k), rule, mask)
        return _packed(unfold_heads(level.mix(weights, v), shape.length), shape)

    # --- spans ------------------------------------------------------------------------------------

    def _span(
        self,
        place: int,
        index: int,
        q: Tensor,
        kv: Tensor,
        span: PlannedSpan,
        rule: Rule,
        bias: RelativeBias | None,
    ) -> Tensor:
        bank, feed = self._rows.banks[place], span.feeds[0]
        shape = (len(span.feeds), span.count)
        own = q[span.offset : span.stop].view(*shape, *q.shape[1:])
        blocks = kv[span.offset : span.stop].view(*shape, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
        if bank.coding is not None:
            seen = _coded(bank, index, feed, feed.before[place], feed.after[place], blocks[:, 0])
        elif span.fresh:
            seen = blocks
        else:
            held = bank.read(index, feed.before[place], feed.slot)
            seen = torch.cat([*held, blocks[:, 0]], dim=2)[:, None]
        return _seen(own, seen, rule, self._sight(place, feed), bias, feed, self.attentions)

    def _sight(self, place: int, feed: PlannedFeed) -> Sight:
        """What a span's queries see, made once for all layers of a bank."""
        key = (place, feed.index)
        if key not in self._sights:
            bank, before = self._rows.banks[place], feed.before[place]
            if bank.coding is None:
                self._sights[key] = _span_sight(feed, before.first)
            else:
                self._sights[key] = _coded_sight(bank, feed, before)
        return self._sights[key]

    def _across(self, index: int, row: CacheRow) -> Tensor:
        """(2, K, S, D)."""
        if row.across is None:
            raise InvariantError(message("a row of a model with an encoder has no encoder states"))
        return self._rows.across.pool.layer(index)[:, row.across.slot, :, : row.across.length]


def _write(tails: Tensor, writes: Writes, kept: Tensor) -> None:
    """Packed positions (N, 2, K, D) lie in the tails (2, slots, K, capacity, D)."""
    chosen = kept if writes.chosen is None else kept[writes.chosen]
    # Indices on both sides of a slice: the result's first dimension is theirs, (N, 2, K, D).
    tails[:, writes.slots, :, writes.places] = chosen


def _chained(
    bank: Bank,
    index: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    box: Box,
    rule: Rule,
    mask: Tensor | None,
) -> Tensor:
    """One softmax over the scores of every level of segments and of the tails."""
    shelf = bank.shelf.pool.layer(index)
    held = [shelf[:, one.first : one.last, :, : one.length] for one in box.levels]
    pairs = list(zip(box.levels, map(bank.format.unpacked, held), strict=True))
    scores = [level.scores(q, store[0]) for level, store in pairs]
    weights = probabilities(torch.cat([*scores, q @ k.transpose(-1, -2)], -1), rule, mask)
    lengths = [*(level.length for level in box.levels), box.tail]
    *shared, own = torch.split(weights, lengths, dim=-1)
    out = own @ v
    for (level, store), part in zip(pairs, shared, strict=True):
        out = out + level.mix(part, store[1])
    return out


def _seen(
    q: Tensor,
    kv: Tensor,
    rule: Rule,
    sight: Sight,
    bias: RelativeBias | None,
    feed: PlannedFeed,
    weights: dict[int, list[Tensor]],
) -> Tensor:
    """Queries (R, T, H, D) on kv (2, R, K, S, D); the feed's weights are kept where wanted."""
    k, v = kv
    if not feed.weights:
        return look(q, k, v, rule, sight, bias)
    out, found = look_and_weigh(q, k, v, rule, sight, bias)
    weights[feed.index].append(_by_position(found[0], sight))
    return out


def _by_position(weights: Tensor, sight: Sight) -> Tensor:
    """(H, T, keys) -> (H, T, S): one weight for every position of the row."""
    if sight is _EVERYTHING:
        return weights
    keys = torch.as_tensor(sight.keys, device=weights.device)
    room = weights.new_zeros(*weights.shape[:2], int(sight.queries[-1]) + 1)
    return room.index_add_(2, keys, weights)


def _span_sight(feed: PlannedFeed, first: int) -> Sight:
    """A span looks at what its row held from `first` on, and at itself."""
    keys = np.arange(first, feed.start + feed.count)
    mask = None if feed.mask is None else feed.mask[..., first:]
    aligned = first == feed.start
    return Sight(keys[feed.start - first :], keys, mask, causal=mask is None, aligned=aligned)


# --- codes ----------------------------------------------------------------------------------------


def _coded(
    bank: Bank, index: int, feed: PlannedFeed, before: BankPart, after: BankPart, own: Tensor
) -> Tensor:
    """(2, 1, K, S, D): what some query sees as codes, then what some query sees exactly.

    Stores `own` (2, K, count, D).
    """
    *codes, exact = [*bank.read(index, before, feed.slot), own]
    if before.tail:
        exact = torch.cat([codes.pop(), exact], dim=2)
    soon = _soon(bank, feed, before)
    made = after.chain[-1].segment if len(after.chain) > len(before.chain) else None
    if soon:
        codes.append(bank.encode(exact[:, :, :soon], made))
    kept = exact[:, :, exact.shape[2] - after.tail :]
    bank.tails.layer(index)[:, feed.slot, :, : after.tail] = kept
    return torch.cat([*codes, exact], dim=2)[:, None]


def _soon(bank: Bank, feed: PlannedFeed, before: BankPart) -> int:
    """How many exact positions the last query of a feed sees as codes."""
    how = bank.coding
    return 0 if how is None else max(how.packed(feed.start + feed.count - 1) - before.base, 0)


def _coded_sight(bank: Bank, feed: PlannedFeed, before: BankPart) -> Sight:
    """Each position is seen exactly up to its turn, and by its codes from then on."""
    base, end = before.base, feed.start + feed.count
    codes, exact = np.arange(base + _soon(bank, feed, before)), np.arange(base, end)
    keys = np.concatenate([codes, exact])
    queries = np.arange(feed.start, end)
    how = bank.coding
    turns = keys if how is None else np.asarray(how.turn(torch.from_numpy(keys)))
    coded = (queries[:, None] >= turns) == (np.arange(len(keys)) < len(codes))
    if feed.mask is None:
        return Sight(queries, keys, coded[None])
    seen = feed.mask.cpu()[..., torch.from_numpy(keys)] & torch.from_numpy(coded)
    return Sight(queries, keys, seen, causal=False)


def _filled(q: Tensor, shape: Rectangle) -> Tensor:
    """Packed queries (N, H, D) -> (rows, length, H, D)."""
    chosen = q[: shape.packed] if shape.gather is None else q[shape.gather]
    return chosen.view(shape.rows, shape.length, *q.shape[1:])


def _packed(out: Tensor, shape: Rectangle) -> Tensor:
    """(rows * length, x) -> (n, x)."""
    return out if shape.scatter is None else out[shape.scatter]
