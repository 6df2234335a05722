"""T5: an encoder that is run once per prompt, and a decoder that looks at its output.

Positions are relative biases only, learned in the first layer of each stack and used in all. The
spec follows the reference's `T5Config`; weights of a decoder that scales its output are tied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everystep.models.config import Fields
from everystep.models.families import Family
from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter, frame, linear, norm, parameter
from everystep.models.spec import NormSpec
from everystep.nn.activations import ACTIVATIONS, gated
from everystep.nn.attention import RelativeBias, Rule, additive, attend, probabilities
from everystep.nn.linear import LinearMap
from everystep.nn.network import Context, Cross, Full, Heard, Network, StepInputs, Store
from everystep.nn.norm import Norm

_RULE = Rule(scale=1.0)


@dataclass(frozen=True)
class T5Spec:
    """`scaled`: the decoder's output is divided by the root of `width` before the head."""

    vocab_size: int
    width: int
    heads: int
    head_dim: int
    inner: int
    encoder_layers: int
    decoder_layers: int
    buckets: int
    max_distance: int
    activation: str
    gated: bool
    norm: NormSpec
    tied: bool
    scaled: bool


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """Self-attention and feed-forward, each after a norm."""

    norm: Norm
    qkv: LinearMap
    out: LinearMap
    mlp_norm: Norm
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
class T5(Network):
    """The network; `table` has the embeddings of both stacks, `norm` is the decoder's."""

    spec: T5Spec
    encoder: tuple[EncoderLayer, ...]
    encoder_norm: Norm
    encoder_bias: RelativeBias
    decoder: tuple[DecoderLayer, ...]
    decoder_bias: RelativeBias

    @property
    def heads(self) -> int:
        """How many query heads a layer has."""
        return self.spec.heads

    @property
    def encodes(self) -> bool:
        """True: rows look at an encoder."""
        return True

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """Keys and values of every layer of the decoder, its own and those of encoder states."""
        size = (self.spec.heads, self.spec.head_dim, self.spec.head_dim)
        return ((Full(*size), Cross(*size)),) * self.spec.decoder_layers

    def encode(self, hidden: Tensor, seen: Tensor | None, heard: Heard | None = None) -> Tensor:
        """Embeddings (B, S, E), of which `seen` (B, S) are real, -> encoder states (B, S, E)."""
        places = torch.arange(hidden.shape[1], device=hidden.device)
        mask = self.encoder_bias(places, places)
        if seen is not None:
            mask = mask + additive(seen, hidden.dtype)[:, None, None]
        for layer in self.encoder:
            if heard is not None:
                heard.layers.append(hidden)
            mixed = self._look(layer.qkv(layer.norm(hidden)), mask, heard)
            hidden = layer.out.add_to(hidden, mixed)
            hidden = self._feed_forward(layer, hidden)
        states = self.encoder_norm(hidden)
        if heard is not None:
            heard.layers.append(states)
        return states

    def across(self, encoder: Tensor) -> Tensor:
        """Encoder states (S, E) -> their keys and values for every layer, (L, 2, K, S, D)."""
        shape = (encoder.shape[0], 2, self.spec.heads, self.spec.head_dim)
        states = encoder.to(self.device, self.dtype)
        projected = [layer.across_kv(states).view(shape) for layer in self.decoder]
        return torch.stack(projected).permute(0, 2, 3, 1, 4)

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        """(N, E) decoder states after the last layer, before the last norm."""
        hidden = inputs.hidden
        context.keep(hidden)
        for index, layer in enumerate(self.decoder):
            qkv = layer.qkv(layer.norm(hidden)).view(-1, 3, self.spec.heads, self.spec.head_dim)
            mixed = context.attend(index, qkv[:, 0], qkv[:, 1:], _RULE, self.decoder_bias)
            hidden = layer.out.add_to(hidden, mixed)
            q = layer.across_q(layer.across_norm(hidden))
            q = q.view(-1, self.spec.heads, self.spec.head_dim)
            hidden = layer.across_out.add_to(hidden, context.attend_across(index, q, _RULE))
            hidden = self._feed_forward(layer, hidden)
            context.keep(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Normalised decoder states (..., E) -> (..., V)."""
        return self.head(hidden * self.spec.width**-0.5 if self.spec.scaled else hidden)

    def _look(self, qkv: Tensor, mask: Tensor, heard: Heard | None) -> Tensor:
        """(B, S, 3 * H * D) -> (B, S, H * D): every position sees every other."""
        batch, length = qkv.shape[:2]
        apart = qkv.view(batch, length, 3, self.spec.heads, self.spec.head_dim)
        q, k, v = apart.permute(2, 0, 3, 1, 4)
        if heard is not None:
            heard.attentions.append(probabilities(q @ k.transpose(-1, -2), _RULE, mask))
        return attend(q, k, v, _RULE, mask).transpose(1, 2).reshape(batch, length, -1)

    def _feed_forward(self, layer: EncoderLayer, hidden: Tensor) -> Tensor:
        inner = layer.up(layer.mlp_norm(hidden))
        activation = ACTIVATIONS[self.spec.activation]
        inner = gated(inner, activation) if self.spec.gated else activation(inner)
        return layer.down.add_to(hidden, inner)


def read_spec(config: Mapping[str, Any]) -> T5Spec:
    """The spec of a configuration, defaults filled in by the caller."""
    read = Fields(config)
    kind = read.choice("feed_forward_proj", _KINDS)
    layers = read.integer("num_layers")
    tied = read.flag("tie_word_embeddings")
    return T5Spec(
        vocab_size=read.integer("vocab_size"),
        width=read.integer("d_model"),
        heads=read.integer("num_heads"),
        head_dim=read.integer("d_kv"),
        inner=read.integer("d_ff"),
        encoder_layers=layers,
        decoder_layers=read.integer("num_decoder_layers", layers),
        buckets=read.integer("relative_attention_num_buckets", least=4),
        max_distance=read.integer("relative_attention_max_distance", least=2),
        activation=_KINDS[kind],
        gated=kind.startswith("gated-"),
        norm=NormSpec("rms_t5", read.number("layer_norm_epsilon")),
        tied=tied,
        scaled=read.flag("scale_decoder_outputs", tied),
    )


# The reference takes the tanh approximation for gated-gelu, whatever the name says.
_KINDS: Mapping[str, str] = {name: name for name in ACTIVATIONS} | {
    f"gated-{name}": "gelu_new" if name == "gelu" else name for name in ACTIVATIONS
}
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


_NAMES = {"embed": "shared", "norm": "decoder.final_layer_norm", "head": "lm_head"}


def t5_parameters(spec: T5Spec) -> Iterator[Parameter]:
    """Every tensor of the network, each with its names."""
    yield from frame(spec, _NAMES)
    yield from norm(spec.norm, "encoder_norm", "encoder.final_layer_norm", spec.width)
    for stack, count in (("encoder", spec.encoder_layers), ("decoder", spec.decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield parameter(f"{stack}_bias", bias, spec.buckets, spec.heads)
        for index in range(count):
            yield from _layer(spec, stack, index)


def _layer(spec: T5Spec, stack: str, index: int) -> Iterator[Parameter]:
    key, name = f"{stack}.{index}", f"{stack}.block.{index}.layer"
    width, size = spec.width, spec.heads * spec.head_dim
    own = f"{name}.0.SelfAttention"
    yield from norm(spec.norm, f"{key}.norm", f"{name}.0.layer_norm", width)
    yield from linear(f"{key}.qkv", {f"{own}.{x}": size for x in "qkv"}, width)
    yield parameter(f"{key}.out.weight", f"{own}.o.weight", width, size)
    last = 1
    if stack == "decoder":
        last, other = 2, f"{name}.1.EncDecAttention"
        yield from norm(spec.norm, f"{key}.across_norm", f"{name}.1.layer_norm", width)
        yield parameter(f"{key}.across_q.weight", f"{other}.q.weight", size, width)
        yield from linear(f"{key}.across_kv", {f"{other}.{x}": size for x in "kv"}, width)
        yield parameter(f"{key}.across_out.weight", f"{other}.o.weight", width, size)
    inner = ("wi_0", "wi_1") if spec.gated else ("wi",)
    dense = f"{name}.{last}.DenseReluDense"
    yield from norm(spec.norm, f"{key}.mlp_norm", f"{name}.{last}.layer_norm", width)
    yield from linear(f"{key}.up", {f"{dense}.{one}": spec.inner for one in inner}, width)
    yield parameter(f"{key}.down.weight", f"{dense}.wo.weight", width, spec.inner)


def assemble_t5(spec: T5Spec, loader: WeightLoader) -> T5:
    """The network from its parameters."""

    def bias(stack: str) -> RelativeBias:
        both_ways = stack == "encoder"
        return RelativeBias(loader.tensor(f"{stack}_bias"), spec.max_distance, both_ways)

    return T5(
        spec,
        *loader.frame(spec),
        encoder=loader.layers(EncoderLayer, "encoder", spec.encoder_layers, spec.norm),
        encoder_norm=loader.norm(spec.norm, "encoder_norm"),
        encoder_bias=bias("encoder"),
        decoder=loader.layers(DecoderLayer, "decoder", spec.decoder_layers, spec.norm),
        decoder_bias=bias("decoder"),
    )


_LEFTOVERS = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "*EncDecAttention.relative_attention_bias.weight",
)
FAMILIES = {"t5": Family(_DEFAULTS, read_spec, t5_parameters, assemble_t5, _LEFTOVERS)}
