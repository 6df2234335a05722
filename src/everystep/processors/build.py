"""Which processors a request has: one maker per class, from the fields of its configuration.

A processor of the caller that is of exactly the class that a field asks for as well takes that
one's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from warnings import warn

from everystep.config.nested import SynthIDTextWatermarkingConfig, WatermarkingConfig
from everystep.errors import RequestError, message
from everystep.processors.allowed import (
    InfNanRemoveLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
from everystep.processors.base import Processor, User, reads_rows
from everystep.processors.bias import (
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    check_width,
)
from everystep.processors.dry import Dry
from everystep.processors.facts import Facts, Maker, Values
from everystep.processors.guidance import UnbatchedClassifierFreeGuidanceLogitsProcessor
from everystep.processors.length import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from everystep.processors.order import CANONICAL, RANK
from everystep.processors.penalties import LogitBias, OccurrencePenalty
from everystep.processors.repetition import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.processors.sampling import FOR_SAMPLING, ordered
from everystep.processors.stacking import at_row
from everystep.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from everystep.processors.warpers import LogitNormalization
from everystep.processors.watermark import WatermarkLogitsProcessor


def build(effective: Values, facts: Facts) -> tuple[Processor, ...]:
    """All processors of a request, in order.

    `effective`: every field's value by name, as `Effective` has them. RequestError for values that
    this model or prompt cannot have; UserWarning for one that has no effect here.
    """
    made = [_made(kind, effective, facts) for kind in CANONICAL]
    slot = RANK[User]
    user = [_for_row(one, facts) for one in facts.user]
    before, free = _replaced([one for one in made[:slot] if one is not None], user)
    guiding, free = _guiding(effective, free)
    after = [one for one in made[slot:] if one is not None]
    samplers = [one for one in after if type(one) in FOR_SAMPLING]
    return (
        *(_at_slot(one) for one in guiding),
        *before,
        *(_at_slot(one) for one in free),
        *ordered(samplers, effective["sampler_order"]),
        *(one for one in after if type(one) not in FOR_SAMPLING),
    )


def _made(kind: type, effective: Values, facts: Facts) -> Processor | None:
    if kind in FOR_SAMPLING:
        return FOR_SAMPLING[kind](effective, facts) if effective["do_sample"] else None
    return _ALWAYS[kind](effective, facts) if kind in _ALWAYS else None


def _replaced(built: list[Processor], user: Sequence[Any]) -> tuple[list[Processor], list[Any]]:
    """The built processors, some of them replaced by the caller's, and the caller's others."""
    free = [one for i, one in enumerate(user) if not any(one is other for other in user[:i])]
    for place, own in enumerate(built):
        for given in free:
            if type(given) is type(own):
                warn(
                    f"the given {type(own).__name__} replaces the one that generate()'s own "
                    f"arguments ask for: {own}",
                    UserWarning,
                    stacklevel=4,
                )
                built[place] = given
                free = [one for one in free if one is not given]
                break
    return built, free


def _guiding(values: Values, free: list[Any]) -> tuple[list[Any], list[Any]]:
    """The caller's guidance where a field asks for guidance too, and the caller's others.

    It stands in the place of the companion rows: before everything else.
    """
    own = [one for one in free if type(one) is UnbatchedClassifierFreeGuidanceLogitsProcessor][:1]
    if not own or values["guidance_scale"] in (None, 1):
        return [], free
    warn(
        "the given UnbatchedClassifierFreeGuidanceLogitsProcessor replaces the guidance that "
        "guidance_scale asks for",
        UserWarning,
        stacklevel=4,
    )
    return own, [one for one in free if one is not own[0]]


def _for_row(given: Any, facts: Facts) -> Any:
    """The caller's processor, with the row's own values where it has one per row."""
    return at_row(given, facts.row, facts.rows) if reads_rows(given) else given


def _at_slot(given: Any) -> User:
    if isinstance(given, User):
        return given
    return User(given, takes_rows=reads_rows(given))


def _within(ids: Sequence[int], facts: Facts, name: str) -> None:
    if facts.vocab_size is not None:
        check_width(tuple(((token,), 0.0) for token in ids), facts.vocab_size, name)


def _sequence_bias(values: Values, facts: Facts) -> Processor | None:
    if values["sequence_bias"] is None:
        return None
    table = values["sequence_bias"]
    _within([token for ids in table for token in ids], facts, "sequence_bias")
    return SequenceBiasLogitsProcessor(values["sequence_bias"])


def _encoder_repetition(values: Values, facts: Facts) -> Processor | None:
    penalty = values["encoder_repetition_penalty"]
    if penalty == 1.0 or not _has_encoder_ids(facts, "encoder_repetition_penalty"):
        return None
    return EncoderRepetitionPenaltyLogitsProcessor(penalty, (facts.encoder_ids or (),))


def _encoder_ngram(values: Values, facts: Facts) -> Processor | None:
    size = values["encoder_no_repeat_ngram_size"]
    if size == 0 or not _has_encoder_ids(facts, "encoder_no_repeat_ngram_size"):
        return None
    return EncoderNoRepeatNGramLogitsProcessor(size, (facts.encoder_ids or (),))


def _has_encoder_ids(facts: Facts, name: str) -> bool:
    if facts.encoder_ids is None:
        warn(f"{name} has no effect: the prompt was not given as ids", UserWarning, stacklevel=5)
    return facts.encoder_ids is not None


def _repetition(values: Values, facts: Facts) -> Processor | None:
    penalty = values["repetition_penalty"]
    return None if penalty == 1.0 else RepetitionPenaltyLogitsProcessor(penalty)


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


def _logit_bias(values: Values, facts: Facts) -> Processor | None:
    if values["logit_bias"] is None:
        return None
    _within(list(values["logit_bias"]), facts, "logit_bias")
    return LogitBias(tuple(values["logit_bias"].items()))


def _occurrence(values: Values, facts: Facts) -> Processor | None:
    presence, frequency = values["presence_penalty"], values["frequency_penalty"]
    return OccurrencePenalty(presence, frequency) if presence or frequency else None


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
    """The id, or the last one of the text behind a letter, as it stands within a sentence."""
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


def _ngram(values: Values, facts: Facts) -> Processor | None:
    size = values["no_repeat_ngram_size"]
    return NoRepeatNGramLogitsProcessor(size) if size else None


def _bad_words(values: Values, facts: Facts) -> Processor | None:
    if values["bad_words_ids"] is None:
        return None
    words = values["bad_words_ids"]
    _within([token for word in words for token in word], facts, "bad_words_ids")
    return NoBadWordsLogitsProcessor(words, facts.eos or None)


def _min_length(values: Values, facts: Facts) -> Processor | None:
    least = values["min_length"]
    return MinLengthLogitsProcessor(least, facts.eos) if least and facts.eos else None


def _min_new_tokens(values: Values, facts: Facts) -> Processor | None:
    least = values["min_new_tokens"]
    return (
        MinNewTokensLengthLogitsProcessor(None, least, facts.eos) if least and facts.eos else None
    )


def _prefix(values: Values, facts: Facts) -> Processor | None:
    allowed = facts.prefix_allowed_tokens_fn
    if allowed is None:
        return None
    return PrefixConstrainedLogitsProcessor(allowed, facts.beams, first=facts.first_row)


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


def _suppress(values: Values, facts: Facts) -> Processor | None:
    tokens = values["suppress_tokens"]
    return None if tokens is None else SuppressTokensLogitsProcessor(tokens)


def _begin_suppress(values: Values, facts: Facts) -> Processor | None:
    tokens = values["begin_suppress_tokens"]
    if tokens is None:
        return None
    # A forced first token is none that could be suppressed: the next one is meant.
    forced = facts.prompt_length <= 1 and values["forced_bos_token_id"] is not None
    return SuppressTokensAtBeginLogitsProcessor(tokens, None, after=int(forced))


_ALWAYS: dict[type, Maker] = {
    SequenceBiasLogitsProcessor: _sequence_bias,
    LogitBias: _logit_bias,
    EncoderRepetitionPenaltyLogitsProcessor: _encoder_repetition,
    RepetitionPenaltyLogitsProcessor: _repetition,
    OccurrencePenalty: _occurrence,
    Dry: _dry,
    NoRepeatNGramLogitsProcessor: _ngram,
    EncoderNoRepeatNGramLogitsProcessor: _encoder_ngram,
    NoBadWordsLogitsProcessor: _bad_words,
    MinLengthLogitsProcessor: _min_length,
    MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    PrefixConstrainedLogitsProcessor: _prefix,
    ForcedBOSTokenLogitsProcessor: _forced_bos,
    ForcedEOSTokenLogitsProcessor: _forced_eos,
    InfNanRemoveLogitsProcessor: lambda values, facts: (
        InfNanRemoveLogitsProcessor() if values["remove_invalid_values"] else None
    ),
    ExponentialDecayLengthPenalty: _decay,
    SuppressTokensLogitsProcessor: _suppress,
    SuppressTokensAtBeginLogitsProcessor: _begin_suppress,
    WatermarkLogitsProcessor: _watermark(WatermarkingConfig, WatermarkLogitsProcessor),
    SynthIDTextWatermarkLogitsProcessor: _watermark(
        SynthIDTextWatermarkingConfig, SynthIDTextWatermarkLogitsProcessor
    ),
    LogitNormalization: lambda values, facts: (
        LogitNormalization() if values["renormalize_logits"] else None
    ),
}
