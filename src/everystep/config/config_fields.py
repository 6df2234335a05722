"""The fields of a generation configuration, as keywords, for type checkers.

Written by `scripts/keywords` from `fields.py`. `None` stands for what a field
has where nothing was said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from everystep.config.nested import CompileConfig, Watermark


class FieldOptions(TypedDict, total=False):
    """The fields that leave open neither how many results there are nor of which class."""

    max_length: int | None
    """Ids in the whole sequence, prompt included, at most; 20 unless set."""
    max_new_tokens: int | Sequence[int] | None
    """Generated ids at most; goes before max_length."""
    min_length: int | None
    """Ids in the whole sequence before it may end; 0 unless set."""
    min_new_tokens: int | Sequence[int] | None
    """Generated ids before the sequence may end."""
    early_stopping: bool | Literal["never"] | None
    """When beams stop searching; False unless set."""
    max_time: float | None
    """Seconds after which a sequence ends."""
    stop_strings: str | Sequence[str] | None
    """Texts that end a sequence; needs the tokenizer."""
    do_sample: bool | None
    """Whether tokens are drawn, not only ranked; False unless set."""
    num_beams: int | None
    """Hypotheses that are followed per prompt; 1 unless set."""
    use_mtp: bool | None
    """Draft with the model's own multi-token heads."""
    penalty_alpha: float | None
    """Contrastive search: weight of the repetition term."""
    dola_layers: Literal["low", "high"] | Sequence[int] | None
    """DoLa: which layers the last one is contrasted with."""
    num_beam_groups: int | None
    """Diverse beams: groups that beams are divided into; 1 unless set."""
    diversity_penalty: float | None
    """Diverse beams: cost of another group's token; 0.0 unless set."""
    constraints: Sequence[Any] | None
    """Constrained beams: Constraint objects to fulfil."""
    force_words_ids: Sequence[Sequence[int] | Sequence[Sequence[int]]] | None
    """Constrained beams: words that must occur."""
    length_penalty: float | None
    """Beams: exponent of the length that divides a score; 1.0 unless set."""
    low_memory: bool | None
    """Contrastive search and beams in smaller batches."""
    use_cache: bool | None
    """Keep keys and values instead of computing them anew; True unless set."""
    cache_implementation: (
        Literal[
            "dynamic",
            "static",
            "offloaded",
            "offloaded_static",
            "quantized",
            "paged",
            "sliding_window",
            "hybrid",
            "hybrid_chunked",
            "offloaded_hybrid",
            "offloaded_hybrid_chunked",
        ]
        | None
    )
    """How keys and values are kept."""
    cache_config: Mapping[str, Any] | None
    """Settings of the cache."""
    max_cache_len: int | None
    """Positions that a static cache has room for."""
    prefill_chunk_size: int | None
    """Prompt positions fed at once at most."""
    temperature: float | Sequence[float] | None
    """What scores are divided by before sampling; 1.0 unless set."""
    top_k: int | Sequence[int] | None
    """Sample among this many best tokens; 0: among all; 50 unless set."""
    top_p: float | Sequence[float] | None
    """Sample among the best tokens of this mass; 1.0 unless set."""
    min_p: float | Sequence[float] | None
    """Sample where p is at least this share of the best."""
    top_h: float | Sequence[float] | None
    """Sample among the best tokens of this entropy share."""
    typical_p: float | Sequence[float] | None
    """Sample among the most typical of this mass; 1.0 unless set."""
    epsilon_cutoff: float | Sequence[float] | None
    """Sample where p is at least this; 0.0 unless set."""
    eta_cutoff: float | Sequence[float] | None
    """As epsilon_cutoff, lowered by entropy; 0.0 unless set."""
    repetition_penalty: float | Sequence[float] | None
    """Factor against ids that already stand; 1.0 unless set."""
    encoder_repetition_penalty: float | Sequence[float] | None
    """Factor for ids of the (encoder) prompt; 1.0 unless set."""
    no_repeat_ngram_size: int | Sequence[int] | None
    """N-grams of this size occur once; 0 unless set."""
    encoder_no_repeat_ngram_size: int | Sequence[int] | None
    """N-grams of the prompt do not occur; 0 unless set."""
    bad_words_ids: Sequence[Sequence[int]] | None
    """Id sequences that must not occur."""
    renormalize_logits: bool | None
    """Log-softmax after everything else."""
    forced_bos_token_id: int | None
    """The id after a prompt of one id."""
    forced_eos_token_id: int | Sequence[int] | None
    """The id at the last place of max_length."""
    remove_invalid_values: bool | None
    """Replace nan and infinities in scores; False unless set."""
    exponential_decay_length_penalty: tuple[int, float] | None
    """(start, factor): ending grows likely."""
    suppress_tokens: Sequence[int] | None
    """Ids that are never chosen."""
    begin_suppress_tokens: Sequence[int] | None
    """Ids that are not chosen first."""
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]] | None
    """{ids: bias}, added to the last id after the others."""
    token_healing: bool | None
    """Redo the prompt's last token with its continuations."""
    guidance_scale: float | None
    """Classifier-free guidance against a negative prompt."""
    watermarking_config: Watermark | Mapping[str, Any] | None
    """Mark the text so that it can be recognised."""
    presence_penalty: float | Sequence[float] | None
    """What every generated id loses; 0.0 unless set."""
    frequency_penalty: float | Sequence[float] | None
    """What it loses each time it was generated; 0.0 unless set."""
    penalty_scope: Literal["all", "new"] | None
    """Ids that penalties count: all, or the new ones; None: as each has it."""
    logit_bias: Mapping[int, float] | None
    """{id: bias}, added whatever stands before."""
    dry_multiplier: float | Sequence[float] | None
    """Cost of continuing a repetition; 0: none; 0.0 unless set."""
    dry_base: float | Sequence[float] | None
    """Factor of that cost per id that the repetition has; 1.75 unless set."""
    dry_allowed_length: int | Sequence[int] | None
    """Ids from which on a repetition costs; 2 unless set."""
    dry_sequence_breakers: Sequence[str | int] | None
    """Texts and ids that end every repetition."""
    top_n_sigma: float | None
    """Sample within so many standard deviations of the best."""
    xtc_probability: float | None
    """How often all likely tokens but one go; 0.0 unless set."""
    xtc_threshold: float | None
    """From which probability on a token is likely; 0.1 unless set."""
    mirostat_tau: float | None
    """Mirostat 2: the surprise to keep up, in bits."""
    mirostat_eta: float | None
    """Mirostat 2: how fast its limit follows; 0.1 unless set."""
    dynatemp_range: float | None
    """How far entropy moves the temperature; 0.0 unless set."""
    dynatemp_exponent: float | None
    """Exponent of that entropy; 1.0 unless set."""
    sampler_order: Sequence[str] | None
    """Samplers that come first, in this order."""
    output_attentions: bool | None
    """Return attention weights."""
    output_hidden_states: bool | None
    """Return hidden states."""
    output_scores: bool | None
    """Return scores, processors applied; False unless set."""
    output_logits: bool | None
    """Return logits as the model gave them."""
    pad_token_id: int | None
    """The id that fills rows up."""
    bos_token_id: int | None
    """The id that stands for an empty prompt."""
    eos_token_id: int | Sequence[int] | None
    """The id or ids that end a sequence."""
    decoder_start_token_id: int | Sequence[int] | None
    """Encoder-decoder: the first id, or one per row."""
    is_assistant: bool | None
    """The model drafts for another."""
    num_assistant_tokens: int | None
    """Tokens drafted at once; 20 unless set."""
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "heuristic_transient"] | None
    """How that number adapts; 'constant' unless set."""
    assistant_confidence_threshold: float | None
    """Drafting stops below this; 0.4 unless set."""
    prompt_lookup_num_tokens: int | None
    """Tokens drafted by copying from the prompt."""
    max_matching_ngram_size: int | None
    """Longest n-gram looked up for copying."""
    assistant_early_exit: int | None
    """Draft with the first so many layers."""
    assistant_lookbehind: int | None
    """Other tokenizer: assistant ids re-encoded; 10 unless set."""
    target_lookbehind: int | None
    """Other tokenizer: own ids re-encoded; 10 unless set."""
    assistant_ensemble_weight: float | None
    """Verify against a mixture; lossy."""
    draft_verification: Literal["matching", "rejection"] | None
    """How drafts are judged."""
    num_drafts: int | None
    """Drafts of a sequence that are verified together, a tree; 1 unless set."""
    speculation_type: Literal["dflash"] | None
    """Kind of drafting model."""
    compile_config: CompileConfig | Mapping[str, Any] | None
    """How forwards are compiled."""
    disable_compile: bool | None
    """Never compile."""
    continuous_batching_config: Mapping[str, Any] | None
    """Settings of a continuous scheduler."""


class ConfigOptions(FieldOptions, total=False):
    """Every field that says how to generate."""

    num_return_sequences: int | None
    """Sequences returned per prompt; 1 unless set."""
    return_dict_in_generate: bool | None
    """Return an output object, not a tensor; False unless set."""


class StoredOptions(ConfigOptions, total=False):
    """Everything that a configuration holds, where it comes from included."""

    _from_model_config: bool | None
    """Made from a model's config, not from a file of its own."""
    transformers_version: str | None
    """What wrote the file."""
