"""What the hash function reads of a prompt and the tokens after it, from the first position on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch import Tensor

from everystep.testing.hash_function import HashFunction
from everystep.types import Prompt


def logits(function: HashFunction, prompt: Prompt, tokens: list[int]) -> Tensor:
    """(V,) logits of what may follow a prompt and the tokens after it."""
    inputs = enumerate(keys_of(function, prompt, tokens))
    keys = [masked(function, prompt, place, key) for place, key in inputs]
    return logits_after(function, states_of(function, prompt, keys), keys)


def logits_after(function: HashFunction, states: list[int], keys: list[int]) -> Tensor:
    """(V,) logits after the last of these positions."""
    pair = [0, *keys][-2:]
    return function.logits(np.array(states[-1:], np.uint64), np.array([pair], np.uint64))[0]


def keys_of(function: HashFunction, prompt: Prompt, tokens: list[int]) -> list[int]:
    """The key of the input of every position."""
    if prompt.embeds is not None:
        keys = function.keys(prompt.embeds)
    else:
        keys = [function.token_key(token) for token in prompt.ids.tolist()]  # type: ignore[union-attr]
    if prompt.injected is not None:
        found = function.keys(prompt.injected.embeds)
        for place, key in zip(prompt.injected.positions.tolist(), found, strict=True):
            keys[place] = key
    return [*keys, *(function.token_key(token) for token in tokens)]


def states_of(function: HashFunction, prompt: Prompt, keys: list[int]) -> list[int]:
    """The state after every position."""
    state, states = function.start(prompt.encoder), []
    for key, position in zip(keys, _positions(prompt), strict=False):
        state = function.advance(state, key, position)
        states.append(state)
    return states


def masked(function: HashFunction, prompt: Prompt, place: int, key: int) -> int:
    """The key of a position that its prompt's mask lets see a part of what stands before it."""
    if prompt.mask is None:
        return key
    length, own = prompt.length, prompt.mask.numpy().reshape(-1, prompt.length, prompt.length)
    seen = np.ones((len(own), place + 1), dtype=bool)
    seen[:, :length] = own[:, min(place, length - 1), : place + 1]
    return function.seeing(key, seen)


def _positions(prompt: Prompt) -> Iterator[tuple[int, ...]]:
    """The position ids of the prompt, and then without end those of generated tokens."""
    places = torch.arange(prompt.length) if prompt.positions is None else prompt.positions
    given = [tuple(place) for place in places.reshape(-1, places.shape[-1]).T.tolist()]
    yield from given
    for place in count(max(map(max, given)) + 1):
        yield (place,) * len(given[-1])
