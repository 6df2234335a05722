"""Models: one decoder driven by a spec, networks beside it, and how weights get in and out."""

from __future__ import annotations

from everystep.models.dense import embedded
from everystep.models.early import first_layers
from everystep.models.gguf import build_gguf_model
from everystep.models.load import (
    build_model,
    complete_config,
    convert_model,
    exported_config,
    learning_weights,
    named_shapes,
    named_weights,
    stored_weights,
    usable_device,
    weight_bytes,
    weight_digest,
)
from everystep.models.model import Encode, Model, recomputing, refuse_copies
from everystep.models.weight_module import LayerModule, WeightModule, Within, gathers, is_one

__all__ = [
    "Encode",
    "Model",
    "LayerModule",
    "WeightModule",
    "Within",
    "gathers",
    "is_one",
    "build_gguf_model",
    "build_model",
    "complete_config",
    "convert_model",
    "embedded",
    "exported_config",
    "first_layers",
    "learning_weights",
    "named_shapes",
    "named_weights",
    "recomputing",
    "refuse_copies",
    "stored_weights",
    "usable_device",
    "weight_bytes",
    "weight_digest",
]
