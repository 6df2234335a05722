"""An executor of the hash function's states, in rows where no misuse is forgiven.

Each row keeps its own keys and states of everything that was fed into it, and logits come only from
positions fed in that very call.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everystep.testing.hash_function import HashFunction
from everystep.testing.strict import Row, RowFeed, StrictExecutor, require
from everystep.types import Answer, InputSpec, StepOutput, Work

ABILITIES = frozenset(
    {
        *("truncate", "cut", "embeds", "positions", "mask"),
        *("hidden", "layers", "early", "attentions", "encoder"),
    }
)
LAYERS = 2
HEADS = 2


class HashExecutor(StrictExecutor):
    """Runs works on the hash function; a row holds the keys of its inputs and the states after."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int = 4,
        *,
        max_rows: int | None = None,
        abilities: frozenset[str] = ABILITIES,
        inputs: tuple[InputSpec, ...] = (),
    ) -> None:
        self.function = HashFunction(vocab_size, embed_dim)
        named = {one.name: one for one in inputs}
        super().__init__(vocab_size, embed_dim, abilities | frozenset(named), named, max_rows)

    def embed(self, ids: Tensor) -> Tensor:
        """(n,) ids -> (n, E) what can be fed in their place."""
        return self.function.embed(ids.numpy())

    def empty_row(self, encoder: Tensor | None) -> Row:
        nothing = np.empty(0, np.uint64)
        return Row([nothing, nothing], self.function.start(encoder))

    def extend(self, row: Row, feed: RowFeed) -> tuple[Tensor, Answer]:
        keys, states = self._keys(feed), []
        state = int(row.parts[1][-1]) if row.length else row.start
        for key, position in zip(keys, feed.positions.T.tolist(), strict=True):
            state = self.function.advance(state, key, position)
            states.append(state)
        more = (np.array(new, np.uint64) for new in (keys, states))
        row.parts = [np.concatenate(pair) for pair in zip(row.parts, more, strict=True)]
        return self._logits(row, row.length - feed.logits), self._answer(row, feed)

    def _keys(self, feed: RowFeed) -> list[int]:
        """One per position: its id or embedding, with every further input and its mask."""
        keys = [self.function.token_key(token) for token in feed.tokens.tolist()]
        inputs = sorted(feed.extra.inputs, key=lambda given: given.name != "embeds")
        for name, start, values in inputs:
            found = self.function.keys(values.flatten(1).float())
            for i, key in enumerate(found, start):
                keys[i] = key if name == "embeds" else self.function.joined(keys[i], name, key)
        if feed.extra.mask is None:
            return keys
        mask = feed.extra.mask.numpy()
        for i, place in enumerate(range(feed.start, feed.start + feed.count)):
            require(not mask[:, i, place + 1 :].any(), "a position sees what stands after it")
            keys[i] = self.function.seeing(keys[i], mask[:, i, : place + 1])
        return keys

    def _logits(self, row: Row, first: int) -> Tensor:
        """(n, V) after each position from `first` on."""
        if first == row.length:
            return torch.empty(0, self.vocab_size)
        keys, states = row.parts
        earlier = np.concatenate([np.zeros(1, np.uint64), keys])[first:-1]
        return self.function.logits(states[first:], np.array([earlier, keys[first:]]).T)

    def _answer(self, row: Row, feed: RowFeed) -> Answer:
        extra, states, hidden = feed.extra, row.parts[1][feed.start :], self.function.hidden
        return Answer(
            hidden(states) if extra.hidden else None,
            tuple(hidden(states, n) for n in range(LAYERS, -1, -1)) if extra.layers else None,
            self._attentions(row, feed) if extra.attentions else None,
            early=self._early(states[len(states) - feed.logits :], extra.early),
        )

    def _early(self, states: np.ndarray, layers: tuple[int, ...]) -> Tensor | None:
        found = [self.function.early(states, layer) for layer in layers]
        return torch.stack(found) if found else None

    def _attentions(self, row: Row, feed: RowFeed) -> tuple[Tensor, ...]:
        hidden = self.function.hidden(row.parts[1])
        later = torch.ones(feed.count, len(hidden)).triu(feed.start + 1).bool()
        scores = (hidden[feed.start :] @ hidden.T).masked_fill(later, -torch.inf)
        return (torch.softmax(scores, dim=-1).expand(HEADS, -1, -1),) * LAYERS


class HesitantExecutor(HashExecutor):
    """Says what the hash function says, but takes its best id for the second best where it is even:
    as a draft model it is right at first or at its second try."""

    def run(self, work: Work) -> StepOutput:
        output = super().run(work)
        if len(output.logits):
            values, best = output.logits.topk(2)
            wrong = best[:, 0] % 2 == 0
            output.logits[wrong] = output.logits.scatter(1, best, values.flip(1))[wrong]
        return output
