"""One network for every family with an encoder and a decoder, driven by its spec.

The encoder runs once per prompt and sees all of it; the decoder looks at its own row and at keys
and values of the encoder's states. In a stack that normalises after its parts, the last norm of the
last layer is the norm that ends the stack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.models.encoder_decoders.spec import (
    AbsolutePositions,
    EncoderDecoderSpec,
    RelativePositions,
    StackSpec,
)
from everystep.models.loader import WeightLoader
from everystep.nn.activations import ACTIVATIONS, gated
from everystep.nn.attention import RelativeBias, Rule, additive, attend, probabilities
from everystep.nn.linear import LinearMap, Weight, look_up
from everystep.nn.network import Context, Cross, Full, Heard, Network, StepInputs, Store
from everystep.nn.norm import Norm

SOUND = "input_features"


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """Self-attention and feed-forward; no `mlp_norm` where the stack's norm is in its place."""

    norm: Norm
    qkv: LinearMap
    out: LinearMap
    mlp_norm: Norm | None
    up: LinearMap
    down: LinearMap


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer(EncoderLayer):
    """An encoder's layer with attention to the encoder in the middle."""

    across_norm: Norm
    across_q: LinearMap
    across_kv: LinearMap
    across_out: LinearMap


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """Over three neighbours; `weight`: (E, channels, 3), `bias`: (E,)."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EncoderDecoder(Network):
    """The network; `table` and `norm` are the decoder's.

    `encoder_positions`, `decoder_positions`: biases of distances, or (n, E) vectors of places.
    `source_table`: the encoder's token embeddings where they are others. `convolutions`: what turns
    sounds into embeddings, of which the second moves by two frames.
    """

    spec: EncoderDecoderSpec
    encoder: tuple[EncoderLayer, ...]
    encoder_norm: Norm
    encoder_positions: RelativeBias | Tensor
    decoder: tuple[DecoderLayer, ...]
    decoder_positions: RelativeBias | Tensor
    encoder_embed_norm: Norm | None
    decoder_embed_norm: Norm | None
    source_table: Weight | None
    convolutions: tuple[Convolution, ...]
    logits_bias: Tensor | None

    @property
    def heads(self) -> int:
        """The number of query heads of a layer of the decoder."""
        return self.spec.decoder.heads

    @property
    def encodes(self) -> bool:
        """True: rows look at an encoder."""
        return True

    @property
    def source(self) -> str | None:
        """The name of what the encoder reads in place of ids or embeddings."""
        return None if self.spec.sound is None else SOUND

    @property
    def source_shape(self) -> tuple[int, int]:
        """(channels, frames) of the sounds that the encoder reads."""
        sound, most = self.spec.sound, self.most_source_positions
        if sound is None or most is None:
            raise NotImplementedError
        return sound.channels, 2 * most

    @property
    def most_positions(self) -> int | None:
        """The number of positions that a row can have, None for any number."""
        return _most(self.spec.decoder)

    @property
    def most_source_positions(self) -> int | None:
        """The number of positions that the encoder can read, None for any number."""
        return _most(self.spec.encoder)

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """Keys and values of every layer of the decoder, its own and those of encoder states."""
        stack = self.spec.decoder
        size = (stack.heads, stack.head_dim, stack.head_dim)
        return ((Full(*size), Cross(*size)),) * stack.layers

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ids (...,) of the decoder -> (..., E)."""
        return self._scaled(look_up(self.table, tokens))

    @property
    def source_vocab_size(self) -> int:
        """The number of ids that the encoder reads."""
        table = self.table if self.source_table is None else self.source_table
        return int(table.shape[0])

    def embed_source(self, tokens: Tensor) -> Tensor:
        """Embed ids (...,) of the encoder -> (..., E)."""
        if self.source_table is None:
            return self.embed(tokens)
        return self._scaled(look_up(self.source_table, tokens))

    def listen(self, sounds: Tensor) -> Tensor:
        """Turn features of sounds (B, channels, 2 S) into embeddings (B, S, E)."""
        for step, one in enumerate(self.convolutions, 1):
            sounds = F.gelu(F.conv1d(sounds, one.weight, one.bias, stride=step, padding=1))
        return sounds.transpose(1, 2)

    def encode(self, hidden: Tensor, seen: Tensor | None, heard: Heard | None = None) -> Tensor:
        """Turn embeddings (B, S, E) into encoder states (B, S, E).

        `seen`: (B, S), which of them are real.
        """
        places = torch.arange(hidden.shape[1], device=hidden.device)
        positions = self.encoder_positions
        mask = positions(places, places) if isinstance(positions, RelativeBias) else None
        if seen is not None:
            hidden_ones = additive(seen, hidden.dtype)[:, None, None]
            mask = hidden_ones if mask is None else mask + hidden_ones
        hidden = self._begun(self.spec.encoder, hidden, places, positions, self.encoder_embed_norm)
        for layer in self.encoder:
            if heard is not None:
                heard.layers.append(hidden)
            mixed = self._look(layer.qkv(self._before(layer.norm, hidden)), mask, heard)
            hidden = self._after(layer.norm, layer.out.add_to(hidden, mixed))
            hidden = self._feed_forward(self.spec.encoder, layer, hidden)
        states = self.encoder_norm(hidden)
        if heard is not None:
            heard.layers.append(states)
        return states

    def across(self, encoder: Tensor) -> Tensor:
        """Turn encoder states (S, E) into keys and values for every layer, (L, 2, K, S, D)."""
        stack = self.spec.decoder
        shape = (encoder.shape[0], 2, stack.heads, stack.head_dim)
        states = encoder.to(self.device, self.dtype)
        projected = [layer.across_kv(states).view(shape) for layer in self.decoder]
        return torch.stack(projected).permute(0, 2, 3, 1, 4)

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        """Return (N, E) decoder states after the last layer, before the last norm."""
        stack, positions = self.spec.decoder, self.decoder_positions
        rule, shape = self._rule(stack), (-1, stack.heads, stack.head_dim)
        bias = positions if isinstance(positions, RelativeBias) else None
        hidden = self._begun(
            stack, inputs.hidden, inputs.positions, positions, self.decoder_embed_norm
        )
        context.keep(hidden)
        for index, layer in enumerate(self.decoder):
            qkv = layer.qkv(self._before(layer.norm, hidden)).view(-1, 3, *shape[1:])
            mixed = context.attend(index, qkv[:, 0], qkv[:, 1:], rule, bias)
            hidden = self._after(layer.norm, layer.out.add_to(hidden, mixed))
            q = layer.across_q(self._before(layer.across_norm, hidden)).view(shape)
            mixed = context.attend_across(index, q, rule)
            hidden = self._after(layer.across_norm, layer.across_out.add_to(hidden, mixed))
            hidden = self._feed_forward(stack, layer, hidden)
            context.keep(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn normalised decoder states (..., E) into logits (..., V)."""
        scale = self.spec.output_scale
        logits = self.head(hidden if scale is None else hidden * scale)
        return logits if self.logits_bias is None else logits + self.logits_bias[0]

    def early_logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states (..., E) before an earlier layer into logits (..., V), scaled and
        shifted as the last ones are."""
        return self.logits(hidden)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.spec.embed_scale is None else hidden * self.spec.embed_scale

    def _begun(
        self,
        stack: StackSpec,
        hidden: Tensor,
        places: Tensor,
        table: RelativeBias | Tensor,
        norm: Norm | None,
    ) -> Tensor:
        """Return what a stack's first layer reads of embeddings (..., n, E) at `places` (n,)."""
        if isinstance(table, Tensor) and isinstance(stack.positions, AbsolutePositions):
            hidden = hidden + F.embedding(places + stack.positions.offset, table)
        return hidden if norm is None else norm(hidden)

    def _before(self, norm: Norm, hidden: Tensor) -> Tensor:
        return norm(hidden) if self.spec.pre_norm else hidden

    def _after(self, norm: Norm, hidden: Tensor) -> Tensor:
        return hidden if self.spec.pre_norm else norm(hidden)

    def _rule(self, stack: StackSpec) -> Rule:
        return Rule(stack.head_dim**-0.5 if self.spec.scale is None else self.spec.scale)

    def _look(self, qkv: Tensor, mask: Tensor | None, heard: Heard | None) -> Tensor:
        """Attend (B, S, 3 * H * D) -> (B, S, H * D): every position sees every other."""
        stack = self.spec.encoder
        rule, (batch, length) = self._rule(stack), qkv.shape[:2]
        apart = qkv.view(batch, length, 3, stack.heads, stack.head_dim)
        q, k, v = apart.permute(2, 0, 3, 1, 4)
        if heard is not None:
            heard.attentions.append(probabilities(q @ k.transpose(-1, -2), rule, mask))
        return attend(q, k, v, rule, mask).transpose(1, 2).reshape(batch, length, -1)

    def _feed_forward(self, stack: StackSpec, layer: EncoderLayer, hidden: Tensor) -> Tensor:
        norm, activation = layer.mlp_norm, ACTIVATIONS[stack.mlp.activation]
        inner = layer.up(hidden if norm is None else self._before(norm, hidden))
        inner = gated(inner, activation) if stack.mlp.gated else activation(inner)
        hidden = layer.down.add_to(hidden, inner)
        return hidden if norm is None else self._after(norm, hidden)


def _most(stack: StackSpec) -> int | None:
    return stack.positions.size if isinstance(stack.positions, AbsolutePositions) else None


def assemble_encoder_decoder(spec: EncoderDecoderSpec, loader: WeightLoader) -> EncoderDecoder:
    """Assemble the network from its parameters."""

    def positions(stack: str, how: RelativePositions | AbsolutePositions) -> RelativeBias | Tensor:
        table = loader.tensor(f"{stack}_positions")
        if isinstance(how, AbsolutePositions):
            return table
        return RelativeBias(table, how.max_distance, both_ways=stack == "encoder")

    def embed_norm(stack: str) -> Norm | None:
        return loader.norm(spec.norm, f"{stack}_embed_norm") if spec.embed_norm else None

    heard = () if spec.sound is None else (0, 1)
    return EncoderDecoder(
        spec,
        *loader.frame(spec),
        encoder=loader.layers(EncoderLayer, "encoder", spec.encoder.layers, spec.norm),
        encoder_norm=loader.norm(spec.norm, "encoder_norm"),
        encoder_positions=positions("encoder", spec.encoder.positions),
        decoder=loader.layers(DecoderLayer, "decoder", spec.decoder.layers, spec.norm),
        decoder_positions=positions("decoder", spec.decoder.positions),
        encoder_embed_norm=embed_norm("encoder"),
        decoder_embed_norm=embed_norm("decoder"),
        source_table=None if spec.shared or spec.sound else loader.table("source_table"),
        convolutions=tuple(
            Convolution(*(loader.tensor(f"convolutions.{i}.{x}") for x in ("weight", "bias")))
            for i in heard
        ),
        logits_bias=loader.tensor("logits_bias") if spec.logits_bias else None,
    )
