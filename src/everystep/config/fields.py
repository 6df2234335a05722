"""The fields of a generation configuration: name, kind, meaning, and the default that holds; and
which way of generating their values ask for.

The one place that says any of it: `scripts/keywords` writes `config_fields.py` and `attributes.py`,
which editors and type checkers read, from this table; help() and the reference are made of it too.

Every field of a configuration starts as None, "not said". `default` holds where nothing says
anything; the names, meanings and defaults are those of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from warnings import warn

from everystep.config import kinds
from everystep.config.foreign_names import advice_on
from everystep.config.kinds import (
    COUNT,
    FLAG,
    NUMBER,
    POSITIONS,
    POSITIVE,
    ROWS,
    SIZE,
    TOKENS,
    Kind,
    one_of,
    plain,
)
from everystep.config.nested import (
    CompileConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    compilation,
    is_nested,
    watermark,
)
from everystep.errors import UnknownArgumentError, message, nearest, with_nearest

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
    "Watermark | Mapping[str, Any]",
)
_COMPILATION = Kind(
    "a CompileConfig or a dict of one",
    lambda value: is_nested(value, CompileConfig),
    compilation,
    "CompileConfig | Mapping[str, Any]",
)


@dataclass(frozen=True)
class Field:
    """One field; `meaning` is a line about it, and `hint` says what to do when a value is refused.

    With `per_row`, a list of values stands for one per row of the call.
    """

    name: str
    kind: Kind
    meaning: str
    default: Any = None
    hint: str | None = None
    per_row: bool = False

    @property
    def type(self) -> str:
        """The type of its values for type checkers, as source."""
        inner = self.kind.type
        return f"{inner} | Sequence[{inner}] | None" if self.per_row else f"{inner} | None"

    @property
    def line(self) -> str:
        """The meaning, and the value where nobody says one."""
        if self.default is None:
            return self.meaning
        return f"{self.meaning.removesuffix('.')}; {self.default!r} unless set."

    @property
    def neutral(self) -> Any:
        """The meaning of a None that the call gives on purpose."""
        return None if self.name in ("top_k", "max_length") else self.default

    def read(self, value: Any) -> Any:
        """Return the value in the form in which it is kept.

        Raise RequestError if it is of another kind.
        """
        if hasattr(value, "tolist"):
            value = plain(value)
        if value is None:
            return None
        do = self.hint or f"Give {self.name} such a value, or leave it out"
        if self.per_row and isinstance(value, list | tuple) and value:
            return [self.kind.checked(item, self.name, do) for item in value]
        return self.kind.checked(value, self.name, do)


_ALL = (
    # How long.
    Field("max_length", POSITIONS, "Ids in the whole sequence, prompt included, at most.", 20),
    Field("max_new_tokens", POSITIONS, "Generated ids at most; goes before max_length."),
    Field("min_length", COUNT, "Ids in the whole sequence before it may end.", 0),
    Field("min_new_tokens", COUNT, "Generated ids before the sequence may end."),
    Field("early_stopping", one_of(True, False, "never"), "When beams stop searching.", False),
    Field("max_time", kinds.NOT_NEGATIVE, "Seconds after which a sequence ends."),
    Field("stop_strings", kinds.TEXTS, "Texts that end a sequence; needs the tokenizer."),
    # How tokens are chosen.
    Field("do_sample", FLAG, "Whether tokens are drawn, not only ranked.", False),
    Field("num_beams", ROWS, "Hypotheses that are followed per prompt.", 1),
    Field("use_mtp", FLAG, "Draft with the model's own multi-token heads."),
    Field("num_return_sequences", ROWS, "Sequences returned per prompt.", 1),
    Field(
        "penalty_alpha", kinds.NOT_NEGATIVE, "Contrastive search: weight of the repetition term."
    ),
    Field("dola_layers", kinds.LAYERS, "DoLa: which layers the last one is contrasted with."),
    Field("num_beam_groups", ROWS, "Diverse beams: groups that beams are divided into.", 1),
    Field("diversity_penalty", NUMBER, "Diverse beams: cost of another group's token.", 0.0),
    Field("constraints", kinds.OBJECTS, "Constrained beams: Constraint objects to fulfil."),
    Field("force_words_ids", kinds.FORCED_WORDS, "Constrained beams: words that must occur."),
    Field("length_penalty", NUMBER, "Beams: exponent of the length that divides a score.", 1.0),
    Field("low_memory", FLAG, "Contrastive search and beams in smaller batches."),
    # What is kept.
    Field("use_cache", FLAG, "Keep keys and values instead of computing them anew.", True),
    Field("cache_implementation", one_of(*CACHES, *OLD_CACHES), "How keys and values are kept."),
    Field("cache_config", kinds.MAPPING, "Settings of the cache."),
    Field("max_cache_len", POSITIONS, "Positions that a static cache has room for."),
    Field("prefill_chunk_size", SIZE, "Prompt positions fed at once at most."),
    # What becomes of the scores.
    Field(
        "temperature",
        kinds.NOT_NEGATIVE,
        "What scores are divided by before sampling.",
        1.0,
        "For greedy decoding set do_sample=False",
    ),
    Field("top_k", COUNT, "Sample among this many best tokens; 0: among all.", 50),
    Field("top_p", kinds.FRACTION, "Sample among the best tokens of this mass.", 1.0),
    Field("min_p", kinds.FRACTION, "Sample where p is at least this share of the best."),
    Field("top_h", kinds.FRACTION_ABOVE_0, "Sample among the best tokens of this entropy share."),
    Field("typical_p", kinds.FRACTION_ABOVE_0, "Sample among the most typical of this mass.", 1.0),
    Field("epsilon_cutoff", kinds.FRACTION_BELOW_1, "Sample where p is at least this.", 0.0),
    Field("eta_cutoff", kinds.FRACTION_BELOW_1, "As epsilon_cutoff, lowered by entropy.", 0.0),
    Field("repetition_penalty", POSITIVE, "Factor against ids that already stand.", 1.0),
    Field("encoder_repetition_penalty", POSITIVE, "Factor for ids of the (encoder) prompt.", 1.0),
    Field("no_repeat_ngram_size", COUNT, "N-grams of this size occur once.", 0),
    Field("encoder_no_repeat_ngram_size", COUNT, "N-grams of the prompt do not occur.", 0),
    Field("bad_words_ids", kinds.WORDS, "Id sequences that must not occur."),
    Field("renormalize_logits", FLAG, "Log-softmax after everything else."),
    Field("forced_bos_token_id", kinds.integer(0), "The id after a prompt of one id."),
    Field("forced_eos_token_id", TOKENS, "The id at the last place of max_length."),
    Field("remove_invalid_values", FLAG, "Replace nan and infinities in scores.", False),
    Field("exponential_decay_length_penalty", kinds.DECAY, "(start, factor): ending grows likely."),
    Field("suppress_tokens", kinds.IDS, "Ids that are never chosen."),
    Field("begin_suppress_tokens", kinds.IDS, "Ids that are not chosen first."),
    Field("sequence_bias", kinds.BIASES, "{ids: bias}, added to the last id after the others."),
    Field("token_healing", FLAG, "Redo the prompt's last token with its continuations."),
    Field("guidance_scale", NUMBER, "Classifier-free guidance against a negative prompt."),
    Field("watermarking_config", _WATERMARK, "Mark the text so that it can be recognised."),
    # None of these is a field of transformers, which ignores them in a file.
    Field("presence_penalty", kinds.PENALTY, "What every generated id loses.", 0.0),
    Field("frequency_penalty", kinds.PENALTY, "What it loses each time it was generated.", 0.0),
    Field(
        "penalty_scope",
        one_of("all", "new"),
        "Ids that penalties count: all, or the new ones; None: as each has it.",
    ),
    Field("logit_bias", kinds.LOGIT_BIAS, "{id: bias}, added whatever stands before."),
    Field("dry_multiplier", kinds.NOT_NEGATIVE, "Cost of continuing a repetition; 0: none.", 0.0),
    Field(
        "dry_base", kinds.AT_LEAST_1, "Factor of that cost per id that the repetition has.", 1.75
    ),
    Field("dry_allowed_length", SIZE, "Ids from which on a repetition costs.", 2),
    Field("dry_sequence_breakers", kinds.BREAKERS, "Texts and ids that end every repetition."),
    Field("top_n_sigma", POSITIVE, "Sample within so many standard deviations of the best."),
    Field("xtc_probability", kinds.FRACTION, "How often all likely tokens but one go.", 0.0),
    Field("xtc_threshold", kinds.FRACTION, "From which probability on a token is likely.", 0.1),
    Field("mirostat_tau", POSITIVE, "Mirostat 2: the surprise to keep up, in bits."),
    Field("mirostat_eta", kinds.FRACTION, "Mirostat 2: how fast its limit follows.", 0.1),
    Field("dynatemp_range", kinds.NOT_NEGATIVE, "How far entropy moves the temperature.", 0.0),
    Field("dynatemp_exponent", POSITIVE, "Exponent of that entropy.", 1.0),
    Field("sampler_order", kinds.SAMPLER_ORDER, "Samplers that come first, in this order."),
    # What is returned.
    Field("output_attentions", FLAG, "Return attention weights."),
    Field("output_hidden_states", FLAG, "Return hidden states."),
    Field("output_scores", FLAG, "Return scores, processors applied.", False),
    Field("output_logits", FLAG, "Return logits as the model gave them."),
    Field("return_dict_in_generate", FLAG, "Return an output object, not a tensor.", False),
    # Tokens with a meaning.
    Field("pad_token_id", kinds.integer(), "The id that fills rows up."),
    Field("bos_token_id", kinds.integer(), "The id that stands for an empty prompt."),
    Field("eos_token_id", TOKENS, "The id or ids that end a sequence."),
    Field("decoder_start_token_id", TOKENS, "Encoder-decoder: the first id, or one per row."),
    # How tokens are drafted.
    Field("is_assistant", FLAG, "The model drafts for another."),
    Field("num_assistant_tokens", POSITIONS, "Tokens drafted at once.", 20),
    Field("num_assistant_tokens_schedule", _SCHEDULE, "How that number adapts.", "constant"),
    Field("assistant_confidence_threshold", kinds.FRACTION, "Drafting stops below this.", 0.4),
    Field("prompt_lookup_num_tokens", POSITIONS, "Tokens drafted by copying from the prompt."),
    Field("max_matching_ngram_size", SIZE, "Longest n-gram looked up for copying."),
    Field("assistant_early_exit", SIZE, "Draft with the first so many layers."),
    Field("assistant_lookbehind", SIZE, "Other tokenizer: assistant ids re-encoded.", 10),
    Field("target_lookbehind", SIZE, "Other tokenizer: own ids re-encoded.", 10),
    Field("assistant_ensemble_weight", kinds.BETWEEN_0_AND_1, "Verify against a mixture; lossy."),
    Field("draft_verification", one_of("matching", "rejection"), "How drafts are judged."),
    Field("num_drafts", ROWS, "Drafts of a sequence that are verified together, a tree.", 1),
    Field("speculation_type", one_of("dflash"), "Kind of drafting model."),
    # How it is computed.
    Field("compile_config", _COMPILATION, "How forwards are compiled."),
    Field("disable_compile", FLAG, "Never compile."),
    Field("continuous_batching_config", kinds.MAPPING, "Settings of a continuous scheduler."),
    # Where the configuration comes from: `META`.
    Field("_from_model_config", FLAG, "Made from a model's config, not from a file of its own."),
    Field("transformers_version", kinds.TEXT, "What wrote the file."),
)

_PER_ROW = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_new_tokens"),
        *("min_new_tokens", "presence_penalty", "frequency_penalty", "dry_multiplier"),
        *("dry_base", "dry_allowed_length"),
    }
)
PER_ROW = tuple(field.name for field in _ALL if field.name in _PER_ROW)
"""The fields that may have a value for each row of a call."""
FIELDS: dict[str, Field] = {
    field.name: replace(field, per_row=field.name in _PER_ROW) for field in _ALL
}
META: frozenset[str] = frozenset({"_from_model_config", "transformers_version"})

# Names that belong to the call of generate(), not to a configuration.
CALL_ONLY: frozenset[str] = frozenset(
    {
        *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
        *("assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask"),
    }
)


# Names that files have beside fields: what a model that listens reads of its checkpoint, and fields
# that earlier versions of transformers had.
BESIDE: frozenset[str] = frozenset(
    {
        *("lang_to_id", "task_to_id", "is_multilingual", "language", "task", "prev_sot_token_id"),
        *("no_timestamps_token_id", "max_initial_timestamp_index", "return_timestamps"),
        *("return_token_timestamps", "alignment_heads", "median_filter_width", "num_frames"),
        *("prompt_condition_type", "condition_on_prev_tokens", "force_unique_generate_call"),
        *("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"),
        *("forced_decoder_ids", "generation_kwargs", "return_legacy_cache", "trust_remote_code"),
    }
)


def warn_of_unknown_names(names: Iterable[str], file: str) -> None:
    """Warn once of the names in a file that nothing reads, with the nearest ones that are read.

    Names that begin with an underscore are notes of whoever wrote the file.
    """
    strange = [one for one in names if not (one in FIELDS or one in BESIDE or one[:1] == "_")]
    if strange:
        told = with_nearest(strange, [*(FIELDS.keys() - META), *BESIDE])
        what, do = f"{file} has names that nothing reads", "Correct them, or delete these lines"
        warn(message(what, got=told, do=do), stacklevel=4)


def unknown_name(name: str, says: str) -> UnknownArgumentError:
    """Return the error for a name that no field has, with the nearest one that there is."""
    if name in CALL_ONLY:
        do = f"Pass {name} to generate() itself"
    else:
        names = [*(known for known in FIELDS if known not in META), *CALL_ONLY]
        guess = nearest(name, names)
        do = f"The nearest is {guess}" if guess else "See everystep.config.FIELDS for all names"
        do = advice_on(name) or do
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
