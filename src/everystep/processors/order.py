"""The one order of all processors: the reference's (`_get_logits_processor` of 5.23.0).

The caller's processors stand in the slot of `User`, before those that shape the distribution for
sampling.
"""

from __future__ import annotations

from everystep.processors.allowed import (
    InfNanRemoveLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
from everystep.processors.base import User
from everystep.processors.bias import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from everystep.processors.dry import Dry
from everystep.processors.length import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from everystep.processors.mirostat import Mirostat
from everystep.processors.penalties import LogitBias, OccurrencePenalty
from everystep.processors.repetition import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.processors.samplers import DynamicTemperature, TopNSigma, Xtc
from everystep.processors.synthid import SynthIDTextWatermarkLogitsProcessor
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
from everystep.processors.watermark import WatermarkLogitsProcessor

CANONICAL: tuple[type, ...] = (
    SequenceBiasLogitsProcessor,
    LogitBias,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    OccurrencePenalty,
    Dry,
    NoRepeatNGramLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    ExponentialDecayLengthPenalty,
    SuppressTokensLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    User,
    TemperatureLogitsWarper,
    DynamicTemperature,
    TopNSigma,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    Xtc,
    Mirostat,
    WatermarkLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    LogitNormalization,
)
RANK: dict[type, int] = {kind: rank for rank, kind in enumerate(CANONICAL)}
