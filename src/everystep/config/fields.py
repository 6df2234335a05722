"""The fields of a generation configuration: name, kind, and the default that holds; and which
way of generating their values ask for. `options.py` says what each means.

Every field of a configuration starts as None, "not said". `default` holds where nothing says
anything; the names, meanings and defaults are those of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from everystep.config import kinds
from everystep.config.kinds import COUNT, FLAG, NUMBER, POSITIVE, SIZE, TOKENS, Kind, one_of, plain
from everystep.config.nested import (
    CompileConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    compilation,
    is_nested,
    watermark,
)
from everystep.errors import UnknownArgumentError, nearest

CACHES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized", "paged")
# Spellings of "static" that older checkpoints and scripts use.
OLD_CACHES = (
    *("sliding_window", "hybrid", "hybrid_chunked"),
    *("offloaded_hybrid", "offloaded_hybrid_chunked"),
)
_SCHEDULE = one_of("constant", "heuristic", "heuristic_transient")
_WATERMARK = Kind(
    "a WatermarkingConfig, a SynthIDTextWatermarkingConfig or a dict of one",
    lambda v: is_nested(v, WatermarkingConfig, SynthIDTextWatermarkingConfig),
    watermark,
)
_COMPILATION = Kind(
    "a CompileConfig or a dict of one",
    lambda value: is_nested(value, CompileConfig),
    compilation,
)


@dataclass(frozen=True)
class Field:
    """One field; `hint` says what to do when a value is refused.

    With `per_row`, a list of values stands for one per row of the call.
    """

    name: str
    kind: Kind
    default: Any = None
    hint: str | None = None
    per_row: bool = False

    @property
    def neutral(self) -> Any:
        """The meaning of a None that the call gives on purpose."""
        return None if self.name in ("top_k", "max_length") else self.default

    def read(self, value: Any) -> Any:
        """Return the value in the form in which it is kept.

        Raise RequestError if it is of another kind.
        """
        value = plain(value)
        if value is None:
            return None
        if self.per_row and isinstance(value, list | tuple) and value:
            return [self._read_one(item) for item in value]
        return self._read_one(value)

    def _read_one(self, value: Any) -> Any:
        do = self.hint or f"Give {self.name} such a value, or leave it out"
        return self.kind.checked(value, self.name, do)


_ALL = (
    # How long.
    Field("max_length", SIZE, 20),
    Field("max_new_tokens", SIZE),
    Field("min_length", COUNT, 0),
    Field("min_new_tokens", COUNT),
    Field("early_stopping", one_of(True, False, "never"), False),
    Field("max_time", kinds.NOT_NEGATIVE),
    Field("stop_strings", kinds.TEXTS),
    # How tokens are chosen.
    Field("do_sample", FLAG, False),
    Field("num_beams", SIZE, 1),
    Field("use_mtp", FLAG),
    Field("num_return_sequences", SIZE, 1),
    Field("penalty_alpha", kinds.NOT_NEGATIVE),
    Field("dola_layers", kinds.LAYERS),
    Field("num_beam_groups", SIZE, 1),
    Field("diversity_penalty", NUMBER, 0.0),
    Field("constraints", kinds.OBJECTS),
    Field("force_words_ids", kinds.FORCED_WORDS),
    Field("length_penalty", NUMBER, 1.0),
    Field("low_memory", FLAG),
    # What is kept.
    Field("use_cache", FLAG, True),
    Field("cache_implementation", one_of(*CACHES, *OLD_CACHES)),
    Field("cache_config", kinds.MAPPING),
    Field("max_cache_len", SIZE),
    Field("prefill_chunk_size", SIZE),
    # What becomes of the scores.
    Field(
        "temperature",
        kinds.NOT_NEGATIVE,
        1.0,
        "For greedy decoding set do_sample=False",
    ),
    Field("top_k", COUNT, 50),
    Field("top_p", kinds.FRACTION, 1.0),
    Field("min_p", kinds.FRACTION),
    Field("top_h", kinds.FRACTION_ABOVE_0),
    Field("typical_p", kinds.FRACTION_ABOVE_0, 1.0),
    Field("epsilon_cutoff", kinds.FRACTION_BELOW_1, 0.0),
    Field("eta_cutoff", kinds.FRACTION_BELOW_1, 0.0),
    Field("repetition_penalty", POSITIVE, 1.0),
    Field("encoder_repetition_penalty", POSITIVE, 1.0),
    Field("no_repeat_ngram_size", COUNT, 0),
    Field("encoder_no_repeat_ngram_size", COUNT, 0),
    Field("bad_words_ids", kinds.WORDS),
    Field("renormalize_logits", FLAG),
    Field("forced_bos_token_id", kinds.integer(0)),
    Field("forced_eos_token_id", TOKENS),
    Field("remove_invalid_values", FLAG, False),
    Field("exponential_decay_length_penalty", kinds.DECAY),
    Field("suppress_tokens", kinds.IDS),
    Field("begin_suppress_tokens", kinds.IDS),
    Field("sequence_bias", kinds.BIASES),
    Field("token_healing", FLAG),
    Field("guidance_scale", NUMBER),
    Field("watermarking_config", _WATERMARK),
    # None of these is a field of transformers, which ignores them in a file.
    Field("presence_penalty", kinds.PENALTY, 0.0),
    Field("frequency_penalty", kinds.PENALTY, 0.0),
    Field("logit_bias", kinds.LOGIT_BIAS),
    Field("dry_multiplier", kinds.NOT_NEGATIVE, 0.0),
    Field("dry_base", kinds.AT_LEAST_1, 1.75),
    Field("dry_allowed_length", SIZE, 2),
    Field("dry_sequence_breakers", kinds.BREAKERS),
    Field("top_n_sigma", POSITIVE),
    Field("xtc_probability", kinds.FRACTION, 0.0),
    Field("xtc_threshold", kinds.FRACTION, 0.1),
    Field("mirostat_tau", POSITIVE),
    Field("mirostat_eta", kinds.FRACTION, 0.1),
    Field("dynatemp_range", kinds.NOT_NEGATIVE, 0.0),
    Field("dynatemp_exponent", POSITIVE, 1.0),
    Field("sampler_order", kinds.SAMPLER_ORDER),
    # What is returned.
    Field("output_attentions", FLAG),
    Field("output_hidden_states", FLAG),
    Field("output_scores", FLAG, False),
    Field("output_logits", FLAG),
    Field("return_dict_in_generate", FLAG, False),
    # Tokens with a meaning.
    Field("pad_token_id", kinds.integer()),
    Field("bos_token_id", kinds.integer()),
    Field("eos_token_id", TOKENS),
    Field("decoder_start_token_id", TOKENS),
    # How tokens are drafted.
    Field("is_assistant", FLAG),
    Field("num_assistant_tokens", SIZE, 20),
    Field("num_assistant_tokens_schedule", _SCHEDULE, "constant"),
    Field("assistant_confidence_threshold", kinds.FRACTION, 0.4),
    Field("prompt_lookup_num_tokens", SIZE),
    Field("max_matching_ngram_size", SIZE),
    Field("assistant_early_exit", SIZE),
    Field("assistant_lookbehind", SIZE, 10),
    Field("target_lookbehind", SIZE, 10),
    Field("assistant_ensemble_weight", kinds.BETWEEN_0_AND_1),
    Field("draft_verification", one_of("matching", "rejection")),
    Field("num_drafts", SIZE, 1),
    Field("speculation_type", one_of("dflash")),
    # How it is computed.
    Field("compile_config", _COMPILATION),
    Field("disable_compile", FLAG),
    Field("continuous_batching_config", kinds.MAPPING),
    # Where the configuration comes from: `META`.
    Field("_from_model_config", FLAG),
    Field("transformers_version", kinds.TEXT),
)

_PER_ROW = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    }
)
FIELDS: dict[str, Field] = {
    field.name: replace(field, per_row=field.name in _PER_ROW) for field in _ALL
}
META: frozenset[str] = frozenset({"_from_model_config", "transformers_version"})

ELSEWHERE = {
    "stop": "stop_strings",
    "stop_token_ids": "eos_token_id",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
}
"""The names that other engines have for our fields."""

# Names that belong to the call of generate(), not to a configuration.
CALL_ONLY: frozenset[str] = frozenset(
    {
        *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
        *("assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask"),
    }
)


def unknown_name(name: str, says: str) -> UnknownArgumentError:
    """Return the error for a name that no field has, with the nearest one that there is."""
    if name in CALL_ONLY:
        do = f"Pass {name} to generate() itself"
    else:
        names = [*(known for known in FIELDS if known not in META), *CALL_ONLY]
        guess = ELSEWHERE.get(name) or nearest(name, names)
        do = f"The nearest is {guess}" if guess else "See everystep.config.FIELDS for all names"
    return UnknownArgumentError(f"{says} {name!r}", do=do)


class GenerationMode(StrEnum):
    """The ways of generating; `GenerationMode` of transformers 5.23.0."""

    CONTRASTIVE_SEARCH = "contrastive_search"
    GREEDY_SEARCH = "greedy_search"
    SAMPLE = "sample"
    ASSISTED_GENERATION = "assisted_generation"
    DOLA_GENERATION = "dola_generation"
    BEAM_SEARCH = "beam_search"
    BEAM_SAMPLE = "beam_sample"
    CONSTRAINED_BEAM_SEARCH = "constrained_beam_search"
    GROUP_BEAM_SEARCH = "group_beam_search"


def generation_mode(values: Mapping[str, Any], *, assisted: bool = False) -> GenerationMode:
    """Return the mode that the values of all fields stand for; `assisted` by a second model.

    Drafts and DoLa build on greedy decoding and sampling, and are not modes of anything else.
    """
    base = _base_mode(values)
    if base not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return base
    drafts = ("prompt_lookup_num_tokens", "assistant_early_exit")
    if assisted or values["use_mtp"] or any(values[name] is not None for name in drafts):
        return GenerationMode.ASSISTED_GENERATION
    if values["dola_layers"] is not None:
        return GenerationMode.DOLA_GENERATION
    return base


def _base_mode(values: Mapping[str, Any]) -> GenerationMode:
    if values["constraints"] is not None or values["force_words_ids"] is not None:
        return GenerationMode.CONSTRAINED_BEAM_SEARCH
    sampled = bool(values["do_sample"])
    if (values["num_beams"] or 1) == 1:
        if sampled:
            return GenerationMode.SAMPLE
        contrastive = (values["top_k"] or 0) > 1 and (values["penalty_alpha"] or 0) > 0
        return GenerationMode.CONTRASTIVE_SEARCH if contrastive else GenerationMode.GREEDY_SEARCH
    if (values["num_beam_groups"] or 1) > 1:
        return GenerationMode.GROUP_BEAM_SEARCH
    return GenerationMode.BEAM_SAMPLE if sampled else GenerationMode.BEAM_SEARCH
