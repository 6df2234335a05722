"""Models: one decoder driven by a spec, one file per family, and how weights get in and out."""

from __future__ import annotations

from everystep.models.load import build_model, convert_model, named_weights
from everystep.models.model import Model

__all__ = ["Model", "build_model", "convert_model", "named_weights"]
