"""Families with an encoder and a decoder: logits, folders, generation, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.errors import EverystepError, FormatError, RequestError, UnsupportedError
from everystep.models import build_model
from everystep.models.encoder_decoders.spec import EncoderDecoderSpec
from everystep.models.families import find_family
from everystep.models.load import complete_config
from tests.models.tiny import (
    ENCODER_DECODERS,
    SOUND_SIZES,
    TEXT_SIZES,
    Tensors,
    farthest,
    ids,
    ours,
    reference_pair,
    sounds,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ENCODER_DECODERS},
    "t5, gated": ("t5", {"feed_forward_proj": "gated-gelu"}),
    "mt5, relu": ("mt5", {"feed_forward_proj": "relu"}),
    "bart, scaled": ("bart", {"scale_embedding": True, "activation_function": "relu"}),
    "bart, untied": ("bart", {"tie_word_embeddings": False}),
    "bart, one layer": ("bart", {"encoder_layers": 1, "decoder_layers": 1}),
    "mbart, scaled": ("mbart", {"scale_embedding": True}),
    "marian, swish": ("marian", {"activation_function": "swish", "scale_embedding": True}),
    "marian, two tables": (
        "marian",
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53},
    ),
    "whisper, untied": ("whisper", {"tie_word_embeddings": False, "scale_embedding": True}),
}
TEXTS = [kind for kind in ENCODER_DECODERS if kind != "whisper"]
NEW = 12
# transformers makes as many layers of cache as its encoder has.
EVEN = {
    kind: {"num_decoder_layers": 2} if "t5" in kind else {"decoder_layers": 2}
    for kind in ENCODER_DECODERS
}


def read_by(kind: str, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What the encoder of a family is given, padded on the right where it can be."""
    if kind == "whisper":
        return {"input_features": sounds(batch, dtype)}
    mask = torch.ones(batch, 14, dtype=torch.int64)
    mask[0, 5:] = 0
    read = ids(batch, 14)
    read[mask == 0] = 0
    return {"input_ids": read, "attention_mask": mask}


def logits_of(model: Any, given: dict[str, Tensor], written: Tensor) -> Tensor:
    """(B, T, V) of a rectangle, of either library."""
    with torch.no_grad():
        return model(**given, decoder_input_ids=written).logits


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    kind, config = FAMILIES[name]
    reference = reference_pair(kind, dtype, **config)
    model = es.LanguageModel(ours(reference))
    given, written = read_by(kind, 3, dtype), ids(3, 20, config.get("decoder_vocab_size", 97))
    found = logits_of(model, given, written)
    assert found.dtype == dtype
    assert farthest(found, logits_of(reference, given, written)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", TEXTS)
def test_a_source_of_padding_alone_gives_numbers(kind: str) -> None:
    model, read = es.LanguageModel(ours(reference_pair(kind, torch.float64))), ids(2, 6)
    written, mask = ids(2, 4), torch.zeros_like(read)
    assert logits_of(model, {"input_ids": read, "attention_mask": mask}, written).isfinite().all()
    mask[0] = 1
    found = logits_of(model, {"input_ids": read, "attention_mask": mask}, written)
    assert found.isfinite().all()
    alone = logits_of(model, {"input_ids": read[:1]}, written[:1])
    assert farthest(found[:1], alone) < 1e-10


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 2},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 2, "num_beams": 2},
    "no repetition": {"no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "a static cache": {"cache_implementation": "static"},
}


def same(first: Tensor, second: Tensor) -> bool:
    """Whether tokens agree, beyond which there is padding."""
    return first.shape == second.shape and torch.equal(first, second)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_folder_generates_what_transformers_generates(kind: str, tmp_path: Path) -> None:
    reference = reference_pair(kind, torch.float32, **EVEN[kind])
    reference.generation_config.update(decoder_start_token_id=3, pad_token_id=0, eos_token_id=2)
    reference.generation_config.forced_eos_token_id = 2
    reference.save_pretrained(tmp_path)
    model = es.load_model(tmp_path)
    given = read_by(kind, 3)
    for name, way in WAYS.items():
        settings = {"max_new_tokens": NEW, "do_sample": False, **way}
        expected = reference.generate(**given, **settings)
        assert same(model.generate(**given, **settings), expected), name


@pytest.mark.parametrize("kind", TEXTS)
def test_a_run_goes_on_where_it_was_saved(kind: str, tmp_path: Path) -> None:
    model = es.LanguageModel(ours(reference_pair(kind, torch.float32)))
    options = {"max_new_tokens": 2 * NEW, "num_beams": 2, "eos_token_id": None, "pad_token_id": 0}
    options["decoder_start_token_id"] = 3
    run = es.open(model, None, ids(1, 9)[0], **options)
    for _ in range(NEW):
        next(run)
    run.save(tmp_path / "run")
    again = es.resume(tmp_path / "run", model, None)
    assert again.result().tokens == run.result().tokens


@pytest.mark.parametrize("kind", TEXTS)
def test_padding_chunks_and_drafts_change_nothing(kind: str) -> None:
    model = es.LanguageModel(ours(reference_pair(kind, torch.float64)), es.GenerationConfig())
    read, begun = ids(1, 9), ids(1, 7)
    settings = {"max_new_tokens": NEW, "decoder_start_token_id": 3, "decoder_input_ids": begun}
    alone = model.generate(read, **settings)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), read], dim=1)
    mask = (torch.arange(14) >= 5).long()[None]
    for way in (
        {"attention_mask": mask, "input_ids": padded},
        {"input_ids": read, "prefill_chunk_size": 2},
        {"input_ids": read, "prompt_lookup_num_tokens": 3},
        {"input_ids": read, "use_cache": False},
    ):
        assert torch.equal(model.generate(**way, **settings), alone), [*way]


@pytest.mark.parametrize("kind", [kind for kind in TEXTS if "t5" not in kind])
def test_a_length_beyond_the_table_of_positions_is_an_error(kind: str) -> None:
    model = es.LanguageModel(ours(reference_pair(kind, torch.float32)), es.GenerationConfig())
    settings = {"decoder_start_token_id": 3, "prompt_lookup_num_tokens": 10}
    most = model.generate(ids(1, 40), max_new_tokens=40, **settings)
    assert most.shape[1] <= 41
    for call in (
        lambda: model.generate(ids(1, 41), max_new_tokens=5, **settings),
        lambda: model.generate(ids(1, 4), max_new_tokens=41, **settings),
        lambda: model(ids(1, 41), decoder_input_ids=ids(1, 2)),
        lambda: model(ids(1, 4), decoder_input_ids=ids(1, 41)),
    ):
        with pytest.raises(RequestError, match="positions"):
            call()


def test_marian_makes_its_table_where_a_checkpoint_leaves_it_out() -> None:
    reference = reference_pair("marian", torch.float64, max_position_embeddings=300)
    kept = {n: w for n, w in reference.state_dict().items() if "embed_positions" not in n}
    kept.pop("final_logits_bias")
    reference.final_logits_bias.zero_()
    model = build_model(reference.config.to_dict(), Tensors(kept), dtype=torch.float64)
    read, written = ids(2, 200), ids(2, 250)
    found = model.forward(read, decoder_input_ids=written)
    assert farthest(found, logits_of(reference, {"input_ids": read}, written)) < 1e-7


def test_tied_tables_may_have_any_of_their_names() -> None:
    reference = reference_pair("bart", torch.float32)
    names = ("model.shared.weight", "model.encoder.embed_tokens.weight", "lm_head.weight")
    read, written = ids(2, 5), ids(2, 5)
    expected = ours(reference).forward(read, decoder_input_ids=written)
    held = dict(reference.state_dict())
    for name in (*names, "model.decoder.embed_tokens.weight"):
        held.pop(name)
    for name in names:
        source = Tensors({**held, name: reference.state_dict()[name]})
        model = build_model(reference.config.to_dict(), source)
        assert torch.equal(model.forward(read, decoder_input_ids=written), expected)
    with pytest.raises(FormatError, match=r"missing: model\.shared\.weight"):
        build_model(reference.config.to_dict(), Tensors(held))


WRONG: dict[str, tuple[dict[str, Any], type[EverystepError], str]] = {
    "heads that do not fit": (
        {"model_type": "bart", **TEXT_SIZES, "encoder_attention_heads": 5},
        FormatError,
        "encoder_attention_heads is impossible; wanted a divisor of d_model = 32; got 5",
    ),
    "no layers": (
        {"model_type": "mbart", **TEXT_SIZES, "decoder_layers": 0},
        FormatError,
        "decoder_layers is impossible",
    ),
    "an activation that there is not": (
        {"model_type": "marian", **TEXT_SIZES, "activation_function": "softmax"},
        UnsupportedError,
        "activation_function is not supported",
    ),
    "no positions": (
        {"model_type": "bart", **TEXT_SIZES, "max_position_embeddings": 0},
        FormatError,
        "max_position_embeddings is impossible",
    ),
    "a scale that is no switch": (
        {"model_type": "mbart", **TEXT_SIZES, "scale_embedding": 2.0},
        FormatError,
        "scale_embedding is impossible; wanted true or false",
    ),
    "silence": (
        {"model_type": "whisper", **SOUND_SIZES, "num_mel_bins": 0},
        FormatError,
        "num_mel_bins is impossible",
    ),
    "too few buckets": (
        {"model_type": "mt5", "relative_attention_num_buckets": 2},
        FormatError,
        "relative_attention_num_buckets is impossible",
    ),
    "no vocabulary of the other language": (
        {
            "model_type": "marian",
            **TEXT_SIZES,
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": -1,
        },
        FormatError,
        "decoder_vocab_size is impossible",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_an_error(name: str) -> None:
    values, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        build_model(values, Tensors({}))


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(kind: str) -> None:
    make_config, _, _ = ENCODER_DECODERS[kind]
    family = find_family(kind)
    whole = json.loads(make_config().to_json_string(use_diff=False))
    spec = family.read_spec(complete_config({"model_type": kind}))
    assert isinstance(spec, EncoderDecoderSpec)
    assert spec == family.read_spec(complete_config(whole))
    ids_of = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    for name in (*ids_of, "forced_eos_token_id"):
        assert complete_config({"model_type": kind}).get(name) == whole.get(name), name
