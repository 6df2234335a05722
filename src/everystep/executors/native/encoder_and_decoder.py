"""The two stacks of a network with an encoder and a decoder, as the library reads them."""

from __future__ import annotations

from typing import Any, cast

import torch

from everystep.executors.native.library import (
    LayerWeights,
    NormWeights,
    StackWeights,
)
from everystep.executors.native.packing import ACTIVATIONS, NORMS, Packing
from everystep.models.encoder_decoders.network import DecoderLayer, EncoderDecoder, EncoderLayer
from everystep.models.encoder_decoders.spec import AbsolutePositions, EncoderDecoderSpec, StackSpec
from everystep.nn.attention import RelativeBias
from everystep.nn.norm import Norm


def encoder_weights(packing: Packing, network: EncoderDecoder) -> StackWeights:
    """Pack the encoder, which reads embeddings and has no head."""
    spec = network.spec
    layers = [_layer(packing, spec, layer) for layer in network.encoder]
    return StackWeights(
        **_frame(packing, spec, spec.encoder, layers),
        **_places(packing, spec.encoder, network.encoder_positions),
        both_ways=1,
        norm=packing.norm(network.encoder_norm),
        embed_norm=packing.norm(network.encoder_embed_norm),
    )


def crossing_weights(packing: Packing, network: EncoderDecoder) -> StackWeights:
    """Pack the decoder, with what its layers make of encoder states."""
    spec = network.spec
    layers = [_across(packing, spec, layer) for layer in network.decoder]
    table = packing.matrix(network.table)
    bias = None if network.logits_bias is None else network.logits_bias[0]
    head = network.head
    return StackWeights(
        **_frame(packing, spec, spec.decoder, layers),
        **_places(packing, spec.decoder, network.decoder_positions),
        vocabulary=spec.vocab_size,
        embed_scale=spec.embed_scale or 0.0,
        output_scale=spec.output_scale or 0.0,
        norm=packing.norm(network.norm),
        embed_norm=packing.norm(network.decoder_embed_norm),
        embedding=table,
        head=packing.joined([table], bias) if spec.tied else packing.linear(head, bias),
    )


def _frame(
    packing: Packing, spec: EncoderDecoderSpec, stack: StackSpec, layers: list[LayerWeights]
) -> dict[str, Any]:
    """Return what both stacks have."""
    each = (LayerWeights * len(layers))(*layers)
    packing.alive.append(each)
    return {
        "layers": len(layers),
        "layer": each,
        "width": spec.width,
        "heads": stack.heads,
        "kv_heads": stack.heads,
        "head_dim": stack.head_dim,
        "inner": stack.mlp.size,
        "norm_kind": NORMS[spec.norm.kind],
        "activation": ACTIVATIONS[stack.mlp.activation],
        "norms_sums": not spec.pre_norm,
        "eps": spec.norm.eps,
        "scale": stack.head_dim**-0.5 if spec.scale is None else spec.scale,
    }


def _places(
    packing: Packing, stack: StackSpec, positions: RelativeBias | torch.Tensor
) -> dict[str, Any]:
    """Return how a stack tells positions apart: by embeddings, or by additions to scores."""
    if isinstance(positions, RelativeBias):
        # Keys further away than this are all in the last bucket.
        reach = positions.max_distance
        distances = torch.arange(-reach, reach + 1)
        added = positions(torch.zeros(1, dtype=torch.int64), distances)
        return {"distances": packing.floats(added.flatten(1)), "reach": reach}
    rows = positions[cast(AbsolutePositions, stack.positions).offset :]
    return {"positions": packing.floats(rows), "places": len(rows)}


def _layer(packing: Packing, spec: EncoderDecoderSpec, layer: EncoderLayer) -> LayerWeights:
    """Pack what layers of both stacks have."""
    stack = spec.decoder if isinstance(layer, DecoderLayer) else spec.encoder
    first, last = _norms(packing, spec, layer.norm), _norms(packing, spec, layer.mlp_norm)
    return LayerWeights(
        qkv=packing.linear(layer.qkv),
        out=packing.linear(layer.out),
        dense=packing.mlp(layer.up, layer.down, stack.mlp.size, gated=stack.mlp.gated),
        attention=first[0],
        attention_post=first[1],
        mlp=last[0],
        mlp_post=last[1],
        rope=-1,
        factor=1.0,
    )


def _across(packing: Packing, spec: EncoderDecoderSpec, layer: DecoderLayer) -> LayerWeights:
    """Pack a decoder's layer, with its attention to the encoder in the middle."""
    made, norms = _layer(packing, spec, layer), _norms(packing, spec, layer.across_norm)
    made.across_q = packing.linear(layer.across_q)
    made.across_kv = packing.linear(layer.across_kv)
    made.across_out = packing.linear(layer.across_out)
    made.across, made.across_post = norms
    return made


def _norms(
    packing: Packing, spec: EncoderDecoderSpec, norm: Norm | None
) -> tuple[NormWeights, NormWeights]:
    """Pack a part's norm where it stands: before the part, or after it."""
    made = packing.norm(norm)
    return (made, NormWeights()) if spec.pre_norm else (NormWeights(), made)
