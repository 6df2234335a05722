"""What a network with an encoder and a decoder is, as values: what distinguishes the families.

A spec is complete: the network asks no configuration. It names no weight of any checkpoint and
holds no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from everystep.models.spec import MlpSpec, NormSpec


@dataclass(frozen=True)
class RelativePositions:
    """Positions are distances: each bucket of them adds a learned number per head to the scores."""

    buckets: int
    max_distance: int


@dataclass(frozen=True)
class AbsolutePositions:
    """Positions are places: row `offset` + i of a table is added to the embedding at position i.

    `size`: how many positions there are. `sinusoidal`: a checkpoint may leave the table out, which
    is made of sines and cosines then.
    """

    size: int
    offset: int = 0
    sinusoidal: bool = False


@dataclass(frozen=True)
class StackSpec:
    """One of the two stacks. `heads` of `head_dim` attend."""

    layers: int
    heads: int
    head_dim: int
    mlp: MlpSpec
    positions: RelativePositions | AbsolutePositions


@dataclass(frozen=True)
class SoundSpec:
    """An encoder that reads `channels` of a spectrum, two frames a position."""

    channels: int


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """`scale`: what attention scores are multiplied by, None for the root of a head's size.

    `bias`: attention has biases; `key_bias`: also that of keys. `pre_norm`: a layer's parts read
    normalised values, and each stack ends with a norm; without it, what a part gives is added and
    normalised. `embed_norm`: embeddings are normalised before the first layer. `embed_scale`: token
    embeddings are multiplied by it. `shared`: both stacks read one table of token embeddings; else
    the encoder's has `source_vocab_size` rows. `tied`: the head is the decoder's table.
    `output_scale`: what the head reads is multiplied by it. `logits_bias`: logits have a bias.
    `sound`: what the encoder reads in place of ids.
    """

    vocab_size: int
    width: int
    norm: NormSpec
    encoder: StackSpec
    decoder: StackSpec
    scale: float | None = None
    bias: bool = False
    key_bias: bool = False
    pre_norm: bool = True
    embed_norm: bool = False
    embed_scale: float | None = None
    shared: bool = True
    source_vocab_size: int = 0
    tied: bool = True
    output_scale: float | None = None
    logits_bias: bool = False
    sound: SoundSpec | None = None
