"""Text generation you can see, steer and trust at every step.

The public names, sorted, and nothing else; each is documented where it is defined. A name is
imported when it is first used, so that `import everystep` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from everystep._version import __version__

if TYPE_CHECKING:
    from everystep.api.auto import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
    )
    from everystep.api.load import load, load_model
    from everystep.api.model import LanguageModel
    from everystep.api.session import Generated, Stream
    from everystep.api.text import chat, generate, stream
    from everystep.cache.containers import (
        Cache,
        DynamicCache,
        EncoderDecoderCache,
        OffloadedCache,
        OffloadedStaticCache,
        QuantizedCache,
        SlidingWindowCache,
        StaticCache,
    )
    from everystep.config import GenerationConfig
    from everystep.draws import set_seed
    from everystep.errors import EverystepError
    from everystep.outputs import (
        GenerateBeamDecoderOnlyOutput,
        GenerateBeamEncoderDecoderOutput,
        GenerateDecoderOnlyOutput,
        GenerateEncoderDecoderOutput,
    )
    from everystep.stops.criteria import (
        ConfidenceCriteria,
        EosTokenCriteria,
        MaxLengthCriteria,
        MaxTimeCriteria,
        StoppingCriteria,
        StoppingCriteriaList,
        StopStringCriteria,
    )
    from everystep.text import BatchEncoding, Tokenizer
    from everystep.types import Event, FinishReason

_HOME = {
    "AutoConfig": "api.auto",
    "AutoModelForCausalLM": "api.auto",
    "AutoModelForSeq2SeqLM": "api.auto",
    "AutoTokenizer": "api.auto",
    "BatchEncoding": "text",
    "Cache": "cache.containers",
    "ConfidenceCriteria": "stops.criteria",
    "DynamicCache": "cache.containers",
    "EncoderDecoderCache": "cache.containers",
    "EosTokenCriteria": "stops.criteria",
    "Event": "types",
    "EverystepError": "errors",
    "FinishReason": "types",
    "GenerateBeamDecoderOnlyOutput": "outputs",
    "GenerateBeamEncoderDecoderOutput": "outputs",
    "GenerateDecoderOnlyOutput": "outputs",
    "GenerateEncoderDecoderOutput": "outputs",
    "Generated": "api.session",
    "GenerationConfig": "config",
    "LanguageModel": "api.model",
    "MaxLengthCriteria": "stops.criteria",
    "MaxTimeCriteria": "stops.criteria",
    "OffloadedCache": "cache.containers",
    "OffloadedStaticCache": "cache.containers",
    "QuantizedCache": "cache.containers",
    "SlidingWindowCache": "cache.containers",
    "StaticCache": "cache.containers",
    "StopStringCriteria": "stops.criteria",
    "StoppingCriteria": "stops.criteria",
    "StoppingCriteriaList": "stops.criteria",
    "Stream": "api.session",
    "Tokenizer": "text",
    "chat": "api.text",
    "generate": "api.text",
    "load": "api.load",
    "load_model": "api.load",
    "set_seed": "draws",
    "stream": "api.text",
}
"""Public name -> the module that defines it."""

__all__ = [
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoTokenizer",
    "BatchEncoding",
    "Cache",
    "ConfidenceCriteria",
    "DynamicCache",
    "EncoderDecoderCache",
    "EosTokenCriteria",
    "Event",
    "EverystepError",
    "FinishReason",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "Generated",
    "GenerationConfig",
    "LanguageModel",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "OffloadedCache",
    "OffloadedStaticCache",
    "QuantizedCache",
    "SlidingWindowCache",
    "StaticCache",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "Stream",
    "Tokenizer",
    "__version__",
    "chat",
    "generate",
    "load",
    "load_model",
    "set_seed",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"everystep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
