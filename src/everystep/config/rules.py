"""Which values do not go together: the closed list, as data, and what follows from each.

    impossible   an error wherever the values come from: nothing could be generated as asked
    conflict     an error when the caller set both; a notice when the caller set only the value that
                 has no effect; nothing when that value is inherited from a checkpoint
    notice       a warning when the caller set the value that has no effect

`RULES` is the whole list; each rule says in words what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from everystep.config.fields import OLD_CACHES
from everystep.config.rule import (
    ConfigRule,
    Values,
    both,
    contrastive,
    differs,
    greedy,
    is_set,
    one_beam,
    samples,
    truthy,
)
from everystep.config.sampling_rules import SAMPLING
from everystep.errors import RequestError

_ONLY_BEAMS = {"early_stopping": False, "length_penalty": 1.0}
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
"""Fields that ask for more than ids."""

_EACH_BEAM = tuple(
    ConfigRule(
        "conflict",
        "num_beams",
        name,
        both(one_beam, differs(name, neutral)),
        f"{name} has no effect without beams",
        f"Set num_beams above 1, or leave {name} out",
    )
    for name, neutral in _ONLY_BEAMS.items()
)
_BEAMS = (
    *_EACH_BEAM,
    ConfigRule(
        "conflict",
        "num_beam_groups",
        "diversity_penalty",
        both(lambda v: v["num_beam_groups"] in (None, 1), differs("diversity_penalty", 0.0)),
        "diversity_penalty has no effect without groups of beams",
        "Set num_beam_groups above 1, or leave diversity_penalty out",
    ),
    ConfigRule(
        "impossible",
        "num_beams",
        "num_beam_groups",
        lambda v: (v["num_beams"] or 1) % (v["num_beam_groups"] or 1) != 0,
        "num_beams must be a multiple of num_beam_groups",
        "Change one of them",
    ),
    ConfigRule(
        "impossible",
        "do_sample",
        "num_beam_groups",
        both(samples, lambda values: (values["num_beam_groups"] or 1) > 1),
        "groups of beams do not sample",
        "Set do_sample=False, or leave num_beam_groups out",
    ),
    ConfigRule(
        "impossible",
        "num_beam_groups",
        "diversity_penalty",
        lambda v: (v["num_beam_groups"] or 1) > 1 and not (v["diversity_penalty"] or 0) > 0,
        "groups of beams need a diversity_penalty above 0, or all find the same",
        "Set diversity_penalty above 0, or leave num_beam_groups out",
    ),
)

_RETURNS = (
    ConfigRule(
        "impossible",
        "do_sample",
        "num_return_sequences",
        both(greedy, one_beam, differs("num_return_sequences", 1)),
        "greedy decoding finds one sequence: num_return_sequences must be 1",
        "Set do_sample=True or num_beams, or leave num_return_sequences out",
    ),
    ConfigRule(
        "impossible",
        "num_beams",
        "num_return_sequences",
        lambda v: not one_beam(v) and (v["num_return_sequences"] or 1) > v["num_beams"],
        "num_return_sequences must be at most num_beams",
        "Raise num_beams or lower num_return_sequences",
    ),
)

_CONSTRAINTS = tuple(
    rule
    for name in ("constraints", "force_words_ids")
    for rule in (
        ConfigRule(
            "impossible",
            "do_sample",
            name,
            both(samples, is_set(name)),
            "constrained beams do not sample",
            f"Set do_sample=False, or leave {name} out",
        ),
        ConfigRule(
            "impossible",
            "num_beams",
            name,
            both(one_beam, is_set(name)),
            "constraints need beams",
            f"Set num_beams above 1, or leave {name} out",
        ),
        ConfigRule(
            "impossible",
            "num_beam_groups",
            name,
            both(lambda v: (v["num_beam_groups"] or 1) > 1, is_set(name)),
            "constrained beams have no groups",
            f"Leave num_beam_groups or {name} out",
        ),
    )
)

# Other ways to choose one token at a time, none of which goes with beams.
_EACH_SINGLE = tuple(
    ConfigRule(
        "conflict",
        "num_beams",
        name,
        both(lambda values: not one_beam(values), truthy(name)),
        f"{name} has no effect with beams",
        f"Leave num_beams or {name} out",
    )
    for name in (
        "penalty_alpha",
        "dola_layers",
        "prompt_lookup_num_tokens",
        "assistant_early_exit",
        "use_mtp",
    )
)
_SINGLE = (
    *_EACH_SINGLE,
    ConfigRule(
        "impossible",
        "penalty_alpha",
        "top_k",
        lambda v: contrastive(v) and greedy(v) and isinstance(v["top_k"], list),
        "contrastive search looks at the same number of candidates in every row",
        "Give top_k one number, or leave penalty_alpha out",
    ),
    ConfigRule(
        "conflict",
        "do_sample",
        "penalty_alpha",
        both(samples, contrastive),
        "penalty_alpha has no effect when sampling",
        "Set do_sample=False, or leave penalty_alpha out",
    ),
    ConfigRule(
        "impossible",
        "prompt_lookup_num_tokens",
        "assistant_ensemble_weight",
        lambda v: bool(v["prompt_lookup_num_tokens"]) and bool(v["assistant_ensemble_weight"]),
        "assistant_ensemble_weight needs an assistant that gives probabilities",
        "Leave prompt_lookup_num_tokens or assistant_ensemble_weight out",
    ),
)

_EACH_CACHE = tuple(
    ConfigRule(
        "conflict",
        "use_cache",
        name,
        both(lambda values: values["use_cache"] is False, is_set(name)),
        f"{name} has no effect without a cache",
        f"Set use_cache=True, or leave {name} out",
    )
    for name in ("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size")
)
_CACHING = (
    *_EACH_CACHE,
    ConfigRule(
        "notice",
        "cache_implementation",
        "max_cache_len",
        lambda v: (
            v["max_cache_len"] is not None
            and v["cache_implementation"] not in ("static", "offloaded_static", *OLD_CACHES)
        ),
        "max_cache_len has an effect on static caches only",
        "Set cache_implementation='static', or leave max_cache_len out",
    ),
    ConfigRule(
        "notice",
        "cache_implementation",
        "cache_config",
        lambda v: v["cache_config"] is not None and v["cache_implementation"] != "quantized",
        "cache_config has an effect on quantised caches only",
        "Set cache_implementation='quantized', or leave cache_config out",
    ),
)

_OUTPUTS = tuple(
    ConfigRule(
        "conflict",
        "return_dict_in_generate",
        name,
        both(truthy(name), lambda values: not values["return_dict_in_generate"]),
        f"{name} has no effect where a tensor is returned",
        f"Set return_dict_in_generate=True, or leave {name} out",
    )
    for name in EXTRA_OUTPUTS
)


def _listed(value: Any) -> list[int]:
    """One id, several or none, as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _forced_is_suppressed(name: str) -> Callable[[Values], bool]:
    def clash(values: Values) -> bool:
        tokens, suppressed = set(_listed(values[name])), values["suppress_tokens"] or ()
        return bool(tokens) and tokens <= set(suppressed)

    return clash


_EACH_FORCED = tuple(
    ConfigRule(
        "impossible",
        name,
        "suppress_tokens",
        _forced_is_suppressed(name),
        f"every token of {name} is also suppressed, so that no token would be left",
        f"Take it out of {name} or of suppress_tokens; to end later, set min_new_tokens",
    )
    for name in ("forced_bos_token_id", "forced_eos_token_id")
)
_OTHERS = (
    *_EACH_FORCED,
    ConfigRule(
        "notice",
        "max_new_tokens",
        "max_length",
        lambda v: v["max_new_tokens"] is not None and v["max_length"] is not None,
        "max_new_tokens goes before max_length",
        "Leave one of them out",
    ),
    ConfigRule(
        "notice",
        "min_new_tokens",
        "min_length",
        lambda v: v["min_new_tokens"] is not None and bool(v["min_length"]),
        "min_new_tokens goes before min_length",
        "Leave one of them out",
    ),
    ConfigRule(
        "conflict",
        "max_new_tokens",
        "min_new_tokens",
        lambda v: (v["min_new_tokens"] or 0) > (v["max_new_tokens"] or 2**62),
        "min_new_tokens cannot be reached",
        "Raise max_new_tokens or lower min_new_tokens",
    ),
    ConfigRule(
        "notice",
        "eos_token_id",
        "eos_token_id",
        lambda v: any(token < 0 for token in _listed(v["eos_token_id"])),
        "eos_token_id holds a negative number, which is no token and ends nothing",
        "Set eos_token_id to ids of the vocabulary, or to None to end at the length alone",
    ),
    ConfigRule(
        "notice",
        "pad_token_id",
        "pad_token_id",
        lambda v: v["pad_token_id"] is not None and v["pad_token_id"] < 0,
        "pad_token_id is no token",
        "Set pad_token_id to an id of the vocabulary",
    ),
)

RULES: tuple[ConfigRule, ...] = (
    *SAMPLING,
    *_BEAMS,
    *_RETURNS,
    *_CONSTRAINTS,
    *_SINGLE,
    *_CACHING,
    *_OUTPUTS,
    *_OTHERS,
)


def refuse_impossible(values: Values) -> None:
    """Returns if something can be generated as asked; RequestError with the first reason if not."""
    for rule in RULES:
        if rule.level == "impossible" and rule.clash(values):
            raise RequestError(rule.text(values))


def judge(values: Values, caller: Collection[str]) -> tuple[str, ...]:
    """Warnings for the caller; RequestError for what is impossible or in conflict.

    `values`: every field's value, defaults filled in. `caller`: the fields that the caller set.
    """
    refuse_impossible(values)
    notices = []
    for rule in RULES:
        if rule.level == "impossible" or rule.loses not in caller or not rule.clash(values):
            continue
        if rule.level == "conflict" and rule.decides in caller:
            raise RequestError(rule.text(values))
        notices.append(rule.text(values))
    return tuple(notices)
