"""Phi-3, 3.5 and 4-mini: projections that read the same input are one tensor in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import (
    decoder_family,
    gated_decoder,
    rope_of,
    window_of,
)
from everystep.models.parameters import NAMES
from everystep.models.spec import DecoderSpec, LayerSpec

_NAMES = {**NAMES, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(_with_longrope(config))
    layer = LayerSpec(rope_of(read), window_of(read))
    return gated_decoder(read, [layer] * read.count("num_hidden_layers"))


def _with_longrope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with longrope by that name; older files call it "su" or "yarn"."""
    found = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            kinds = {one: "longrope" for one in ("type", "rope_type") if rope.get(one) in _OLDER}
            found[key] = {**rope, **kinds}
    return found


_OLDER = ("su", "yarn")
FAMILIES = {
    "phi3": decoder_family(
        _read,
        _NAMES,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
}
