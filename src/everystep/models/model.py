"""A model: a network with the configuration it was made from, and a plain forward.

A model never changes once it is built, so any number of calls may share it. It knows no cache: the
plain forward looks at whole rectangles of tokens; executors run works against rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everystep.errors import RequestError, UnsupportedError, message
from everystep.models.config import ModelConfig
from everystep.models.dense import dense_logits, paired_logits
from everystep.nn.network import Heard, Network
from everystep.types import Prompt


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
        *,
        decoder_input_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V) of ids (B, T), or of embeddings (B, T, E), without a cache.

        `attention_mask` (B, T) hides padding on any side. Positions are 0..T-1 unless given, as in
        the reference's `forward`. With an encoder these describe what it reads, and the logits are
        those of `decoder_input_ids` (B, T).
        """
        if self.network.encodes != (decoder_input_ids is not None):
            raise RequestError(
                message(
                    "decoder_input_ids belong to models with an encoder, and only to them",
                    wanted="decoder_input_ids" if self.network.encodes else "none",
                )
            )
        if decoder_input_ids is None:
            return dense_logits(self.network, ids, attention_mask, position_ids, inputs_embeds)
        if position_ids is not None:
            raise UnsupportedError(message("this model has relative positions, not position_ids"))
        return paired_logits(self.network, ids, attention_mask, inputs_embeds, decoder_input_ids)

    @torch.inference_mode()
    def encode(self, prompt: Prompt, heard: Heard | None = None) -> Tensor:
        """Encoder states (S, E) of one prompt without padding; `heard` gets what layers show."""
        if not self.network.encodes:
            raise UnsupportedError(message("this model has no encoder"))
        if prompt.embeds is not None:
            hidden = prompt.embeds.to(self.device, self.dtype)
        elif prompt.ids is not None:
            hidden = self.network.embed(torch.from_numpy(prompt.ids).to(self.device))
        else:
            raise RequestError(message("there is nothing to encode", wanted="ids or embeddings"))
        return self.network.encode(hidden[None], None, heard)[0]
