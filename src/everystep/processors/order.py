"""The one order of all processors, and how each is made from the fields of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

from torch import Tensor

from everystep.config.nested import SynthIDTextWatermarkingConfig, WatermarkingConfig
from everystep.errors import RequestError, message
from everystep.processors.base import UserProcessor
from everystep.processors.bias import (
    InfNanRemoveLogitsProcessor,
    LogitBias,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
    check_width,
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
    Dry,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    OccurrencePenalty,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.processors.samplers import DynamicTemperature, Mirostat, TopNSigma, Xtc
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
from everystep.types.protocols import Processor


@dataclass(frozen=True, eq=False)
class Facts:
    """What processors depend on beside the configuration.

    `prompt_length`, `max_length`: visible ids, pad prefix included. `encoder_ids`: the prompt of
    the encoder, or of a decoder alone; None if it was not given as ids. `beams`: how many
    hypotheses are searched together. `row` of `rows`: which prompt of the call it is.
    `first_row`: the call's row of the request's first sequence.
    `user`: callables of (input_ids, scores), instances of classes in `CANONICAL`, or
    `UserProcessor`.
    `encode`: a text's ids without special ones; None without a tokenizer.
    """

    eos: tuple[int, ...] = ()
    prompt_length: int = 0
    max_length: int | None = None
    encoder_ids: tuple[int, ...] | None = None
    beams: int = 1
    vocab_size: int | None = None
    row: int = 0
    rows: int = 1
    first_row: int = 0
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None
    user: tuple[Any, ...] = ()
    encode: Callable[[str], Sequence[int]] | None = None

    @property
    def min_tokens_to_keep(self) -> int:
        """Beams need a token to go on with beside every one that ends them."""
        return max(len(self.eos), 1) + 1 if self.beams > 1 else 1


Values = Mapping[str, Any]
Maker = Callable[[Values, Facts], Processor | None]


def _within(ids: Sequence[int], facts: Facts, name: str) -> None:
    if facts.vocab_size is not None:
        check_width(tuple(((token,), 0.0) for token in ids), facts.vocab_size, name)


def _sequence_bias(values: Values, facts: Facts) -> Processor | None:
    if values["sequence_bias"] is None:
        return None
    table = values["sequence_bias"]
    _within([token for ids in table for token in ids], facts, "sequence_bias")
    return SequenceBiasLogitsProcessor(values["sequence_bias"])


def _below_one(field: str, make: Callable[..., Processor]) -> Maker:
    """Where the field is below 1, made from it and how many tokens stay at least."""

    def maker(values: Values, facts: Facts) -> Processor | None:
        value = values[field]
        return make(value, min_tokens_to_keep=facts.min_tokens_to_keep) if value < 1 else None

    return maker


def _above_zero(field: str, make: Callable[..., Processor], *further: str) -> Maker:
    """Where the field has a value above 0, made from it and the values of further fields."""

    def maker(values: Values, facts: Facts) -> Processor | None:
        if not values[field]:
            return None
        others = (values[name] for name in further)
        return make(values[field], *others, min_tokens_to_keep=facts.min_tokens_to_keep)

    return maker


def _unless(field: str, unused: object, make: Callable[[Any], Processor | None]) -> Maker:
    """Where the field has a value that has an effect, made from it."""
    return lambda values, facts: None if values[field] == unused else make(values[field])


def _of_encoder(field: str, unused: object, make: Callable[..., Processor]) -> Maker:
    """Likewise, from it and the ids of the encoder's prompt."""

    def maker(values: Values, facts: Facts) -> Processor | None:
        if values[field] == unused:
            return None
        if facts.encoder_ids is None:
            text = f"{field} has no effect: the prompt was not given as ids"
            warn(text, UserWarning, stacklevel=5)
            return None
        return make(values[field], (facts.encoder_ids or (),))

    return maker


def _before_end(field: str, make: Callable[[int, tuple[int, ...]], Processor]) -> Maker:
    """Where the field says how many ids come before the end, and there are end tokens."""
    return lambda values, facts: (
        make(values[field], facts.eos) if values[field] and facts.eos else None
    )


def _logit_bias(values: Values, facts: Facts) -> Processor | None:
    if values["logit_bias"] is None:
        return None
    _within(list(values["logit_bias"]), facts, "logit_bias")
    return LogitBias(tuple(values["logit_bias"].items()))


def _occurrence(values: Values, facts: Facts) -> Processor | None:
    presence, frequency = values["presence_penalty"], values["frequency_penalty"]
    return OccurrencePenalty(presence, frequency) if presence or frequency else None


def _prefix(values: Values, facts: Facts) -> Processor | None:
    allowed = facts.prefix_allowed_tokens_fn
    if allowed is None:
        return None
    return PrefixConstrainedLogitsProcessor(allowed, facts.beams, first=facts.first_row)


def _min_p(values: Values, facts: Facts) -> Processor | None:
    value, keep = values["min_p"], facts.min_tokens_to_keep
    return None if value is None else MinPLogitsWarper(value, min_tokens_to_keep=keep)


def _temperature(values: Values, facts: Facts) -> Processor | None:
    value, spread = values["temperature"], values["dynatemp_range"]
    if spread:
        return DynamicTemperature(value, spread, values["dynatemp_exponent"])
    return None if value == 1.0 else TemperatureLogitsWarper(value)


def _watermark(kind: type, make: Callable[..., Processor]) -> Maker:
    """Where the watermark is of that kind, made from its values."""

    def maker(values: Values, facts: Facts) -> Processor | None:
        config = values["watermarking_config"]
        if not isinstance(config, WatermarkingConfig | SynthIDTextWatermarkingConfig):
            return None
        if not isinstance(config, kind):
            return None
        further = {"vocab_size": facts.vocab_size} if kind is WatermarkingConfig else {}
        return make(**config.to_dict(), **further)

    return maker


def _dry(values: Values, facts: Facts) -> Processor | None:
    if not values["dry_multiplier"]:
        return None
    return Dry(
        values["dry_multiplier"],
        values["dry_base"],
        values["dry_allowed_length"],
        tuple(_breaker(one, facts) for one in values["dry_sequence_breakers"] or ()),
    )


def _breaker(given: str | int, facts: Facts) -> int:
    """The id, or the last id of the text encoded after a letter, as it stands within a sentence."""
    if not isinstance(given, str):
        return given
    if facts.encode is None:
        text = message(
            "dry_sequence_breakers holds a text, which needs a tokenizer",
            wanted="tokenizer=..., or token ids",
            got=repr(given),
            do="Pass tokenizer=tokenizer to generate",
        )
        raise RequestError(text)
    return int(facts.encode("a" + given)[-1])


def _bad_words(values: Values, facts: Facts) -> Processor | None:
    if values["bad_words_ids"] is None:
        return None
    words = values["bad_words_ids"]
    _within([token for word in words for token in word], facts, "bad_words_ids")
    return NoBadWordsLogitsProcessor(words, facts.eos or None)


def _forced_bos(values: Values, facts: Facts) -> Processor | None:
    token = values["forced_bos_token_id"]
    if token is None:
        return None
    _within([token], facts, "forced_bos_token_id")
    return ForcedBOSTokenLogitsProcessor(token)


def _forced_eos(values: Values, facts: Facts) -> Processor | None:
    given = values["forced_eos_token_id"]
    if given is None:
        return None
    tokens = (given,) if isinstance(given, int) else tuple(given)
    _within(tokens, facts, "forced_eos_token_id")
    if facts.max_length is None:
        text = message(
            "forced_eos_token_id needs a last place",
            wanted="a max_length",
            got=None,
            do="Set max_length or max_new_tokens",
        )
        raise RequestError(text)
    return ForcedEOSTokenLogitsProcessor(facts.max_length, tokens)


def _decay(values: Values, facts: Facts) -> Processor | None:
    if values["exponential_decay_length_penalty"] is None:
        return None
    if not facts.eos:
        text = message(
            "exponential_decay_length_penalty needs an end token",
            wanted="eos_token_id",
            got=None,
            do="Set eos_token_id, or leave the penalty out",
        )
        raise RequestError(text)
    _within(facts.eos, facts, "eos_token_id")
    decay = values["exponential_decay_length_penalty"]
    return ExponentialDecayLengthPenalty(decay, facts.eos, None)


def _begin_suppress(values: Values, facts: Facts) -> Processor | None:
    tokens = values["begin_suppress_tokens"]
    if tokens is None:
        return None
    # A forced first token cannot be suppressed: the next one is meant.
    forced = facts.prompt_length <= 1 and values["forced_bos_token_id"] is not None
    return SuppressTokensAtBeginLogitsProcessor(tokens, None, after=int(forced))


# The one order of all processors: the reference's (`_get_logits_processor` of 5.23.0). The caller's
# stand in the slot of `UserProcessor`, before those that shape the distribution for sampling.
BEFORE: dict[type, Maker] = {
    SequenceBiasLogitsProcessor: _sequence_bias,
    LogitBias: _logit_bias,
    EncoderRepetitionPenaltyLogitsProcessor: _of_encoder(
        "encoder_repetition_penalty", 1.0, EncoderRepetitionPenaltyLogitsProcessor
    ),
    RepetitionPenaltyLogitsProcessor: _unless(
        "repetition_penalty", 1.0, RepetitionPenaltyLogitsProcessor
    ),
    OccurrencePenalty: _occurrence,
    Dry: _dry,
    NoRepeatNGramLogitsProcessor: lambda values, facts: (
        NoRepeatNGramLogitsProcessor(values["no_repeat_ngram_size"])
        if values["no_repeat_ngram_size"]
        else None
    ),
    EncoderNoRepeatNGramLogitsProcessor: _of_encoder(
        "encoder_no_repeat_ngram_size", 0, EncoderNoRepeatNGramLogitsProcessor
    ),
    NoBadWordsLogitsProcessor: _bad_words,
    MinLengthLogitsProcessor: _before_end("min_length", MinLengthLogitsProcessor),
    MinNewTokensLengthLogitsProcessor: _before_end(
        "min_new_tokens", lambda least, eos: MinNewTokensLengthLogitsProcessor(None, least, eos)
    ),
    PrefixConstrainedLogitsProcessor: _prefix,
    ForcedBOSTokenLogitsProcessor: _forced_bos,
    ForcedEOSTokenLogitsProcessor: _forced_eos,
    InfNanRemoveLogitsProcessor: lambda values, facts: (
        InfNanRemoveLogitsProcessor() if values["remove_invalid_values"] else None
    ),
    ExponentialDecayLengthPenalty: _decay,
    SuppressTokensLogitsProcessor: _unless("suppress_tokens", None, SuppressTokensLogitsProcessor),
    SuppressTokensAtBeginLogitsProcessor: _begin_suppress,
}
SAMPLERS: dict[type, Maker] = {
    TemperatureLogitsWarper: _temperature,  # or a DynamicTemperature
    TopNSigma: _unless("top_n_sigma", None, TopNSigma),
    TopHLogitsWarper: _unless("top_h", None, TopHLogitsWarper),
    TopKLogitsWarper: _above_zero("top_k", TopKLogitsWarper),
    TopPLogitsWarper: _below_one("top_p", TopPLogitsWarper),
    MinPLogitsWarper: _min_p,
    TypicalLogitsWarper: _below_one("typical_p", TypicalLogitsWarper),
    EpsilonLogitsWarper: _above_zero("epsilon_cutoff", EpsilonLogitsWarper),
    EtaLogitsWarper: _above_zero("eta_cutoff", EtaLogitsWarper),
    Xtc: _above_zero("xtc_probability", Xtc, "xtc_threshold"),
    Mirostat: _above_zero("mirostat_tau", Mirostat, "mirostat_eta"),
}
AFTER: dict[type, Maker] = {
    WatermarkLogitsProcessor: _watermark(WatermarkingConfig, WatermarkLogitsProcessor),
    SynthIDTextWatermarkLogitsProcessor: _watermark(
        SynthIDTextWatermarkingConfig, SynthIDTextWatermarkLogitsProcessor
    ),
    LogitNormalization: lambda values, facts: (
        LogitNormalization() if values["renormalize_logits"] else None
    ),
}
_SAMPLING = (TemperatureLogitsWarper, DynamicTemperature, *SAMPLERS)
CANONICAL: tuple[type, ...] = (*BEFORE, UserProcessor, *dict.fromkeys(_SAMPLING), *AFTER)
RANK: dict[type, int] = {kind: rank for rank, kind in enumerate(CANONICAL)}
# What `sampler_order` may name; those that it names come first, as it names them.
BY_NAME: dict[str, tuple[type, ...]] = {
    "temperature": (TemperatureLogitsWarper, DynamicTemperature),
    "top_n_sigma": (TopNSigma,),
    "top_h": (TopHLogitsWarper,),
    "top_k": (TopKLogitsWarper,),
    "top_p": (TopPLogitsWarper,),
    "min_p": (MinPLogitsWarper,),
    "typical_p": (TypicalLogitsWarper,),
    "epsilon_cutoff": (EpsilonLogitsWarper,),
    "eta_cutoff": (EtaLogitsWarper,),
    "xtc": (Xtc,),
    "mirostat": (Mirostat,),
}
