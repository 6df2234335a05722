"""Places of the Python API that take a value: names, and the calls that a value goes into."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import everystep as es
from everystep.strategies import Reads, continue_each, in_order
from tests.api.hostile_values import IDS, MODEL, TOKENIZER

Place = Callable[[Any], Any]
SCORES = torch.rand(2, 320, generator=torch.Generator().manual_seed(1))
USER = {"role": "user", "content": "a"}
QUIET: dict[str, Any] = {"max_new_tokens": 2, "pad_token_id": 0}

NAMES = """
    temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff top_h repetition_penalty
    encoder_repetition_penalty no_repeat_ngram_size length_penalty num_beams
    num_return_sequences max_new_tokens min_new_tokens max_length min_length eos_token_id
    pad_token_id bos_token_id bad_words_ids force_words_ids sequence_bias suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    exponential_decay_length_penalty guidance_scale watermarking_config stop_strings
    early_stopping penalty_alpha dola_layers num_beam_groups diversity_penalty
    prompt_lookup_num_tokens assistant_early_exit max_time cache_implementation cache_config
    use_cache output_scores return_dict_in_generate renormalize_logits remove_invalid_values
    token_healing constraints generation_config logits_processor stopping_criteria
    prefix_allowed_tokens_fn assistant_model streamer negative_prompt_ids custom_generate seed
    tokenizer logprobs prompt_logprobs hooks attention_mask position_ids past_key_values
    inputs_embeds strategy strategy_options schema regex grammar choices allowed_sequences
    n_best best_of majority scorer amateur_model contrast_alpha draft_corpus num_drafts
    draft_verification adapter_names prefix cache_salt token_type_ids pixel_values
    decoder_input_ids encoder_outputs synced_gpus do_sample
"""
OPTIONS = NAMES.split()


def generate(ids: Any = IDS, **options: Any) -> Any:
    return MODEL.generate(ids, **{**QUIET, **options})


def moved_and_back(device: Any) -> None:
    """Where there is an accelerator, some of the values name it."""
    MODEL.to(device).to("cpu")


def run() -> es.Run:
    made = es.open(MODEL, TOKENIZER, "a", max_new_tokens=4)
    next(made)
    return made


def asynchronously(
    model: Any = MODEL, tokenizer: Any = TOKENIZER, prompt: Any = "a", **o: Any
) -> Any:
    async def ask() -> Any:
        async with es.AsyncEngine(model, tokenizer, **o) as engine:
            return await engine.generate(prompt, max_new_tokens=2)

    return asyncio.run(ask())


def of_option(name: str) -> Place:
    beside = {"tokenizer": TOKENIZER} if name == "stop_strings" else {}
    return lambda v: generate(**{**beside, name: v})


def of_many(name: str) -> Place:
    return lambda v: es.generate(MODEL, TOKENIZER, ["a", "b"], **{"max_new_tokens": 2, name: v})


CALLS: dict[str, Place] = {
    **{f"generate({name}=)": of_option(name) for name in OPTIONS},
    **{
        f"es.generate({name}=)": of_many(name)
        for name in ("seed", "options", "on_error", "progress", "prefix", "hooks", "strategy")
    },
    "generate": generate,
    "es.generate": lambda v: es.generate(MODEL, TOKENIZER, v, max_new_tokens=2),
    "es.generate of a model": lambda v: es.generate(v, TOKENIZER, "a", max_new_tokens=2),
    "es.generate of a tokenizer": lambda v: es.generate(MODEL, v, "a", max_new_tokens=2),
    "es.stream": lambda v: list(es.stream(MODEL, TOKENIZER, v, max_new_tokens=2)),
    "es.stream of a tokenizer": lambda v: list(es.stream(MODEL, v, "a", max_new_tokens=2)),
    "es.stream(beam_events=)": lambda v: list(
        es.stream(MODEL, TOKENIZER, "a", beam_events=v, max_new_tokens=2)
    ),
    "es.chat": lambda v: es.chat(MODEL, TOKENIZER, v, max_new_tokens=2),
    "es.chat of a message": lambda v: es.chat(MODEL, TOKENIZER, [v], max_new_tokens=2),
    "es.chat of a content": lambda v: es.chat(
        MODEL, TOKENIZER, [{"role": "user", "content": v}], max_new_tokens=2
    ),
    "es.chat of a role": lambda v: es.chat(
        MODEL, TOKENIZER, [{"role": v, "content": "a"}], max_new_tokens=2
    ),
    "es.score": lambda v: es.score(MODEL, TOKENIZER, v),
    "es.score of a model": lambda v: es.score(v, TOKENIZER, "ab"),
    "es.score of a tokenizer": lambda v: es.score(MODEL, v, "ab"),
    **{
        f"es.score({name}=)": lambda v, name=name: es.score(MODEL, TOKENIZER, "ab", **{name: v})
        for name in ("after", "best", "window", "stride", "adapter_names")
    },
    "es.verify(tokens=)": lambda v: es.verify("nowhere", tokens=v, offline=True),
    "es.load": lambda v: None if v is None else es.load(v, offline=True),
    "es.load_model": lambda v: None if v is None else es.load_model(v, offline=True),
    **{
        f"es.load({name}=)": lambda v, name=name: es.load("model", **{name: v, "offline": True})
        for name in ("dtype", "quantize", "cache_dtype", "device", "executor", "progress")
    },
    "es.quantize": lambda v: None if v is None else es.quantize(v, "a.gguf", "q8_0", offline=True),
    "es.quantize to": lambda v: es.quantize("model", v, offline=True),
    "es.quantize(format=)": lambda v: es.quantize("model", "to", v, offline=True),
    "es.quantize(importance=)": lambda v: es.quantize(
        "model", "a.gguf", "q8_0", importance=v, offline=True
    ),
    "es.open": lambda v: es.open(MODEL, TOKENIZER, v, max_new_tokens=2).result(),
    "es.open(seed=)": lambda v: es.open(MODEL, TOKENIZER, "a", seed=v, max_new_tokens=2).result(),
    "es.resume": lambda v: es.resume(v, MODEL, TOKENIZER),
    "run.send": lambda v: run().send(v),
    "run.set": lambda v: run().set(temperature=v),
    "run.edit at": lambda v: run().edit(v, [1]),
    "run.edit": lambda v: run().edit(1, v),
    "run.rewind": lambda v: run().rewind(v),
    "run.explain": lambda v: run().explain(v),
    "run.save": lambda v: run().save(v),
    "run.more": lambda v: run().more(v),
    "es.prefill": lambda v: es.prefill(MODEL, TOKENIZER, v),
    "es.prefill(prefix=)": lambda v: es.prefill(MODEL, TOKENIZER, "a", prefix=v),
    "es.wrap": es.wrap,
    "model": lambda v: MODEL(v),
    **{
        f"model({name}=)": lambda v, name=name: MODEL(IDS, **{name: v})
        for name in (
            *("attention_mask", "position_ids", "past_key_values", "labels", "logits_to_keep"),
            *("output_hidden_states", "output_attentions", "decoder_input_ids"),
            *("adapter_names", "adapters"),
        )
    },
    "model(inputs_embeds=)": lambda v: MODEL(inputs_embeds=v),
    "model.to": lambda v: None if v is None or isinstance(v, torch.dtype) else moved_and_back(v),
    "model.load_adapter": lambda v: MODEL.load_adapter(v, "a"),
    "model.load_adapter as": lambda v: MODEL.load_adapter("nowhere", v),
    "model.delete_adapter": MODEL.delete_adapter,
    "model.add_adapter": lambda v: MODEL.add_adapter("a", v),
    "model.add_adapter as": lambda v: MODEL.add_adapter(v),
    "model.add_weighted_adapter": lambda v: MODEL.add_weighted_adapter(v, [1.0], "a"),
    "model.add_weighted_adapter by": lambda v: MODEL.add_weighted_adapter(["a"], v, "b"),
    "model.merge_adapter": MODEL.merge_adapter,
    "model.save_adapter": lambda v: MODEL.save_adapter(v, "nobody"),
    "model.save_adapter of": lambda v: MODEL.save_adapter("nowhere", v),
    "model.save_pretrained": MODEL.save_pretrained,
    **{
        f"model.save_pretrained({n}=)": lambda v, n=n: MODEL.save_pretrained("saved", **{n: v})
        for n in ("dtype", "max_shard_size", "adapters")
    },
    "model.compute_transition_scores": lambda v: MODEL.compute_transition_scores(v, v),
    "model.compute_transition_scores of": lambda v: MODEL.compute_transition_scores(IDS, v),
    "AsyncEngine of a model": lambda v: asynchronously(model=v),
    "AsyncEngine of a tokenizer": lambda v: asynchronously(tokenizer=v),
    "AsyncEngine": lambda v: asynchronously(prompt=v),
    **{
        f"AsyncEngine({name}=)": lambda v, name=name: asynchronously(**{name: v})
        for name in ("max_rows", "token_budget", "max_positions", "max_waiting", "max_events")
    },
}
TEXTS: dict[str, Place] = {
    "tokenizer": TOKENIZER,
    "tokenizer of a pair": lambda v: TOKENIZER("a", v),
    "tokenizer of a list": lambda v: TOKENIZER([v]),
    **{
        f"tokenizer({name}=)": lambda v, name=name: TOKENIZER("a", **{"padding": True, name: v})
        for name in (
            *("padding", "truncation", "max_length", "pad_to_multiple_of", "padding_side"),
            "return_tensors",
        )
    },
    "tokenizer.encode": TOKENIZER.encode,
    "tokenizer.tokenize": TOKENIZER.tokenize,
    "tokenizer.decode": TOKENIZER.decode,
    "tokenizer.batch_decode": TOKENIZER.batch_decode,
    "tokenizer.convert_ids_to_tokens": TOKENIZER.convert_ids_to_tokens,
    "tokenizer.convert_tokens_to_ids": TOKENIZER.convert_tokens_to_ids,
    "tokenizer.convert_tokens_to_string": TOKENIZER.convert_tokens_to_string,
    "tokenizer.token_of": TOKENIZER.token_of,
    "tokenizer.pad": TOKENIZER.pad,
    "tokenizer.pad of ids": lambda v: TOKENIZER.pad({"input_ids": v}),
    "tokenizer.pad of a row": lambda v: TOKENIZER.pad([v]),
    "tokenizer.save_pretrained": TOKENIZER.save_pretrained,
    "Tokenizer.from_folder": es.Tokenizer.from_folder,
    "a chat": TOKENIZER.apply_chat_template,
    "a message": lambda v: TOKENIZER.apply_chat_template([v]),
    "a content": lambda v: TOKENIZER.apply_chat_template([{"role": "user", "content": v}]),
    **{
        f"a chat's {name}": lambda v, name=name: TOKENIZER.apply_chat_template(
            [USER], chat_template="{{ tools }}{{ documents }}{{ x }}{{ messages }}", **{name: v}
        )
        for name in ("tools", "documents", "x", "continue_final_message")
    },
    "a chat's template": lambda v: TOKENIZER.apply_chat_template([USER], chat_template=v),
    "Corpus": lambda v: es.Corpus(v, TOKENIZER),
    "AllowedSequences": lambda v: es.AllowedSequences(v, TOKENIZER),
    "set_seed": lambda v: es.set_seed(v) if type(v) is not int else None,
    "GenerationConfig.from_pretrained": es.GenerationConfig.from_pretrained,
    "GenerationConfig.from_dict": es.GenerationConfig.from_dict,
    "BatchEncoding": lambda v: es.BatchEncoding(v, tensor_type="pt"),
    "BatchEncoding of ids": lambda v: es.BatchEncoding({"input_ids": v}, tensor_type="pt"),
    "BatchEncoding.to": lambda v: TOKENIZER("a", return_tensors="pt").to(v),
    "read_sound": es.read_sound,
    "WhisperFeatureExtractor": lambda v: es.WhisperFeatureExtractor()(v),
}


def by_hand(make: Callable[[Any], Any]) -> Place:
    return lambda v: make(v)(IDS, SCORES)


PARTS: dict[str, Place] = {
    **{
        kind.__name__: by_hand(kind)
        for kind in (
            *(es.TemperatureLogitsWarper, es.TopKLogitsWarper, es.TopPLogitsWarper),
            *(es.MinPLogitsWarper, es.TypicalLogitsWarper, es.EpsilonLogitsWarper),
            *(es.EtaLogitsWarper, es.TopHLogitsWarper, es.RepetitionPenaltyLogitsProcessor),
            *(es.NoRepeatNGramLogitsProcessor, es.SequenceBiasLogitsProcessor),
            *(es.NoBadWordsLogitsProcessor, es.SuppressTokensLogitsProcessor),
            *(es.ForcedBOSTokenLogitsProcessor, es.ClassifierFreeGuidanceLogitsProcessor),
            *(es.MaxLengthCriteria, es.MaxTimeCriteria, es.EosTokenCriteria),
        )
    },
    "MinLength": by_hand(lambda v: es.MinLengthLogitsProcessor(v, 2)),
    "MinLength before": by_hand(lambda v: es.MinLengthLogitsProcessor(9, v)),
    "ForcedEOS": by_hand(lambda v: es.ForcedEOSTokenLogitsProcessor(4, v)),
    "ForcedEOS at": by_hand(lambda v: es.ForcedEOSTokenLogitsProcessor(v, 2)),
    "ExponentialDecay": by_hand(lambda v: es.ExponentialDecayLengthPenalty(v, 2, 1)),
    "EncoderRepetition": by_hand(lambda v: es.EncoderRepetitionPenaltyLogitsProcessor(1.1, v)),
    "EncoderNoRepeat": by_hand(lambda v: es.EncoderNoRepeatNGramLogitsProcessor(2, v)),
    "HammingDiversity": by_hand(lambda v: es.HammingDiversityLogitsProcessor(v, 2, 2)),
    "Watermark": by_hand(lambda v: es.WatermarkLogitsProcessor(320, greenlist_ratio=v)),
    "SynthIDText": by_hand(lambda v: es.SynthIDTextWatermarkLogitsProcessor(2, v, 8, 0, 8)),
    "StopStringCriteria": by_hand(lambda v: es.StopStringCriteria(TOKENIZER, v)),
    "WatermarkDetector": lambda v: es.WatermarkDetector(MODEL.config, "cpu", v),
    "scores": lambda v: es.TopKLogitsWarper(3)(IDS, v),
    "scores of a penalty": lambda v: es.RepetitionPenaltyLogitsProcessor(1.2)(IDS, v),
    "scores of a list": lambda v: es.LogitsProcessorList([es.TemperatureLogitsWarper(2.0)])(IDS, v),
    "ids": lambda v: es.NoRepeatNGramLogitsProcessor(2)(v, SCORES),
    "ids of a criterion": lambda v: es.MaxLengthCriteria(4)(v, None),
    "PhrasalConstraint": es.PhrasalConstraint,
    "DisjunctiveConstraint": es.DisjunctiveConstraint,
    "ConstraintListState": es.ConstraintListState,
    "DynamicCache": es.DynamicCache,
    "StaticCache": lambda v: es.StaticCache(MODEL.config, v),
    "StaticCache of a configuration": lambda v: es.StaticCache(v, 10),
    "QuantizedCache": lambda v: es.QuantizedCache(v, MODEL.config),
    "EncoderDecoderCache": es.EncoderDecoderCache,
    "PromptInput": lambda v: es.PromptInput("a", v, (1,), token=1),
    "PromptInput of a shape": lambda v: es.PromptInput("a", len, v, token=1),
    "TextStreamer": lambda v: None if isinstance(v, bytes) else es.TextStreamer(v),
}


class Given(es.Hook):
    """A hook that answers with what it was made of."""

    gives = ("embeds",)

    def __init__(self, prompt: Any = None, before: Any = None, after: Any = None) -> None:
        self.prompt, self.before, self.after = prompt, before, after

    def on_prompt(self, moment: Any) -> Any:
        return self.prompt

    def before_step(self, step: Any) -> Any:
        return self.before

    def after_step(self, step: Any) -> Any:
        return self.after


def hooked(**answers: Any) -> Any:
    return generate(hooks=[Given(**answers)])


def strategy(**members: Any) -> Any:
    """A strategy that chooses the best token, but for these members of it."""
    usual: dict[str, Any] = {
        "width": 1,
        "returns": 1,
        "streams": True,
        "rounds": 1,
        "reads": Reads(alone=True),
        "pick": lambda self, batch, scores, earlier=(): (scores.whole().values.argmax(-1),),
        "select": lambda self, batch, picked: continue_each(batch, picked[0][0]),
        "finish": lambda self, group: in_order(group),
    }
    return dataclass(frozen=True)(type("Own", (), {**usual, **members}))()


def streamed(value: Any) -> Any:
    own = type("Own", (), {"put": lambda self, ids: value, "end": lambda self: value})
    return generate(IDS[:1], streamer=own())


ANSWERS: dict[str, Place] = {
    "a processor": lambda v: generate(logits_processor=[lambda ids, scores: v]),
    "a processor of beams": lambda v: generate(logits_processor=[lambda i, s: v], num_beams=2),
    "a criterion": lambda v: generate(stopping_criteria=[lambda ids, scores: v]),
    "a function of allowed ids": lambda v: generate(prefix_allowed_tokens_fn=lambda row, ids: v),
    "a hook of a prompt": lambda v: hooked(prompt=v),
    "a hook before": lambda v: hooked(before=v),
    "a hook's embeddings": lambda v: hooked(before={"embeds": v}),
    "a hook after": lambda v: hooked(after=v),
    "a hook's force": lambda v: hooked(after=es.Next(force=v)),
    "a hook's stop": lambda v: hooked(after=es.Next(stop=v)),
    "a scorer": lambda v: es.generate(
        MODEL, TOKENIZER, "a", best_of=2, do_sample=True, scorer=lambda *_: v, max_new_tokens=2
    ),
    **{
        f"a strategy's {name}": lambda v, name=name: generate(strategy=strategy(**{name: v}))
        for name in ("width", "returns", "streams", "reads", "rounds")
    },
    "a strategy's pick": lambda v: generate(strategy=strategy(pick=lambda *_: v)),
    "a strategy's picked": lambda v: generate(strategy=strategy(pick=lambda *_: (v,))),
    "a strategy's select": lambda v: generate(strategy=strategy(select=lambda *_: v)),
    "a strategy's tokens": lambda v: generate(
        strategy=strategy(select=lambda self, batch, _: continue_each(batch, v))
    ),
    "a strategy's finish": lambda v: generate(strategy=strategy(finish=lambda *_: v)),
    "a streamer": streamed,
}
PLACES = {
    **CALLS,
    **TEXTS,
    **PARTS,
    **{f"what {name} returns": one for name, one in ANSWERS.items()},
}
