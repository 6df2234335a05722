"""The plain forward: a rectangle of tokens, in which every position looks at those before it.

A cache object may hold what stands before the rectangle; it is filled as its layers are reached.
This is what a loop of the caller's runs on. The engine's rows are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.cache.containers import Cache, EncoderDecoderCache
from everystep.errors import InvariantError, RequestError
from everystep.nn.attention import RelativeBias, Rule, View, look, look_and_weigh
from everystep.nn.network import Heard, Network, Placed, State, StepInputs
from everystep.nn.ragged import Ragged

Across = Sequence[tuple[Tensor, Tensor]]
"""(L,) keys and values (B, K, S, D) of encoder states."""


class DenseContext:
    """B rows of T positions that see each other, after those that `cache` holds.

    `seen` (B, S) marks real positions, not padding, the cached ones first. `across`: what encoder
    states give each layer to look at, of which `across_seen` (B, S) are real. `packed` (B, T):
    which of the sequences that lie one after another in a row a position belongs to; they
    do not see each other. `heard` is given what the layers show. Recurrent layers begin with
    nothing.
    """

    def __init__(
        self,
        network: Network,
        batch: int,
        length: int,
        seen: Tensor | None,
        across: Across | None = None,
        across_seen: Tensor | None = None,
        cache: Cache | None = None,
        packed: Tensor | None = None,
        heard: Heard | None = None,
    ) -> None:
        self._packed = packed
        self._heard = heard
        self._network = network
        self._shape = (batch, length)
        self._cache = cache
        self._start = 0 if cache is None else int(cache.get_seq_length())
        self._seen = seen
        self._across = across
        held = None if across_seen is None else across_seen[:, None, None]
        nowhere = torch.empty(0)
        self._across_view = View(nowhere, nowhere, held, causal=False)
        self._views: dict[int, View] = {}
        self._feeds: Ragged | None = None

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        """Let q (B * T, H, D) look at kv (B * T, 2, K, D) and at what is cached; store kv there.

        Return (B * T, H * D).
        """
        k, v = kv.view(*self._shape, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
        if self._cache is not None:
            k, v = self._cache.update(k, v, layer)
        q, view = q.view(*self._shape, *q.shape[1:]), self._view(k)
        if self._heard is None:
            return look(q, k, v, rule, view, bias)
        out, weights = look_and_weigh(q, k, v, rule, view, bias)
        self._heard.attentions.append(weights)
        return out

    def attend_across(self, layer: int, q: Tensor, rule: Rule) -> Tensor:
        """Let q (B * T, H, D) look at the encoder states of its row, return (B * T, H * D)."""
        if self._across is None:
            raise InvariantError("there are no encoder states to look at")
        k, v = self._across[layer]
        q, view = q.view(*self._shape, *q.shape[1:]), self._across_view
        if self._heard is None:
            return look(q, k, v, rule, view)
        out, weights = look_and_weigh(q, k, v, rule, view)
        self._heard.across.append(weights)
        return out

    def feeds(self) -> Ragged:
        """Return the rectangle as a recurrent layer reads it, without padding."""
        if self._feeds is None:
            self._feeds = Ragged.of_rectangle(*self._shape, self._seen, self._network.device)
        return self._feeds

    def recall(self, layer: int) -> tuple[Tensor, ...]:
        """Return (B, *shape) of each shape: zeros."""
        (store,) = (one for one in self._network.stores[layer] if isinstance(one, State))
        dtype = torch.promote_types(self._network.dtype, torch.float32)
        batch = self._shape[0]
        return tuple(
            torch.zeros(batch, *shape, dtype=dtype, device=self._network.device)
            for shape in store.shapes
        )

    def remember(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """Keep nothing."""

    def keep(self, hidden: Tensor) -> None:
        """Note (B, T, E) of it where somebody listens."""
        if self._heard is not None:
            self._heard.layers.append(hidden.view(*self._shape, -1))

    def _view(self, k: Tensor) -> View:
        """Return what is seen of keys (B, K, S, D): a layer's last positions, or room for more."""
        length = k.shape[2]
        if length not in self._views:
            stop = self._start + self._shape[1]
            first = max(stop - length, 0)
            queries = torch.arange(self._start, stop, device=k.device)
            keys = torch.arange(first, first + length, device=k.device)
            seen = None
            if self._seen is not None:
                real = F.pad(self._seen, (0, max(length - self._seen.shape[1], 0)))
                # A row of padding that sees nothing would divide by zero: it sees itself.
                itself = keys == queries[:, None]
                seen = (real[:, None, keys] | itself)[:, None]
            if self._packed is not None:
                seen = (self._packed[:, :, None] == self._packed[:, None])[:, None]
            aligned = length == self._shape[1]
            self._views[length] = View(queries, keys, seen, aligned=aligned)
        return self._views[length]


def embedded(
    network: Network, ids: Tensor, name: str = "input_ids", *, source: bool = False
) -> Tensor:
    """Return (..., E) embeddings of ids (...,), the decoder's or those of the `source`.

    An encoder reads the `source`. Raise RequestError where an id is outside the vocabulary.
    """
    size = network.source_vocab_size if source else network.spec.vocab_size
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        do = "Pass a tensor of ids, or inputs_embeds"
        raise RequestError(f"{name} has the wrong type", wanted="integers", got=ids.dtype, do=do)
    found = ids.to(network.device)
    if found.numel():
        low, high = (int(one) for one in found.aminmax())
        if low < 0 or high >= size:
            raise RequestError(
                f"{name} holds an id outside the vocabulary",
                wanted=f"0 to {size - 1}",
                got=low if low < 0 else high,
                do="Check that tokenizer and model belong together; embed placeholders yourself",
            )
    return network.embed_source(found) if source else network.embed(found)


def dense_states(
    network: Network,
    ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    decoded: Tensor | None,
    cache: Cache | None,
    kept: slice | Tensor,
    decoder_attention_mask: Tensor | None = None,
    encoder_states: Tensor | None = None,
    heard: Heard | None = None,
    declared: Mapping[str, Placed] | None = None,
) -> Tensor:
    """Return (B, n, E) normalised states of positions `kept`; see `Model.forward`.

    `decoded`: the ids (B, T), or embeddings (B, T, E), of a decoder beside an encoder, whose states
    (B, S, E) are given unless the cache holds their keys and values.
    """
    start = 0 if cache is None else int(cache.get_seq_length())
    across, across_seen = None, None
    if decoded is not None:
        across, mask = _held_across(cache), attention_mask
        if across is not None:
            keys, _ = across[0]
            across_seen = _seen((keys.shape[0], keys.shape[2]), mask, keys.device)
        elif encoder_states is not None:
            across, across_seen = _looked_at(network, encoder_states, mask)
            _keep_across(cache, across)
        if decoded.dim() == 3:
            hidden = decoded.to(network.device, network.dtype)
        else:
            hidden = embedded(network, decoded, "decoder_input_ids")
        attention_mask = decoder_attention_mask
    else:
        hidden = _hidden(network, ids, inputs_embeds, source=False)
    seen = _seen((hidden.shape[0], start + hidden.shape[1]), attention_mask, hidden.device)
    batch, length = hidden.shape[:2]
    packed = None
    if position_ids is not None and attention_mask is None and cache is None:
        packed = _packed(position_ids, batch, network.device)
    if position_ids is None and seen is not None and network.counts_seen:
        # Padding has no position of its own, and stands where the first one does.
        position_ids = (seen.cumsum(-1) - 1).clamp(min=0)[:, start:]
    elif position_ids is None:
        position_ids = torch.arange(start, start + length)
    if length:
        network.require_places(int(position_ids.min()), int(position_ids.max()))
    # (B, T) or (axes, B, T)
    places = position_ids.expand(*position_ids.shape[:-2], batch, length)
    ends = places.cpu().view(-1, batch, length).amax(dim=(0, 2))
    lengths = ends.add(1)[:, None].expand(batch, length)
    places = places.to(network.device).flatten(-2)
    context = DenseContext(network, batch, length, seen, across, across_seen, cache, packed, heard)
    inputs = StepInputs(hidden.flatten(0, 1), places, lengths.flatten(), declared or {})
    out = network.forward(inputs, context)
    whole = network.finish(out).view(batch, length, -1)
    if heard is not None:
        heard.layers[-1] = whole
    return whole[:, kept]


def _packed(position_ids: Tensor, batch: int, device: torch.device) -> Tensor | None:
    """Return (B, T) the number of each position's sequence, None where a row is one sequence.

    A new one begins where positions do not go on by one, as in transformers, which reads them so
    where there is neither a mask nor a cache. Positions of several axes say nothing of that.
    """
    if position_ids.dim() > 2:
        return None
    breaks = position_ids.diff(dim=-1) != 1
    if not bool(breaks.any()):
        return None
    numbers = F.pad(breaks.long().cumsum(-1), (1, 0))
    return numbers.expand(batch, numbers.shape[-1]).to(device)


def encoded_states(
    network: Network,
    ids: Tensor | None,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    heard: Heard | None = None,
) -> Tensor:
    """Return encoder states (B, S, E) of what an encoder reads; `heard` gets what its layers
    show."""
    hidden = _hidden(network, ids, inputs_embeds, source=True)
    return network.encode(hidden, _seen_states(network, hidden, attention_mask), heard)


def _seen_states(network: Network, hidden: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Return which of an encoder's positions (B, S, E) are real, None where all are."""
    require_within(hidden.shape[1], network.most_source_positions, "the encoder")
    seen = _seen(hidden.shape[:2], attention_mask, hidden.device)
    # A row of padding alone would divide by zero: it is read whole.
    return None if seen is None else seen | ~seen.any(dim=1, keepdim=True)


def _looked_at(
    network: Network, states: Tensor, attention_mask: Tensor | None
) -> tuple[Across, Tensor | None]:
    """Return keys and values of encoder states (B, S, E), and which of them are real."""
    seen = _seen_states(network, states, attention_mask)
    # (L, 2, K, B * S, D) -> (L, 2, B, K, S, D)
    both = network.across(states.flatten(0, 1)).unflatten(3, states.shape[:2]).transpose(2, 3)  # type: ignore[no-untyped-call]
    return [(keys, values) for keys, values in both], seen


def holds_across(cache: Cache | None) -> bool:
    """Return whether a cache holds keys and values of encoder states."""
    return isinstance(cache, EncoderDecoderCache) and any(cache.is_updated.values())


def _held_across(cache: Cache | None) -> Across | None:
    """Return keys and values of encoder states where a cache holds them."""
    if not isinstance(cache, EncoderDecoderCache) or not holds_across(cache):
        return None
    return [layer.whole() for layer in cache.cross_attention_cache.layers]


def _keep_across(cache: Cache | None, across: Across) -> None:
    """Put keys and values of encoder states into the cache, if there is one."""
    if not isinstance(cache, EncoderDecoderCache):
        return
    for layer, (keys, values) in enumerate(across):
        cache.cross_attention_cache.update(keys, values, layer)
        cache.is_updated[layer] = True


def _seen(
    wanted: tuple[int, ...], attention_mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return (B, S) which positions are real, None where all are. `wanted`: B and S."""
    if attention_mask is None:
        return None
    if attention_mask.shape != wanted:
        raise RequestError(
            "attention_mask does not fit the inputs",
            wanted=f"{tuple(wanted)}, cached positions included",
            got=tuple(attention_mask.shape),
        )
    seen = attention_mask.to(device).bool()
    return None if bool(seen.all()) else seen


def require_within(length: int, most: int | None, who: str) -> None:
    """Raise RequestError for more positions than there are vectors for."""
    if most is not None and length > most:
        raise RequestError(
            f"{who} has no positions beyond those that it was made with",
            wanted=f"at most {most}",
            got=f"{length} positions",
            do="Shorten the prompt or what may follow it",
        )


def _hidden(
    network: Network, ids: Tensor | None, inputs_embeds: Tensor | None, *, source: bool
) -> Tensor:
    if ids is not None and not ids.numel():
        what, do = "input_ids holds no ids", "Pass at least one per row"
        raise RequestError(what, wanted="(batch, length)", got=tuple(ids.shape), do=do)
    if ids is not None and inputs_embeds is None:
        return embedded(network, ids, source=source)
    if inputs_embeds is not None and ids is None:
        return inputs_embeds.to(network.device, network.dtype)
    raise RequestError("a forward reads either ids or embeddings", wanted="exactly one of them")
