"""A decoder that stands alone, as the library reads it."""

from __future__ import annotations

from collections.abc import Sequence

from everystep.executors.native.library import (
    ExpertWeights,
    LayerWeights,
    MlpWeights,
    StackWeights,
)
from everystep.executors.native.packing import ACTIVATIONS, NORMS, Packing
from everystep.models.decoder import Decoder, Layer
from everystep.models.spec import DecoderSpec, ExpertsSpec, LayerSpec
from everystep.nn.experts import Experts
from everystep.nn.rotary import Rope


def ropes_of(spec: DecoderSpec) -> list[Rope]:
    """Return every rope of a decoder's layers once, in the order of the library's count."""
    return list(dict.fromkeys(one.rope for one in spec.layers if one.rope))


def decoder_weights(packing: Packing, decoder: Decoder) -> StackWeights:
    """Pack the decoder; a head tied to the embedding table shares its panels."""
    spec, head = decoder.spec, decoder.head
    ropes = ropes_of(spec)
    layers = (LayerWeights * len(spec.layers))(
        *(
            _layer(packing, spec, own, layer, ropes)
            for own, layer in zip(spec.layers, decoder.layers, strict=True)
        )
    )
    table = packing.matrix(decoder.table)
    attention = spec.attention
    return StackWeights(
        layers=len(spec.layers),
        width=spec.width,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        inner=spec.mlp.size,
        vocabulary=spec.vocab_size,
        places=decoder.most_positions or 0,
        norm_kind=NORMS[spec.norm.kind],
        activation=ACTIVATIONS[spec.mlp.activation],
        parallel=spec.parallel,
        whole_qk=attention.qk_norm == "whole",
        eps=spec.norm.eps,
        scale=attention.scale,
        softcap=attention.softcap or 0.0,
        embed_scale=spec.embed_scale or 0.0,
        final_softcap=spec.final_softcap or 0.0,
        layer=layers,
        norm=packing.norm(decoder.norm),
        embedding=table,
        head=packing.joined([table], head.bias) if spec.tied else packing.linear(head),
        positions=packing.floats(decoder.placed_rows),
    )


def _layer(
    packing: Packing, spec: DecoderSpec, own: LayerSpec, layer: Layer, ropes: Sequence[Rope]
) -> LayerWeights:
    dense = MlpWeights()
    if layer.up is not None and layer.down is not None:
        dense = packing.mlp(layer.up, layer.down, spec.mlp.size, gated=spec.mlp.gated)
    return LayerWeights(
        qkv=packing.linear(layer.qkv),
        out=packing.linear(layer.out),
        dense=dense,
        experts=_experts(packing, own.experts, layer.experts, gated=spec.mlp.gated),
        attention=packing.norm(layer.attention_norm),
        mlp=packing.norm(layer.mlp_norm),
        attention_post=packing.norm(layer.attention_post_norm),
        mlp_post=packing.norm(layer.mlp_post_norm),
        q=packing.norm(layer.q_norm),
        k=packing.norm(layer.k_norm),
        rope=-1 if own.rope is None else ropes.index(own.rope),
        window=own.window or 0,
        factor=own.factor,
    )


def _experts(
    packing: Packing, spec: ExpertsSpec | None, experts: Experts | None, *, gated: bool
) -> ExpertWeights:
    if spec is None or experts is None:
        return ExpertWeights()
    pairs = zip(experts.up, experts.down, strict=True)
    made = (packing.mlp(*pair, spec.size, gated=gated) for pair in pairs)
    each = (MlpWeights * spec.count)(*made)
    packing.alive.append(each)
    return ExpertWeights(
        count=spec.count,
        chosen=spec.chosen,
        normalised=spec.normalised,
        router=packing.linear(experts.router),
        each=each,
    )
