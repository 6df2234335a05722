"""One step's view of the cache: stores new keys and values, and lets queries look at their rows.

The layout comes from the plan; masks are made at the first layer that needs them and kept for the
others. The usual step is one scatter and one attention per layer. A span looks at what its row held
before and at its own keys and values, which need not be stored for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from everystep.cache.bank import Bank
from everystep.cache.plan import Box, Plan, PlannedFeed, Rectangle, make_plan
from everystep.cache.rows import RowCache
from everystep.errors import InvariantError
from everystep.nn.attention import (
    RelativeBias,
    Rule,
    View,
    fold_heads,
    look,
    look_and_weigh,
    probabilities,
    unfold_heads,
)
from everystep.nn.ragged import Ragged
from everystep.types import Work

_EVERYTHING = View(np.empty(0), np.empty(0), causal=False)


class CacheContext:
    """The rows in one step, whose verbs were applied, as the layers of a network see them.

    `attentions`, `cross_attentions`: by the index of each feed that wants weights, (H, count, S) of
    one layer after another. `kept`: the hidden states of layers, None where no feed wants them.
    """

    def __init__(self, rows: RowCache, plan: Plan, *, keeps: bool = False) -> None:
        self._rows = rows
        self.plan = plan
        self._views: dict[tuple[int, int], View] = {}
        weighed = [feed.index for feed in plan.feeds if feed.weights]
        self.attentions: dict[int, list[Tensor]] = {index: [] for index in weighed}
        self.cross_attentions: dict[int, list[Tensor]] = {index: [] for index in weighed}
        self.kept: list[Tensor] | None = [] if keeps else None

    @classmethod
    def of(cls, rows: RowCache, work: Work) -> CacheContext:
        """Return the context of a work whose verbs were applied."""
        layers = any(extra.layers or extra.early for extra in work.extras.values())
        return cls(rows, make_plan(rows, work), keeps=layers)

    def keep(self, hidden: Tensor) -> None:
        if self.kept is not None:
            self.kept.append(hidden)

    # --- recurrent layers: see `Context` ----------------------------------------------------------

    def feeds(self) -> Ragged:
        return self._rows.recurrence.feeds

    def recall(self, layer: int) -> tuple[Tensor, ...]:
        return self._rows.recurrence.recall(self._rows.recurrent[layer])

    def remember(self, layer: int, states: tuple[Tensor, ...]) -> None:
        self._rows.recurrence.remember(states)

    # --- attention --------------------------------------------------------------------------------

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        """Store kv (N, 2, K, D), let q (N, H, D) look at its rows, return (N, H * D)."""
        place, index = self._rows.place[layer]
        bank, plan = self._rows.banks[place], self.plan
        kept = bank.format.packed(kv)
        kv = bank.format.unpacked(kept)
        # Spans come first: what is written may take the place of what they still look at.
        parts = [self._span(place, index, q, kv, span, rule, bias) for span in plan.spans]
        if bank.coding is None:
            lines, places, chosen = plan.writes[place]
            # Indices on both sides of a slice: their dimension comes first, (N, 2, K, D).
            tails = bank.tails.layer(index)
            tails[:, lines, :, places] = kept if chosen is None else kept[chosen]
        if plan.rectangle is not None:
            box = plan.rectangle.boxes[place]
            parts.insert(0, self._rectangle(bank, index, q, plan.rectangle, box, rule, bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_across(self, layer: int, q: Tensor, rule: Rule) -> Tensor:
        """Let q (N, H, D) look at the encoder states of its rows, return (N, H * D)."""
        across = self._rows.across.layer(self._rows.crossed[layer])
        parts = []
        if self.plan.rectangle is not None:
            parts.append(_rectangle_across(across, q, self.plan.rectangle, rule))
        for span in self.plan.spans:
            for feed in span:
                states = feed.row.across
                if states is None:
                    _refuse_no_states()
                own = q[None, feed.offset : feed.offset + feed.count]
                kv = across[:, states.line, None, :, : states.length]
                parts.append(_seen(own, kv, rule, _EVERYTHING, None, feed, self.cross_attentions))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
        """Take one softmax over the scores of every level of segments and of the tails."""
        tails, shelf = bank.tails.layer(index), bank.shelf.layer(index)
        k, v = bank.format.unpacked(tails[:, : shape.rows, :, : box.tail])
        own = _filled(q, shape)
        if not box.levels:
            return _packed(look(own, k, v, rule, box.view, bias), shape)
        mask = box.view.mask(rule, bias, own, k.shape[1])
        own = fold_heads(own, k.shape[1])
        held = [shelf[:, one.first : one.last, :, : one.length] for one in box.levels]
        pairs = list(zip(box.levels, map(bank.format.unpacked, held), strict=True))
        scores = [level.scores(own, store[0]) for level, store in pairs]
        weights = probabilities(torch.cat([*scores, own @ k.transpose(-1, -2)], -1), rule, mask)
        lengths = [*(level.length for level in box.levels), box.tail]
        *shared, last = torch.split(weights, lengths, dim=-1)
        out = last @ v
        for (level, store), part in zip(pairs, shared, strict=True):
            out = out + level.mix(part, store[1])
        return _packed(unfold_heads(out, shape.length), shape)

    def _span(
        self,
        place: int,
        index: int,
        q: Tensor,
        kv: Tensor,
        span: Sequence[PlannedFeed],
        rule: Rule,
        bias: RelativeBias | None,
    ) -> Tensor:
        bank, feed = self._rows.banks[place], span[0]
        shape = (len(span), feed.count)
        packed = slice(feed.offset, feed.offset + feed.count * len(span))
        own = q[packed].view(*shape, *q.shape[1:])
        seen = kv[packed].view(*shape, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
        if bank.coding is not None:
            seen = _coded(bank, place, index, feed, seen[:, 0])
        elif feed.start:
            held = bank.read(index, feed.before[place], feed.row.line)
            seen = torch.cat([*held, seen[:, 0]], dim=2)[:, None]
        return _seen(own, seen, rule, self._view(place, feed), bias, feed, self.attentions)

    def _view(self, place: int, feed: PlannedFeed) -> View:
        """Return what a span's queries see, made once for all layers of a bank."""
        key = (place, feed.index)
        if key not in self._views:
            bank = self._rows.banks[place]
            coded = bank.coding is not None
            made = _coded_view(bank, place, feed) if coded else _span_view(place, feed)
            self._views[key] = made
        return self._views[key]


def _rectangle_across(across: Tensor, q: Tensor, shape: Rectangle, rule: Rule) -> Tensor:
    level = shape.across
    if level is None:
        _refuse_no_states()
    k, v = across[:, level.first : level.last, :, : level.length]
    own = _filled(q, shape)
    mask = shape.across_seen.mask(rule, None, own, k.shape[1])
    weights = probabilities(level.scores(fold_heads(own, k.shape[1]), k), rule, mask)
    return _packed(unfold_heads(level.mix(weights, v), shape.length), shape)


def _refuse_no_states() -> NoReturn:
    raise InvariantError("a row of a model with an encoder has no encoder states")


def _seen(
    q: Tensor,
    kv: Tensor,
    rule: Rule,
    view: View,
    bias: RelativeBias | None,
    feed: PlannedFeed,
    weights: dict[int, list[Tensor]],
) -> Tensor:
    """Attend with queries (R, T, H, D) to kv (2, R, K, S, D); keep weights that the feed wants."""
    k, v = kv
    if not feed.weights:
        return look(q, k, v, rule, view, bias)
    out, found = look_and_weigh(q, k, v, rule, view, bias)
    weights[feed.index].append(_by_position(found[0], view))
    return out


def _by_position(weights: Tensor, view: View) -> Tensor:
    """Turn (H, T, keys) into (H, T, S): one weight for every position of the row."""
    if view is _EVERYTHING:
        return weights
    keys = torch.as_tensor(view.keys, device=weights.device)
    room = weights.new_zeros(*weights.shape[:2], int(view.queries[-1]) + 1)
    return room.index_add_(2, keys, weights)


def _span_view(place: int, feed: PlannedFeed) -> View:
    """Return the view of a span, which looks at what its row held, and at itself."""
    first = feed.before[place].first
    keys = np.arange(first, feed.start + feed.count)
    mask = None if feed.mask is None else feed.mask[..., first:]
    aligned = first == feed.start
    return View(keys[feed.start - first :], keys, mask, causal=mask is None, aligned=aligned)


# --- codes ----------------------------------------------------------------------------------------


def _coded(bank: Bank, place: int, index: int, feed: PlannedFeed, own: Tensor) -> Tensor:
    """Return (2, 1, K, S, D): what some query sees as codes, then what some query sees exactly.

    Store `own` (2, K, count, D).
    """
    before, after = feed.before[place], feed.after[place]
    *codes, exact = [*bank.read(index, before, feed.row.line), own]
    if before.tail:
        exact = torch.cat([codes.pop(), exact], dim=2)
    soon = _soon(bank, place, feed)
    made = after.chain[-1].segment if len(after.chain) > len(before.chain) else None
    if soon:
        codes.append(bank.encode(exact[:, :, :soon], made))
    kept = exact[:, :, exact.shape[2] - after.tail :]
    bank.tails.layer(index)[:, feed.row.line, :, : after.tail] = kept
    return torch.cat([*codes, exact], dim=2)[:, None]


def _soon(bank: Bank, place: int, feed: PlannedFeed) -> int:
    """Return how many exact positions the last query of a feed sees as codes."""
    return max(bank.how.packed(feed.start + feed.count - 1) - feed.before[place].base, 0)


def _coded_view(bank: Bank, place: int, feed: PlannedFeed) -> View:
    """Return a view of each position exactly up to its turn, and by its codes from then on."""
    base, end = feed.before[place].base, feed.start + feed.count
    codes, exact = np.arange(base + _soon(bank, place, feed)), np.arange(base, end)
    keys = np.concatenate([codes, exact])
    queries = np.arange(feed.start, end)
    turns = bank.how.turn(keys)
    coded = (queries[:, None] >= turns) == (np.arange(len(keys)) < len(codes))
    if feed.mask is None:
        return View(queries, keys, coded[None])
    seen = feed.mask.cpu()[..., torch.from_numpy(keys)] & torch.from_numpy(coded)
    return View(queries, keys, seen, causal=False)


def _filled(q: Tensor, shape: Rectangle) -> Tensor:
    """View packed queries (N, H, D) as (rows, length, H, D), filled up."""
    chosen = q[: shape.packed] if shape.gather is None else q[shape.gather]
    return chosen.view(shape.rows, shape.length, *q.shape[1:])


def _packed(out: Tensor, shape: Rectangle) -> Tensor:
    """Pack (rows * length, x) -> (n, x)."""
    return out if shape.scatter is None else out[shape.scatter]
