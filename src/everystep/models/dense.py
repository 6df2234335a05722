"""The plain forward: a rectangle of tokens, in which every position looks at those before it.

A cache object may hold what stands before the rectangle; it is filled as its layers are reached.
This is what a loop of the caller's runs on. The engine's rows are not known here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.cache.containers import Cache
from everystep.errors import InvariantError, RequestError, message
from everystep.nn.attention import Rule, additive, attend, attend_causally, visible
from everystep.nn.network import Inputs, Network
from everystep.nn.relative_bias import RelativeBias


class DenseContext:
    """B rows of T positions that see each other, behind those that `cache` holds.

    `seen` (B, S) tells real positions from padding, the cached ones first.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        seen: Tensor | None,
        across: Tensor | None = None,
        across_seen: Tensor | None = None,
        cache: Cache | None = None,
    ) -> None:
        self._shape = (batch, length)
        self._cache = cache
        self._start = 0 if cache is None else int(cache.get_seq_length())
        self._seen = seen
        self._across = across
        self._across_seen = across_seen
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        """Lets q (B * T, H, D) look at kv (B * T, 2, K, D) and at what is cached, and stores kv
        there; returns (B * T, H * D)."""
        k, v = kv.view(*self._shape, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
        if self._cache is not None:
            k, v = self._cache.update(k, v, layer)
        q = q.view(*self._shape, *q.shape[1:]).transpose(1, 2)
        alone = k.shape[2] == self._shape[1] and self._seen is None
        if alone and rule.softcap is None and rule.window is None and bias is None:
            out = attend_causally(q, k, v, rule)
        else:
            groups = q.shape[1] // k.shape[1]
            mask = self._mask(rule.window, k)
            if bias is not None:
                mask = mask + bias(*self._places(k))
            out = attend(
                q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), rule, mask
            )
        return out.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def attend_across(self, layer: int, q: Tensor, rule: Rule) -> Tensor:
        """Lets q (B * T, H, D) look at the encoder states of its row, returns (B * T, H * D)."""
        if self._across is None:
            raise InvariantError(message("there are no encoder states to look at"))
        k, v = self._across[layer]
        q = q.view(*self._shape, *q.shape[1:]).transpose(1, 2)
        seen = self._across_seen
        mask = None if seen is None else additive(seen, q.dtype)[:, None, None]
        out = attend(q, k, v, rule, mask)
        return out.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def keep(self, hidden: Tensor) -> None:
        """Nothing is kept."""

    def _places(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) and (S,) where the queries and keys (B, K, S, D) stand.

        A layer shows its last positions, or room for more than there are.
        """
        stop = self._start + self._shape[1]
        first = max(stop - keys.shape[2], 0)
        queries = torch.arange(self._start, stop, device=keys.device)
        return queries, torch.arange(first, first + keys.shape[2], device=keys.device)

    def _mask(self, window: int | None, k: Tensor) -> Tensor:
        """(1 or B, 1, T, S) for keys (B, K, S, D)."""
        key = (window, k.shape[2])
        if key not in self._masks:
            queries, keys = self._places(k)
            seen = visible(queries, keys, window)[None, None]
            if self._seen is not None:
                real = F.pad(self._seen, (0, max(k.shape[2] - self._seen.shape[1], 0)))
                # A row of padding that sees nothing would divide by zero: it sees itself.
                itself = keys == queries[:, None]
                seen = seen & real[:, None, None, keys] | itself
            self._masks[key] = additive(seen, k.dtype)
        return self._masks[key]


def dense_logits(
    network: Network,
    ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    cache: Cache | None,
    kept: slice | Tensor,
) -> Tensor:
    """(B, T, V); see `Model.forward`."""
    hidden = _hidden(network, ids, inputs_embeds)
    batch, length = hidden.shape[:2]
    start = 0 if cache is None else int(cache.get_seq_length())
    seen = _seen(hidden, attention_mask, start)
    if position_ids is None:
        position_ids = torch.arange(start, start + length)
    lead = position_ids.shape[:-2]
    places = position_ids.to(network.device).expand(*lead, batch, length)
    context = DenseContext(batch, length, seen, cache=cache)
    return _logits(network, hidden, places, context, kept)


def paired_logits(
    network: Network,
    ids: Tensor | None,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    decoder_input_ids: Tensor,
    kept: slice | Tensor,
) -> Tensor:
    """(B, T, V) of the decoder's ids (B, T), after the encoder's inputs; see `Model.forward`."""
    read = _hidden(network, ids, inputs_embeds)
    seen = _seen(read, attention_mask, 0)
    states = network.encode(read, seen)
    # (L, 2, K, B * S, D) -> (L, 2, B, K, S, D)
    across = network.across(states.flatten(0, 1))
    across = across.unflatten(3, states.shape[:2]).transpose(2, 3)  # type: ignore[no-untyped-call]
    hidden = network.embed(decoder_input_ids.to(network.device))
    batch, length = hidden.shape[:2]
    places = torch.arange(length, device=network.device).expand(batch, length)
    context = DenseContext(batch, length, None, across, seen)
    return _logits(network, hidden, places, context, kept)


def _logits(
    network: Network,
    hidden: Tensor,
    places: Tensor,
    context: DenseContext,
    kept: slice | Tensor,
) -> Tensor:
    """(B, n, V) of positions `kept` of embeddings (B, T, E) at places (B, T) or (axes, B, T)."""
    batch, length = places.shape[-2:]
    ends = places.cpu().view(-1, batch, length).amax(dim=(0, 2))
    lengths = ends.add(1)[:, None].expand(batch, length)
    inputs = Inputs(hidden.flatten(0, 1), places.flatten(-2), lengths.flatten())
    out = network.finish(network.forward(inputs, context))
    out = out.view(batch, length, -1)[:, kept]
    return network.logits(out.flatten(0, 1)).view(batch, out.shape[1], -1)


def _seen(hidden: Tensor, attention_mask: Tensor | None, start: int) -> Tensor | None:
    """(B, start + T) which positions are real, None where all are."""
    if attention_mask is None:
        return None
    wanted = (hidden.shape[0], start + hidden.shape[1])
    if attention_mask.shape != wanted:
        raise RequestError(
            message(
                "attention_mask does not fit the inputs",
                wanted=f"{wanted}, cached positions included",
                got=tuple(attention_mask.shape),
            )
        )
    seen = attention_mask.to(hidden.device).bool()
    return None if bool(seen.all()) else seen


def _hidden(network: Network, ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    if ids is not None and inputs_embeds is None:
        return network.embed(ids.to(network.device))
    if inputs_embeds is not None and ids is None:
        return inputs_embeds.to(network.device, network.dtype)
    raise RequestError(
        message("a forward reads either ids or embeddings", wanted="exactly one of them")
    )
