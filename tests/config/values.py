"""Which fields have a default, which are ours, and a value other than its default for each."""

from __future__ import annotations

from typing import Any

from everystep.config import (
    FIELDS,
    CompileConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

DEFAULTS = {name: field.default for name, field in FIELDS.items() if field.default is not None}
# The fields that transformers does not have.
OURS = {
    *("presence_penalty", "frequency_penalty", "penalty_scope", "logit_bias"),
    *("dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_sequence_breakers", "top_n_sigma", "xtc_probability"),
    *("xtc_threshold", "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent"),
    *("sampler_order", "draft_verification", "num_drafts"),
}
GREEN = WatermarkingConfig(greenlist_ratio=0.5, bias=1.5, seeding_scheme="selfhash")
SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=5, keys=[654, 400], debug_mode=True)
# A value other than the default for every field that JSON can hold.
VALUES: dict[str, Any] = {
    "max_length": 99, "max_new_tokens": 7, "min_length": 3, "min_new_tokens": 2,
    "early_stopping": "never", "max_time": 1.5, "stop_strings": ["a", "b"], "do_sample": True,
    "num_beams": 6, "use_mtp": True, "num_return_sequences": 2, "penalty_alpha": 0.6,
    "dola_layers": [1, 3], "num_beam_groups": 3, "diversity_penalty": 0.5,
    "force_words_ids": [[1, 2], [[3], [4, 5]]], "length_penalty": 0.5, "low_memory": True,
    "use_cache": False, "cache_implementation": "static", "cache_config": {"nbits": 4},
    "max_cache_len": 512, "prefill_chunk_size": 64, "temperature": 0.7, "top_k": 10,
    "top_p": 0.9, "min_p": 0.05, "top_h": 0.4, "typical_p": 0.8, "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02, "repetition_penalty": 1.2, "encoder_repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 4, "bad_words_ids": [[1], [2, 3]],
    "renormalize_logits": True, "forced_bos_token_id": 5, "forced_eos_token_id": [6, 7],
    "remove_invalid_values": True, "exponential_decay_length_penalty": (5, 1.1),
    "suppress_tokens": [8], "begin_suppress_tokens": [9],
    "sequence_bias": {(1, 2): 1.0, (3,): float("-inf")}, "token_healing": True,
    "guidance_scale": 1.5, "watermarking_config": SYNTHID, "output_attentions": True,
    "output_hidden_states": True, "output_scores": True, "output_logits": True,
    "return_dict_in_generate": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 3],
    "decoder_start_token_id": [4, 5], "is_assistant": True, "num_assistant_tokens": 4,
    "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.3,
    "prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3, "assistant_early_exit": 4,
    "assistant_lookbehind": 5, "target_lookbehind": 6, "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash", "compile_config": CompileConfig(mode="default", dynamic=True),
    "disable_compile": True, "continuous_batching_config": {"page_size": 128},
    "presence_penalty": 0.5, "frequency_penalty": -0.25, "penalty_scope": "new",
    "logit_bias": {3: 1.5, 40: -2.0}, "dry_multiplier": 0.8, "dry_base": 1.5,
    "dry_allowed_length": 3, "dry_sequence_breakers": ["\n", 7], "top_n_sigma": 1.5,
    "xtc_probability": 0.5, "xtc_threshold": 0.2, "mirostat_tau": 5.0, "mirostat_eta": 0.2,
    "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "sampler_order": ["min_p", "temperature"],
    "draft_verification": "rejection", "num_drafts": 3,
    "transformers_version": "5.23.0", "_from_model_config": True,
}  # fmt: skip
