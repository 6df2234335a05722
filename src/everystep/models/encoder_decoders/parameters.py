"""Every tensor of a network with an encoder and a decoder, with its names in checkpoints.

Names follow roles: `frame` has those of single tensors, `layer` those of a layer, which come after
the stack's own prefix. A role whose name is None does not occur.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from everystep.models.encoder_decoders.spec import (
    AbsolutePositions,
    EncoderDecoderSpec,
    StackSpec,
)
from everystep.models.parameters import Parameter, ParameterPart, linear, norm, parameter

LAYERS: Mapping[str, str] = {
    "norm": "self_attn_layer_norm",
    "own": "self_attn",
    "across_norm": "encoder_attn_layer_norm",
    "across": "encoder_attn",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "out_proj",
}
"""The names in a layer of most families; the projections come after an attention."""


@dataclass(frozen=True)
class StackNames:
    """`layers`: what stands before a layer's number; `layer`: what comes after it, by role."""

    layers: str
    norm: str
    positions: str
    embed: str
    embed_norm: str
    layer: Mapping[str, str]


def stack_names(prefix: str) -> StackNames:
    """Return the names of a stack in most families."""
    return StackNames(
        f"{prefix}.layers",
        f"{prefix}.layer_norm",
        f"{prefix}.embed_positions.weight",
        f"{prefix}.embed_tokens.weight",
        f"{prefix}.layernorm_embedding",
        LAYERS,
    )


@dataclass(frozen=True)
class EncoderDecoderNames:
    """`shared`: the token embeddings of both stacks, `head`: those of the head."""

    shared: str
    encoder: StackNames
    decoder: StackNames
    head: str = "lm_head.weight"


NAMES = EncoderDecoderNames(
    "model.shared.weight", stack_names("model.encoder"), stack_names("model.decoder")
)


def encoder_decoder_parameters(
    spec: EncoderDecoderSpec, names: EncoderDecoderNames = NAMES
) -> list[Parameter]:
    """Return every tensor of the network."""
    found = list(_frame(spec, names))
    stacks = (("encoder", spec.encoder, names.encoder), ("decoder", spec.decoder, names.decoder))
    for key, stack, own in stacks:
        found.append(_positions(f"{key}_positions", spec, stack, own.positions))
        if spec.embed_norm:
            found += norm(spec.norm, f"{key}_embed_norm", own.embed_norm, spec.width)
        last = own.norm
        if not spec.pre_norm:
            last = f"{own.layers}.{stack.layers - 1}.{own.layer['mlp_norm']}"
        found += norm(spec.norm, "norm" if key == "decoder" else "encoder_norm", last, spec.width)
        for index in range(stack.layers):
            found += _layer(spec, key, stack, own, index)
    return found


def _frame(spec: EncoderDecoderSpec, names: EncoderDecoderNames) -> Iterator[Parameter]:
    """Yield tables, head, and what is listened with."""
    own, source, head = names.decoder.embed, names.encoder.embed, names.head
    first = names.shared if spec.shared else own
    # A checkpoint may have kept any one of the names that tied weights have.
    others = [own, source] if spec.shared else []
    others += [head] if spec.tied else []
    shape = (spec.vocab_size, spec.width)
    part = ParameterPart(first, 0, spec.vocab_size, others=tuple(others))
    yield Parameter("embed", shape, (part,))
    if not spec.shared and spec.sound is None:
        yield parameter("source_table", source, spec.source_vocab_size, spec.width)
    if not spec.tied:
        yield parameter("head.weight", head, *shape)
    if spec.logits_bias:
        part, size = ParameterPart("final_logits_bias", 0, 1), (1, spec.vocab_size)
        yield Parameter("logits_bias", size, (part,), partial(torch.zeros, size))
    if spec.sound is not None:
        stem = names.encoder.layers.rpartition(".")[0]
        for index, channels in enumerate((spec.sound.channels, spec.width)):
            key, name = f"convolutions.{index}", f"{stem}.conv{index + 1}"
            yield parameter(f"{key}.weight", f"{name}.weight", spec.width, channels, 3)
            yield parameter(f"{key}.bias", f"{name}.bias", spec.width)


def _positions(key: str, spec: EncoderDecoderSpec, stack: StackSpec, name: str) -> Parameter:
    how = stack.positions
    if not isinstance(how, AbsolutePositions):
        return parameter(key, name, how.buckets, stack.heads)
    rows = how.size + how.offset
    made = partial(sinusoids, rows, spec.width) if how.sinusoidal else None
    return Parameter(key, (rows, spec.width), (ParameterPart(name, 0, rows),), made)


def sinusoids(rows: int, width: int) -> Tensor:
    """Return (rows, width) float32: sines in the first half, cosines in the second.

    Source: Vaswani et al. 2017; transformers' MarianSinusoidalPositionalEmbedding.
    """
    pairs = (torch.arange(width) // 2).double()
    angles = torch.arange(rows, dtype=torch.float64)[:, None] / 10000 ** (2 * pairs / width)
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=1).float()


def _layer(
    spec: EncoderDecoderSpec, stack_key: str, stack: StackSpec, names: StackNames, index: int
) -> Iterator[Parameter]:
    key = f"{stack_key}.{index}"
    own = {role: f"{names.layers}.{index}.{name}" for role, name in names.layer.items()}
    roles = ["norm", "mlp_norm"] if spec.pre_norm or index < stack.layers - 1 else ["norm"]
    attentions = [("", "own")]
    if stack_key == "decoder":
        roles.append("across_norm")
        attentions.append(("across_", "across"))
    for role in roles:
        yield from norm(spec.norm, f"{key}.{role}", own[role], spec.width)
    for prefix, attention in attentions:
        yield from _attention(spec, f"{key}.{prefix}", stack, own[attention], names.layer)
    mlp = stack.mlp
    ups = {own[role]: mlp.size for role in (("gate", "up") if mlp.gated else ("up",))}
    yield from linear(f"{key}.up", ups, spec.width, bias=mlp.bias)
    yield from linear(f"{key}.down", {own["down"]: spec.width}, mlp.size, bias=mlp.bias)


def _attention(
    spec: EncoderDecoderSpec, key: str, stack: StackSpec, name: str, roles: Mapping[str, str]
) -> Iterator[Parameter]:
    """Yield the maps of one attention.

    Queries, keys and values of one input are one map; those of an encoder have no queries.
    """
    size = stack.heads * stack.head_dim
    q, k, v = ({f"{name}.{roles[role]}": size} for role in "qkv")
    unbiased = () if spec.key_bias else tuple(k)
    if key.endswith("across_"):
        yield from linear(f"{key}q", q, spec.width, bias=spec.bias)
        yield from linear(f"{key}kv", k | v, spec.width, bias=spec.bias, unbiased=unbiased)
    else:
        fused = q | k | v
        yield from linear(f"{key}qkv", fused, spec.width, bias=spec.bias, unbiased=unbiased)
    yield from linear(f"{key}out", {f"{name}.{roles['out']}": spec.width}, size, bias=spec.bias)
