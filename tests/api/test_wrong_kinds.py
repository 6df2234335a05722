"""Things of the wrong kind, or in the wrong place, in the calls that take texts: each is one of our
errors, before anything is computed, and says what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError, ModelClassError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.models.tiny import reference_decoder

TOKENIZER = tiny_tokenizer(320)
MODEL = tiny_llama(vocab_size=320)
THEIRS = reference_decoder("llama", torch.float64)
ENCODED = TOKENIZER(["Hello", "You"], padding=True, return_tensors="pt")
USER = {"role": "user", "content": "Hi"}
generate, stream, chat = es.generate, es.stream, es.chat

# What is called, its arguments, its keywords, parts of the error.
Wrong = tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]
# fmt: off
WRONG: dict[str, Wrong] = {
    "swapped": (generate, (TOKENIZER, MODEL, "x"), {}, ["are swapped", "es.load"]),
    "swapped in a stream": (stream, (TOKENIZER, MODEL, "x"), {}, ["are swapped"]),
    "swapped in a chat": (chat, (TOKENIZER, MODEL, "x"), {}, ["are swapped"]),
    "swapped without a prompt": (generate, (TOKENIZER, MODEL), {}, ["are swapped"]),
    "no model": (generate, (None, TOKENIZER, "x"), {}, ["no model", "NoneType"]),
    "the name of a model": (generate, ("smollm2", TOKENIZER, "x"), {}, ["no model", "es.load"]),
    "the pair of load": (generate, ((MODEL, TOKENIZER), "x"), {}, ["no model", "tuple"]),
    "a core": (generate, (MODEL.core, TOKENIZER, "x"), {}, ["no model", "Model"]),
    "the tokenizer left out": (generate, (MODEL, "x"), {}, ["tokenizer", "'x'", "encode, decode"]),
    "left out of a stream": (stream, (MODEL, "x", "y"), {}, ["tokenizer", "'x'"]),
    "bytes for a tokenizer": (generate, (MODEL, b"x", "y"), {}, ["tokenizer", "encode, decode"]),
    "the class of a tokenizer's backend": (generate, (MODEL, int, "y"), {}, ["tokenizer"]),
    "text without a tokenizer": (generate, (MODEL, None, "x"), {}, ["needs a tokenizer"]),
    "messages without one": (stream, (MODEL, None, [USER]), {}, ["needs a tokenizer"]),
    "an encoding as the prompt": (generate, (MODEL, TOKENIZER, ENCODED), {},
                                  ["several rows", "model.generate(**"]),
    "an encoding as ids": (MODEL.generate, (ENCODED,), {}, ["BatchEncoding", "**"]),
    "a dict as ids": (MODEL.generate, ({"input_ids": [[5]]},), {}, ["dict", "**"]),
    "objects as what is not wanted": (MODEL.generate, (torch.ones(1, 2).long(),),
                                      {"guidance_scale": 2.0, "negative_prompt_ids":
                                       np.array([[object(), 1]])}, ["negative_prompt_ids"]),
    "bytes as the prompt": (generate, (MODEL, TOKENIZER, b"x"), {}, ["no known kind", "bytes"]),
    "a number as the prompt": (stream, (MODEL, TOKENIZER, 7), {}, ["no known kind", "int"]),
    "flags as the prompt": (generate, (MODEL, None, [True, False]), {}, ["integers"]),
    "nothing to stream": (stream, (MODEL, TOKENIZER, []), {}, ["no prompt"]),
    "an empty text": (generate, (MODEL, TOKENIZER, ""), {}, ["empty"]),
    "a table as one prompt": (generate, (MODEL, None, torch.zeros(1, 2, 3).long()), {},
                              ["not a row of ids"]),
    "ids in a chat": (chat, (MODEL, TOKENIZER, [5, 6]), {}, ["no conversation", "es.generate"]),
    "several chats": (chat, (MODEL, TOKENIZER, [[USER], [USER]]), {}, ["no conversation"]),
    "a message that is text": (chat, (MODEL, TOKENIZER, [USER, "Hi"]), {}, ["no conversation"]),
    "no message": (chat, (MODEL, TOKENIZER, []), {}, ["no conversation"]),
    "several answers": (chat, (MODEL, TOKENIZER, "Hi"), {"num_beams": 2, "num_return_sequences": 2},
                        ["one answer", "num_return_sequences"]),
    "an object for an answer": (chat, (MODEL, TOKENIZER, "Hi"), {"return_dict_in_generate": True},
                                ["one answer", "return_dict_in_generate"]),
    "as a configuration": (chat, (MODEL, TOKENIZER, "Hi"),
                           {"generation_config": es.GenerationConfig(return_dict_in_generate=True)},
                           ["one answer", "return_dict_in_generate"]),
    "a dict for a configuration": (generate, (MODEL, TOKENIZER, "x"),
                                   {"generation_config": {"top_k": 5}}, ["dict", "from_dict"]),
    "a model's configuration": (generate, (MODEL, TOKENIZER, "x"),
                                {"generation_config": THEIRS.config}, ["LlamaConfig"]),
    "the class of it": (stream, (MODEL, TOKENIZER, "x"),
                        {"generation_config": es.GenerationConfig}, ["not a configuration"]),
    "a tokenizer for a configuration": (MODEL.generate, (torch.tensor([[5]]), TOKENIZER), {},
                                        ["generation_config", "Tokenizer"]),
    "a misspelt field of theirs": (generate, (MODEL, TOKENIZER, "x"),
                                   {"generation_config": transformers.GenerationConfig(top_kk=3)},
                                   ["top_kk", "top_k"]),
    "options for one": (generate, (MODEL, TOKENIZER, "x"), {"options": {"top_k": 5}}, ["options"]),
    "options of another kind": (generate, (MODEL, TOKENIZER, ["x", "y"]),
                                {"options": [{}, [("top_k", 5)]]}, ["options[1]", "list"]),
    "too few options": (stream, (MODEL, TOKENIZER, ["x", "y"]), {"options": [{}]}, ["list of 2"]),
    "a processor that is none": (generate, (MODEL, TOKENIZER, "x"), {"logits_processor": [5]},
                                 ["logits_processor", "(input_ids, scores)"]),
    "a processor of no package": (generate, (MODEL, TOKENIZER, "x"), {"logits_processor": ["a"]},
                                  ["logits_processor", "'a'", "Install the package"]),
    "one function, not a list": (generate, (MODEL, TOKENIZER, "x"), {"logits_processor": max},
                                 ["logits_processor", "list"]),
    "a criterion that is none": (stream, (MODEL, TOKENIZER, "x"), {"stopping_criteria": [5]},
                                 ["stopping_criteria"]),
    "a streamer": (generate, (MODEL, TOKENIZER, "x"), {"streamer": es.TextStreamer(TOKENIZER)},
                   ["streamer", "es.stream"]),
    "tensors": (generate, (MODEL, TOKENIZER, "x"), {**ENCODED}, ["input_ids", "prompt as"]),
    "a seed of text": (generate, (MODEL, TOKENIZER, "x"), {"seed": "7"}, ["seed", "'7'"]),
    "seeds of others": (stream, (MODEL, TOKENIZER, "x"), {"seed": [1, 2]}, ["seed", "[1, 2]"]),
    "a model of another library to load": (es.load, (THEIRS,), {}, ["LlamaForCausalLM"]),
    "nothing to load": (es.load, (None,), {}, ["NoneType"]),
    "a number to load": (es.load_model, (5,), {}, ["int"]),
    "a type by its name": (es.load, ("smollm2-135m-instruct",), {"dtype": "float32"},
                           ["dtype", "torch.float32", "'float32'"]),
}
# fmt: on


@pytest.mark.parametrize(
    ("ask", "given", "keywords", "parts"), [pytest.param(*one, id=n) for n, one in WRONG.items()]
)
def test_the_wrong_kind_is_refused_with_what_to_do(
    ask: Any,
    given: tuple[Any, ...],
    keywords: dict[str, Any],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def computes(*_: object, **__: object) -> None:
        raise AssertionError("the call reached the model")

    monkeypatch.setattr("everystep.engine.Engine.step", computes)
    with pytest.raises(EverystepError) as caught:
        ask(*given, **keywords)
    text = str(caught.value)
    assert [part for part in parts if part not in text] == []
    assert text.endswith(".") and len(text) < 500


def test_the_table_holds_forty_causes() -> None:
    assert len(WRONG) >= 40


def test_what_looks_alike_and_is_right_is_answered() -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None, "do_sample": False}
    wanted = es.generate(MODEL, TOKENIZER, [USER], **options)
    assert isinstance(MODEL, LanguageModel)
    for said in ("Hi", USER, [USER], (USER,)):
        assert es.chat(MODEL, TOKENIZER, said, **options) == wanted
    assert es.generate(MODEL, TOKENIZER, "Hi", **options) != wanted  # that is continued as text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"decoder_start_token_id": 1}, "as the model has no encoder"),
        ({"trim_stop_strings": True}, "trim_stop_strings has no effect without stop_strings"),
        ({"forced_bos_token_id": 5}, "after a prompt of several ids"),
        ({"max_matching_ngram_size": 2}, "no drafts are copied"),
        ({"add_generation_prompt": False}, "a prompt that is no conversation"),
    ],
)
def test_what_has_no_effect_is_said(given: dict[str, Any], told: str) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None}
    for call in (es.generate, lambda *one, **more: [*es.stream(*one, **more)]):
        with pytest.warns(UserWarning, match=told):
            call(MODEL, TOKENIZER, "Hi there", **asked, **given)


def test_a_class_made_of_a_model_is_refused() -> None:
    """Nothing would call what it overrides."""
    methods = {"prepare_inputs_for_generation": lambda self, **given: given}
    with pytest.raises(ModelClassError, match=r"has no subclasses.*Pass hooks, processors"):
        type("Own", (es.LanguageModel,), methods)
