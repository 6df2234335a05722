"""The one order of all processors, and which of them a request has.

Those that its configuration asks for are made from its fields; the caller's stand among them. One
of the caller's that is of exactly the class that a field asks for as well takes that one's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

from torch import Tensor

from everystep.config import kinds
from everystep.config.fields import FIELDS
from everystep.config.nested import SynthIDTextWatermarkingConfig, WatermarkingConfig
from everystep.errors import RequestError, shown
from everystep.processors import bias, length, repetition, warpers
from everystep.processors.allowed import AllowedSequences, AllowedSequencesLogitsProcessor
from everystep.processors.base import UserProcessor, reads_rows
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.guidance import (
    HammingDiversityLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from everystep.processors.samplers import DynamicTemperature, Mirostat, TopNSigma, Xtc
from everystep.processors.stacking import at_row
from everystep.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from everystep.processors.thoughts import ThoughtBudget
from everystep.processors.watermark import WatermarkLogitsProcessor
from everystep.types.protocols import Processor


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts that processors depend on beside the configuration.

    `prompt_length`, `max_length`: visible ids, pad prefix included. `encoder_ids`: the prompt of
    the encoder, or of a decoder alone; None if it was not given as ids. `beams`: how many
    hypotheses are searched together. `row` of `rows`: which prompt of the call it is.
    `first_row`: the call's row of the request's first sequence.
    `user`: callables of (input_ids, scores), instances of classes in `CANONICAL`, or
    `UserProcessor`.
    `allowed`: what `allowed_sequences` says of this row. `encode`: a text's ids without special
    ones; None without a tokenizer. `grammar`: what the text has to follow; `thoughts`: how long
    it may think.
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
    allowed: AllowedSequences | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    grammar: GrammarMask | None = None
    thoughts: ThoughtBudget | None = None

    @property
    def min_tokens_to_keep(self) -> int:
        """Beams need a token to go on with beside every one that ends them."""
        return max(len(self.eos), 1) + 1 if self.beams > 1 else 1


Values = Mapping[str, Any]
# Makes a processor of a class from the value of its field, all values and the facts.
Maker = Callable[[Any, Any, Values, Facts], Processor | None]


def _alone(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value)


def _switched(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind()


def _bounded(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value, min_tokens_to_keep=facts.min_tokens_to_keep)


def _encoder(kind: Any, value: Any, values: Values, facts: Facts) -> Processor | None:
    if facts.encoder_ids is None:
        text = f"{kind.checked[0].label} has no effect: the prompt was not given as ids"
        warn(text, UserWarning, stacklevel=5)
        return None
    return kind(value, (facts.encoder_ids or (),))


def _logit_bias(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(tuple(value.items()))


def _diversity(kind: Any, value: Any, values: Values, facts: Facts) -> Processor | None:
    groups = values["num_beam_groups"] or 1
    return kind(value, facts.beams, groups) if groups > 1 else None


def _occurrence(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    every = values["penalty_scope"] == "all"
    return kind(values["presence_penalty"], values["frequency_penalty"], every)


def _repetition(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value, facts.prompt_length if values["penalty_scope"] == "new" else None)


def _dry(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    breakers = tuple(_breaker(one, facts) for one in values["dry_sequence_breakers"] or ())
    return kind(value, values["dry_base"], values["dry_allowed_length"], breakers)


def _breaker(given: str | int, facts: Facts) -> int:
    """Return the id, or the last id of the text encoded after a letter, as within a sentence."""
    if not isinstance(given, str):
        return given
    if facts.encode is None:
        raise RequestError(
            "dry_sequence_breakers holds a text, which needs a tokenizer",
            wanted="tokenizer=..., or token ids",
            got=shown(given),
            do="Pass tokenizer=tokenizer to generate",
        )
    return int(facts.encode("a" + given)[-1])


def _bad_words(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value, facts.eos or None)


def _min_length(kind: Any, value: Any, values: Values, facts: Facts) -> Processor | None:
    return kind(value, facts.eos) if facts.eos else None


def _new_tokens(kind: Any, value: Any, values: Values, facts: Facts) -> Processor | None:
    return kind(None, value, facts.eos) if value and facts.eos else None


def _prefix(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value, facts.beams, first=facts.first_row)


def _allowed(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value, facts.eos, facts.beams)


def _forced_eos(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    if facts.max_length is None:
        raise RequestError(
            "forced_eos_token_id needs a last place",
            wanted="a max_length",
            got=None,
            do="Set max_length or max_new_tokens",
        )
    return kind(facts.max_length, value)


def _decay(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    if not facts.eos:
        raise RequestError(
            "exponential_decay_length_penalty needs an end token",
            wanted="eos_token_id",
            got=None,
            do="Set eos_token_id, or leave the penalty out",
        )
    bias.check_width(facts.eos, facts.vocab_size, "eos_token_id")
    return kind(value, facts.eos, None)


def _begin_suppress(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    # A forced first token cannot be suppressed: the next one is meant.
    forced = facts.prompt_length <= 1 and values["forced_bos_token_id"] is not None
    return kind(value, None, after=int(forced))


def _temperature(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    spread = values["dynatemp_range"]
    return DynamicTemperature(value, spread, values["dynatemp_exponent"]) if spread else kind(value)


def _xtc(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value, values["xtc_threshold"], facts.min_tokens_to_keep)


def _mirostat(kind: Any, value: Any, values: Values, facts: Facts) -> Processor:
    return kind(value, values["mirostat_eta"], facts.min_tokens_to_keep)


def _green_list(kind: Any, value: Any, values: Values, facts: Facts) -> Processor | None:
    if not isinstance(value, WatermarkingConfig):
        return None
    return kind(facts.vocab_size, **value.to_dict())


def _synthid(kind: Any, value: Any, values: Values, facts: Facts) -> Processor | None:
    return kind(**value.to_dict()) if isinstance(value, SynthIDTextWatermarkingConfig) else None


# The one order of all processors: transformers' (`_get_logits_processor` of 5.23.0). Each is made
# where its field, or one of its fields, has an effect. The caller's stand in the slot of
# `UserProcessor`, and a grammar after them, before those that shape the distribution for sampling.
Slots = dict[type, tuple[Maker, *tuple[str, ...]]]
BEFORE: Slots = {
    bias.SequenceBiasLogitsProcessor: (_alone, "sequence_bias"),
    bias.LogitBias: (_logit_bias, "logit_bias"),
    HammingDiversityLogitsProcessor: (_diversity, "diversity_penalty"),
    repetition.EncoderRepetitionPenaltyLogitsProcessor: (_encoder, "encoder_repetition_penalty"),
    repetition.RepetitionPenaltyLogitsProcessor: (_repetition, "repetition_penalty"),
    repetition.OccurrencePenalty: (_occurrence, "presence_penalty", "frequency_penalty"),
    repetition.Dry: (_dry, "dry_multiplier"),
    repetition.NoRepeatNGramLogitsProcessor: (_alone, "no_repeat_ngram_size"),
    repetition.EncoderNoRepeatNGramLogitsProcessor: (_encoder, "encoder_no_repeat_ngram_size"),
    bias.NoBadWordsLogitsProcessor: (_bad_words, "bad_words_ids"),
    length.MinLengthLogitsProcessor: (_min_length, "min_length"),
    length.MinNewTokensLengthLogitsProcessor: (_new_tokens, "min_new_tokens"),
    bias.PrefixConstrainedLogitsProcessor: (_prefix, "prefix_allowed_tokens_fn"),
    AllowedSequencesLogitsProcessor: (_allowed, "allowed_sequences"),
    length.ForcedBOSTokenLogitsProcessor: (_alone, "forced_bos_token_id"),
    length.ForcedEOSTokenLogitsProcessor: (_forced_eos, "forced_eos_token_id"),
    bias.InfNanRemoveLogitsProcessor: (_switched, "remove_invalid_values"),
    length.ExponentialDecayLengthPenalty: (_decay, "exponential_decay_length_penalty"),
    length.SuppressTokensLogitsProcessor: (_alone, "suppress_tokens"),
    length.SuppressTokensAtBeginLogitsProcessor: (_begin_suppress, "begin_suppress_tokens"),
}
SAMPLERS: Slots = {
    warpers.TemperatureLogitsWarper: (_temperature, "temperature", "dynatemp_range"),
    TopNSigma: (_alone, "top_n_sigma"),
    warpers.TopHLogitsWarper: (_alone, "top_h"),
    warpers.TopKLogitsWarper: (_bounded, "top_k"),
    warpers.TopPLogitsWarper: (_bounded, "top_p"),
    warpers.MinPLogitsWarper: (_bounded, "min_p"),
    warpers.TypicalLogitsWarper: (_bounded, "typical_p"),
    warpers.EpsilonLogitsWarper: (_bounded, "epsilon_cutoff"),
    warpers.EtaLogitsWarper: (_bounded, "eta_cutoff"),
    Xtc: (_xtc, "xtc_probability"),
    Mirostat: (_mirostat, "mirostat_tau"),
}
AFTER: Slots = {
    WatermarkLogitsProcessor: (_green_list, "watermarking_config"),
    SynthIDTextWatermarkLogitsProcessor: (_synthid, "watermarking_config"),
    warpers.LogitNormalization: (_switched, "renormalize_logits"),
}
_SAMPLING = (warpers.TemperatureLogitsWarper, DynamicTemperature, *SAMPLERS)
_SHAPING = (*dict.fromkeys(_SAMPLING), *AFTER)
CANONICAL: tuple[type, ...] = (*BEFORE, UserProcessor, ThoughtBudget, GrammarMask, *_SHAPING)
RANK: dict[type, int] = {kind: rank for rank, kind in enumerate(CANONICAL)}
# What `sampler_order` calls them; those that it names come first, as it names them.
NAMES: dict[type, str] = {
    **dict(zip(SAMPLERS, kinds.SAMPLERS, strict=True)),
    DynamicTemperature: "temperature",
}
# The value of each field that has no effect, beside None and False.
_UNUSED = {
    name: FIELDS[name].default if name in FIELDS and name != "top_k" else 0
    for slots in (BEFORE, SAMPLERS, AFTER)
    for _, *names in slots.values()
    for name in names
}
_HOLD_IDS = {
    *("sequence_bias", "logit_bias", "bad_words_ids", "forced_bos_token_id"),
    "forced_eos_token_id",
}


def build(effective: Values, facts: Facts) -> tuple[Processor, ...]:
    """Build all processors of a request, in order.

    `effective`: every field's value by name, as `Effective` has them. Raise RequestError for values
    that this model or prompt cannot have; warn, by UserWarning, of one that has no effect here.
    """
    # Row by row, where the caller's have a value per row; an object that is given twice runs once.
    user = (at_row(one, facts.row, facts.rows) if reads_rows(one) else one for one in facts.user)
    free = list({id(one): one for one in user}.values())
    values = {
        **effective,
        "prefix_allowed_tokens_fn": facts.prefix_allowed_tokens_fn,
        "allowed_sequences": facts.allowed,
    }
    before, guiding = _made(BEFORE, values, facts), list[Any]()
    if free:
        before, free = _replaced(before, free)
        guiding, free = _guiding(effective, free)
    samplers = _made(SAMPLERS, effective, facts) if effective["do_sample"] else []
    place = {name: i for i, name in enumerate(effective["sampler_order"] or ())}
    return (
        *map(_at_slot, guiding),
        *before,
        *map(_at_slot, free),
        *((facts.thoughts,) if facts.thoughts else ()),
        *((facts.grammar,) if facts.grammar else ()),
        *sorted(samplers, key=lambda one: place.get(NAMES[type(one)], len(place))),
        *_made(AFTER, effective, facts),
    )


def _made(slots: Slots, values: Values, facts: Facts) -> list[Processor]:
    made = []
    for kind, (make, *fields) in slots.items():
        given = ((values[field], _UNUSED[field]) for field in fields)
        if any(one is not None and one is not False and one != unused for one, unused in given):
            value = values[fields[0]]
            if fields[0] in _HOLD_IDS:
                bias.check_width(_ids(value), facts.vocab_size, fields[0])
            made.append(make(kind, value, values, facts))
    return [one for one in made if one is not None]


def _ids(value: Any) -> Iterator[int]:
    """Yield every id in a number, or in lists or keys however deep."""
    if kinds.is_integer(value):
        yield value
    else:
        for part in value:
            yield from _ids(part)


def _replaced(built: list[Processor], free: list[Any]) -> tuple[list[Processor], list[Any]]:
    """Return the built processors, some replaced by the caller's, and the caller's others."""
    for place, own in enumerate(built):
        given = next((one for one in free if type(one) is type(own)), None)
        if given is not None:
            warn(
                f"the given {type(own).__name__} replaces the one that generate()'s own "
                f"arguments ask for: {own}",
                UserWarning,
                stacklevel=4,
            )
            built[place] = given
            free = [one for one in free if one is not given]
    return built, free


def _guiding(values: Values, free: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the caller's guidance where a field asks for some too, and the caller's others.

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


def _at_slot(given: Any) -> UserProcessor:
    if isinstance(given, UserProcessor):
        return given
    return UserProcessor(given, takes_rows=reads_rows(given))
