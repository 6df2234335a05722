"""BART: layers that normalise after their parts, learned positions from row 2 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.encoder_decoders.encoder_decoder_families import (
    encoder_decoder_family,
    translator,
)
from everystep.models.encoder_decoders.spec import AbsolutePositions, EncoderDecoderSpec


def _read(config: Mapping[str, Any]) -> EncoderDecoderSpec:
    read = Fields(config)
    positions = AbsolutePositions(read.integer("max_position_embeddings"), offset=2)
    return translator(read, positions, embed_norm=True)


FAMILIES = {
    "bart": encoder_decoder_family(
        _read,
        leftovers=("model.encoder.version", "model.decoder.version"),
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
}
