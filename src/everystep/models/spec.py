"""What a decoder is, as values: everything that distinguishes one family from another.

A spec is complete: the decoder asks no configuration. It names no weight of any checkpoint and
holds no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everystep.errors import InvariantError, shown
from everystep.models.vision.spec import VisionSpec
from everystep.nn.norm import NormKind
from everystep.nn.rotary import Rope

QkNorm = Literal["heads", "whole"]
PreNorms = Literal["each", "shared", "none"]


@dataclass(frozen=True)
class NormSpec:
    """`plus_one`: the scale is 1 + weight. `bias`: of layer norms."""

    kind: NormKind
    eps: float
    plus_one: bool = False
    bias: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """`qk_norm`: queries and keys are normalised before they turn, each of the "heads" by itself or
    all of them as a "whole"."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class MlpSpec:
    """`gated`: activation(gate) * up instead of activation(up)."""

    size: int
    activation: str
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class ExpertsSpec:
    """`count` MLPs of `size`, of which a router chooses `chosen` for each position.

    `normalised`: the shares of the chosen ones add up to 1.
    """

    count: int
    chosen: int
    size: int
    normalised: bool


@dataclass(frozen=True)
class LayerSpec:
    """The properties of one layer that may differ; no rope means that queries and keys do not turn.

    `factor`: scores are multiplied by it beside the scale of attention.
    `experts`: stand where other layers have an MLP, and are MLPs like it but for their size.
    """

    rope: Rope | None
    window: int | None = None
    factor: float = 1.0
    experts: ExpertsSpec | None = None


@dataclass(frozen=True)
class LearnedPositions:
    """A table of `count` embeddings, one per position id, which are added to those of tokens.

    A checkpoint has `unused` rows before the first. `from_mask`: where no position ids are given,
    the plain forward counts the positions that its mask leaves, not all of them.
    """

    count: int
    unused: int = 0
    from_mask: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """`parallel`: the MLP reads what attention reads, the layer's input, and both are added to it.

    `pre_norms`: attention and MLP read it through a norm "each", or through one that is "shared",
    which wants `parallel`, or as it is. `post_norms`: the output of each is normalised before it is
    added. `embed_scale`: token embeddings are multiplied by it. `tied`: the head is the embedding
    table. `positions`: those that are learned, where there are any. `deepstack`: after
    how many of the first layers features are added to the hidden states of positions that have
    some. `vision`: the tower that makes such features of pictures, None without one.
    """

    vocab_size: int
    width: int
    norm: NormSpec
    attention: AttentionSpec
    mlp: MlpSpec
    layers: tuple[LayerSpec, ...]
    parallel: bool = False
    pre_norms: PreNorms = "each"
    post_norms: bool = False
    embed_scale: float | None = None
    tied: bool = False
    head_bias: bool = False
    final_softcap: float | None = None
    positions: LearnedPositions | None = None
    deepstack: int = 0
    vision: VisionSpec | None = None

    def __post_init__(self) -> None:
        if self.pre_norms == "shared" and not self.parallel:
            what = "attention and MLP share a norm only where they are parallel"
            raise InvariantError(what, got=shown(self))
