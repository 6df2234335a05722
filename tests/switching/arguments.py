"""Every argument of `model.generate`: a value that asks for something, what must stand beside it,
and where it is refused or changes nothing.

Without an entry in `REFUSED` or `WITHOUT_EFFECT` an argument must change what comes back, or the
request that the engine gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar

import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.strategies import Greedy, Reads, strategy
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

Given = dict[str, Any]
BASE: Given = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
TOKENIZER = tiny_tokenizer(320)
IDS = TOKENIZER.encode("Is i")  # three ids, the last of which could go on as another
PROMPT = torch.tensor([IDS])

SAMPLED = {"do_sample": True, "seed": 3}
BEAMS = {"num_beams": 3}
OBJECT = {"return_dict_in_generate": True}
ASSISTANT = tiny_llama(seed=1, vocab_size=320, hidden_size=16)
OTHER = tiny_tokenizer(300)
DRAFTED = {"assistant_model": ASSISTANT}
RECORDED = NamedTemporaryFile(suffix=".jsonl")  # noqa: SIM115  (it goes with the process)
TRANSLATED = {**DRAFTED, "assistant_tokenizer": OTHER, "tokenizer": TOKENIZER}
TEXTS = {"tokenizer": TOKENIZER, "eos_token_id": 2}
TWICE = {"no_repeat_ngram_size": 1}


def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, scores.argmax(-1)] = -torch.inf
    return scores


def stop_at_5(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] >= 5)


class Recorder:
    """A streamer whose text is part of what comes back."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


class Louder(es.Hook):
    gives = ("embeds",)

    def before_step(self, step: es.BeforeStep) -> dict[str, torch.Tensor]:
        return {"embeds": step.embeds.flip(-1)}


@strategy("nth_best")
@dataclass(frozen=True)
class Nth(Greedy):
    """The token of the n-th highest score."""

    n: int = 2
    name: ClassVar[str] = "nth_best"
    reads: ClassVar[Reads] = Reads(alone=True)

    def pick(self, batch: Any, scores: Any, earlier: Any = ()) -> tuple[torch.Tensor, ...]:
        return (scores.whole().values.topk(self.n).indices[:, -1],)


def loop(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return input_ids


# name -> (value, what must stand beside it)
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    # how long
    "max_length": (6, {"max_new_tokens": None}),
    "max_new_tokens": (3, {}),
    "min_length": (8, {"eos_token_id": "second"}),
    "min_new_tokens": (5, {"eos_token_id": "second"}),
    "early_stopping": ("never", BEAMS),
    "max_time": (0.0, {}),
    "stop_strings": ("text", {"tokenizer": TOKENIZER}),
    # how tokens are chosen
    "do_sample": (True, {"seed": 3}),
    "num_beams": (3, {}),
    "num_return_sequences": (2, BEAMS),
    "penalty_alpha": (0.6, {"top_k": 4}),
    "length_penalty": (-2.0, BEAMS),
    "temperature": (3.0, SAMPLED),
    "top_k": (2, SAMPLED),
    "top_p": (0.2, SAMPLED),
    "min_p": (0.5, SAMPLED),
    "top_h": (0.2, SAMPLED),
    "typical_p": (0.3, SAMPLED),
    "epsilon_cutoff": (0.01, SAMPLED),
    "eta_cutoff": (0.01, SAMPLED),
    "top_n_sigma": (0.5, SAMPLED),
    "xtc_probability": (1.0, SAMPLED),
    "xtc_threshold": (0.4, {**SAMPLED, "xtc_probability": 0.5}),
    "mirostat_tau": (2.0, SAMPLED),
    "mirostat_eta": (0.9, {**SAMPLED, "mirostat_tau": 2.0}),
    "dynatemp_range": (0.5, SAMPLED),
    "dynatemp_exponent": (2.0, {**SAMPLED, "dynatemp_range": 0.5}),
    "sampler_order": (["top_p", "temperature"], {**SAMPLED, "temperature": 2.0, "top_p": 0.5}),
    # what becomes of the scores
    "repetition_penalty": (2.0, {}),
    "encoder_repetition_penalty": (3.0, {}),
    "no_repeat_ngram_size": (1, {}),
    "encoder_no_repeat_ngram_size": (1, {}),
    "bad_words_ids": ("first", {}),
    "renormalize_logits": (True, {}),
    "forced_bos_token_id": (9, {}),
    "forced_eos_token_id": (9, {}),
    "remove_invalid_values": (True, {}),
    "exponential_decay_length_penalty": ((1, 3.0), {"eos_token_id": 9}),
    "suppress_tokens": ("first", {}),
    "begin_suppress_tokens": ("first", {}),
    "sequence_bias": ({(9,): 50.0}, {}),
    "token_healing": (True, {"tokenizer": TOKENIZER}),
    "guidance_scale": (3.0, {}),
    "watermarking_config": (es.WatermarkingConfig(bias=9.0), {}),
    "presence_penalty": (2.0, {}),
    "frequency_penalty": (2.0, {}),
    "penalty_scope": ("all", {"presence_penalty": 2.0}),
    "logit_bias": ({9: 50.0}, {}),
    "dry_multiplier": (3.0, {}),
    "dry_base": (3.0, {"dry_multiplier": 1.0}),
    "dry_allowed_length": (1, {"dry_multiplier": 1.0}),
    "dry_sequence_breakers": ([9], {"dry_multiplier": 1.0}),
    "diversity_penalty": (0.5, {}),
    # what is kept and returned
    "use_cache": (False, {}),
    "cache_implementation": ("quantized", {}),
    "cache_config": ({"nbits": 8}, {"cache_implementation": "quantized"}),
    "max_cache_len": (32, {}),
    "prefill_chunk_size": (2, {}),
    "return_dict_in_generate": (True, {}),
    **dict.fromkeys(
        ("output_scores", "output_logits", "output_hidden_states", "output_attentions"),
        (True, OBJECT),
    ),
    # tokens with a meaning
    "pad_token_id": (7, {**SAMPLED, "eos_token_id": "second", "num_return_sequences": 8}),
    "bos_token_id": (9, {}),
    "eos_token_id": ("second", {}),
    "decoder_start_token_id": (9, {}),
    # drafts
    "prompt_lookup_num_tokens": (3, {}),
    "max_matching_ngram_size": (1, {"prompt_lookup_num_tokens": 3}),
    "assistant_model": (ASSISTANT, {}),
    "assistant_tokenizer": (OTHER, {"assistant_model": ASSISTANT, "tokenizer": TOKENIZER}),
    "assistant_early_exit": (1, {}),
    "draft_corpus": (es.Corpus([[5, 6, 7]]), {}),
    "num_assistant_tokens": (5, DRAFTED),
    "num_assistant_tokens_schedule": ("heuristic", DRAFTED),
    "assistant_confidence_threshold": (0.1, DRAFTED),
    "assistant_lookbehind": (5, TRANSLATED),
    "target_lookbehind": (5, TRANSLATED),
    "assistant_ensemble_weight": (0.5, DRAFTED),
    "draft_verification": ("rejection", {**SAMPLED, **DRAFTED}),
    "num_drafts": (2, DRAFTED),
    "disable_compile": (True, {}),
    # objects
    "generation_config": (es.GenerationConfig(repetition_penalty=2.0), {}),
    "logits_processor": ([ban], {}),
    "stopping_criteria": ([stop_at_5], {}),
    "prefix_allowed_tokens_fn": (lambda batch, ids: [5, 6], {}),
    "allowed_sequences": ([[9, 8], [9, 7]], {"eos_token_id": 2}),
    "n_best": (4, BEAMS),
    "best_of": (3, SAMPLED),
    "majority": (len, {**SAMPLED, "best_of": 3}),
    "scorer": (len, {**SAMPLED, "best_of": 3}),
    "amateur_model": (tiny_llama(vocab_size=320, hidden_size=8), {}),
    **{
        name: (0.5, {"amateur_model": tiny_llama(vocab_size=320, hidden_size=8)})
        for name in ("contrast_alpha", "contrast_beta")
    },
    "seed": (4, {"do_sample": True}),
    "logprobs": (2, OBJECT),
    "prompt_logprobs": (2, OBJECT),
    "record": (RECORDED.name, {}),
    "tokenizer": (TOKENIZER, OBJECT),
    "streamer": (Recorder(), {}),
    "custom_generate": (loop, {}),
    "negative_prompt_ids": (PROMPT.flip(1), {"guidance_scale": 2.0}),
    "negative_prompt_attention_mask": (
        torch.tensor([[0, 1, 1]]),
        {"guidance_scale": 2.0, "negative_prompt_ids": PROMPT.flip(1)},
    ),
    # model inputs
    "input_ids": (PROMPT, {}),
    "attention_mask": (torch.tensor([[0, 1, 1]]), {}),
    "inputs_embeds": (torch.zeros(1, 3, 16, dtype=torch.float64), {}),
    "position_ids": (torch.tensor([[0, 5, 9]]), {}),
    "decoder_input_ids": (PROMPT, {}),
    "decoder_attention_mask": (torch.ones(1, 3).long(), {}),
    "encoder_outputs": ((torch.zeros(1, 3, 16),), {}),
    "assistant_encoder_outputs": ((torch.zeros(1, 3, 16),), {}),
    "past_key_values": (es.DynamicCache, {}),
    "prefix": (es.Prefix, {}),
    "hooks": ([Louder()], {}),
    "adapter_names": ("formal", {}),
    "adapters": ({"formal": 0.5}, {}),
    "steer": ({0: 9 * torch.ones(16)}, {}),
    # searches and layers
    "num_beam_groups": (2, {"num_beams": 4, "diversity_penalty": 0.5}),
    "dola_layers": ("low", {}),
    "constraints": ([es.PhrasalConstraint([9, 8])], BEAMS),
    "force_words_ids": ([[9, 8]], BEAMS),
    # what texts have to follow
    "schema": ({"type": "integer"}, TEXTS),
    "regex": ("[a-z]+", TEXTS),
    "grammar": ('start: "a" start | "b"', TEXTS),
    "choices": (["yes", "no"], TEXTS),
    "strategy": ("beam", {}),
    "strategy_options": ({"n": 3}, {"strategy": Nth.name}),
    # what is refused with a reason
    "use_mtp": (True, {}),
    "low_memory": (True, {}),
    "is_assistant": (True, {}),
    "speculation_type": ("dflash", {}),
    "compile_config": (es.CompileConfig(), {}),
    "continuous_batching_config": ({"a": 1}, {}),
    "synced_gpus": (True, {}),
    "decoder_inputs_embeds": (torch.zeros(1, 3, 16), {}),
    "cache_position": (torch.arange(3), {}),
    "cache_params": (object(), {}),
    "pixel_values": (torch.zeros(1), {}),
    "pixel_values_videos": (torch.zeros(1), {}),
    "input_features": (torch.zeros(1), {}),
    "mm_encoder_outputs": (object(), {}),
    "token_type_ids": (PROMPT, {}),
    "trust_remote_code": (True, {}),
    "language": ("en", {}),
    "task": ("transcribe", {}),
    "return_timestamps": (True, {}),
    "return_segments": (True, {}),
    "prompt_ids": (torch.tensor([1]), {}),
    "condition_on_prev_tokens": (True, {}),
    "is_multilingual": (True, {}),
    "prompt_condition_type": ("all-segments", {}),
    "compression_ratio_threshold": (2.4, {}),
    "logprob_threshold": (-1.0, {}),
    "no_speech_threshold": (0.6, {}),
    "timeout": (1e-9, {}),
    "logits_to_keep": (5, {}),
    "use_model_defaults": (True, {}),
    "return_legacy_cache": (True, {}),
}

EVERYWHERE = ("model.generate", "es.generate", "es.stream", "es.open")
OF_TEXTS = ("es.generate", "es.stream", "es.open")
_LATER = (
    *("use_mtp", "low_memory", "is_assistant", "speculation_type", "compile_config"),
    *("continuous_batching_config", "decoder_inputs_embeds", "cache_position"),
    *("cache_params", "pixel_values", "pixel_values_videos", "input_features"),
    *("mm_encoder_outputs", "token_type_ids", "trust_remote_code", "logits_to_keep"),
    *("language", "task", "return_timestamps", "return_segments", "prompt_ids"),
    *("condition_on_prev_tokens", "is_multilingual", "prompt_condition_type"),
    *("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"),
    *("use_model_defaults", "return_legacy_cache"),
    # of a model with an encoder
    *("decoder_input_ids", "decoder_attention_mask"),
    *("encoder_outputs", "assistant_encoder_outputs"),
)
IN_PROMPTS = ("input_ids", "attention_mask", "inputs_embeds", "position_ids")
"""What stands in a prompt that is a mapping, and is no keyword of a call about prompts."""
_RECTANGLES = (
    *("use_cache", "prefill_chunk_size", "max_cache_len", "past_key_values"),
    *("streamer", "custom_generate", "negative_prompt_ids", "negative_prompt_attention_mask"),
)
REFUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LATER, EVERYWHERE),
    **dict.fromkeys((*_RECTANGLES, "synced_gpus"), OF_TEXTS),
    **dict.fromkeys(("output_scores", "output_logits"), ("es.generate", "es.stream")),
    **dict.fromkeys(("output_hidden_states", "output_attentions"), ("es.stream",)),
    "timeout": ("model.generate", "es.open"),
    "adapter_names": EVERYWHERE,  # by this model, which has none
    "adapters": EVERYWHERE,
}
"""Argument -> the faces on which it is an error that says what to do."""

WITHOUT_EFFECT: dict[str | tuple[str, str], str] = {
    ("es.stream", "return_dict_in_generate"): "a stream's results are objects anyway",
    ("es.open", "return_dict_in_generate"): "a run's result is an object anyway",
    ("es.open", "output_scores"): "a step shows its scores anyway",
    ("es.open", "output_logits"): "a step shows its logits anyway",
    "synced_gpus": "the weights of this model are whole on each process",
    "use_cache": "the tokens are those of a call with a cache",
    "prefill_chunk_size": "the tokens are those of a prompt fed at once",
    "max_cache_len": "for a static cache; a warning says so",
    "renormalize_logits": "greedy choices are the same",
    "remove_invalid_values": "there are none here",
    "forced_bos_token_id": "for a prompt of one id; a warning says so",
    "bos_token_id": "for a call without a prompt",
    "decoder_start_token_id": "for a model with an encoder; a warning says so",
    "diversity_penalty": "for groups of beams; a warning says so",
    "disable_compile": "nothing is compiled",
    "input_ids": "it is the prompt that was given anyway",
}
"""Argument, or face and argument -> why nothing changes in this call."""


def resolved(model: LanguageModel, name: str, plain: list[int] | None = None) -> tuple[Any, Given]:
    """The value that is given, and what stands beside it; `plain`: what a plain run says, unless
    that is said after `PROMPT`."""
    value, beside = ASKED[name]
    new = model.generate(PROMPT, **BASE)[0, 3:].tolist() if plain is None else plain
    for key, one in {name: value, **beside}.items():
        if isinstance(one, str) and one in ("first", "second", "text"):
            one = {"first": new[0], "second": new[1], "text": TOKENIZER.decode(new[:2])}[one]
            one = [[one]] if key == "bad_words_ids" else [one] if "suppress" in key else one
        if isinstance(one, Recorder):
            one.seen.clear()
        if one is es.DynamicCache:
            one = es.DynamicCache()
        if one is es.Prefix:
            # What a tiny Whisper hears, where the model reads no ids.
            read: Any = IDS if model.core.source is None else {"input_features": torch.ones(5, 32)}
            one = es.prefill(model, prompt=read)
        if key == name:
            value = one
        else:
            beside = {**beside, key: one}
    return value, {**BASE, **beside}
