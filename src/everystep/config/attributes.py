"""The fields of a generation configuration as its attributes, None where unsaid.

Written by `scripts/keywords` from `fields.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from everystep.config.nested import CompileConfig, Watermark


class FieldAttributes:
    """The attributes of a configuration, for type checkers."""

    max_length: int | None
    max_new_tokens: int | Sequence[int] | None
    min_length: int | None
    min_new_tokens: int | Sequence[int] | None
    early_stopping: bool | Literal["never"] | None
    max_time: float | None
    stop_strings: str | Sequence[str] | None
    do_sample: bool | None
    num_beams: int | None
    use_mtp: bool | None
    num_return_sequences: int | None
    penalty_alpha: float | None
    dola_layers: Literal["low", "high"] | Sequence[int] | None
    num_beam_groups: int | None
    diversity_penalty: float | None
    constraints: Sequence[Any] | None
    force_words_ids: Sequence[Sequence[int] | Sequence[Sequence[int]]] | None
    length_penalty: float | None
    low_memory: bool | None
    use_cache: bool | None
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
    cache_config: Mapping[str, Any] | None
    max_cache_len: int | None
    prefill_chunk_size: int | None
    temperature: float | Sequence[float] | None
    top_k: int | Sequence[int] | None
    top_p: float | Sequence[float] | None
    min_p: float | Sequence[float] | None
    top_h: float | Sequence[float] | None
    typical_p: float | Sequence[float] | None
    epsilon_cutoff: float | Sequence[float] | None
    eta_cutoff: float | Sequence[float] | None
    repetition_penalty: float | Sequence[float] | None
    encoder_repetition_penalty: float | Sequence[float] | None
    no_repeat_ngram_size: int | Sequence[int] | None
    encoder_no_repeat_ngram_size: int | Sequence[int] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    renormalize_logits: bool | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    remove_invalid_values: bool | None
    exponential_decay_length_penalty: tuple[int, float] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]] | None
    token_healing: bool | None
    guidance_scale: float | None
    watermarking_config: Watermark | Mapping[str, Any] | None
    presence_penalty: float | Sequence[float] | None
    frequency_penalty: float | Sequence[float] | None
    penalty_scope: Literal["all", "new"] | None
    logit_bias: Mapping[int, float] | None
    dry_multiplier: float | Sequence[float] | None
    dry_base: float | Sequence[float] | None
    dry_allowed_length: int | Sequence[int] | None
    dry_sequence_breakers: Sequence[str | int] | None
    top_n_sigma: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    sampler_order: Sequence[str] | None
    output_attentions: bool | None
    output_hidden_states: bool | None
    output_scores: bool | None
    output_logits: bool | None
    return_dict_in_generate: bool | None
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | Sequence[int] | None
    decoder_start_token_id: int | Sequence[int] | None
    is_assistant: bool | None
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "heuristic_transient"] | None
    assistant_confidence_threshold: float | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    assistant_early_exit: int | None
    assistant_lookbehind: int | None
    target_lookbehind: int | None
    assistant_ensemble_weight: float | None
    draft_verification: Literal["matching", "rejection"] | None
    num_drafts: int | None
    speculation_type: Literal["dflash"] | None
    compile_config: CompileConfig | Mapping[str, Any] | None
    disable_compile: bool | None
    continuous_batching_config: Mapping[str, Any] | None
    _from_model_config: bool | None
    transformers_version: str | None
