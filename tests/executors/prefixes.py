"""A model as the textbook loops see one: prefixes that are read anew for every choice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everystep.models import Model
from tests.executors.works import History


class Prefixes:
    """What the loops call states are indices into a list of prefixes; nothing is cached.

    A key is an id, or V + i for the i-th embedding that was given.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self._given: list[Tensor] = []
        self._prefixes: list[tuple[tuple[int, tuple[int, ...]], ...]] = [()]

    def start(self, encoder: Tensor | None) -> int:
        """The empty prefix."""
        return 0

    def token_key(self, token: int) -> int:
        """The id itself."""
        return token

    def keys(self, embeds: Tensor) -> list[int]:
        """(T, E) embeddings -> T keys."""
        first = self.vocab_size + len(self._given)
        self._given += list(embeds)
        return list(range(first, first + len(embeds)))

    def advance(self, state: int, key: int, position: tuple[int, ...]) -> int:
        """The prefix with one more input."""
        self._prefixes.append((*self._prefixes[state], (key, position)))
        return len(self._prefixes) - 1

    def logits(self, states: np.ndarray, pairs: np.ndarray) -> Tensor:
        """(R,) states -> (R, V)."""
        return torch.stack([self._read(state).logits(self.model)[-1] for state in states.tolist()])

    def hidden(self, states: np.ndarray) -> Tensor:
        """(R,) states, each the start of the last -> (R, E)."""
        last = self._read(int(states[-1])).watched(self.model).layers[-1]
        return last[[len(self._prefixes[state]) - 1 for state in states.tolist()]]

    def _read(self, state: int) -> History:
        keys, places = zip(*self._prefixes[state], strict=True)
        positions = torch.tensor(places).T
        positions = positions if len(positions) > 1 else positions[0]
        return History(torch.stack([self._input(key) for key in keys]), positions)

    def _input(self, key: int) -> Tensor:
        if key >= self.vocab_size:
            return self._given[key - self.vocab_size].double()
        return self.model.network.embed(torch.tensor(key))
