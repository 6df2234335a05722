"""Which values have no effect, or cannot be, with and without sampling."""

from __future__ import annotations

from everystep.config.rule import (
    ConfigRule,
    both,
    contrastive,
    differs,
    greedy,
    is_set,
    lowest,
    off,
    samples,
)

# The value that means "off" for each.
_ONLY_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_n_sigma": None,
    "xtc_probability": 0.0,
    "mirostat_tau": None,
    "dynatemp_range": 0.0,
    "sampler_order": None,
}
# The field that turns a sampler on, and its further parameters.
_PARAMETERS = {
    "dry_multiplier": ("dry_base", "dry_allowed_length", "dry_sequence_breakers"),
    "xtc_probability": ("xtc_threshold",),
    "mirostat_tau": ("mirostat_eta",),
    "dynatemp_range": ("dynatemp_exponent",),
}

_EACH_SAMPLING = tuple(
    ConfigRule(
        "conflict",
        "do_sample",
        name,
        both(greedy, differs(name, neutral)),
        f"{name} has no effect without sampling",
        f"Set do_sample=True, or leave {name} out",
    )
    for name, neutral in _ONLY_SAMPLING.items()
)
_EACH_PARAMETER = tuple(
    ConfigRule(
        "notice",
        switch,
        name,
        both(off(switch), is_set(name)),
        f"{name} has no effect without {switch}",
        f"Set {switch}, or leave {name} out",
    )
    for switch, names in _PARAMETERS.items()
    for name in names
)
SAMPLING: tuple[ConfigRule, ...] = (
    *_EACH_SAMPLING,
    *_EACH_PARAMETER,
    ConfigRule(
        "impossible",
        "temperature",
        "dynatemp_range",
        both(samples, lambda v: 0 < (lowest(v["temperature"]) or 1.0) <= v["dynatemp_range"]),
        "the temperature would reach 0",
        "Make dynatemp_range smaller than temperature",
    ),
    ConfigRule(
        "conflict",
        "do_sample",
        "top_k",
        both(greedy, differs("top_k", 50), lambda values: not contrastive(values)),
        "top_k has no effect without sampling or contrastive search",
        "Set do_sample=True, or leave top_k out",
    ),
    ConfigRule(
        "impossible",
        "do_sample",
        "temperature",
        both(samples, lambda values: lowest(values["temperature"]) == 0),
        "temperature must be above 0 to sample",
        "For greedy decoding set do_sample=False",
    ),
)
