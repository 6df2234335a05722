"""Which processors shape the distribution that a request samples from, and in which order.

Without `sampler_order` they stand as in `CANONICAL`; the samplers that it names come first, as it
names them, and the others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from everystep.processors.base import Processor
from everystep.processors.facts import Facts, Maker, Values
from everystep.processors.mirostat import Mirostat
from everystep.processors.samplers import DynamicTemperature, TopNSigma, Xtc
from everystep.processors.warpers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


def ordered(samplers: Sequence[Processor], names: Sequence[str] | None) -> list[Processor]:
    """The samplers, those that are named first."""
    place = {kind: i for i, name in enumerate(names or ()) for kind in BY_NAME[name]}
    return sorted(samplers, key=lambda one: place.get(type(one), len(place)))


def _below_one(field: str, make: Callable[..., Processor]) -> Maker:
    """Where the field is below 1, made from it and how many tokens stay at least."""

    def maker(values: Values, facts: Facts) -> Processor | None:
        value = values[field]
        return make(value, min_tokens_to_keep=facts.min_tokens_to_keep) if value < 1 else None

    return maker


def _given(field: str, make: Callable[..., Processor], *further: str) -> Maker:
    """Where the field has a value above 0, made from it and the values of further fields."""

    def maker(values: Values, facts: Facts) -> Processor | None:
        if not values[field]:
            return None
        others = (values[name] for name in further)
        return make(values[field], *others, min_tokens_to_keep=facts.min_tokens_to_keep)

    return maker


def _min_p(values: Values, facts: Facts) -> Processor | None:
    value, keep = values["min_p"], facts.min_tokens_to_keep
    return None if value is None else MinPLogitsWarper(value, min_tokens_to_keep=keep)


def _temperature(values: Values, facts: Facts) -> Processor | None:
    value = values["temperature"]
    return None if value == 1.0 or values["dynatemp_range"] else TemperatureLogitsWarper(value)


def _dynamic_temperature(values: Values, facts: Facts) -> Processor | None:
    spread = values["dynatemp_range"]
    if not spread:
        return None
    return DynamicTemperature(values["temperature"], spread, values["dynatemp_exponent"])


def _top_h(values: Values, facts: Facts) -> Processor | None:
    value = values["top_h"]
    return None if value is None else TopHLogitsWarper(value)


def _top_n_sigma(values: Values, facts: Facts) -> Processor | None:
    value = values["top_n_sigma"]
    return None if value is None else TopNSigma(value)


FOR_SAMPLING: dict[type, Maker] = {
    TemperatureLogitsWarper: _temperature,
    DynamicTemperature: _dynamic_temperature,
    TopNSigma: _top_n_sigma,
    TopHLogitsWarper: _top_h,
    TopKLogitsWarper: _given("top_k", TopKLogitsWarper),
    TopPLogitsWarper: _below_one("top_p", TopPLogitsWarper),
    MinPLogitsWarper: _min_p,
    TypicalLogitsWarper: _below_one("typical_p", TypicalLogitsWarper),
    EpsilonLogitsWarper: _given("epsilon_cutoff", EpsilonLogitsWarper),
    EtaLogitsWarper: _given("eta_cutoff", EtaLogitsWarper),
    Xtc: _given("xtc_probability", Xtc, "xtc_threshold"),
    Mirostat: _given("mirostat_tau", Mirostat, "mirostat_eta"),
}
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
