"""Text generation you can see, steer and trust at every step.

The public names and nothing else; each is documented where it is defined. A name is imported when
it is first used, so that `import everystep` costs nothing.
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from everystep._version import __version__ as __version__

if TYPE_CHECKING:
    from everystep.adapters import LoHaConfig as LoHaConfig
    from everystep.adapters import LoraConfig as LoraConfig
    from everystep.adapters import PeftAdapter as PeftAdapter
    from everystep.api.asynchronous import AsyncEngine as AsyncEngine
    from everystep.api.asynchronous import AsyncStream as AsyncStream
    from everystep.api.auto import AutoConfig as AutoConfig
    from everystep.api.auto import AutoModelForCausalLM as AutoModelForCausalLM
    from everystep.api.auto import AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM
    from everystep.api.auto import AutoTokenizer as AutoTokenizer
    from everystep.api.capabilities import Capability as Capability
    from everystep.api.chat import ChatAnswer as ChatAnswer
    from everystep.api.chat import chat as chat
    from everystep.api.layout_prompt import layout_prompt as layout_prompt
    from everystep.api.load import load as load
    from everystep.api.load import load_model as load_model
    from everystep.api.many import generate as generate
    from everystep.api.many import stream as stream
    from everystep.api.model import LanguageModel as LanguageModel
    from everystep.api.model import wrap as wrap
    from everystep.api.open import open as open
    from everystep.api.open import resume as resume
    from everystep.api.prefill import prefill as prefill
    from everystep.api.quantize import export_gguf as export_gguf
    from everystep.api.quantize import quantize as quantize
    from everystep.api.score import Score as Score
    from everystep.api.score import score as score
    from everystep.api.transcribe import Transcript as Transcript
    from everystep.api.transcribe import transcribe as transcribe
    from everystep.api.verify import Verification as Verification
    from everystep.api.verify import verify as verify
    from everystep.cache.containers import Cache as Cache
    from everystep.cache.containers import DynamicCache as DynamicCache
    from everystep.cache.containers import EncoderDecoderCache as EncoderDecoderCache
    from everystep.cache.containers import OffloadedCache as OffloadedCache
    from everystep.cache.containers import OffloadedStaticCache as OffloadedStaticCache
    from everystep.cache.containers import QuantizedCache as QuantizedCache
    from everystep.cache.containers import SlidingWindowCache as SlidingWindowCache
    from everystep.cache.containers import StaticCache as StaticCache
    from everystep.cache.layers import DynamicLayer as DynamicLayer
    from everystep.cache.layers import StaticLayer as StaticLayer
    from everystep.cache.layers import StaticSlidingWindowLayer as StaticSlidingWindowLayer
    from everystep.config import ChatDefaults as ChatDefaults
    from everystep.config import CompileConfig as CompileConfig
    from everystep.config import GenerationConfig as GenerationConfig
    from everystep.config import GenerationMode as GenerationMode
    from everystep.config import SynthIDTextWatermarkingConfig as SynthIDTextWatermarkingConfig
    from everystep.config import WatermarkingConfig as WatermarkingConfig
    from everystep.dialogue import Message as Message
    from everystep.dialogue import ToolCall as ToolCall
    from everystep.draws import set_seed as set_seed
    from everystep.drivers.generated import Generated as Generated
    from everystep.drivers.stream import Stream as Stream
    from everystep.engine.corpus import Corpus as Corpus
    from everystep.engine.explained import Account as Account
    from everystep.engine.explained import Explanation as Explanation
    from everystep.engine.explained import StageAccount as StageAccount
    from everystep.errors import EverystepError as EverystepError
    from everystep.nn.activations import register_activation as register_activation
    from everystep.outputs import GenerateBeamDecoderOnlyOutput as GenerateBeamDecoderOnlyOutput
    from everystep.outputs import (
        GenerateBeamEncoderDecoderOutput as GenerateBeamEncoderDecoderOutput,
    )
    from everystep.outputs import GenerateDecoderOnlyOutput as GenerateDecoderOnlyOutput
    from everystep.outputs import GenerateEncoderDecoderOutput as GenerateEncoderDecoderOutput
    from everystep.processors.allowed import AllowedSequences as AllowedSequences
    from everystep.processors.audio import (
        AlternatingCodebooksLogitsProcessor as AlternatingCodebooksLogitsProcessor,
    )
    from everystep.processors.audio import (
        BarkEosPrioritizerLogitsProcessor as BarkEosPrioritizerLogitsProcessor,
    )
    from everystep.processors.audio import (
        DiaEOSChannelFilterLogitsProcessor as DiaEOSChannelFilterLogitsProcessor,
    )
    from everystep.processors.audio import (
        DiaEOSDelayPatternLogitsProcessor as DiaEOSDelayPatternLogitsProcessor,
    )
    from everystep.processors.audio import WhisperNoSpeechDetection as WhisperNoSpeechDetection
    from everystep.processors.audio import (
        WhisperTimeStampLogitsProcessor as WhisperTimeStampLogitsProcessor,
    )
    from everystep.processors.base import LogitsProcessor as LogitsProcessor
    from everystep.processors.base import LogitsProcessorList as LogitsProcessorList
    from everystep.processors.bias import (
        InfNanRemoveLogitsProcessor as InfNanRemoveLogitsProcessor,
    )
    from everystep.processors.bias import NoBadWordsLogitsProcessor as NoBadWordsLogitsProcessor
    from everystep.processors.bias import (
        PrefixConstrainedLogitsProcessor as PrefixConstrainedLogitsProcessor,
    )
    from everystep.processors.bias import SequenceBiasLogitsProcessor as SequenceBiasLogitsProcessor
    from everystep.processors.guidance import (
        ClassifierFreeGuidanceLogitsProcessor as ClassifierFreeGuidanceLogitsProcessor,
    )
    from everystep.processors.guidance import (
        DiaClassifierFreeGuidanceLogitsProcessor as DiaClassifierFreeGuidanceLogitsProcessor,
    )
    from everystep.processors.guidance import (
        HammingDiversityLogitsProcessor as HammingDiversityLogitsProcessor,
    )
    from everystep.processors.guidance import (
        UnbatchedClassifierFreeGuidanceLogitsProcessor as UnbatchedClassifierFreeGuidanceLogitsProcessor,  # noqa: E501
    )
    from everystep.processors.length import (
        ExponentialDecayLengthPenalty as ExponentialDecayLengthPenalty,
    )
    from everystep.processors.length import (
        ForcedBOSTokenLogitsProcessor as ForcedBOSTokenLogitsProcessor,
    )
    from everystep.processors.length import (
        ForcedEOSTokenLogitsProcessor as ForcedEOSTokenLogitsProcessor,
    )
    from everystep.processors.length import MinLengthLogitsProcessor as MinLengthLogitsProcessor
    from everystep.processors.length import (
        MinNewTokensLengthLogitsProcessor as MinNewTokensLengthLogitsProcessor,
    )
    from everystep.processors.length import (
        SuppressTokensAtBeginLogitsProcessor as SuppressTokensAtBeginLogitsProcessor,
    )
    from everystep.processors.length import (
        SuppressTokensLogitsProcessor as SuppressTokensLogitsProcessor,
    )
    from everystep.processors.repetition import (
        EncoderNoRepeatNGramLogitsProcessor as EncoderNoRepeatNGramLogitsProcessor,
    )
    from everystep.processors.repetition import (
        EncoderRepetitionPenaltyLogitsProcessor as EncoderRepetitionPenaltyLogitsProcessor,
    )
    from everystep.processors.repetition import (
        NoRepeatNGramLogitsProcessor as NoRepeatNGramLogitsProcessor,
    )
    from everystep.processors.repetition import (
        RepetitionPenaltyLogitsProcessor as RepetitionPenaltyLogitsProcessor,
    )
    from everystep.processors.synthid import (
        SynthIDTextWatermarkDetector as SynthIDTextWatermarkDetector,
    )
    from everystep.processors.synthid import (
        SynthIDTextWatermarkLogitsProcessor as SynthIDTextWatermarkLogitsProcessor,
    )
    from everystep.processors.synthid import WeightedMeanDetector as WeightedMeanDetector
    from everystep.processors.warpers import EpsilonLogitsWarper as EpsilonLogitsWarper
    from everystep.processors.warpers import EtaLogitsWarper as EtaLogitsWarper
    from everystep.processors.warpers import LogitNormalization as LogitNormalization
    from everystep.processors.warpers import MinPLogitsWarper as MinPLogitsWarper
    from everystep.processors.warpers import TemperatureLogitsWarper as TemperatureLogitsWarper
    from everystep.processors.warpers import TopHLogitsWarper as TopHLogitsWarper
    from everystep.processors.warpers import TopKLogitsWarper as TopKLogitsWarper
    from everystep.processors.warpers import TopPLogitsWarper as TopPLogitsWarper
    from everystep.processors.warpers import TypicalLogitsWarper as TypicalLogitsWarper
    from everystep.processors.watermark import WatermarkDetector as WatermarkDetector
    from everystep.processors.watermark import WatermarkDetectorOutput as WatermarkDetectorOutput
    from everystep.processors.watermark import WatermarkLogitsProcessor as WatermarkLogitsProcessor
    from everystep.records.reader import Record as Record
    from everystep.records.reader import RecordedRow as RecordedRow
    from everystep.records.reader import RecordedRun as RecordedRun
    from everystep.records.reader import RecordedStep as RecordedStep
    from everystep.records.reader import read_record as read_record
    from everystep.requests.features import PromptInput as PromptInput
    from everystep.requests.options import Prefix as Prefix
    from everystep.runs.run import Run as Run
    from everystep.runs.steps import Step as Step
    from everystep.sounds.features import WhisperFeatureExtractor as WhisperFeatureExtractor
    from everystep.sounds.sound_files import read_sound as read_sound
    from everystep.stops.criteria import ConfidenceCriteria as ConfidenceCriteria
    from everystep.stops.criteria import EosTokenCriteria as EosTokenCriteria
    from everystep.stops.criteria import MaxLengthCriteria as MaxLengthCriteria
    from everystep.stops.criteria import MaxTimeCriteria as MaxTimeCriteria
    from everystep.stops.criteria import StoppingCriteria as StoppingCriteria
    from everystep.stops.criteria import StoppingCriteriaList as StoppingCriteriaList
    from everystep.stops.criteria import StopStringCriteria as StopStringCriteria
    from everystep.stops.criteria import validate_stopping_criteria as validate_stopping_criteria
    from everystep.strategies.constraint_list import ConstraintListState as ConstraintListState
    from everystep.strategies.constraints import Constraint as Constraint
    from everystep.strategies.constraints import DisjunctiveConstraint as DisjunctiveConstraint
    from everystep.strategies.constraints import PhrasalConstraint as PhrasalConstraint
    from everystep.streamers import AsyncTextIteratorStreamer as AsyncTextIteratorStreamer
    from everystep.streamers import BaseStreamer as BaseStreamer
    from everystep.streamers import BeamEvent as BeamEvent
    from everystep.streamers import LiveBeam as LiveBeam
    from everystep.streamers import TextIteratorStreamer as TextIteratorStreamer
    from everystep.streamers import TextStreamer as TextStreamer
    from everystep.text import BatchEncoding as BatchEncoding
    from everystep.text import Tokenizer as Tokenizer
    from everystep.train.arguments import TrainingArguments as TrainingArguments
    from everystep.train.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
    from everystep.train.callbacks import TrainerCallback as TrainerCallback
    from everystep.train.collators import (
        DataCollatorForLanguageModeling as DataCollatorForLanguageModeling,
    )
    from everystep.train.collators import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
    from everystep.train.collators import DataCollatorWithFlattening as DataCollatorWithFlattening
    from everystep.train.collators import DataCollatorWithPadding as DataCollatorWithPadding
    from everystep.train.collators import default_data_collator as default_data_collator
    from everystep.train.data_files import Examples as Examples
    from everystep.train.data_files import read_examples as read_examples
    from everystep.train.evaluation import EvalPrediction as EvalPrediction
    from everystep.train.evaluation import PredictionOutput as PredictionOutput
    from everystep.train.forms import DataForm as DataForm
    from everystep.train.forms import TrainingRows as TrainingRows
    from everystep.train.forms import read_rows as read_rows
    from everystep.train.inspection import Inspection as Inspection
    from everystep.train.inspection import TrainedPiece as TrainedPiece
    from everystep.train.inspection import inspect_rows as inspect_rows
    from everystep.train.packing import pack_rows as pack_rows
    from everystep.train.preference import PreferenceLoss as PreferenceLoss
    from everystep.train.state import TrainerControl as TrainerControl
    from everystep.train.state import TrainerState as TrainerState
    from everystep.train.state import TrainOutput as TrainOutput
    from everystep.train.trainer import Trainer as Trainer
    from everystep.types import AfterStep as AfterStep
    from everystep.types import BeforeStep as BeforeStep
    from everystep.types import Event as Event
    from everystep.types import FinishReason as FinishReason
    from everystep.types import Next as Next
    from everystep.types import PromptMoment as PromptMoment
    from everystep.types.hooks import Hook as Hook

_NAMES = {
    "adapters": "LoHaConfig LoraConfig PeftAdapter",
    "api.asynchronous": "AsyncEngine AsyncStream",
    "api.auto": "AutoConfig AutoModelForCausalLM AutoModelForSeq2SeqLM AutoTokenizer",
    "api.capabilities": "Capability",
    "api.chat": "ChatAnswer chat",
    "api.load": "load load_model",
    "api.many": "generate stream",
    "drivers.stream": "Stream",
    "api.model": "LanguageModel wrap",
    "records.reader": "Record RecordedRow RecordedRun RecordedStep read_record",
    "requests.features": "PromptInput",
    "api.layout_prompt": "layout_prompt",
    "api.prefill": "prefill",
    "requests.options": "Prefix",
    "api.quantize": "export_gguf quantize",
    "runs.run": "Run",
    "api.open": "open resume",
    "api.score": "Score score",
    "drivers.generated": "Generated",
    "runs.steps": "Step",
    "api.transcribe": "Transcript transcribe",
    "api.verify": "Verification verify",
    "cache.containers": """
        Cache DynamicCache EncoderDecoderCache OffloadedCache OffloadedStaticCache
        QuantizedCache SlidingWindowCache StaticCache
    """,
    "cache.layers": "DynamicLayer StaticLayer StaticSlidingWindowLayer",
    "config": """
        ChatDefaults CompileConfig GenerationConfig GenerationMode SynthIDTextWatermarkingConfig
        WatermarkingConfig
    """,
    "dialogue": "Message ToolCall",
    "draws": "set_seed",
    "engine.corpus": "Corpus",
    "engine.explained": "Account Explanation StageAccount",
    "errors": "EverystepError",
    "nn.activations": "register_activation",
    "outputs": """
        GenerateBeamDecoderOnlyOutput GenerateBeamEncoderDecoderOutput
        GenerateDecoderOnlyOutput GenerateEncoderDecoderOutput
    """,
    "processors.allowed": "AllowedSequences",
    "processors.audio": """
        AlternatingCodebooksLogitsProcessor BarkEosPrioritizerLogitsProcessor
        DiaEOSChannelFilterLogitsProcessor DiaEOSDelayPatternLogitsProcessor
        WhisperNoSpeechDetection WhisperTimeStampLogitsProcessor
    """,
    "processors.base": "LogitsProcessor LogitsProcessorList",
    "processors.bias": """
        InfNanRemoveLogitsProcessor NoBadWordsLogitsProcessor
        PrefixConstrainedLogitsProcessor SequenceBiasLogitsProcessor
    """,
    "processors.guidance": """
        ClassifierFreeGuidanceLogitsProcessor DiaClassifierFreeGuidanceLogitsProcessor
        HammingDiversityLogitsProcessor UnbatchedClassifierFreeGuidanceLogitsProcessor
    """,
    "processors.length": """
        ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor
        ForcedEOSTokenLogitsProcessor MinLengthLogitsProcessor
        MinNewTokensLengthLogitsProcessor SuppressTokensAtBeginLogitsProcessor
        SuppressTokensLogitsProcessor
    """,
    "processors.repetition": """
        EncoderNoRepeatNGramLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor
        NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor
    """,
    "processors.synthid": """
        SynthIDTextWatermarkDetector SynthIDTextWatermarkLogitsProcessor
        WeightedMeanDetector
    """,
    "processors.warpers": """
        EpsilonLogitsWarper EtaLogitsWarper LogitNormalization MinPLogitsWarper
        TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper
        TypicalLogitsWarper
    """,
    "processors.watermark": "WatermarkDetector WatermarkDetectorOutput WatermarkLogitsProcessor",
    "sounds.features": "WhisperFeatureExtractor",
    "sounds.sound_files": "read_sound",
    "stops.criteria": """
        ConfidenceCriteria EosTokenCriteria MaxLengthCriteria MaxTimeCriteria
        StopStringCriteria StoppingCriteria StoppingCriteriaList
        validate_stopping_criteria
    """,
    "strategies.constraint_list": "ConstraintListState",
    "strategies.constraints": "Constraint DisjunctiveConstraint PhrasalConstraint",
    "streamers": """
        AsyncTextIteratorStreamer BaseStreamer BeamEvent LiveBeam TextIteratorStreamer
        TextStreamer
    """,
    "text": "BatchEncoding Tokenizer",
    "train.arguments": "TrainingArguments",
    "train.callbacks": "EarlyStoppingCallback TrainerCallback",
    "train.collators": """
        DataCollatorForLanguageModeling DataCollatorForSeq2Seq DataCollatorWithFlattening
        DataCollatorWithPadding default_data_collator
    """,
    "train.data_files": "Examples read_examples",
    "train.evaluation": "EvalPrediction PredictionOutput",
    "train.forms": "DataForm TrainingRows read_rows",
    "train.inspection": "Inspection TrainedPiece inspect_rows",
    "train.packing": "pack_rows",
    "train.preference": "PreferenceLoss",
    "train.state": "TrainerControl TrainerState TrainOutput",
    "train.trainer": "Trainer",
    "types": "AfterStep BeforeStep Event FinishReason Next PromptMoment",
    "types.hooks": "Hook",
}
"""Module -> the public names that it defines."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from everystep.requests.absent import refuse_name

        refuse_name(name, sys._getframe(1))
    value = getattr(_imported(f"everystep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def _imported(name: str) -> ModuleType:
    """Return the module, imported without a collection of garbage: the classes that are made
    meanwhile would have the collector walk through all that torch holds, and free nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return __all__
