"""A model without weights: logits that are a hash of everything it has read.

Every position folds its input and its position id into the state of the position before, so a
wrong, missing, doubled or moved input changes all that follows. On top lies a share that depends on
the last two inputs alone, so that phrases come back and n-gram drafts are sometimes right. All
values are exact in float32. It knows neither rows nor works: a prefix is the whole truth.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from everystep.draws import mix, mix_one

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_START = 0x243F6A8885A308D3
_FAVOURED = 4.0


class HashFunction:
    """Keys of inputs, states of prefixes, outputs of states; keys and states are 64-bit numbers."""

    def __init__(self, vocab_size: int, embed_dim: int = 4) -> None:
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        grid = np.arange(1, vocab_size * embed_dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._embeddings = _signed_unit(mix(grid)).reshape(vocab_size, embed_dim)
        self._token_keys = self.keys(torch.from_numpy(self._embeddings))
        self._token_salts = mix(np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_MIX_1))

    def embed(self, ids: np.ndarray) -> Tensor:
        """(T, E) float32: what the model reads in place of the ids, to the same effect."""
        return torch.from_numpy(self._embeddings[ids])

    def token_key(self, token: int) -> int:
        """The key of an id, which is that of its embedding."""
        return self._token_keys[token]

    def keys(self, embeds: Tensor) -> list[int]:
        """(T, E) embeddings -> T keys."""
        bits = embeds.detach().to("cpu", torch.float32).contiguous().numpy().view(np.uint32)
        keys = np.full(len(bits), _START, dtype=np.uint64)
        for column in bits.astype(np.uint64).T:
            keys = mix(keys * np.uint64(_GOLDEN) + column)
        found: list[int] = keys.tolist()
        return found

    def joined(self, key: int, name: str, further: int) -> int:
        """The key of an input that has a further, named part."""
        for byte in name.encode():
            further = mix_one(further * _GOLDEN + byte & _MASK)
        return mix_one(key * _GOLDEN + further & _MASK)

    def seeing(self, key: int, seen: np.ndarray) -> int:
        """The key of an input that sees (heads, n) of the n positions up to its own, bool."""
        if seen.all():
            return key
        bits = torch.tensor([[*seen.shape, *np.packbits(seen).tolist()]], dtype=torch.float32)
        return self.joined(key, "mask", self.keys(bits)[0])

    def start(self, encoder: Tensor | None) -> int:
        """The state of the empty prefix, which reads the encoder's states if there are any."""
        state = _START
        for key in [] if encoder is None else self.keys(encoder):
            state = mix_one(state * _GOLDEN + key & _MASK)
        return state

    def advance(self, state: int, key: int, position: Iterable[int]) -> int:
        """The state after one more input at a position id of any rank; equal ids count as one."""
        place = 0
        for coordinate in dict.fromkeys(position):
            place = mix_one(place * _GOLDEN + coordinate + 1 & _MASK)
        return mix_one(state * _GOLDEN + mix_one(key ^ place) & _MASK)

    def logits(self, states: np.ndarray, pairs: np.ndarray) -> Tensor:
        """(R,) states and (R, 2) keys of the last two inputs, both uint64 -> (R, V) float32."""
        noise = mix(states[:, None] ^ self._token_salts) >> np.uint64(44)
        phrase = mix(pairs[:, 0] * np.uint64(_GOLDEN) + pairs[:, 1])
        favoured = mix(phrase[:, None] ^ self._token_salts) >> np.uint64(60) == 0
        # 20 bits below 4 and a whole number on top: a sum of 22 bits, exact in float32
        values = noise.astype(np.float32) * np.float32(2.0**-18)
        return torch.from_numpy(values + favoured * np.float32(_FAVOURED))

    def early(self, states: np.ndarray, layer: int) -> Tensor:
        """(R,) states -> (R, V) float32 logits that an earlier layer would have given."""
        salted = mix(states ^ np.uint64(mix_one(layer + 1)))
        noise = mix(salted[:, None] ^ self._token_salts) >> np.uint64(44)
        return torch.from_numpy(noise.astype(np.float32) * np.float32(2.0**-18))

    def hidden(self, states: np.ndarray, layer: int = 0) -> Tensor:
        """(R,) states -> (R, E) float32 in [-1, 1), a different one for every layer."""
        salts = np.arange(1, self.embed_dim + 1, dtype=np.uint64) * np.uint64(_MIX_2)
        salts = mix(salts + np.uint64(mix_one(layer)))
        return torch.from_numpy(_signed_unit(mix(states[:, None] ^ salts)))


def _signed_unit(bits: np.ndarray) -> np.ndarray:
    """uint64 -> float32 in [-1, 1) on a grid of 2^-23."""
    return ((bits >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0).astype(np.float32)
