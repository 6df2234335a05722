"""What a decoder is, as values: everything that distinguishes one family from another.

A spec is complete: the decoder asks no configuration. It names no weight of any checkpoint and
holds no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from everystep.nn.norm import NormKind
from everystep.nn.rotary import Rope


@dataclass(frozen=True)
class NormSpec:
    """`plus_one`: the scale is 1 + weight. `bias`: of layer norms."""

    kind: NormKind
    eps: float
    plus_one: bool = False
    bias: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """`qk_norm`: queries and keys are normalised per head before they turn."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    softcap: float | None = None


@dataclass(frozen=True)
class MlpSpec:
    """`gated`: activation(gate) * up instead of activation(up)."""

    size: int
    activation: str
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer; no rope means no position at all."""

    rope: Rope | None
    window: int | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """`parallel`: attention and MLP read the same normalised input and are added together.

    `post_norms`: the output of each is normalised before it is added. `embed_scale`: token
    embeddings are multiplied by it. `tied`: the head is the embedding table.
    """

    vocab_size: int
    width: int
    norm: NormSpec
    attention: AttentionSpec
    mlp: MlpSpec
    layers: tuple[LayerSpec, ...]
    parallel: bool = False
    post_norms: bool = False
    embed_scale: float | None = None
    tied: bool = False
    head_bias: bool = False
    final_softcap: float | None = None
