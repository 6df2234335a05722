"""How to generate: the fields, the configuration of them, and what holds for a call."""

from __future__ import annotations

from everystep.config.chat_defaults import ChatDefaults, chat_defaults_of
from everystep.config.effective import Effective, merge_configs
from everystep.config.fields import FIELDS, META, GenerationMode
from everystep.config.generation import GenerationConfig, is_configuration, is_data
from everystep.config.nested import CompileConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

__all__ = [
    "ChatDefaults",
    "CompileConfig",
    "Effective",
    "FIELDS",
    "GenerationConfig",
    "GenerationMode",
    "META",
    "SynthIDTextWatermarkingConfig",
    "WatermarkingConfig",
    "chat_defaults_of",
    "is_configuration",
    "is_data",
    "merge_configs",
]
