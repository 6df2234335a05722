"""Text generation you can see, steer and trust at every step.

The public names, sorted, and nothing else; each is documented where it is defined. A name is
imported when it is first used, so that `import everystep` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
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
    from everystep.api.many import Stream, chat, generate, stream
    from everystep.api.model import LanguageModel
    from everystep.api.session import Generated
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
    from everystep.cache.layers import DynamicLayer, StaticLayer, StaticSlidingWindowLayer
    from everystep.config import (
        CompileConfig,
        GenerationConfig,
        GenerationMode,
        SynthIDTextWatermarkingConfig,
        WatermarkingConfig,
    )
    from everystep.draws import set_seed
    from everystep.errors import EverystepError
    from everystep.outputs import (
        GenerateBeamDecoderOnlyOutput,
        GenerateBeamEncoderDecoderOutput,
        GenerateDecoderOnlyOutput,
        GenerateEncoderDecoderOutput,
    )
    from everystep.processors.audio import (
        AlternatingCodebooksLogitsProcessor,
        BarkEosPrioritizerLogitsProcessor,
        DiaEOSChannelFilterLogitsProcessor,
        DiaEOSDelayPatternLogitsProcessor,
        WhisperNoSpeechDetection,
        WhisperTimeStampLogitsProcessor,
    )
    from everystep.processors.base import LogitsProcessor, LogitsProcessorList
    from everystep.processors.bias import (
        InfNanRemoveLogitsProcessor,
        NoBadWordsLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )
    from everystep.processors.guidance import (
        ClassifierFreeGuidanceLogitsProcessor,
        DiaClassifierFreeGuidanceLogitsProcessor,
        HammingDiversityLogitsProcessor,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
    )
    from everystep.processors.length import (
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
    )
    from everystep.processors.repetition import (
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
    )
    from everystep.processors.synthid import (
        SynthIDTextWatermarkDetector as SynthIDTextWatermarkDetector,
    )
    from everystep.processors.synthid import SynthIDTextWatermarkLogitsProcessor
    from everystep.processors.synthid import WeightedMeanDetector as WeightedMeanDetector
    from everystep.processors.warpers import (
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        LogitNormalization,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    )
    from everystep.processors.watermark import WatermarkDetector as WatermarkDetector
    from everystep.processors.watermark import WatermarkDetectorOutput as WatermarkDetectorOutput
    from everystep.processors.watermark import WatermarkLogitsProcessor
    from everystep.stops.criteria import (
        ConfidenceCriteria,
        EosTokenCriteria,
        MaxLengthCriteria,
        MaxTimeCriteria,
        StoppingCriteria,
        StoppingCriteriaList,
        StopStringCriteria,
        validate_stopping_criteria,
    )
    from everystep.streamers import (
        AsyncTextIteratorStreamer,
        BaseStreamer,
        BeamEvent,
        LiveBeam,
        TextIteratorStreamer,
        TextStreamer,
    )
    from everystep.text import BatchEncoding, Tokenizer
    from everystep.types import Event, FinishReason

_HOME = {
    "AlternatingCodebooksLogitsProcessor": "processors.audio",
    "AsyncTextIteratorStreamer": "streamers",
    "AutoConfig": "api.auto",
    "AutoModelForCausalLM": "api.auto",
    "AutoModelForSeq2SeqLM": "api.auto",
    "AutoTokenizer": "api.auto",
    "BarkEosPrioritizerLogitsProcessor": "processors.audio",
    "BaseStreamer": "streamers",
    "BatchEncoding": "text",
    "BeamEvent": "streamers",
    "Cache": "cache.containers",
    "ClassifierFreeGuidanceLogitsProcessor": "processors.guidance",
    "CompileConfig": "config",
    "ConfidenceCriteria": "stops.criteria",
    "DiaClassifierFreeGuidanceLogitsProcessor": "processors.guidance",
    "DiaEOSChannelFilterLogitsProcessor": "processors.audio",
    "DiaEOSDelayPatternLogitsProcessor": "processors.audio",
    "DynamicCache": "cache.containers",
    "DynamicLayer": "cache.layers",
    "EncoderDecoderCache": "cache.containers",
    "EncoderNoRepeatNGramLogitsProcessor": "processors.repetition",
    "EncoderRepetitionPenaltyLogitsProcessor": "processors.repetition",
    "EosTokenCriteria": "stops.criteria",
    "EpsilonLogitsWarper": "processors.warpers",
    "EtaLogitsWarper": "processors.warpers",
    "Event": "types",
    "EverystepError": "errors",
    "ExponentialDecayLengthPenalty": "processors.length",
    "FinishReason": "types",
    "ForcedBOSTokenLogitsProcessor": "processors.length",
    "ForcedEOSTokenLogitsProcessor": "processors.length",
    "GenerateBeamDecoderOnlyOutput": "outputs",
    "GenerateBeamEncoderDecoderOutput": "outputs",
    "GenerateDecoderOnlyOutput": "outputs",
    "GenerateEncoderDecoderOutput": "outputs",
    "Generated": "api.session",
    "GenerationConfig": "config",
    "GenerationMode": "config",
    "HammingDiversityLogitsProcessor": "processors.guidance",
    "InfNanRemoveLogitsProcessor": "processors.bias",
    "LanguageModel": "api.model",
    "LiveBeam": "streamers",
    "LogitNormalization": "processors.warpers",
    "LogitsProcessor": "processors.base",
    "LogitsProcessorList": "processors.base",
    "MaxLengthCriteria": "stops.criteria",
    "MaxTimeCriteria": "stops.criteria",
    "MinLengthLogitsProcessor": "processors.length",
    "MinNewTokensLengthLogitsProcessor": "processors.length",
    "MinPLogitsWarper": "processors.warpers",
    "NoBadWordsLogitsProcessor": "processors.bias",
    "NoRepeatNGramLogitsProcessor": "processors.repetition",
    "OffloadedCache": "cache.containers",
    "OffloadedStaticCache": "cache.containers",
    "PrefixConstrainedLogitsProcessor": "processors.bias",
    "QuantizedCache": "cache.containers",
    "RepetitionPenaltyLogitsProcessor": "processors.repetition",
    "SequenceBiasLogitsProcessor": "processors.bias",
    "SlidingWindowCache": "cache.containers",
    "StaticCache": "cache.containers",
    "StaticLayer": "cache.layers",
    "StaticSlidingWindowLayer": "cache.layers",
    "StopStringCriteria": "stops.criteria",
    "StoppingCriteria": "stops.criteria",
    "StoppingCriteriaList": "stops.criteria",
    "Stream": "api.many",
    "SuppressTokensAtBeginLogitsProcessor": "processors.length",
    "SuppressTokensLogitsProcessor": "processors.length",
    "SynthIDTextWatermarkDetector": "processors.synthid",
    "SynthIDTextWatermarkLogitsProcessor": "processors.synthid",
    "SynthIDTextWatermarkingConfig": "config",
    "TemperatureLogitsWarper": "processors.warpers",
    "TextIteratorStreamer": "streamers",
    "TextStreamer": "streamers",
    "Tokenizer": "text",
    "TopHLogitsWarper": "processors.warpers",
    "TopKLogitsWarper": "processors.warpers",
    "TopPLogitsWarper": "processors.warpers",
    "TypicalLogitsWarper": "processors.warpers",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "processors.guidance",
    "WatermarkDetector": "processors.watermark",
    "WatermarkDetectorOutput": "processors.watermark",
    "WatermarkLogitsProcessor": "processors.watermark",
    "WatermarkingConfig": "config",
    "WeightedMeanDetector": "processors.synthid",
    "WhisperNoSpeechDetection": "processors.audio",
    "WhisperTimeStampLogitsProcessor": "processors.audio",
    "chat": "api.many",
    "generate": "api.many",
    "load": "api.load",
    "load_model": "api.load",
    "set_seed": "draws",
    "stream": "api.many",
    "validate_stopping_criteria": "stops.criteria",
}
"""Public name -> the module that defines it."""

__all__ = [
    "AlternatingCodebooksLogitsProcessor",
    "AsyncTextIteratorStreamer",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoTokenizer",
    "BarkEosPrioritizerLogitsProcessor",
    "BaseStreamer",
    "BatchEncoding",
    "BeamEvent",
    "Cache",
    "ClassifierFreeGuidanceLogitsProcessor",
    "CompileConfig",
    "ConfidenceCriteria",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "DynamicCache",
    "DynamicLayer",
    "EncoderDecoderCache",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EosTokenCriteria",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "Event",
    "EverystepError",
    "ExponentialDecayLengthPenalty",
    "FinishReason",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "Generated",
    "GenerationConfig",
    "GenerationMode",
    "HammingDiversityLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LanguageModel",
    "LiveBeam",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "OffloadedCache",
    "OffloadedStaticCache",
    "PrefixConstrainedLogitsProcessor",
    "QuantizedCache",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SlidingWindowCache",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "Stream",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SynthIDTextWatermarkDetector",
    "SynthIDTextWatermarkLogitsProcessor",
    "SynthIDTextWatermarkingConfig",
    "TemperatureLogitsWarper",
    "TextIteratorStreamer",
    "TextStreamer",
    "Tokenizer",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WatermarkDetector",
    "WatermarkDetectorOutput",
    "WatermarkLogitsProcessor",
    "WatermarkingConfig",
    "WeightedMeanDetector",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
    "__version__",
    "chat",
    "generate",
    "load",
    "load_model",
    "set_seed",
    "stream",
    "validate_stopping_criteria",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from everystep.api.absent import refuse_name

        refuse_name(name, sys._getframe(1))
    value = getattr(importlib.import_module(f"everystep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
