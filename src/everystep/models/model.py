"""A model: a network with the configuration it was made from, and a plain forward.

A model never changes once it is built, so any number of calls may share it. It knows no cache: the
plain forward looks at whole rectangles of tokens; executors run works against rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everystep.models.config import ModelConfig
from everystep.models.dense import dense_logits
from everystep.nn.network import Network


@dataclass(frozen=True, eq=False)
class Model:
    """`config`: the values of config.json. `spec`: what the network was built from."""

    config: ModelConfig
    spec: Any = field(repr=False)
    network: Network = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.network.device

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.network.vocab_size

    def forward(
        self,
        ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V) of ids (B, T), or of embeddings (B, T, E), without a cache.

        `attention_mask` (B, T) hides padding on any side. Positions are 0..T-1 unless given, as in
        the reference's `forward`.
        """
        return dense_logits(self.network, ids, attention_mask, position_ids, inputs_embeds)
