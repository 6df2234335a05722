"""The generation tests of transformers by their names, and what shows here what they show there.

Source: transformers' tests/generation/test_utils.py, the tests that its model classes inherit and
those of single cases.
"""

from __future__ import annotations

from collections.abc import Mapping

HERE: Mapping[str, str] = {
    "test_greedy_generate": "results_have_the_same_fields",
    "test_greedy_generate_dict_outputs": "results_have_the_same_fields",
    "test_greedy_generate_dict_outputs_use_cache": "results_have_the_same_fields",
    "test_sample_generate": "results_have_the_same_fields",
    "test_sample_generate_dict_output": "results_have_the_same_fields",
    "test_beam_search_generate": "results_have_the_same_fields",
    "test_beam_search_generate_dict_output": "results_have_the_same_fields",
    "test_beam_search_generate_dict_outputs_use_cache": "results_have_the_same_fields",
    "test_beam_sample_generate": "results_have_the_same_fields",
    "test_beam_sample_generate_dict_output": "results_have_the_same_fields",
    "test_group_beam_search_generate": "beams_in_groups_have_every_field",
    "test_group_beam_search_generate_dict_output": "beams_in_groups_have_every_field",
    "test_constrained_beam_search_generate": "a_forced_phrase_is_in_every_sequence",
    "test_constrained_beam_search_generate_dict_output": "a_forced_phrase_is_in_every_sequence",
    "test_contrastive_generate": "contrastive_search_has_every_field",
    "test_contrastive_generate_dict_outputs_use_cache": "contrastive_search_has_every_field",
    "test_contrastive_generate_low_memory": "contrastive_search_has_every_field",
    "test_dola_decoding_sample": "contrast_of_layers_has_every_field",
    "test_assisted_decoding_matches_greedy_search": "drafts_of_a_model_change_nothing",
    "test_assisted_decoding_sample": "drafts_of_a_model_change_nothing",
    "test_assisted_generation_early_exit": "drafts_of_a_model_change_nothing",
    "test_prompt_lookup_decoding_matches_greedy_search": "drafts_from_the_prompt_change_nothing",
    "test_generate_without_input_ids": "nothing_need_be_said_where_a_begin_token_is_known",
    "test_left_padding_compatibility": "padding_and_told_places_change_nothing",
    "test_generate_with_and_without_position_ids": "padding_and_told_places_change_nothing",
    "test_past_key_values_format": "a_call_of_the_model_has_a_cache_in_the_same_form",
    "test_generate_from_inputs_embeds": "embeddings_stand_for_their_ids",
    "test_generate_from_inputs_embeds_with_static_cache": (
        "a_static_cache_changes_nothing_and_has_the_same_room"
    ),
    "test_generate_with_static_cache": "a_static_cache_changes_nothing_and_has_the_same_room",
    "test_generate_continue_from_past_key_values": "generating_goes_on_behind_a_cache",
    "test_generate_continue_from_inputs_embeds": "generating_goes_on_behind_embeddings",
    "test_generate_with_quant_cache": (
        "a_quantised_cache_is_of_its_class_and_its_settings_are_checked"
    ),
    "test_generate_methods_with_logits_to_keep": "logits_are_kept_for_the_last_place",
    "test_assisted_decoding_with_logits_to_keep": "logits_are_kept_for_the_last_place",
    "test_transition_scores_group_beam_search_encoder_decoder": (
        "scores_of_grouped_beams_are_the_sum_of_their_tokens"
    ),
    "test_max_length_if_input_embeds": "limits_behind_embeddings_count_them",
    "test_min_length_if_input_embeds": "limits_behind_embeddings_count_them",
    "test_generate_from_inputs_embeds_with_bos_token_id_is_none": (
        "without_a_prompt_there_must_be_a_begin_token"
    ),
    "test_special_tokens_fall_back_to_model_default": "a_begin_token_is_the_calls_or_the_models",
    "test_logits_processor_not_inplace": "raw_logits_are_those_of_a_forward",
    "test_compare_unprocessed_logit_scores": "raw_logits_are_those_of_a_forward",
    "test_return_unprocessed_logit_scores": "raw_logits_are_those_of_a_forward",
    "test_default_max_length_warning": "a_default_length_is_told_of_and_a_set_one_is_not",
    "test_length_warning_assisted_generation": "drafts_keep_lengths_without_a_word",
    "test_generated_length_assisted_generation": "drafts_keep_lengths_without_a_word",
    "test_constrained_beam_search_mixin_type_checks": "words_that_are_no_lists_of_ids_are_refused",
    "test_batched_decoder_start_id": "decoders_begin_with_an_id_for_each_row",
    "test_decoder_start_id_from_config": "decoders_begin_with_an_id_for_each_row",
    "test_contrastive_search_batched": "a_row_of_contrastive_search_is_the_row_alone",
    "test_padding_input_contrastive_search_gpt2": "a_row_of_contrastive_search_is_the_row_alone",
    "test_padding_input_contrastive_search_t5": "a_row_of_contrastive_search_is_the_row_alone",
    "test_eos_token_id_int_and_list_top_k_top_sampling": "any_of_several_end_tokens_ends",
    "test_custom_stopping_criteria": "a_criterion_or_the_limit_ends_whichever_is_first",
}
"""Their names -> which test of test_generation_tests.py."""

ELSEWHERE: Mapping[str, str] = {
    "test_speculative_sampling": "tests/laws/test_samplers.py",
    "test_speculative_sampling_target_distribution": "tests/laws/test_samplers.py",
    "test_custom_stopping_criteria_overload_error": (
        "tests/stops/test_criteria.py::test_a_criterion_takes_the_place_of_the_configurations"
    ),
    "test_beam_search_example_integration": (
        "tests/api/test_prepare.py::test_encoder_states_of_the_callers_are_used"
    ),
    "test_constrained_beam_search_example_integration": (
        "tests/api/test_prepare.py::test_encoder_states_of_the_callers_are_used"
    ),
    "test_constrained_beam_search": (
        "tests/strategies/test_constraints.py::test_what_must_occur_occurs"
    ),
    "test_constrained_beam_search_mixed": (
        "tests/strategies/test_constraints.py::test_what_must_occur_occurs"
    ),
    "test_constrained_beam_search_mixed_mixin": (
        "tests/strategies/test_constraints.py::test_what_must_occur_occurs"
    ),
    "test_constrained_beam_search_example_translation_mixin": (
        "tests/strategies/test_constraints.py::test_what_must_occur_occurs"
    ),
    "test_diverse_beam_search": "tests/parity/test_recordings.py",
    "test_cfg_mixin": "tests/parity/test_random_settings.py::test_results_are_the_references",
    "test_green_red_watermark_generation": "tests/processors/test_watermarks.py",
    "test_synthid_text_watermark_generation_mean_expected_bias": (
        "tests/processors/test_watermarks.py"
    ),
    "test_per_row_stopping_criteria": (
        "tests/stops/test_stop_strings.py::"
        "test_every_way_stops_at_the_first_token_that_completes_a_string"
    ),
    "test_beam_search_advanced_stopping_criteria": (
        "tests/stops/test_stop_strings.py::test_beams_end_with_the_string"
    ),
    "test_generate_input_values_as_encoder_kwarg": (
        "tests/bridge/test_encoders.py::test_the_first_argument_is_what_the_encoder_reads"
    ),
    "test_generate_non_nlp_input_ids_as_kwarg": (
        "tests/api/test_prepare.py::test_the_prompt_by_position_is_the_prompt_by_name"
    ),
    "test_model_kwarg_encoder_signature_filtering": (
        "tests/bridge/test_encoders.py::test_what_cannot_be_honoured_is_refused"
    ),
    "test_default_assisted_generation": (
        "tests/config/test_generation_config.py::test_the_defaults_are_the_references"
    ),
    "test_model_kwarg_assisted_decoding_decoder_only": (
        "tests/bridge/test_assisted.py::test_tokens_are_those_of_the_reference"
    ),
    "test_model_kwarg_assisted_decoding_encoder_decoder": (
        "tests/api/test_second_encoders.py::test_wrapped_models_draft_for_each_other"
    ),
    "test_assisted_decoding_encoder_decoder_shared_encoder": (
        "tests/api/test_second_encoders.py::test_states_of_both_encoders_can_be_brought"
    ),
    "test_validate_assistant": (
        "tests/api/test_second_encoders.py::test_what_a_second_encoder_cannot_read_is_refused"
    ),
    "test_assisted_decoding_num_assistant_tokens_heuristic_schedule": (
        "tests/api/test_drafts.py::test_heuristic_drafts_grow_while_they_are_right"
    ),
    "test_assisted_decoding_num_assistant_tokens_heuristic_transient_schedule": (
        "tests/api/test_drafts.py::test_heuristic_drafts_start_anew_with_every_call"
    ),
    "test_speculative_decoding_equals_regular_decoding": (
        "tests/engine/test_alternatives.py::"
        "test_an_assistant_with_another_tokenizer_makes_one_draft"
    ),
    "test_prompt_lookup_decoding_stops_at_eos": (
        "tests/api/test_drafts.py::test_stops_hold_within_drafts"
    ),
    "test_max_time": "tests/stops/test_stops.py::test_time_ends_what_its_deadline_has_passed",
    "test_prompts": (
        "tests/api/test_custom_and_healing.py::test_a_prompt_is_healed_as_by_the_reference"
    ),
    "test_prepare_inputs_for_generation_decoder_llm": (
        "tests/api/test_custom_and_healing.py::"
        "test_a_loop_with_a_cache_gives_the_same_in_the_reference"
    ),
    "test_prepare_inputs_for_generation_encoder_decoder_llm": (
        "tests/api/test_custom_and_healing.py::"
        "test_a_loop_with_a_cache_gives_the_same_in_the_reference"
    ),
}
"""Their names -> which test, or file of tests, shows it."""

INTERNAL: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "test_model_parallel_beam_search",
            "test_assisted_decoding_in_different_gpu",
            "test_assisted_decoding_model_in_gpu_assistant_in_cpu",
            "test_generate_with_static_cache_multi_gpu",
            "test_init_static_cache_multi_gpu",
        ),
        "a model is on one device, or on ranks: docs/guide/parallel.md",
    ),
    "test_offloaded_cache_implementation": "offloaded caches are refused: docs/guide/switching.md",
    **dict.fromkeys(
        ("test_generate_compile_model_forward", "test_generate_compile_fullgraph_tiny"),
        "forwards are not compiled: docs/guide/switching.md",
    ),
    **dict.fromkeys(
        ("test_eager_matches_sdpa_generate", "test_eager_matches_fa2_generate"),
        "there is one attention, which equals theirs",
    ),
    "test_generate_with_head_masking": "no model of transformers takes masks of heads now",
    "test_inherits_generation_mixin": "about their classes",
    "test_stop_sequence_stopping_criteria": "there are no pipelines: docs/guide/switching.md",
    **dict.fromkeys(
        (
            "test_no_intersection",
            "test_complete_overlap",
            "test_partial_overlap",
            "test_no_new_tokens",
            "test_update_candidate_strategy_no_matches_short",
            "test_update_candidate_strategy_with_mix_matches_3",
            "test_update_candidate_strategy_with_matches_4",
            "test_update_candidate_strategy_with_matches_3",
            "test_update_candidate_strategy_with_matches_2",
            "test_update_candidate_strategy_with_matches_1",
        ),
        "about members of their classes that draft, which are none here: docs/guide/switching.md",
    ),
}
"""Their names -> why nothing here is like what they test."""
