"""Two walk-throughs of transformers' `generate`, argument by argument, with either import.

One is a Qwen2.5 with a chat template and a left-padded batch, the other a Llama with one prompt;
both are tiny, have random weights and compute in float64. What both libraries can do gives the same
tokens, scores and texts; what one of them cannot do says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.testing.tokenizer import tiny_tokenizer

# Their tiny tokenizers have the class of a family, and not its rules.
pytestmark = pytest.mark.filterwarnings("ignore:.*transformers replaces its rules")

VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHATS = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": content},
    ]
    for content in ("Give me a short introduction to large language models.", "Who are you?")
]
RECORDED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
both = pytest.mark.parametrize("library", [es, transformers], ids=lambda one: one.__name__)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of model -> a checkpoint as it lies on a disk."""
    made = {}
    for kind in ("Qwen2", "Llama"):
        torch.manual_seed(3)
        config = getattr(transformers, f"{kind}Config")(**SIZES)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
        folder = made[kind] = tmp_path_factory.mktemp(kind) / "checkpoint"
        model.save_pretrained(folder)
        tiny_tokenizer(VOCABULARY).save_pretrained(folder)
        written = folder / "tokenizer_config.json"
        written.write_text(json.dumps({**json.loads(written.read_text()), "model_max_length": 512}))
    return made


@cache
def opened(library: ModuleType, folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer as a script of either library opens them."""
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.eval(), tokenizer


def chats(library: ModuleType, folder: Path) -> tuple[Any, Any, Any]:
    """Model, tokenizer, and the two chats as one left-padded batch."""
    model, tokenizer = opened(library, folder)
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in CHATS
    ]
    inputs = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    return model, tokenizer, inputs.to(model.device)


def answers(library: ModuleType, folder: Path, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """What `generate` returns for the batch, and the texts of what is new."""
    model, tokenizer, inputs = chats(library, folder)
    transformers.set_seed(11)
    out = model.generate(**inputs, **options)
    rows = out if isinstance(out, torch.Tensor) else out.sequences
    width = inputs.input_ids.shape[1]
    new = [row[width:] for row in rows]
    return out, tokenizer.batch_decode(new, skip_special_tokens=True)


def require_same(theirs: Any, ours: Any) -> None:
    """Tokens, and the scores and logits of every step where they were asked for."""
    if isinstance(theirs, torch.Tensor):
        assert ours.tolist() == theirs.tolist()
        return
    assert type(ours).__name__ == type(theirs).__name__
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for name in ("scores", "logits"):
        steps = getattr(theirs, name)
        assert (steps is None) == (getattr(ours, name) is None)
        for own, other in zip(getattr(ours, name) or (), steps or (), strict=True):
            assert own.dtype == other.dtype
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


# --- a Qwen2.5, its chat template, two prompts of different lengths -------------------------------


@both
def test_a_chat_is_spelled_as_the_model_knows_it(
    folders: dict[str, Path], library: ModuleType
) -> None:
    model, tokenizer, inputs = chats(library, folders["Qwen2"])
    text = tokenizer.apply_chat_template(CHATS[1], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert inputs.attention_mask[:, -1].tolist() == [1, 1]
    assert inputs.attention_mask[1, 0] == 0, "the shorter one is padded on the left"
    assert tokenizer.decode(inputs["input_ids"][1], skip_special_tokens=True).endswith(
        "assistant\n"
    )
    assert model.config.model_type == "qwen2"


SHOWN: dict[str, dict[str, Any]] = {
    "max_new_tokens": {},
    "temperature": {"do_sample": True, "temperature": 0.1},
    "top_k": {"do_sample": True, "top_k": 10},
    "top_p": {"do_sample": True, "top_p": 0.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "num_beams": {"num_beams": 6},
    "do_sample": {"do_sample": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "output_logits": {"return_dict_in_generate": True, "output_logits": True},
    "sampling": {"do_sample": True, "temperature": 0.1, "top_k": 10, "top_p": 0.7, **RECORDED},
    "beams": {"num_beams": 6, "no_repeat_ngram_size": 2, **RECORDED},
    "sampled beams": {
        "num_beams": 6, "do_sample": True, "temperature": 0.1, "top_k": 10, "top_p": 0.7,
        "no_repeat_ngram_size": 2, **RECORDED,
    },
    "overridden": {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05
    },
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "min_new_tokens": {"min_new_tokens": 20},
    "max_length": {"max_new_tokens": None, "max_length": 150},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
}  # fmt: skip


@pytest.mark.parametrize("named", SHOWN)
def test_every_argument_of_the_call_gives_the_same(folders: dict[str, Path], named: str) -> None:
    options = {"max_new_tokens": 24, **SHOWN[named]}
    (theirs, their_texts), (ours, our_texts) = (
        answers(library, folders["Qwen2"], options) for library in (transformers, es)
    )
    require_same(theirs, ours)
    assert our_texts == their_texts


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5}, {"num_beams": 3}], ids=str)
def test_the_padded_rows_are_the_single_ones(
    folders: dict[str, Path], options: dict[str, Any]
) -> None:
    model, tokenizer, inputs = chats(es, folders["Qwen2"])
    out = model.generate(
        **inputs, **options, max_new_tokens=24, return_dict_in_generate=True, tokenizer=tokenizer
    )
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in CHATS
    ]
    options = {**options, "max_new_tokens": 24}
    assert es.generate(model, tokenizer, texts, **options) == out.text
    chats_too = {"do_sample": False, **options}  # conversations draw by default
    assert es.generate(model, tokenizer, CHATS, **chats_too) == out.text
    assert len(out.new_tokens) == 2


BUILT_IN: dict[str, dict[str, Any]] = {
    "group-beam-search": {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.5},
    "constrained-beam-search": {"num_beams": 6, "force_words_ids": [[5, 6]]},
    "dola": {"dola_layers": "high"},
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_the_reference_downloads_is_built_in(folders: dict[str, Path], name: str) -> None:
    options = {"max_new_tokens": 12, **BUILT_IN[name]}
    ours, texts = answers(es, folders["Qwen2"], options)
    assert ours.shape[0] == len(texts) == 2
    if "force_words_ids" in options:
        assert all("5, 6" in str(row) for row in ours.tolist())
    with pytest.raises(ValueError, match=f"transformers-community/{name}"):
        answers(transformers, folders["Qwen2"], options)


def test_contrastive_search_is_built_in(folders: dict[str, Path]) -> None:
    options = {"max_new_tokens": 12, "penalty_alpha": 0.6, "top_k": 10}
    ours, texts = answers(es, folders["Qwen2"], options)
    plain, _ = answers(es, folders["Qwen2"], {"max_new_tokens": 12})
    assert ours.shape == (2, plain.shape[1])
    assert ours.tolist() != plain.tolist()
    assert len(texts) == 2
    with pytest.raises(ValueError, match="transformers-community/contrastive-search"):
        answers(transformers, folders["Qwen2"], options)


# --- the further arguments, on a Llama ------------------------------------------------------------


def hello(library: ModuleType, folder: Path, **options: Any) -> Any:
    """What `generate` returns for one prompt."""
    model, tokenizer = opened(library, folder)
    inputs = tokenizer("Hello world!", return_tensors="pt")
    transformers.set_seed(2)
    if "generation_config" not in options:
        options = {"max_new_tokens": 16, **options}
    return model.generate(**inputs, **options)


def forbid_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of the caller's own."""
    scores = scores.clone()
    scores[:, ::2] = -torch.inf
    return scores


def long_enough(ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """A criterion of the caller's own."""
    return torch.full((len(ids),), ids.shape[1] >= 20)


def odd_after_even(row: int, ids: torch.Tensor) -> list[int]:
    """The tokens that may follow."""
    return list(range(5 + int(ids[-1]) % 2, VOCABULARY, 2))


Asked = Callable[[ModuleType, Path], dict[str, Any]]
ARGUMENTS: dict[str, Asked] = {
    "nothing else": lambda library, _: {},
    "generation_config": lambda library, _: {
        "generation_config": library.GenerationConfig(
            max_new_tokens=9, do_sample=True, top_k=5, pad_token_id=0
        ),
    },
    "logits_processor": lambda library, _: {
        "logits_processor": library.LogitsProcessorList([forbid_even])
    },
    "stopping_criteria": lambda library, _: {
        "stopping_criteria": library.StoppingCriteriaList([long_enough])
    },
    "prefix_allowed_tokens_fn": lambda library, _: {
        "prefix_allowed_tokens_fn": odd_after_even,
        "num_beams": 2,
    },
    "stop_strings": lambda library, folder: {
        "stop_strings": ["e", "o", "t"],
        "tokenizer": opened(library, folder)[1],
    },
    "negative_prompt_ids": lambda library, _: {
        "negative_prompt_ids": torch.tensor([[9, 8, 7]]),
        "guidance_scale": 1.5,
    },
    "processors in order": lambda library, _: {
        "repetition_penalty": 1.2,
        "bad_words_ids": [[7], [8, 9]],
        "sequence_bias": [[[11], 2.0]],
        "exponential_decay_length_penalty": (4, 1.1),
        "suppress_tokens": [12],
        "do_sample": True,
        "typical_p": 0.9,
        "min_p": 0.01,
        "renormalize_logits": True,
        **RECORDED,
    },
    "prompt_lookup_num_tokens": lambda *_: {"prompt_lookup_num_tokens": 3, "max_new_tokens": 40},
    "several ends": lambda library, _: {"eos_token_id": [2, *range(40, 90)]},
    "hidden states": lambda library, _: {
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    },
}


@pytest.mark.parametrize("named", ARGUMENTS)
def test_every_further_argument_gives_the_same(folders: dict[str, Path], named: str) -> None:
    folder = folders["Llama"]
    theirs, ours = (
        hello(library, folder, **ARGUMENTS[named](library, folder))
        for library in (transformers, es)
    )
    require_same(theirs, ours)
    if named == "hidden states":
        for own, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            for mine, layer in zip(own, other, strict=True):
                torch.testing.assert_close(mine, layer, rtol=1e-4, atol=1e-4)


@both
def test_the_prompt_may_come_first_and_goes_to_a_streamer(
    folders: dict[str, Path], library: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = opened(library, folders["Llama"])
    ids = tokenizer("Hello world!", return_tensors="pt").input_ids
    streamer = library.TextStreamer(tokenizer, skip_prompt=True)
    out = model.generate(ids, max_new_tokens=16, streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(out[0, ids.shape[1] :]) + "\n"
    assert out.tolist() == hello(library, folders["Llama"]).tolist()


def test_embeddings_stand_for_the_ids(folders: dict[str, Path]) -> None:
    found = []
    for library in (transformers, es):
        model, tokenizer = opened(library, folders["Llama"])
        ids = tokenizer("Hello world!", return_tensors="pt").input_ids
        embeds = model.get_input_embeddings()(ids).detach()
        alone = model.generate(inputs_embeds=embeds, max_new_tokens=12)
        beside = model.generate(ids, inputs_embeds=embeds, max_new_tokens=12)
        found.append((alone.tolist(), beside.tolist()))
        assert beside[:, ids.shape[1] :].tolist() == alone.tolist(), "new tokens only"
    assert found[0] == found[1]


def test_a_filled_cache_goes_on_where_it_ended(folders: dict[str, Path]) -> None:
    found = []
    for library in (transformers, es):
        model, tokenizer = opened(library, folders["Llama"])
        ids = tokenizer("Hello world!", return_tensors="pt").input_ids
        first = model.generate(ids, max_new_tokens=8, return_dict_in_generate=True)
        assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
        cache = first.past_key_values
        rest = model.generate(first.sequences, past_key_values=cache, max_new_tokens=8)
        assert rest.tolist() == model.generate(ids, max_new_tokens=16).tolist()
        found.append(rest.tolist())
    assert found[0] == found[1]


WRONG: dict[str, dict[str, Any]] = {
    "a name that nobody knows": {"max_new_token": 5},
    "a prompt that is longer than the result": {"max_new_tokens": None, "max_length": 3},
    "stop strings without a tokenizer": {"stop_strings": ["a"]},
    "no length": {"max_new_tokens": 0},
    "several of greedy": {"num_return_sequences": 2},
    "more results than beams": {"num_beams": 2, "num_return_sequences": 3},
    "an unknown cache": {"cache_implementation": "elastic"},
    "a cache of two kinds": {"cache_implementation": "static", "past_key_values": "made"},
}


@both
@pytest.mark.parametrize("named", WRONG)
def test_what_is_wrong_is_an_error_of_one_kind(
    folders: dict[str, Path], library: ModuleType, named: str
) -> None:
    options = dict(WRONG[named])
    if "past_key_values" in options:
        options["past_key_values"] = library.DynamicCache()
    with pytest.raises(ValueError):
        hello(library, folders["Llama"], **options)
