"""A decoder in float64 numpy, driven by the same specification and written anew, row after row.

It is slow, and plain enough to judge other executors by: no code is shared with the cache, and
attention is one softmax over the whole row. What a decoder rounds to float32 by definition, root
mean squares and rotary angles, is rounded by the same operators of torch, since another library's
last bits differ. Everything that a specification can say is computed or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everystep.errors import UnsupportedError
from everystep.executors.positions import declared_inputs, position_ids, require_places
from everystep.models import Model
from everystep.models.decoder import Decoder
from everystep.models.loader import network_weights
from everystep.models.spec import DecoderSpec, NormSpec
from everystep.nn.linear import dense
from everystep.nn.rotary import Rope
from everystep.testing.hash_model import ABILITIES
from everystep.testing.strict import Row, RowFeed, StrictExecutor
from everystep.types import Answer, StepOutput, Work

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_fast": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class NumpyExecutor(StrictExecutor):
    """One engine's executor on a decoder; raises UnsupportedError for any other model.

    Weights are read in float64 on the CPU, whatever the model's type and device, so that a model of
    a narrower type differs from this executor by its own rounding. A row holds the keys and then
    the values of every layer, (length, K, D) each.
    """

    dtype = torch.float64

    def __init__(self, model: Model) -> None:
        self._spec, network = _decoder_of(model)
        self._weights = {key: _float64(dense(held)) for key, held in network_weights(network)}
        self._network, self._axes = network, network.axes
        # A decoder rounds the factor to the type of its weights.
        scale = 1.0 if self._spec.embed_scale is None else self._spec.embed_scale
        self._embed_scale = float(torch.tensor(scale, dtype=model.dtype))
        inputs = declared_inputs(network)
        super().__init__(model.vocab_size, self._spec.width, ABILITIES - {"encoder"}, inputs)

    def run(self, work: Work) -> StepOutput:
        """Logits are float64; RequestError for positions that do not fit the model."""
        position_ids(work, self._axes)
        require_places(self._network, work)
        return super().run(work)

    def embed(self, ids: Tensor) -> Tensor:
        """(n,) ids -> (n, E) float64."""
        return torch.from_numpy(self._weights["embed"][ids.numpy()] * self._embed_scale)

    def empty_row(self, encoder: Tensor | None) -> Row:
        attention = self._spec.attention
        empty = np.empty((0, attention.kv_heads, attention.head_dim))
        return Row([empty] * (2 * len(self._spec.layers)))

    def extend(self, row: Row, feed: RowFeed) -> tuple[Tensor, Answer]:
        hidden = self._weights["embed"][np.maximum(feed.tokens, 0)] * self._embed_scale
        for _, start, values in feed.extra.inputs:
            hidden[start : start + len(values)] = _float64(values)
        if self._spec.positions is not None:
            places = feed.positions[0] + self._spec.positions.unused
            hidden = hidden + self._weights["positions"][places]
        mask = None if feed.extra.mask is None else feed.extra.mask.numpy()
        layers, attentions = [hidden], []
        for index in range(len(self._spec.layers)):
            hidden, weights = self._layer(index, hidden, feed.positions, row, mask)
            layers.append(hidden)
            attentions.append(weights)
        first, early = feed.count - feed.logits, feed.extra.early
        seen = [torch.from_numpy(self._head(layers[layer][first:])) for layer in early]
        last = layers[-1] = self._norm("norm", hidden)
        answer = Answer(
            torch.from_numpy(last) if feed.extra.hidden else None,
            tuple(map(torch.from_numpy, layers)) if feed.extra.layers else None,
            tuple(map(torch.from_numpy, attentions)) if feed.extra.attentions else None,
            early=torch.stack(seen) if seen else None,
        )
        return torch.from_numpy(self._logits(last[first:])), answer

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        """Normalised hidden states (R, E) -> (R, V)."""
        return _capped(self._head(hidden), self._spec.final_softcap)

    def _head(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states (R, E) -> (R, V)."""
        weight = self._weights["embed" if self._spec.tied else "head.weight"]
        logits: np.ndarray = hidden @ weight.T + self._weights.get("head.bias", 0.0)
        return logits

    def _layer(
        self,
        index: int,
        hidden: np.ndarray,
        positions: np.ndarray,
        row: Row,
        mask: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(T, E) at (1 or axes, T) position ids -> (T, E), and the weights (H, T, S).

        `mask`: (1 or H, T, S) bool, what each position sees of the row, None for all before it.
        """
        key = f"layers.{index}"
        pre, before = self._spec.pre_norms, hidden
        normed = hidden if pre == "none" else self._norm(f"{key}.attention_norm", hidden)
        q, k, v = self._heads(index, normed, positions)
        for part, new in ((2 * index, k), (2 * index + 1, v)):
            row.parts[part] = np.concatenate([row.parts[part], new])
        mixed, weights = self._attention(index, q, row, mask)
        hidden = hidden + self._post_norm(f"{key}.attention", self._linear(f"{key}.out", mixed))
        if pre != "shared":
            read = before if self._spec.parallel else hidden
            normed = read if pre == "none" else self._norm(f"{key}.mlp_norm", read)
        return hidden + self._post_norm(f"{key}.mlp", self._mlp(index, normed)), weights

    def _heads(self, index: int, x: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """(T, E) -> queries (T, H, D), keys and values (T, K, D)."""
        key, spec = f"layers.{index}", self._spec.attention
        qkv = self._linear(f"{key}.qkv", x).reshape(len(x), -1, spec.head_dim)
        q, k, v = np.split(qkv, [spec.heads, spec.heads + spec.kv_heads], axis=1)
        for role, x in {"q_norm": q, "k_norm": k}.items() if spec.qk_norm else ():
            whole = (len(x), -1) if spec.qk_norm == "whole" else x.shape
            x[:] = self._norm(f"{key}.{role}", x.reshape(whole)).reshape(x.shape)
        if (rope := self._spec.layers[index].rope) is not None:
            q, k = _rotated(q, rope, positions), _rotated(k, rope, positions)
        return [q, k, v]

    def _attention(
        self, index: int, q: np.ndarray, row: Row, mask: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queries (T, H, D) of the row's last T of S positions -> (T, H * D) and (H, T, S)."""
        spec, layer = self._spec.attention, self._spec.layers[index]
        shared = spec.heads // spec.kv_heads
        keys, values = (x.repeat(shared, axis=1) for x in row.parts[2 * index : 2 * index + 2])
        place = np.arange(len(keys))
        own = place[len(keys) - len(q) :, None]
        seen = place <= own
        if layer.window is not None:
            seen = seen & (place > own - layer.window)
        if mask is not None:
            seen = seen & mask
        scores = np.einsum("thd,shd->hts", q, keys) * (spec.scale * layer.factor)
        scores = _capped(scores, spec.softcap)
        scores = np.where(seen, scores, -np.inf)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = powers / powers.sum(axis=-1, keepdims=True)
        return np.einsum("hts,shd->thd", weights, values).reshape(len(q), -1), weights

    def _mlp(self, index: int, x: np.ndarray) -> np.ndarray:
        key, experts = f"layers.{index}", self._spec.layers[index].experts
        if experts is None:
            return self._linear(f"{key}.down", self._inner(f"{key}.up", x))
        logits = torch.from_numpy(x @ self._weights[f"{key}.experts.router.weight"].T)
        every = logits.softmax(-1, dtype=torch.float32).numpy()
        out = np.zeros_like(x)
        for row, shares in enumerate(every):
            best = np.argsort(-shares, kind="stable")[: experts.chosen]
            if experts.normalised:
                shares = shares / shares[best].sum()
            for number in best:
                inner = self._inner(f"{key}.experts.up.{number}", x[row])
                made = self._linear(f"{key}.experts.down.{number}", inner)
                out[row] += np.float64(shares[number]) * made
        return out

    def _inner(self, key: str, x: np.ndarray) -> np.ndarray:
        inner, up = self._linear(key, x), np.ones(1)
        if self._spec.mlp.gated:
            inner, up = np.split(inner, 2, axis=-1)
        active = _ACTIVATIONS[self._spec.mlp.activation](torch.from_numpy(inner)).numpy()
        inner = active * up
        return inner

    def _linear(self, key: str, x: np.ndarray) -> np.ndarray:
        return x @ self._weights[f"{key}.weight"].T + self._weights.get(f"{key}.bias", 0.0)

    def _post_norm(self, key: str, x: np.ndarray) -> np.ndarray:
        return self._norm(f"{key}_post_norm", x) if self._spec.post_norms else x

    def _norm(self, key: str, x: np.ndarray) -> np.ndarray:
        spec, weight = self._spec.norm, self._weights[f"{key}.weight"]
        if spec.kind == "rms":
            return _rms_norm(x, weight, spec)
        centred = x - x.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + spec.eps)
        return centred / spread * weight + self._weights.get(f"{key}.bias", 0.0)


def _decoder_of(model: Model) -> tuple[DecoderSpec, Decoder]:
    """Its specification and network; UnsupportedError unless it is a decoder of a known kind."""
    spec, network = model.spec, model.network
    if not isinstance(spec, DecoderSpec) or not isinstance(network, Decoder):
        _refuse("this model", "a decoder", type(network).__name__)
    if spec.deepstack:
        _refuse("a decoder with features for its layers", "one without", spec.deepstack)
    if spec.mlp.activation not in _ACTIVATIONS:
        _refuse("this activation", ", ".join(_ACTIVATIONS), spec.mlp.activation)
    allowed = {"rms": not spec.norm.bias, "layer": not spec.norm.plus_one}
    if not allowed.get(spec.norm.kind, False):
        _refuse("this norm", "'rms' without bias, or 'layer' without plus_one", spec.norm)
    return spec, network


def _refuse(what: str, wanted: str, got: object) -> NoReturn:
    what, do = f"{what} cannot be run in numpy", "Use the torch executor"
    raise UnsupportedError(what, wanted=wanted, got=got, do=do)


def _float64(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()


def _rms_norm(x: np.ndarray, weight: np.ndarray, spec: NormSpec) -> np.ndarray:
    """x over its root mean square, taken in float32, times the weight."""
    exact = torch.tensor(x, dtype=torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.plus_one:
        return _float64(exact * (1.0 + torch.tensor(weight, dtype=torch.float32)))
    return _float64(exact) * weight


def _rotated(x: np.ndarray, rope: Rope, positions: np.ndarray) -> np.ndarray:
    """(T, H, D) at (1 or axes, T) position ids: pairs (i, i + dim/2) turned, the rest as it is.

    The length that some frequencies depend on is the last of these positions and 1.
    """
    lengths = torch.full((len(x),), int(positions.max()) + 1) if rope.scaling.by_length else None
    frequencies = rope.scaling.frequencies(rope.dim, rope.theta, lengths)
    several = len(positions) > 1 and rope.axes
    places = positions[list(rope.axes)] if several else positions
    angles = torch.tensor(places.T).float() * frequencies
    factor = rope.scaling.attention_factor
    cos, sin = (_float64(f(angles) * factor)[:, None] for f in (torch.cos, torch.sin))
    first, second, rest = np.split(x, [rope.dim // 2, rope.dim], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _capped(scores: np.ndarray, cap: float | None) -> np.ndarray:
    return scores if cap is None else np.tanh(scores / cap) * cap
