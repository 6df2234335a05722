"""What a network needs of the store of its keys and values, and what it offers in return.

This is all that executors, caches and networks know of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from everystep.errors import RequestError
from everystep.nn.attention import RelativeBias, Rule
from everystep.nn.linear import LinearMap, Weight, look_up
from everystep.nn.norm import Norm
from everystep.nn.ragged import Ragged
from everystep.types import InputSpec


@dataclass(frozen=True)
class Full:
    """A layer keeps keys and values of all positions, `heads` of each.

    A network hands them over as (N, 2, heads, D), D the larger of the two sizes, the other filled
    up with zeros, and gets (N, H * D) back.
    """

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Window:
    """A layer looks at the last `size` positions, the query's own among them: see `Full`."""

    heads: int
    key_dim: int
    value_dim: int
    size: int


@dataclass(frozen=True)
class Cross:
    """A layer looks at keys and values of encoder states: see `Full`."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class State:
    """A recurrent layer keeps one tensor of each shape, 0 before the first position."""

    shapes: tuple[tuple[int, ...], ...]


Store = Full | Window | Cross | State


def holds_states(stores: Sequence[Sequence[Store]]) -> bool:
    """Return whether rows of a network with these stores hold states, unlike cache objects."""
    return any(isinstance(store, State) for layer in stores for store in layer)


class Context(Protocol):
    """The positions of one step and everything they may look at."""

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        """Store kv (N, 2, K, D), let q (N, H, D) look at its rows, return (N, H * D)."""
        ...

    def attend_across(self, layer: int, q: Tensor, rule: Rule) -> Tensor:
        """Let q (N, H, D) look at the encoder states of its rows, return (N, H * D)."""
        ...

    def feeds(self) -> Ragged:
        """Return the step as a recurrent layer reads it."""
        ...

    def recall(self, layer: int) -> tuple[Tensor, ...]:
        """Return (R, *shape) of each shape: the layer's states before the feeds."""
        ...

    def remember(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """Keep (M, *shape) of each shape: the layer's states where the feeds say."""
        ...

    def keep(self, hidden: Tensor) -> None:
        """Take the (N, E) hidden states before the first layer and after each."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Values (n, ...) of a declared input, for the positions `places` (n,) of N."""

    places: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """N positions of one step: `hidden` (N, E), `positions` (N,), row `lengths` (N,) after it.

    `positions` are (axes, N) for a network of several axes. `lengths` stay on the CPU: what they
    decide is worked out there. `declared`: values of the inputs that the network declares, by name,
    where there are any.
    """

    hidden: Tensor
    positions: Tensor
    lengths: Tensor
    declared: Mapping[str, Placed] = field(default_factory=dict)

    def places(self, axes: Sequence[int]) -> Tensor:
        """Return the positions that a rope with these axes turns by: all, or the first of each."""
        return self.positions if axes or self.positions.dim() == 1 else self.positions[0]


@dataclass(slots=True, eq=False)
class Heard:
    """The results of a stack of layers on the way.

    `layers`: (B, T, E) each, the embeddings first and the normalised states last. `attentions`: (B,
    H, T, T) each, and `across` (B, H, T, S) each of a decoder that looks at encoder states.
    """

    layers: list[Tensor] = field(default_factory=list)
    attentions: list[Tensor] = field(default_factory=list)
    across: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Weights that turn inputs into hidden states and hidden states into logits.

    `spec`: what it was built from, with `vocab_size`, `width` and `tied`, whether the head is the
    table. `table`: (V, E) token embeddings, float or quantised. `norm`: the last one.
    """

    spec: Any
    table: Weight
    norm: Norm
    head: LinearMap

    @property
    def dtype(self) -> torch.dtype:
        """The type of hidden states, and of weights that are not quantised."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.table.device

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """The stores of each layer for a row, at most one of each kind; () for none."""
        raise NotImplementedError

    @property
    def own_stores(self) -> tuple[tuple[Store, ...], ...]:
        """The stores of what this process keeps of a row: all of them, unless others have parts."""
        return self.stores

    @property
    def encodes(self) -> bool:
        """True if rows look at an encoder."""
        return False

    @property
    def source(self) -> str | None:
        """The name of what its encoder reads in place of ids or embeddings: nothing."""
        return None

    @property
    def source_shape(self) -> tuple[int, int]:
        """(channels, frames) of what it reads so, where there is such a thing."""
        raise NotImplementedError

    @property
    def most_source_positions(self) -> int | None:
        """The number of positions that an encoder can read, None for any number."""
        return None

    @property
    def heads(self) -> int:
        """The number of query heads of a layer; 0 where nothing is attended to."""
        return 0

    @property
    def axes(self) -> int:
        """The number of position ids that a position has."""
        return 1

    @property
    def most_positions(self) -> int | None:
        """The number of positions that it can tell apart; None where any number will do."""
        return None

    @property
    def counts_seen(self) -> bool:
        """True if the plain forward numbers the positions that its mask leaves, not all of them."""
        return False

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that it reads beside ids or embeddings."""
        return ()

    def require_places(self, first: int, last: int) -> None:
        """Raise RequestError where it cannot tell a position from `first` to `last` from others."""
        most = self.most_positions
        if most is not None and (first < 0 or last >= most):
            raise RequestError(
                "the model learned an embedding for each position, and has no others",
                wanted=f"positions 0 to {most - 1}",
                got=first if first < 0 else last,
                do="Shorten the prompt, or ask for fewer new tokens",
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ids (...,) -> (..., E)."""
        return look_up(self.table, tokens)

    @property
    def source_vocab_size(self) -> int:
        """The number of ids that an encoder can read, or a decoder that stands alone."""
        size: int = self.spec.vocab_size
        return size

    def embed_source(self, tokens: Tensor) -> Tensor:
        """Embed ids (...,) that an encoder reads -> (..., E)."""
        return self.embed(tokens)

    def listen(self, sounds: Tensor) -> Tensor:
        """Turn features of sounds (B, channels, frames), if it reads them, into (B, S, E)."""
        raise NotImplementedError

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        """Return (N, E) hidden states after the last layer, before the last norm."""
        raise NotImplementedError

    def at(self, places: Tensor) -> Self:
        """Return the network whose `finish` and `logits` read these (n,) of its positions.

        It is the network itself, except where adapters change both for some of its positions.
        """
        norm, head = self.norm.at(places), self.head.at(places)
        same = norm is self.norm and head is self.head
        return self if same else replace(self, norm=norm, head=head)

    def finish(self, hidden: Tensor) -> Tensor:
        """Apply the last norm, (..., E) -> (..., E)."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn normalised hidden states (..., E) into logits (..., V)."""
        return self.head(hidden)

    def early_logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states (..., E) before an earlier layer into logits (..., V), by the head
        alone as in transformers."""
        return self.head(hidden)

    def encode(self, hidden: Tensor, seen: Tensor | None, heard: Heard | None = None) -> Tensor:
        """Turn embeddings (B, S, E), of which `seen` (B, S) are real, into encoder states (B, S,
        E).

        What the layers show is added to `heard`.
        """
        raise NotImplementedError

    def across(self, encoder: Tensor) -> Tensor:
        """Turn encoder states (S, E) into keys and values (L, 2, K, S, D), where it `encodes`."""
        raise NotImplementedError
