"""The one order of all processors, and which of them a request has.

`CANONICAL` is the reference's order (`_get_logits_processor` of transformers 5.23.0). The caller's
processors stand in the slot of `User`, before those that shape the distribution for sampling; one
of exactly the class that a field asks for as well takes that one's place instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

from torch import Tensor

from everystep.errors import RequestError, UnsupportedError, message
from everystep.processors.allowed import InfNanRemove, PrefixConstrained
from everystep.processors.base import Processor
from everystep.processors.bias import NoBadWords, SequenceBias, check_width
from everystep.processors.length import (
    ExponentialDecayLength,
    ForcedBOS,
    ForcedEOS,
    MinLength,
    MinNewTokens,
    SuppressTokens,
    SuppressTokensAtBegin,
)
from everystep.processors.repetition import (
    EncoderNoRepeatNGram,
    EncoderRepetitionPenalty,
    NoRepeatNGram,
    RepetitionPenalty,
)
from everystep.processors.user import User
from everystep.processors.warpers import (
    Epsilon,
    Eta,
    LogitNormalization,
    MinP,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
)

CANONICAL: tuple[type, ...] = (
    *(SequenceBias, EncoderRepetitionPenalty, RepetitionPenalty, NoRepeatNGram),
    *(EncoderNoRepeatNGram, NoBadWords, MinLength, MinNewTokens, PrefixConstrained),
    *(ForcedBOS, ForcedEOS, InfNanRemove, ExponentialDecayLength),
    *(SuppressTokens, SuppressTokensAtBegin),
    User,
    *(Temperature, TopH, TopK, TopP, MinP, Typical, Epsilon, Eta),
    LogitNormalization,
)
RANK: dict[type, int] = {kind: rank for rank, kind in enumerate(CANONICAL)}


@dataclass(frozen=True, eq=False)
class Facts:
    """What processors depend on beside the configuration.

    `prompt_length`, `max_length`: visible ids, pad prefix included. `encoder_ids`: the prompt of
    the encoder, or of a decoder alone; None if it was not given as ids. `beams`: how many
    hypotheses are searched together. `first_row`: the call's row of the request's first sequence.
    `user`: callables of (input_ids, scores), instances of classes in `CANONICAL`, or `User`.
    """

    eos: tuple[int, ...] = ()
    prompt_length: int = 0
    max_length: int | None = None
    encoder_ids: tuple[int, ...] | None = None
    beams: int = 1
    vocab_size: int | None = None
    first_row: int = 0
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None
    user: tuple[Any, ...] = ()

    @property
    def min_tokens_to_keep(self) -> int:
        """Beams need a token to go on with beside every one that ends them."""
        return max(len(self.eos), 1) + 1 if self.beams > 1 else 1


Values = Mapping[str, Any]
Maker = Callable[[Values, Facts], Processor | None]


def build(effective: Values, facts: Facts) -> tuple[Processor, ...]:
    """All processors of a request, in order.

    `effective`: every field's value by name, as `Effective` has them. RequestError for values that
    this model or prompt cannot have; UserWarning for one that has no effect here.
    """
    if effective["watermarking_config"] is not None:
        text = message(
            "watermarking_config is set",
            wanted="no watermark",
            got="one",
            do="Leave it out: there is no processor for it",
        )
        raise UnsupportedError(text)
    made = [_made(kind, effective, facts) for kind in CANONICAL]
    slot = RANK[User]
    before, free = _replaced([one for one in made[:slot] if one is not None], facts.user)
    after = [one for one in made[slot:] if one is not None]
    return (*before, *(_at_slot(one) for one in free), *after)


def _made(kind: type, effective: Values, facts: Facts) -> Processor | None:
    if kind in _FOR_SAMPLING:
        return _FOR_SAMPLING[kind](effective, facts) if effective["do_sample"] else None
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


def _at_slot(given: Any) -> User:
    if isinstance(given, User):
        return given
    return User(given, takes_rows=type(given) in RANK)


def _within(ids: Sequence[int], facts: Facts, name: str) -> None:
    if facts.vocab_size is not None:
        check_width(tuple(((token,), 0.0) for token in ids), facts.vocab_size, name)


def _sequence_bias(values: Values, facts: Facts) -> Processor | None:
    if values["sequence_bias"] is None:
        return None
    table = tuple(values["sequence_bias"].items())
    _within([token for ids, _ in table for token in ids], facts, "sequence_bias")
    return SequenceBias(table)


def _encoder_repetition(values: Values, facts: Facts) -> Processor | None:
    penalty = values["encoder_repetition_penalty"]
    if penalty == 1.0 or not _has_encoder_ids(facts, "encoder_repetition_penalty"):
        return None
    return EncoderRepetitionPenalty(penalty, facts.encoder_ids or ())


def _encoder_ngram(values: Values, facts: Facts) -> Processor | None:
    size = values["encoder_no_repeat_ngram_size"]
    if size == 0 or not _has_encoder_ids(facts, "encoder_no_repeat_ngram_size"):
        return None
    return EncoderNoRepeatNGram(size, facts.encoder_ids or ())


def _has_encoder_ids(facts: Facts, name: str) -> bool:
    if facts.encoder_ids is None:
        warn(f"{name} has no effect: the prompt was not given as ids", UserWarning, stacklevel=5)
    return facts.encoder_ids is not None


def _repetition(values: Values, facts: Facts) -> Processor | None:
    penalty = values["repetition_penalty"]
    return None if penalty == 1.0 else RepetitionPenalty(penalty)


def _ngram(values: Values, facts: Facts) -> Processor | None:
    size = values["no_repeat_ngram_size"]
    return NoRepeatNGram(size) if size else None


def _bad_words(values: Values, facts: Facts) -> Processor | None:
    if values["bad_words_ids"] is None:
        return None
    words = tuple(tuple(word) for word in values["bad_words_ids"])
    _within([token for word in words for token in word], facts, "bad_words_ids")
    endings = {(token,) for token in facts.eos}
    return NoBadWords(tuple(word for word in words if word not in endings))


def _min_length(values: Values, facts: Facts) -> Processor | None:
    least = values["min_length"]
    return MinLength(least, facts.eos) if least and facts.eos else None


def _min_new_tokens(values: Values, facts: Facts) -> Processor | None:
    least = values["min_new_tokens"]
    return MinNewTokens(least, facts.eos) if least and facts.eos else None


def _prefix(values: Values, facts: Facts) -> Processor | None:
    allowed = facts.prefix_allowed_tokens_fn
    if allowed is None:
        return None
    return PrefixConstrained(allowed, facts.first_row, facts.beams)


def _forced_bos(values: Values, facts: Facts) -> Processor | None:
    token = values["forced_bos_token_id"]
    if token is None:
        return None
    _within([token], facts, "forced_bos_token_id")
    return ForcedBOS(token)


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
    return ForcedEOS(facts.max_length, tokens)


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
    start, factor = values["exponential_decay_length_penalty"]
    return ExponentialDecayLength(start, factor, facts.eos)


def _suppress(values: Values, facts: Facts) -> Processor | None:
    tokens = values["suppress_tokens"]
    return None if tokens is None else SuppressTokens(tuple(tokens))


def _begin_suppress(values: Values, facts: Facts) -> Processor | None:
    tokens = values["begin_suppress_tokens"]
    if tokens is None:
        return None
    # A forced first token is none that could be suppressed: the next one is meant.
    forced = facts.prompt_length <= 1 and values["forced_bos_token_id"] is not None
    return SuppressTokensAtBegin(tuple(tokens), after=int(forced))


def _below_one(field: str, make: Callable[[float, int], Processor]) -> Maker:
    """Where the field is below 1, made from it and how many tokens stay at least."""

    def maker(values: Values, facts: Facts) -> Processor | None:
        value = values[field]
        return make(value, facts.min_tokens_to_keep) if value < 1 else None

    return maker


def _above_zero(field: str, make: Callable[[float, int], Processor]) -> Maker:
    def maker(values: Values, facts: Facts) -> Processor | None:
        value = values[field]
        return make(value, facts.min_tokens_to_keep) if value else None

    return maker


def _given(field: str, make: Callable[[float, int], Processor]) -> Maker:
    def maker(values: Values, facts: Facts) -> Processor | None:
        value = values[field]
        return None if value is None else make(value, facts.min_tokens_to_keep)

    return maker


def _temperature(values: Values, facts: Facts) -> Processor | None:
    value = values["temperature"]
    return None if value == 1.0 else Temperature(value)


_ALWAYS: dict[type, Maker] = {
    SequenceBias: _sequence_bias,
    EncoderRepetitionPenalty: _encoder_repetition,
    RepetitionPenalty: _repetition,
    NoRepeatNGram: _ngram,
    EncoderNoRepeatNGram: _encoder_ngram,
    NoBadWords: _bad_words,
    MinLength: _min_length,
    MinNewTokens: _min_new_tokens,
    PrefixConstrained: _prefix,
    ForcedBOS: _forced_bos,
    ForcedEOS: _forced_eos,
    InfNanRemove: lambda values, facts: InfNanRemove() if values["remove_invalid_values"] else None,
    ExponentialDecayLength: _decay,
    SuppressTokens: _suppress,
    SuppressTokensAtBegin: _begin_suppress,
    LogitNormalization: lambda values, facts: (
        LogitNormalization() if values["renormalize_logits"] else None
    ),
}
_FOR_SAMPLING: dict[type, Maker] = {
    Temperature: _temperature,
    TopH: _given("top_h", lambda value, keep: TopH(value)),
    TopK: _above_zero("top_k", lambda value, keep: TopK(int(value), keep)),
    TopP: _below_one("top_p", TopP),
    MinP: _given("min_p", MinP),
    Typical: _below_one("typical_p", Typical),
    Epsilon: _above_zero("epsilon_cutoff", Epsilon),
    Eta: _above_zero("eta_cutoff", Eta),
}
