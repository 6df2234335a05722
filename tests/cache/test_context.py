"""What the feeds of a step see, judged by a plain softmax over everything that was ever given."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.cache.bank import FIRST_FREEZE, LEAST_SHIFT
from everystep.cache.context import CacheContext
from everystep.cache.formats import Quantization
from everystep.cache.rows import RowCache
from everystep.nn.attention import Rule
from everystep.nn.network import Full, Window
from everystep.types import Extra, Verb, Work

HEADS, SHARED, DIM = 4, 2, 6
STORES = [[Full(SHARED, DIM, DIM)], [Window(SHARED, DIM, DIM, 5)], [Full(SHARED, DIM, 4)]]
RULES = [Rule(0.4), Rule(0.4, window=5), Rule(0.4, softcap=3.0)]
LAYERS = range(len(STORES))


@dataclass
class Judge:
    """A cache, and all keys and values (2, K, n, D) that each row was given, layer by layer."""

    kept: Quantization | None = None
    cache: RowCache = field(init=False)
    held: dict[int, list[Tensor]] = field(default_factory=dict)
    seen: dict[int, list[Tensor]] = field(default_factory=dict)
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def __post_init__(self) -> None:
        layout = (STORES, torch.float64, torch.device("cpu"))
        self.cache = RowCache(*layout, kept=self.kept)

    def step(
        self,
        counts: dict[int, int],
        *verbs: Verb,
        masks: dict[int, Tensor] | None = None,
        weights: tuple[int, ...] = (),
    ) -> float:
        """Feeds rows; the largest difference of what they see, weights included, from the truth."""
        for verb in verbs:
            nothing = torch.empty(2, SHARED, 0, DIM, dtype=torch.float64)
            parent = self.held.get(verb.value) if verb.kind == "fork" else None
            self.held[verb.row] = [*(parent or [nothing for _ in LAYERS])]
        starts = [self.held[row][0].shape[2] for row in counts]
        arrays = [np.array(x) for x in ([*counts], starts, [*counts.values()])]
        masks = masks or {}
        extras = {
            feed: Extra(mask=masks.get(feed), attentions=feed in weights)
            for feed in {*masks, *weights}
        }
        tokens = np.zeros(sum(counts.values()), int)
        work = Work(verbs, *arrays, np.ones_like(arrays[0]), tokens, extras)
        self.cache.apply(work)
        context = CacheContext.of(self.cache, work)
        gaps = [self._layer(layer, context, counts, masks) for layer in LAYERS]
        return max(gaps)

    def _layer(self, layer: int, context, counts, masks) -> float:  # type: ignore[no-untyped-def]
        total = sum(counts.values())
        q = torch.randn(total, HEADS, DIM, generator=self.draw, dtype=torch.float64)
        kv = torch.randn(total, 2, SHARED, DIM, generator=self.draw, dtype=torch.float64)
        kv[:, 1, :, STORES[layer][0].value_dim :] = 0
        order = context.plan.order
        order = slice(None) if order is None else torch.from_numpy(order)
        found = torch.empty(total, HEADS * DIM, dtype=torch.float64)
        found[order] = context.attend(layer, q[order], kv[order], RULES[layer])
        gap, end = 0.0, 0
        for index, (row, count) in enumerate(counts.items()):
            first, end = end, end + count
            self.seen.setdefault(row, []).extend(found[first:end])
            own = kv[first:end].permute(1, 2, 0, 3)
            self.held[row][layer] = torch.cat([self.held[row][layer], own], dim=2)
            wanted, shown = textbook(
                q[first:end], self.held[row][layer], RULES[layer], masks.get(index)
            )
            gap = max(gap, float((found[first:end] - wanted).abs().max()))
            if index in context.attentions:
                gap = max(gap, float((context.attentions[index][layer] - shown).abs().max()))
        return gap


def textbook(q: Tensor, kv: Tensor, rule: Rule, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(T, H * D) of queries (T, H, D) at the end of kv (2, K, S, D), and the (H, T, S) weights."""
    k, v = kv.repeat_interleave(HEADS // SHARED, dim=1)
    scores = torch.einsum("thd,hsd->hts", q, k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    place = torch.arange(k.shape[1])
    queries = place[-len(q) :, None]
    seen = (place <= queries)[None] if mask is None else mask
    if rule.window is not None:
        seen = seen & (place > queries - rule.window)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    return torch.einsum("hts,hsd->thd", weights, v).flatten(1), weights


def opened(*rows: int) -> tuple[Verb, ...]:
    return tuple(Verb("allocate", row) for row in rows)


@pytest.mark.parametrize("weights", [(), (0,), (1, 2)], ids=str)
def test_layers_of_different_stores_share_a_step(weights: tuple[int, ...]) -> None:
    judge = Judge()
    assert judge.step({0: 12, 1: 3, 2: 30}, *opened(0, 1, 2), weights=weights) < 1e-12
    forks = (Verb("fork", 3, 2), Verb("fork", 4, 0))
    for counts in ({2: 1, 0: 1, 1: 1, 3: 2, 4: 1}, {3: 20, 4: 3, 0: 1}, {1: 1, 2: 7, 4: 9}):
        assert judge.step(counts, *forks, weights=weights) < 1e-12
        forks = ()


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("count", [1, 4, 12])
def test_a_mask_is_its_own_feeds(count: int, heads: int) -> None:
    judge = Judge()
    judge.step({0: 6, 1: 9, 2: 2}, *opened(0, 1, 2))
    draw = torch.Generator().manual_seed(count)
    mask = torch.rand(heads, count, 9 + count, generator=draw) < 0.5
    mask[..., torch.arange(count), 9 + torch.arange(count)] = True
    counts = {0: 1, 1: count, 2: count}
    assert judge.step(counts, masks={1: mask}, weights=(1,)) < 1e-12
    assert judge.step({0: 1, 1: 1, 2: 1}) < 1e-12


def test_a_feed_that_wants_much_changes_no_bit_of_another() -> None:
    found = []
    for weights in ((), (0, 2)):
        judge = Judge()
        judge.step({0: 6, 1: 9, 2: 3}, *opened(0, 1, 2), weights=weights)
        judge.step({0: 1, 1: 1, 2: 1}, weights=weights)
        found.append(torch.stack(judge.seen[1]))
    assert torch.equal(*found)


def test_codes_see_what_they_stand_for() -> None:
    # Positions that never become codes are exact, masks and weights included.
    judge = Judge(Quantization(8, group=4, residual=100))
    assert judge.step({0: 12, 1: 3}, *opened(0, 1), weights=(1,)) < 1e-12
    mask = torch.ones(1, 2, 5, dtype=torch.bool)
    mask[..., 1] = False
    assert judge.step({0: 1, 1: 2}, masks={1: mask}) < 1e-12
    rounded = Judge(Quantization(8, group=4, residual=2))
    rounded.step({0: 20, 1: 3}, *opened(0, 1))
    assert 1e-6 < rounded.step({0: 9, 1: 1}, weights=(0,)) < 0.1


def test_shorter_values_are_exported_as_declared() -> None:
    judge = Judge()
    judge.step({0: 12}, *opened(0))
    past = judge.cache.export(0)
    shapes = [tuple(x.shape for x in layer) for layer in past.layers]
    full, window = (SHARED, 12, DIM), (SHARED, 5, DIM)
    assert shapes == [(full, full), (window, window), (full, (SHARED, 12, 4))]
    other = Judge()
    work = Work(opened(7), *[np.empty(0, int)] * 5, pasts={7: past})
    other.cache.apply(work)
    other.held[7] = judge.held[0]
    assert other.step({7: 3}) < 1e-12


def test_forks_of_different_prompts_see_each_their_own() -> None:
    judge = Judge()
    judge.step({0: FIRST_FREEZE, 1: FIRST_FREEZE + 9, 2: 3}, *opened(0, 1, 2))
    forks = (Verb("fork", 3, 0), Verb("fork", 4, 1), Verb("fork", 5, 1))
    assert judge.step(dict.fromkeys(range(6), 1), *forks) < 1e-12
    assert judge.cache.counts.freezes == 2 * 2  # of two prompts, in the two stores that keep all
    assert judge.step({0: 2, 1: 1, 3: 3, 4: 2, 5: 1}) < 1e-12


def test_what_a_window_no_longer_shows_is_given_up_beside_layers_that_see_all() -> None:
    judge, steps = Judge(), 2 * LEAST_SHIFT + 7
    judge.step({0: 6}, *opened(0))
    assert max(judge.step({0: 1}) for _ in range(steps)) < 1e-12
    held = {
        bank.forgets: part.length - part.first
        for bank, part in zip(judge.cache.banks, judge.cache[0].parts, strict=True)
    }
    assert held[False] == steps + 6
    assert held[True] <= LEAST_SHIFT + RULES[1].window
