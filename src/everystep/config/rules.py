"""Which values do not go together: the closed list, as data, and what follows from each.

    impossible   an error wherever the values come from: nothing could be generated as asked
    conflict     an error when the caller set both; a notice when the caller set only the value that
                 has no effect; nothing when that value is inherited from a checkpoint
    notice       a warning when the caller set the value that has no effect

`RULES` is the whole list; each rule says in words what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

from everystep.config.fields import FIELDS, OLD_CACHES
from everystep.errors import RequestError, message, shown

Values = Mapping[str, Any]
Test = Callable[[Values], bool]
Level = Literal["impossible", "conflict", "notice"]

EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
"""Fields that ask for more than ids."""


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields whose count of ids `penalty_scope` chooses."""


@dataclass(frozen=True)
class ConfigRule:
    """Values of `decides` and `loses` clash where `clash` holds; `loses` is what has no effect."""

    level: Level
    decides: str
    loses: str
    clash: Test
    what: str
    do: str

    def text(self, values: Values) -> str:
        """Return what is wrong and what to do."""
        got = f"{self.loses}={shown(values[self.loses])}"
        if self.decides != self.loses:
            got += f" with {self.decides}={shown(values[self.decides])}"
        return message(self.what, got=got, do=self.do)


_impossible, _notice = partial(ConfigRule, "impossible"), partial(ConfigRule, "notice")


def _is_set(name: str) -> Test:
    return lambda values: values[name] is not None


def _truthy(name: str) -> Test:
    return lambda values: bool(values[name])


def _off(name: str) -> Test:
    return lambda values: not values[name]


def _differs(name: str) -> Test:
    """Return a test that the field has another value than its default."""
    return lambda values: values[name] is not None and values[name] != FIELDS[name].default


def _both(*tests: Test) -> Test:
    return lambda values: all(test(values) for test in tests)


def _draws(name: str) -> Test:
    """Return the test of `_differs`, but let a temperature of 0 pass, which means not to sample."""
    differs = _differs(name)
    return lambda values: differs(values) and (name != "temperature" or _highest(values[name]) != 0)


_samples, _greedy = _truthy("do_sample"), _off("do_sample")


def _beams(values: Values) -> bool:
    return (values["num_beams"] or 1) != 1


def _one_beam(values: Values) -> bool:
    return not _beams(values)


def _unpenalised(values: Values) -> bool:
    return not any(_differs(name)(values) for name in PENALTIES)


def _groups(values: Values) -> bool:
    return (values["num_beam_groups"] or 1) != 1


def _contrasting(values: Values) -> bool:
    return _one_beam(values) and (_highest(values["top_k"]) or 0) > 1


def _highest(value: Any) -> Any:
    """Return the value, or the highest of one per row."""
    return max(value) if isinstance(value, list) else value


def _lowest(value: Any) -> Any:
    """Return the value, or the lowest of one per row."""
    return min(value) if isinstance(value, list) else value


def _no_effect(
    decides: str,
    names: Collection[str],
    where: Test,
    reason: str,
    do: str,
    *,
    given: Callable[[str], Test] = _differs,
) -> Iterator[ConfigRule]:
    """Yield a rule per field: it has no effect for that reason where `where` holds.

    `do` has a {name}.
    """
    for name in names:
        what, clash = f"{name} has no effect {reason}", _both(where, given(name))
        yield ConfigRule("conflict", decides, name, clash, what, do.format(name=name))


_ONLY_SAMPLING = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("top_n_sigma", "xtc_probability", "mirostat_tau", "dynatemp_range", "sampler_order"),
)
# The field that turns a sampler on, and its further parameters.
_PARAMETERS = {
    "dry_multiplier": ("dry_base", "dry_allowed_length", "dry_sequence_breakers"),
    "xtc_probability": ("xtc_threshold",),
    "mirostat_tau": ("mirostat_eta",),
    "dynatemp_range": ("dynatemp_exponent",),
}
_SAMPLING = (
    *_no_effect(
        "do_sample",
        _ONLY_SAMPLING,
        _greedy,
        "without sampling",
        "Set do_sample=True, or leave {name} out",
        given=_draws,
    ),
    *(
        _notice(
            switch,
            name,
            _both(_off(switch), _is_set(name)),
            f"{name} has no effect without {switch}",
            f"Set {switch}, or leave {name} out",
        )
        for switch, names in _PARAMETERS.items()
        for name in names
    ),
    _notice(
        "repetition_penalty",
        "penalty_scope",
        _both(_unpenalised, _is_set("penalty_scope")),
        "penalty_scope has no effect without a penalty",
        "Set repetition_penalty, presence_penalty or frequency_penalty, or leave penalty_scope out",
    ),
    _impossible(
        "temperature",
        "dynatemp_range",
        _both(_samples, lambda v: 0 < (_lowest(v["temperature"]) or 1.0) <= v["dynatemp_range"]),
        "the temperature would reach 0",
        "Make dynatemp_range smaller than temperature",
    ),
    *_no_effect(
        "do_sample",
        ["top_k"],
        _both(_greedy, _off("penalty_alpha")),
        "without sampling or contrastive search",
        "Set do_sample=True, or leave {name} out",
    ),
    _impossible(
        "do_sample",
        "temperature",
        _both(_samples, lambda v: _lowest(v["temperature"]) == 0),
        "temperature must be above 0 to sample",
        "For greedy decoding set do_sample=False",
    ),
)

_BEAMS = (
    *_no_effect(
        "num_beams",
        ["early_stopping", "length_penalty"],
        _one_beam,
        "without beams",
        "Set num_beams above 1, or leave {name} out",
    ),
    *_no_effect(
        "num_beam_groups",
        ["diversity_penalty"],
        lambda v: not _groups(v),
        "without groups of beams",
        "Set num_beam_groups above 1, or leave {name} out",
    ),
    _impossible(
        "num_beams",
        "num_beam_groups",
        lambda v: (v["num_beams"] or 1) % (v["num_beam_groups"] or 1) != 0,
        "num_beams must be a multiple of num_beam_groups",
        "Change one of them",
    ),
    _impossible(
        "do_sample",
        "num_beam_groups",
        _both(_samples, _groups),
        "groups of beams do not sample",
        "Set do_sample=False, or leave num_beam_groups out",
    ),
    _impossible(
        "num_beam_groups",
        "diversity_penalty",
        lambda v: _groups(v) and not (v["diversity_penalty"] or 0) > 0,
        "groups of beams need a diversity_penalty above 0, or all find the same",
        "Set diversity_penalty above 0, or leave num_beam_groups out",
    ),
    _impossible(
        "do_sample",
        "num_return_sequences",
        _both(_greedy, _one_beam, _differs("num_return_sequences")),
        "greedy decoding finds one sequence: num_return_sequences must be 1",
        "Set do_sample=True or num_beams, or leave num_return_sequences out",
    ),
    _impossible(
        "num_beams",
        "num_return_sequences",
        lambda v: _beams(v) and (v["num_return_sequences"] or 1) > v["num_beams"],
        "num_return_sequences must be at most num_beams",
        "Raise num_beams or lower num_return_sequences",
    ),
)

# What decides, where it does, what is wrong, and what to do, up to the name.
_UNCONSTRAINED = (
    ("do_sample", _samples, "constrained beams do not sample", "Set do_sample=False, or leave"),
    ("num_beams", _one_beam, "constraints need beams", "Set num_beams above 1, or leave"),
    ("num_beam_groups", _groups, "constrained beams have no groups", "Leave num_beam_groups or"),
)
_CONSTRAINTS = tuple(
    _impossible(decides, name, _both(where, _is_set(name)), what, f"{do} {name} out")
    for name in ("constraints", "force_words_ids")
    for decides, where, what, do in _UNCONSTRAINED
)

# Other ways to choose one token at a time, none of which goes with beams.
_SINGLE = (
    *_no_effect(
        "num_beams",
        (
            *("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens"),
            *("assistant_early_exit", "use_mtp"),
        ),
        _beams,
        "with beams",
        "Leave num_beams or {name} out",
        given=_truthy,
    ),
    _impossible(
        "penalty_alpha",
        "top_k",
        _both(_truthy("penalty_alpha"), _greedy, lambda v: isinstance(v["top_k"], list)),
        "contrastive search looks at the same number of candidates in every row",
        "Give top_k one number, or leave penalty_alpha out",
    ),
    *_no_effect(
        "do_sample",
        ["penalty_alpha"],
        _samples,
        "when sampling",
        "Set do_sample=False, or leave {name} out",
        given=_truthy,
    ),
    _impossible(
        "penalty_alpha",
        "dola_layers",
        _both(_truthy("penalty_alpha"), _greedy, _truthy("dola_layers"), _contrasting),
        "contrastive search does not contrast layers",
        "Leave penalty_alpha or dola_layers out",
    ),
    _impossible(
        "prompt_lookup_num_tokens",
        "assistant_ensemble_weight",
        _both(_truthy("prompt_lookup_num_tokens"), _truthy("assistant_ensemble_weight")),
        "assistant_ensemble_weight needs an assistant that gives probabilities",
        "Leave prompt_lookup_num_tokens or assistant_ensemble_weight out",
    ),
)


def _shown(name: str) -> Test:
    return _both(_truthy("return_dict_in_generate"), _truthy(name), _is_set("prefill_chunk_size"))


_STATIC_CACHES = ("static", "offloaded_static", *OLD_CACHES)
_CACHING = (
    *_no_effect(
        "use_cache",
        ["cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"],
        lambda v: v["use_cache"] is False,
        "without a cache",
        "Set use_cache=True, or leave {name} out",
    ),
    _notice(
        "cache_implementation",
        "max_cache_len",
        _both(_is_set("max_cache_len"), lambda v: v["cache_implementation"] not in _STATIC_CACHES),
        "max_cache_len has an effect on static caches only",
        "Set cache_implementation='static', or leave max_cache_len out",
    ),
    _notice(
        "cache_implementation",
        "cache_config",
        _both(_is_set("cache_config"), lambda v: v["cache_implementation"] != "quantized"),
        "cache_config has an effect on quantised caches only",
        "Set cache_implementation='quantized', or leave cache_config out",
    ),
    *(
        _notice(
            name,
            "prefill_chunk_size",
            _shown(name),
            f"prefill_chunk_size has no effect beside {name}: what is shown of a prompt is one "
            "piece, so it is fed as one",
            f"Leave prefill_chunk_size or {name} out",
        )
        for name in ("output_hidden_states", "output_attentions")
    ),
)


def _listed(value: Any) -> list[int]:
    """Return one id, several or none, as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _unreachable(values: Values) -> bool:
    """Return True where a row has to get more tokens than it may."""
    least, most = (_listed(values[name]) for name in ("min_new_tokens", "max_new_tokens"))
    by_row = len(least) > 1 < len(most)
    pairs = zip(least, most, strict=False) if by_row else product(least, most)
    return any(fewest > limit for fewest, limit in pairs)


def _all_suppressed(name: str) -> Test:
    return lambda v: (
        bool(_listed(v[name])) and {*_listed(v[name])} <= {*(v["suppress_tokens"] or ())}
    )


_OTHERS = (
    *_no_effect(
        "return_dict_in_generate",
        EXTRA_OUTPUTS,
        _off("return_dict_in_generate"),
        "where a tensor is returned",
        "Set return_dict_in_generate=True, or leave {name} out",
        given=_truthy,
    ),
    *(
        _impossible(
            name,
            "suppress_tokens",
            _all_suppressed(name),
            f"every token of {name} is also suppressed, so that no token would be left",
            f"Take it out of {name} or of suppress_tokens; to end later, set min_new_tokens",
        )
        for name in ("forced_bos_token_id", "forced_eos_token_id")
    ),
    *(
        _notice(
            new,
            total,
            _both(_is_set(new), _truthy(total)),
            f"{new} goes before {total}",
            "Leave one of them out",
        )
        for new, total in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
    ),
    ConfigRule(
        "conflict",
        "max_new_tokens",
        "min_new_tokens",
        _unreachable,
        "min_new_tokens cannot be reached",
        "Raise max_new_tokens or lower min_new_tokens",
    ),
    _notice(
        "eos_token_id",
        "eos_token_id",
        lambda v: any(token < 0 for token in _listed(v["eos_token_id"])),
        "eos_token_id holds a negative number, which is no token and ends nothing",
        "Set eos_token_id to ids of the vocabulary, or to None to end at the length alone",
    ),
    _notice(
        "pad_token_id",
        "pad_token_id",
        lambda v: v["pad_token_id"] is not None and v["pad_token_id"] < 0,
        "pad_token_id is no token",
        "Set pad_token_id to an id of the vocabulary",
    ),
)

RULES = (*_SAMPLING, *_BEAMS, *_CONSTRAINTS, *_SINGLE, *_CACHING, *_OTHERS)
_IMPOSSIBLE = tuple(rule for rule in RULES if rule.level == "impossible")
_CONFLICTS = tuple(rule for rule in RULES if rule.level != "impossible")


def refuse_impossible(values: Values) -> None:
    """Raise RequestError, with the first reason, unless something can be generated as asked."""
    for rule in _IMPOSSIBLE:
        said = (name for name in (rule.decides, rule.loses) if values[name] is not None)
        if any(values[name] != FIELDS[name].default for name in said) and rule.clash(values):
            raise RequestError(rule.text(values))


def judge(values: Values, caller: Collection[str]) -> tuple[str, ...]:
    """Return warnings for the caller; raise RequestError for what is impossible or in conflict.

    `values`: every field's value, defaults filled in. `caller`: the fields that the caller set.
    """
    refuse_impossible(values)
    notices = []
    for rule in _CONFLICTS:
        if rule.loses not in caller or not rule.clash(values):
            continue
        if rule.level == "conflict" and rule.decides in caller:
            raise RequestError(rule.text(values))
        notices.append(rule.text(values))
    return tuple(notices)
