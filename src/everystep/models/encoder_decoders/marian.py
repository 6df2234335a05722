"""Marian: positions of sines and cosines, and tables that its two languages may have apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.config import Fields
from everystep.models.encoder_decoders.encoder_decoder_families import (
    encoder_decoder_family,
    translator,
)
from everystep.models.encoder_decoders.spec import AbsolutePositions, EncoderDecoderSpec


def _read(config: Mapping[str, Any]) -> EncoderDecoderSpec:
    read = Fields(config)
    positions = AbsolutePositions(read.integer("max_position_embeddings"), sinusoidal=True)
    spec = translator(read, positions)
    if read.flag("share_encoder_decoder_embeddings"):
        return spec
    size = read.integer("decoder_vocab_size", spec.vocab_size)
    return replace(spec, shared=False, vocab_size=size, source_vocab_size=spec.vocab_size)


FAMILIES = {
    "marian": encoder_decoder_family(
        _read,
        vocab_size=58101,
        decoder_start_token_id=58100,
        pad_token_id=58100,
        eos_token_id=0,
        forced_eos_token_id=0,
        share_encoder_decoder_embeddings=True,
    )
}
