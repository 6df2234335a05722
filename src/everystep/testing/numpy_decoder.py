"""A decoder in float64 numpy, driven by the same specification and written anew.

Attention is a loop over heads and positions with a plain softmax. What a decoder rounds to float32
by definition, root mean squares and rotary angles, is rounded by the same operators of torch, since
another library's last bits differ. Everything that a specification can say is computed or refused.
Families of models, works and row numbers are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.errors import UnsupportedError, message
from everystep.models.decoder import Decoder
from everystep.models.loader import network_weights
from everystep.models.model import Model
from everystep.models.spec import DecoderSpec, NormSpec
from everystep.nn.linear import dense
from everystep.nn.rotary import Rope


@dataclass(slots=True, eq=False)
class NumpyRow:
    """`keys`, `values`: per layer (length, K, D).

    Arrays are replaced, never written into, so that outputs may share them.
    """

    keys: list[np.ndarray]
    values: list[np.ndarray]
    length: int = 0

    def first(self, length: int) -> NumpyRow:
        """A copy of the first `length` positions."""
        keys, values = ([x[:length].copy() for x in side] for side in (self.keys, self.values))
        return NumpyRow(keys, values, length)


@dataclass(frozen=True, slots=True, eq=False)
class NumpyDecoder:
    """A specification and its weights, by the keys of the decoder's tensors."""

    spec: DecoderSpec
    weights: Mapping[str, np.ndarray]
    embed_scale: float

    def empty_row(self) -> NumpyRow:
        """A row without positions."""
        attention, count = self.spec.attention, len(self.spec.layers)
        empty = np.empty((0, attention.kv_heads, attention.head_dim))
        return NumpyRow([empty] * count, [empty] * count)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """(N,) ids -> (N, E), an array of its own."""
        return self.weights["embed"][tokens] * self.embed_scale

    def extend(
        self,
        row: NumpyRow,
        hidden: np.ndarray,
        positions: np.ndarray,
        mask: np.ndarray | None = None,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Reads (T, E) embeddings at (T,) or (axes, T) position ids into the row.

        `mask`: (1 or H, T, S) bool, what each position sees of the row, None for all before it.

        Returns the (T, E) hidden states before the first layer and after each, the last of them
        normalised, and the (H, T, S) attention weights of each layer over all S positions.
        """
        layers, attentions = [hidden], []
        for index in range(len(self.spec.layers)):
            hidden, weights = self._layer(index, hidden, positions, row, mask)
            layers.append(hidden)
            attentions.append(weights)
        layers[-1] = self._norm("norm", hidden)
        row.length += len(hidden)
        return layers, attentions

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Normalised hidden states (R, E) -> (R, V)."""
        weight = self.weights["embed" if self.spec.tied else "head.weight"]
        logits = hidden @ weight.T + self.weights.get("head.bias", 0.0)
        return _capped(logits, self.spec.final_softcap)

    def _layer(
        self,
        index: int,
        hidden: np.ndarray,
        positions: np.ndarray,
        row: NumpyRow,
        mask: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        key = f"layers.{index}"
        normed = self._norm(f"{key}.attention_norm", hidden)
        mixed, weights = self._attention(index, normed, positions, row, mask)
        hidden = hidden + self._post_norm(f"{key}.attention", self._linear(f"{key}.out", mixed))
        if not self.spec.parallel:
            normed = self._norm(f"{key}.mlp_norm", hidden)
        return hidden + self._post_norm(f"{key}.mlp", self._mlp(key, normed)), weights

    def _attention(
        self,
        index: int,
        x: np.ndarray,
        positions: np.ndarray,
        row: NumpyRow,
        mask: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(T, E) -> (T, H * D) and the weights (H, T, S); the row's keys and values grow by T."""
        spec = self.spec.attention
        qkv = self._linear(f"layers.{index}.qkv", x).reshape(len(x), -1, spec.head_dim)
        q, k, v = np.split(qkv, [spec.heads, spec.heads + spec.kv_heads], axis=1)
        if spec.qk_norm:
            q = self._norm(f"layers.{index}.q_norm", q)
            k = self._norm(f"layers.{index}.k_norm", k)
        if (rope := self.spec.layers[index].rope) is not None:
            q, k = rotated(q, rope, positions), rotated(k, rope, positions)
        keys = row.keys[index] = np.concatenate([row.keys[index], k])
        values = row.values[index] = np.concatenate([row.values[index], v])
        return self._mixed(q, keys, values, self.spec.layers[index].window, mask)

    def _mixed(
        self,
        q: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        window: int | None,
        mask: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queries (T, H, D) of the last T of S positions on keys and values (S, K, D)."""
        spec, start = self.spec.attention, len(keys) - len(q)
        out = np.empty_like(q)
        weights = np.zeros((spec.heads, len(q), len(keys)))
        for head in range(spec.heads):
            shared = head // (spec.heads // spec.kv_heads)
            for t in range(len(q)):
                last = start + t
                first = 0 if window is None else max(0, last - window + 1)
                seen = np.arange(first, last + 1)
                if mask is not None:
                    seen = seen[mask[head % len(mask), t, seen]]
                scores = _capped(keys[seen, shared] @ q[t, head] * spec.scale, spec.softcap)
                weights[head, t, seen] = softmax(scores)
                out[t, head] = weights[head, t, seen] @ values[seen, shared]
        return out.reshape(len(q), -1), weights

    def _mlp(self, key: str, x: np.ndarray) -> np.ndarray:
        activation = ACTIVATIONS[self.spec.mlp.activation]
        inner = self._linear(f"{key}.up", x)
        if self.spec.mlp.gated:
            gate, up = np.split(inner, 2, axis=-1)
            return self._linear(f"{key}.down", activation(gate) * up)
        return self._linear(f"{key}.down", activation(inner))

    def _linear(self, key: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{key}.weight"].T + self.weights.get(f"{key}.bias", 0.0)

    def _post_norm(self, key: str, x: np.ndarray) -> np.ndarray:
        return self._norm(f"{key}_post_norm", x) if self.spec.post_norms else x

    def _norm(self, key: str, x: np.ndarray) -> np.ndarray:
        spec, weight = self.spec.norm, self.weights[f"{key}.weight"]
        if spec.kind == "rms":
            return rms_norm(x, weight, spec)
        centred = x - x.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + spec.eps)
        return centred / spread * weight + self.weights.get(f"{key}.bias", 0.0)


def read_decoder(model: Model) -> NumpyDecoder:
    """The model in numpy; UnsupportedError if it is not a decoder, or one of an unknown kind."""
    spec, network = model.spec, model.network
    if not isinstance(spec, DecoderSpec) or not isinstance(network, Decoder):
        raise _unsupported("this model", "a decoder", type(network).__name__)
    if spec.mlp.activation not in ACTIVATIONS:
        raise _unsupported("this activation", ", ".join(ACTIVATIONS), spec.mlp.activation)
    allowed = {"rms": not spec.norm.bias, "layer": not spec.norm.plus_one}
    if not allowed.get(spec.norm.kind, False):
        raise _unsupported(
            "this norm", "'rms' without bias, or 'layer' without plus_one", spec.norm
        )
    weights = {key: float64(dense(held)) for key, held in network_weights(network)}
    # A decoder rounds the factor to the type of its weights.
    scale = torch.tensor(1.0 if spec.embed_scale is None else spec.embed_scale, dtype=model.dtype)
    return NumpyDecoder(spec, weights, float(scale))


def _unsupported(what: str, wanted: str, got: object) -> UnsupportedError:
    return UnsupportedError(
        message(
            f"{what} cannot be run in numpy",
            wanted=wanted,
            got=got,
            do="Use the torch executor",
        )
    )


def float64(tensor: Tensor) -> np.ndarray:
    """The same values on the CPU."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def softmax(scores: np.ndarray) -> np.ndarray:
    """(S,) -> (S,) that sum to one."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def rms_norm(x: np.ndarray, weight: np.ndarray, spec: NormSpec) -> np.ndarray:
    """x over its root mean square, taken in float32, times the weight."""
    exact = torch.tensor(x, dtype=torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.plus_one:
        return float64(exact * (1.0 + torch.tensor(weight, dtype=torch.float32)))
    return float64(exact) * weight


def rotated(x: np.ndarray, rope: Rope, positions: np.ndarray) -> np.ndarray:
    """(T, H, D) at (T,) or (axes, T) position ids: pairs (i, i + dim/2) turned, the rest as it is.

    The length that some frequencies depend on is the last of these positions and 1.
    """
    lengths = torch.full((len(x),), int(positions.max()) + 1) if rope.scaling.by_length else None
    frequencies = rope.scaling.frequencies(rope.dim, rope.theta, lengths)
    places = (
        positions[list(rope.axes)].T if positions.ndim > 1 and rope.axes else positions[:, None]
    )
    angles = torch.tensor(places).float() * frequencies
    factor = rope.scaling.attention_factor
    cos, sin = (float64(f(angles) * factor)[:, None] for f in (torch.cos, torch.sin))
    first, second, rest = np.split(x, [rope.dim // 2, rope.dim], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _capped(scores: np.ndarray, cap: float | None) -> np.ndarray:
    return scores if cap is None else np.tanh(scores / cap) * cap


def _silu(x: np.ndarray) -> np.ndarray:
    # The logistic function as a tanh cannot overflow.
    return x * (0.5 * np.tanh(0.5 * x) + 0.5)


def _gelu(x: np.ndarray) -> np.ndarray:
    error = np.vectorize(math.erf, otypes=[np.float64])
    return 0.5 * x * (1.0 + error(x / math.sqrt(2.0)))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": _silu,
    "swish": _silu,
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _relu,
}
