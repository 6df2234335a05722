"""Whisper: an encoder that listens to 30 seconds of a log-mel spectrum, and a decoder of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.config import Fields
from everystep.models.encoder_decoders.encoder_decoder_families import (
    LAYER_NORM,
    embed_scale_of,
    encoder_decoder_family,
    stack_of,
)
from everystep.models.encoder_decoders.parameters import NAMES
from everystep.models.encoder_decoders.spec import (
    AbsolutePositions,
    EncoderDecoderSpec,
    SoundSpec,
)


def _read(config: Mapping[str, Any]) -> EncoderDecoderSpec:
    read = Fields(config)
    heard = AbsolutePositions(read.integer("max_source_positions"))
    said = AbsolutePositions(read.integer("max_target_positions"))
    # transformers reads `scale_embedding`, and scales nothing by it.
    embed_scale_of(read)
    return EncoderDecoderSpec(
        vocab_size=read.integer("vocab_size"),
        width=read.integer("d_model"),
        norm=LAYER_NORM,
        encoder=stack_of(read, "encoder", heard),
        decoder=stack_of(read, "decoder", said),
        bias=True,
        tied=read.flag("tie_word_embeddings"),
        sound=SoundSpec(read.integer("num_mel_bins")),
    )


FAMILIES = {
    "whisper": encoder_decoder_family(
        _read,
        replace(NAMES, shared="model.decoder.embed_tokens.weight", head="proj_out.weight"),
        vocab_size=51865,
        num_mel_bins=80,
        encoder_layers=4,
        encoder_ffn_dim=1536,
        encoder_attention_heads=6,
        decoder_layers=4,
        decoder_ffn_dim=1536,
        decoder_attention_heads=6,
        d_model=384,
        max_source_positions=1500,
        max_target_positions=448,
        pad_token_id=50256,
        bos_token_id=50256,
        eos_token_id=50256,
        decoder_start_token_id=50257,
        begin_suppress_tokens=[220, 50256],
    )
}
