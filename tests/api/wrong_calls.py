"""Wrong calls of `generate`, each for another reason: what is passed, the error, parts of its text.

The text names the argument, what it got, and what to do instead.
"""

from __future__ import annotations

from typing import Any

import torch

from everystep.config import GenerationConfig
from everystep.errors import (
    EverystepError,
    ModelClassError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
)
from everystep.testing.tokenizer import tiny_tokenizer

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
EMBEDS = torch.zeros(2, 3, 16)
MASK = torch.ones(2, 3, dtype=torch.long)
TOKENIZER = tiny_tokenizer(320)

Wrong = tuple[str, dict[str, Any], type[EverystepError], list[str]]
Bad, Unknown, Absent, Class = RequestError, UnknownArgumentError, UnsupportedError, ModelClassError


def sampled(**values: Any) -> dict[str, Any]:
    return {"do_sample": True, **values}


def embedded(**values: Any) -> dict[str, Any]:
    return {"input_ids": None, "inputs_embeds": EMBEDS, **values}


# fmt: off
NAMES: list[Wrong] = [
    ("misspelt", {"max_new_token": 5}, Unknown, ["max_new_token", "max_new_tokens"]),
    ("unknown", {"wibble": 1}, Unknown, ["wibble", "help(model.generate)"]),
    ("several unknown", {"num_beans": 2, "temprature": 1.0}, Unknown,
     ["'num_beans', 'temprature'", "num_beams instead of num_beans", "temperature instead"]),
    ("misspelt input", {"input_id": IDS}, Unknown, ["input_id", "input_ids"]),
    ("misspelt object", {"streamers": None}, Unknown, ["streamers", "streamer"]),
    ("segments", {"token_type_ids": IDS}, Absent,
     ["token_type_ids", "segments", "return_token_type_ids=False"]),
    ("remote code", {"trust_remote_code": True}, Absent, ["trust_remote_code", "custom_generate"]),
    ("kept logits", {"logits_to_keep": 2}, Absent, ["logits_to_keep", "every position"]),
    ("model defaults", {"use_model_defaults": True}, Absent, ["use_model_defaults", "checkpoint"]),
    ("legacy cache", {"return_legacy_cache": True}, Absent, ["return_legacy_cache", "object"]),
    ("images", {"pixel_values": EMBEDS}, Absent, ["pixel_values", "images", "inputs_embeds"]),
    ("sounds", {"input_features": EMBEDS}, Absent, ["input_features", "sounds", "inputs_embeds"]),
    ("recurrent state", {"cache_params": object()}, Absent, ["cache_params", "input_ids"]),
    ("assistant", {"assistant_model": object()}, Absent,
     ["assistant_model", "prompt_lookup_num_tokens"]),
    ("other tokenizer", {"assistant_tokenizer": object()}, Absent,
     ["assistant_tokenizer", "prompt_lookup_num_tokens"]),
    ("processes", {"synced_gpus": True}, Absent, ["synced_gpus", "processes"]),
    ("repository", {"custom_generate": "some/repository"}, Absent,
     ["custom_generate", "'some/repository'", "pass it"]),
]
PROMPTS: list[Wrong] = [
    ("twice", {"inputs": IDS}, Bad, ["twice", "input_ids"]),
    ("float ids", {"input_ids": IDS.float()}, Bad, ["input_ids", "integers", "float32"]),
    ("flags as ids", {"input_ids": IDS > 0}, Bad, ["input_ids", "integers", "bool"]),
    ("flat ids", {"input_ids": IDS[0]}, Bad, ["(batch, length)", "(3,)", "[None]"]),
    ("deep ids", {"input_ids": IDS[None]}, Bad, ["input_ids", "(1, 2, 3)"]),
    ("no ids", {"input_ids": IDS[:, :0]}, Bad, ["input_ids", "(2, 0)"]),
    ("no rows", {"input_ids": IDS[:0]}, Bad, ["input_ids", "(0, 3)"]),
    ("text", {"input_ids": "Hello"}, Bad, ["input_ids", "rectangle of ids", "str"]),
    ("large id", {"input_ids": IDS + 1000}, Bad, ["vocabulary", "1010", "tokenizer"]),
    ("negative id", {"input_ids": IDS - 100}, Bad, ["vocabulary", "-95"]),
    ("ragged ids", {"input_ids": [[5], [6, 7]]}, Bad, ["rectangle", "attention_mask"]),
    ("nothing", {"input_ids": None, "bos_token_id": None}, Bad, ["start from", "bos_token_id"]),
    ("begin outside", {"input_ids": None, "bos_token_id": 99}, Bad, ["bos_token_id", "99"]),
    ("mask shape", {"attention_mask": torch.ones(2, 4)}, Bad,
     ["attention_mask", "(2, 3)", "(2, 4)"]),
    ("square mask", {"attention_mask": torch.ones(2, 1, 3, 3)}, Bad,
     ["attention_mask", "(2, 3)", "(2, 1, 3, 3)"]),
    ("mask value", {"attention_mask": torch.full((2, 3), 2)}, Bad, ["0 and 1", "2"]),
    ("mask hole", {"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, Bad,
     ["row 0", "hole", "[1, 0, 1]"]),
    ("mask empty", {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, Bad,
     ["row 1", "empty", "start token"]),
    ("pad in the middle", {"input_ids": torch.tensor([[5, 3, 7]])}, Bad,
     ["row 0", "pad id", "attention_mask"]),
    ("pads alone", {"input_ids": torch.tensor([[3, 3, 3]])}, Bad, ["row 0", "empty", "pad id"]),
    ("flat embeddings", embedded(inputs_embeds=EMBEDS[0]), Bad,
     ["inputs_embeds", "hidden", "(3, 16)"]),
    ("integer embeddings", embedded(inputs_embeds=EMBEDS.long()), Bad,
     ["inputs_embeds", "floating point"]),
    ("embeddings of another kind", embedded(inputs_embeds=[[1.0]]), Bad, ["inputs_embeds", "list"]),
    ("wide embeddings", embedded(inputs_embeds=torch.zeros(2, 3, 17)), Bad,
     ["inputs_embeds", "16 values", "17", "get_input_embeddings"]),
    ("empty embeddings", embedded(inputs_embeds=EMBEDS[:, :0]), Bad, ["inputs_embeds", "empty"]),
    ("embeddings and ids", {"inputs_embeds": EMBEDS[:, :2]}, Bad,
     ["inputs_embeds and input_ids", "(2, 2)"]),
    ("positions", {"position_ids": torch.arange(5)[None]}, Bad, ["position_ids", "(1, 5)"]),
    ("positions of more rows", {"position_ids": torch.zeros(3, 3).long()}, Bad,
     ["position_ids", "(3, 3)"]),
    ("broken positions", {"position_ids": torch.rand(2, 3)}, Bad,
     ["position_ids", "integers", "float32"]),
    ("listed positions", {"position_ids": [0, 1, 2]}, Bad, ["position_ids", "list"]),
    ("decoder", {"decoder_input_ids": IDS}, Bad, ["decoder_input_ids", "without an encoder"]),
    ("decoder mask", {"decoder_attention_mask": MASK}, Bad, ["decoder_attention_mask", "encoder"]),
    ("encoder states", {"encoder_outputs": (EMBEDS,)}, Bad, ["encoder_outputs", "encoder"]),
]
LENGTHS: list[Wrong] = [
    ("full", {"max_length": 3}, Bad, ["no room", "max_length=3", "3 positions", "max_new_tokens"]),
    ("full of embeddings", embedded(max_length=2), Bad, ["no room", "max_length=2", "3 positions"]),
    ("no tokens", {"max_new_tokens": 0}, Bad, ["max_new_tokens", "at least 1", "got 0"]),
    ("negative length", {"max_length": -5}, Bad, ["max_length", "-5"]),
    ("broken length", {"max_new_tokens": 2.5}, Bad, ["max_new_tokens", "integer", "2.5"]),
    ("length as text", {"max_new_tokens": "ten"}, Bad, ["max_new_tokens", "'ten'"]),
    ("minimum beyond", {"min_new_tokens": 9, "max_new_tokens": 4}, Bad,
     ["min_new_tokens", "cannot be reached", "max_new_tokens=4"]),
    ("minimum behind the prompt", {"min_new_tokens": 4, "max_length": 6}, Bad,
     ["min_new_tokens=4", "prompt of 3", "at most 3", "max_length=6"]),
    ("whole minimum beyond", {"min_length": 9, "max_new_tokens": 4}, Bad,
     ["min_length=9", "at most 7", "max_new_tokens=4"]),
    ("negative minimum", {"min_length": -1}, Bad, ["min_length", "-1"]),
    ("time", {"max_time": -1.0}, Bad, ["max_time", "at least 0", "-1.0"]),
    ("chunk", {"prefill_chunk_size": 0}, Bad, ["prefill_chunk_size", "at least 1"]),
    ("chunk without cache", {"prefill_chunk_size": 2, "use_cache": False}, Bad,
     ["prefill_chunk_size=2", "use_cache=False"]),
    ("cache flag", {"use_cache": "no"}, Bad, ["use_cache", "True or False", "'no'"]),
]
CHOICES: list[Wrong] = [
    ("configuration", {"generation_config": {"top_k": 5}}, Bad,
     ["generation_config", "dict", "from_dict"]),
    ("sampling flag", {"do_sample": 1}, Bad, ["do_sample", "True or False", "got 1"]),
    ("cold", sampled(temperature=0.0), Bad, ["temperature", "do_sample=False"]),
    ("colder", sampled(temperature=-1.0), Bad, ["temperature", "-1.0"]),
    ("temperature unused", {"temperature": 0.5, "do_sample": False}, Bad,
     ["temperature=0.5", "do_sample=False", "do_sample=True"]),
    ("top_p unused", {"top_p": 0.5, "generation_config": GenerationConfig(do_sample=False)}, Bad,
     ["top_p=0.5", "do_sample=False"]),
    ("top_p", sampled(top_p=2.0), Bad, ["top_p", "from 0 to 1", "2.0"]),
    ("top_k", sampled(top_k=-1), Bad, ["top_k", "-1"]),
    ("min_p", sampled(min_p=1.5), Bad, ["min_p", "1.5"]),
    ("top_h", sampled(top_h=0.0), Bad, ["top_h", "above 0"]),
    ("typical_p", sampled(typical_p=0.0), Bad, ["typical_p", "above 0"]),
    ("epsilon", sampled(epsilon_cutoff=1.0), Bad, ["epsilon_cutoff", "below 1"]),
    ("eta", sampled(eta_cutoff=-0.1), Bad, ["eta_cutoff", "-0.1"]),
    ("beams", {"num_beams": 0}, Bad, ["num_beams", "at least 1"]),
    ("returns", {"num_beams": 2, "num_return_sequences": 3}, Bad,
     ["num_return_sequences=3", "num_beams=2"]),
    ("greedy returns", {"num_return_sequences": 2}, Bad, ["num_return_sequences", "do_sample"]),
    ("early", {"num_beams": 2, "early_stopping": "maybe"}, Bad,
     ["early_stopping", "never", "maybe"]),
    ("beam length", {"num_beams": 1, "length_penalty": 2.0}, Bad,
     ["length_penalty=2.0", "num_beams=1"]),
    ("lookup", {"num_beams": 2, "prompt_lookup_num_tokens": 3}, Bad,
     ["prompt_lookup_num_tokens", "num_beams"]),
    ("lookup and contrast", {"penalty_alpha": 0.6, "top_k": 4, "prompt_lookup_num_tokens": 3}, Bad,
     ["prompt_lookup_num_tokens", "penalty_alpha"]),
    ("contrast", {"penalty_alpha": 0.6, "do_sample": True}, Bad,
     ["penalty_alpha=0.6", "do_sample=True"]),
    ("outputs", {"output_scores": True, "return_dict_in_generate": False}, Bad,
     ["output_scores=True", "return_dict_in_generate=True"]),
    ("seed", {"seed": "seven"}, Bad, ["seed", "seven"]),
    ("seeds", {"seed": [1, 2, 3]}, Bad, ["seed", "[1, 2, 3]", "2 of them"]),
    ("seed flag", {"seed": True}, Bad, ["seed", "True"]),
    ("groups", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, Absent,
     ["num_beam_groups", "diverse beams", "num_beams"]),
    ("uneven groups", {"num_beams": 3, "num_beam_groups": 2}, Bad,
     ["num_beams", "multiple", "num_beam_groups=2"]),
    ("forced words", {"num_beams": 2, "force_words_ids": [[5]]}, Absent,
     ["force_words_ids", "constrained", "sequence_bias"]),
    ("forced words alone", {"force_words_ids": [[5]]}, Bad, ["force_words_ids", "need beams"]),
    ("layers", {"dola_layers": "low"}, Absent, ["dola_layers", "DoLa", "penalty_alpha"]),
    ("heads", {"use_mtp": True}, Absent, ["use_mtp", "prompt_lookup_num_tokens"]),
    ("early exit", {"assistant_early_exit": 2}, Absent, ["assistant_early_exit", "layers"]),
    ("compiled", {"compile_config": {"mode": "default"}}, Absent, ["compile_config", "compiled"]),
    ("low memory", {"low_memory": True}, Absent, ["low_memory", "share their prompt"]),
]
TOKENS: list[Wrong] = [
    ("end outside", {"eos_token_id": 48}, Bad, ["eos_token_id", "0 to 47", "48"]),
    ("ends outside", {"eos_token_id": [2, 480]}, Bad, ["eos_token_id", "480"]),
    ("broken end", {"eos_token_id": 1.5}, Bad, ["eos_token_id", "token id", "1.5"]),
    ("bad words", {"bad_words_ids": [5, 6]}, Bad, ["bad_words_ids", "lists of token ids"]),
    ("no bad words", {"bad_words_ids": []}, Bad, ["bad_words_ids", "non-empty"]),
    ("bias", {"sequence_bias": {5: 1.0}}, Bad, ["sequence_bias", "{(id, id, ...): bias}"]),
    ("bias of nothing", {"sequence_bias": {(): 1.0}}, Bad, ["sequence_bias", "()"]),
    ("decay", {"exponential_decay_length_penalty": (3,)}, Bad,
     ["exponential_decay_length_penalty", "(start, factor)"]),
    ("forced and suppressed", {"forced_eos_token_id": 2, "suppress_tokens": [2]}, Bad,
     ["forced_eos_token_id", "suppress_tokens=[2]", "min_new_tokens"]),
    ("penalty", {"repetition_penalty": 0.0}, Bad, ["repetition_penalty", "above 0"]),
    ("n-grams", {"no_repeat_ngram_size": -1}, Bad, ["no_repeat_ngram_size", "-1"]),
]
OBJECTS: list[Wrong] = [
    ("strings", {"stop_strings": ["."]}, Bad, ["stop_strings", "tokenizer"]),
    ("empty string", {"stop_strings": [""], "tokenizer": TOKENIZER}, Bad,
     ["stop_strings", "empty"]),
    ("tokenizer", {"tokenizer": object()}, Bad, ["tokenizer", "decode"]),
    ("streamer", {"streamer": object()}, Bad, ["streamer", "put, end"]),
    ("processor", {"logits_processor": lambda ids, scores: scores}, Bad,
     ["logits_processor", "list", "(input_ids, scores)"]),
    ("processors", {"logits_processor": [None]}, Bad, ["logits_processor", "None"]),
    ("criterion", {"stopping_criteria": lambda ids, scores: True}, Bad,
     ["stopping_criteria", "list"]),
    ("criteria", {"stopping_criteria": ["stop"]}, Bad, ["stopping_criteria", "stop"]),
    ("allowed", {"prefix_allowed_tokens_fn": [5, 6]}, Bad,
     ["prefix_allowed_tokens_fn", "a function", "[5, 6]"]),
    ("negative", {"negative_prompt_ids": IDS}, Bad, ["negative_prompt_ids", "guidance_scale"]),
    ("negative mask", {"negative_prompt_attention_mask": MASK}, Bad,
     ["negative_prompt_attention_mask", "negative_prompt_ids"]),
    ("negative rows", {"negative_prompt_ids": IDS[:1], "guidance_scale": 2.0}, Bad,
     ["negative_prompt_ids", "rows"]),
    ("negative outside", {"negative_prompt_ids": IDS + 90, "guidance_scale": 2.0}, Bad,
     ["negative_prompt_ids", "vocabulary", "100"]),
    ("guided embeddings", embedded(guidance_scale=2.0), Bad,
     ["guidance_scale", "negative_prompt_ids"]),
    ("healing", {"token_healing": True}, Bad, ["token_healing", "tokenizer=..."]),
    ("healed embeddings", embedded(token_healing=True, tokenizer=TOKENIZER), Bad,
     ["token_healing", "inputs_embeds"]),
    ("healed positions",
     {"token_healing": True, "tokenizer": TOKENIZER, "position_ids": torch.arange(3)}, Bad,
     ["token_healing", "position_ids"]),
    ("guided loop", {"custom_generate": print, "guidance_scale": 2.0}, Absent,
     ["custom_generate", "guidance_scale"]),
    ("seeded loop", {"custom_generate": print, "seed": 3}, Absent, ["custom_generate", "seed"]),
]
# fmt: on
WRONG: list[Wrong] = [*NAMES, *PROMPTS, *LENGTHS, *CHOICES, *TOKENS, *OBJECTS]

# Beside them, where an encoder reads the prompt.
SOURCE: list[Wrong] = [
    ("positions", {"position_ids": torch.arange(3)[None]}, Bad, ["position_ids", "encoder"]),
    ("ids and embeddings", {"inputs_embeds": EMBEDS}, Bad, ["inputs_embeds and input_ids", "both"]),
    ("no start", {"decoder_start_token_id": None, "bos_token_id": None}, Bad, ["start from"]),
    ("starts", {"decoder_start_token_id": [0, 1, 2]}, Bad, ["decoder_start_token_id", "or 2"]),
    ("rows", {"decoder_input_ids": IDS[:1]}, Bad, ["decoder_input_ids", "rows"]),
    ("states", {"encoder_outputs": object()}, Bad, ["encoder_outputs", "last_hidden_state"]),
    ("states and ids", {"encoder_outputs": (EMBEDS,)}, Bad, ["encoder_outputs", "both"]),
    ("healing", {"token_healing": True, "tokenizer": TOKENIZER}, Bad, ["token_healing", "encoder"]),
]
