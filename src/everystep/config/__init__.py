"""How to generate: the fields, the configuration of them, and what holds for a call."""

from __future__ import annotations

from everystep.config.effective import Effective, Source, merge_configs
from everystep.config.fields import CALL_ONLY, DEFAULTS, FIELDS, META, OURS, Field
from everystep.config.generation import CONFIG_NAME, GenerationConfig, unknown_name
from everystep.config.modes import GenerationMode
from everystep.config.nested import (
    CompileConfig,
    SynthIDTextWatermarkingConfig,
    Watermark,
    WatermarkingConfig,
)
from everystep.config.rule import ConfigRule
from everystep.config.rules import RULES

__all__ = [
    "CALL_ONLY",
    "CONFIG_NAME",
    "CompileConfig",
    "DEFAULTS",
    "Effective",
    "FIELDS",
    "Field",
    "GenerationConfig",
    "GenerationMode",
    "META",
    "OURS",
    "RULES",
    "ConfigRule",
    "Source",
    "SynthIDTextWatermarkingConfig",
    "Watermark",
    "WatermarkingConfig",
    "merge_configs",
    "unknown_name",
]
