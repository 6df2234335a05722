"""Folders that transformers wrote, of every family of decoders, give its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import everystep as es
from everystep.errors import FormatError, UnsupportedError
from everystep.models import build_model
from everystep.models.families import MODULES, find_family
from everystep.models.load import complete_config
from everystep.models.spec import DecoderSpec
from tests.models.page import PAGE, with_table
from tests.models.pictures import OWN
from tests.models.tiny import (
    DECODERS,
    ENCODER_DECODERS,
    OWN_SIZES,
    SIZES,
    Tensors,
    ids,
    ours,
    reference_decoder,
    with_norms,
)

NEW = 12
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "a static cache": {"cache_implementation": "static"},
}


def test_every_family_of_decoders_is_tested() -> None:
    texts = {f"{kind}_text" for kind in OWN}  # tests/models/test_without_tower.py
    others = {"doclayllm", "mamba", *ENCODER_DECODERS, *texts}
    assert {*DECODERS, *OWN} == {*MODULES} - others


def test_the_page_of_models_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "run python -m tests.models.page"


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_folder_generates_what_transformers_generates(
    kind: str, executor: Any, tmp_path: Path
) -> None:
    """Also where windows are exceeded, beside padding."""
    reference = with_norms(reference_decoder(kind, torch.float32, num_hidden_layers=5))
    reference.save_pretrained(tmp_path)
    model = es.load_model(tmp_path, executor=executor)
    prompts = ids(3, 11)
    prompts[0, :6] = prompts[2, :2] = 0
    mask = (prompts > 0).long()
    fixed = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for name, way in WAYS.items():
        rows = slice(0, 1) if name == "lookup" else slice(None)
        given = {"attention_mask": mask[rows], **fixed, **way}
        expected = reference.generate(prompts[rows], **given)
        assert torch.equal(model.generate(prompts[rows], **given), expected), name


@pytest.mark.parametrize("kind", DECODERS)
def test_a_run_goes_on_where_it_was_saved(kind: str, tmp_path: Path) -> None:
    model = es.LanguageModel(ours(reference_decoder(kind, torch.float32)))
    options = {"max_new_tokens": 2 * NEW, "num_beams": 2, "eos_token_id": None, "pad_token_id": 0}
    run = es.open(model, None, ids(1, 9)[0], **options)
    for _ in range(NEW):
        next(run)
    run.save(tmp_path / "run")
    again = es.resume(tmp_path / "run", model, None)
    assert again.result().tokens == run.result().tokens


def test_older_files_of_gemma_3_have_two_bases_beside_each_other() -> None:
    older = {
        **SIZES,
        **OWN_SIZES["gemma3_text"],
        "model_type": "gemma3_text",
        "rope_theta": 500.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    reference = reference_decoder(
        "gemma3_text", torch.float64, rope_parameters=ropes, layer_types=types
    )
    model = build_model(older, Tensors(reference.state_dict()), dtype=torch.float64)
    read = ids(2, 20)
    with torch.no_grad():
        expected = reference(read, use_cache=False).logits
    assert torch.allclose(model.forward(read), expected, rtol=0, atol=1e-9)


def test_phi3_of_a_stretched_context(tmp_path: Path) -> None:
    """Rows turn by the longer factors once they are longer than the model was trained for."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.1, 2.5, 3.0],
    }
    reference = reference_decoder(
        "phi3",
        torch.float64,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope,
    )
    model = ours(reference)
    for length in (12, 40):
        read = ids(2, length)
        with torch.no_grad():
            expected = reference(read, use_cache=False).logits
        assert torch.allclose(model.forward(read), expected, rtol=0, atol=1e-9)
    older = {**reference.config.to_dict(), "rope_scaling": {**rope, "type": "su"}}
    del older["rope_scaling"]["rope_type"], older["rope_parameters"]
    again = build_model(older, Tensors(reference.state_dict()), dtype=torch.float64)
    assert torch.equal(again.forward(read), model.forward(read))


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_what_a_checkpoint_of_a_body_holds_is_enough_for_a_tied_head(
    executor: Any, tmp_path: Path
) -> None:
    """As the files of GPT-2 are, masks beside the weights included."""
    whole = with_norms(reference_decoder("gpt2", torch.float32))
    body = dict(whole.transformer.state_dict())
    body |= {f"h.{index}.attn.bias": torch.ones(1, 1, 64, 64).tril() for index in range(3)}
    save_file({n: w.contiguous() for n, w in body.items()}, tmp_path / "model.safetensors")
    whole.config.save_pretrained(tmp_path)
    model, read = es.load_model(tmp_path, executor=executor), ids(2, 9)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    expected = whole.generate(read, do_sample=False, **options)
    assert torch.equal(model.generate(read, **options), expected)
    assert "transformer.h.0.attn.c_attn.weight" in model.state_dict()


def test_a_body_without_a_head_of_its_own_is_no_model() -> None:
    whole = reference_decoder("gpt_neox", torch.float32)
    with pytest.raises(es.EverystepError, match="no language head"):
        build_model(whole.config.to_dict(), Tensors(whole.gpt_neox.state_dict()))


def test_values_have_the_names_of_the_family_and_the_usual_ones() -> None:
    model = ours(reference_decoder("gpt2", torch.float32))
    assert model.config.n_embd == model.config.hidden_size == 48
    assert model.config.n_positions == model.config.max_position_embeddings == 64
    with pytest.raises(FormatError, match="n_embd and hidden_size are two names of one value"):
        complete_config({"model_type": "gpt2", "n_embd": 32, "hidden_size": 48})


def test_older_files_of_gpt_neox_name_the_turning_share_beside_the_base() -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    reference = reference_decoder("gpt_neox", torch.float64, rope_parameters=rope)
    older = {**reference.config.to_dict(), "rotary_pct": 0.5, "rotary_emb_base": 500}
    older |= {"rope_theta": 7.0, "partial_rotary_factor": 1.0}  # which mean nothing there
    del older["rope_parameters"]
    source = Tensors(reference.state_dict())
    model, read = build_model(older, source, dtype=torch.float64), ids(2, 20)
    with torch.no_grad():
        expected = reference(read, use_cache=False).logits
    assert torch.allclose(model.forward(read), expected, rtol=0, atol=1e-9)


WRONG: dict[str, tuple[dict[str, Any], type[es.EverystepError], str]] = {
    "both ways": (
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        UnsupportedError,
        "does not generate",
    ),
    "a cap without effect": (
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        UnsupportedError,
        "no effect in Gemma 3",
    ),
    "a scale of nothing": (
        {"model_type": "gemma2", "query_pre_attn_scalar": 0},
        FormatError,
        "query_pre_attn_scalar is impossible",
    ),
    "a cap of nothing": (
        {"model_type": "gemma2", "final_logit_softcapping": -1.0},
        FormatError,
        "final_logit_softcapping is impossible",
    ),
    "types of too few layers": (
        {"model_type": "gemma2", "layer_types": ["full_attention"]},
        FormatError,
        "layer_types is impossible; wanted 3 times",
    ),
    "a layer of another type": (
        {"model_type": "smollm3", "layer_types": ["chunked_attention"] * 3},
        FormatError,
        "layer_types is impossible",
    ),
    "too few layers": (
        {"model_type": "smollm3", "no_rope_layers": [1, 0]},
        FormatError,
        "no_rope_layers is impossible; wanted a 0 or 1 for each of 3 layers",
    ),
    "neither 0 nor 1": (
        {"model_type": "smollm3", "no_rope_layers": [1, True, 2]},
        FormatError,
        "no_rope_layers is impossible",
    ),
    "a window of nothing": (
        {"model_type": "phi3", "sliding_window": 0},
        FormatError,
        "sliding_window is impossible",
    ),
    "factors for other heads": (
        {
            "model_type": "phi3",
            "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 4},
        },
        FormatError,
        "short_factor is impossible; wanted 4 positive numbers",
    ),
    "another encoder": (
        {"model_type": "gpt2", "add_cross_attention": True},
        UnsupportedError,
        "looks at an encoder",
    ),
    "heads of unequal size": (
        {"model_type": "gpt2", "num_attention_heads": 7},
        FormatError,
        "num_attention_heads is impossible; wanted a divisor of hidden_size = 48",
    ),
    "norms after sums": (
        {"model_type": "opt", "do_layer_norm_before": False},
        UnsupportedError,
        "do_layer_norm_before makes a model with norms after the sums",
    ),
    "no last norm": (
        {"model_type": "opt", "_remove_final_layer_norm": True},
        UnsupportedError,
        "no norm after the last layer",
    ),
    "norms without weights": (
        {"model_type": "opt", "layer_norm_elementwise_affine": False},
        UnsupportedError,
        "norms without weights",
    ),
    "embeddings of another width": (
        {"model_type": "opt", "word_embed_proj_dim": 24},
        UnsupportedError,
        "word_embed_proj_dim = hidden_size = 48",
    ),
    "more than whole heads": (
        {"model_type": "gpt_neox", "rotary_pct": 1.5},
        FormatError,
        "partial_rotary_factor is impossible; wanted at most 1",
    ),
    "a norm for each head": (
        {"model_type": "stablelm", "qk_layernorm": True},
        UnsupportedError,
        "qk_layernorm gives each head a norm of its own",
    ),
    "distances": ({"model_type": "falcon", "alibi": True}, UnsupportedError, "alibi"),
    "groups that do not fit": (
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4},
        FormatError,
        "num_kv_heads is impossible; wanted a divisor of 6",
    ),
    "groups of the older kind": (
        {"model_type": "falcon", "multi_query": False, "num_kv_heads": 2},
        FormatError,
        "num_kv_heads is impossible; wanted 6",
    ),
    "newer branches in a row": (
        {"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
        FormatError,
        "parallel_attn is impossible",
    ),
    "two norms of the older kind": (
        {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
        FormatError,
        "num_ln_in_parallel_attn is impossible; wanted 1",
    ),
    "three norms": (
        {
            "model_type": "falcon",
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 3,
        },
        FormatError,
        "num_ln_in_parallel_attn is impossible; wanted 1 or 2",
    ),
    "a head that turns in part": (
        {"model_type": "falcon", "rope_parameters": {"partial_rotary_factor": 0.5}},
        FormatError,
        "partial_rotary_factor is impossible; wanted heads that turn whole",
    ),
    "a norm that divides by nothing": (
        {"model_type": "starcoder2", "norm_epsilon": 0},
        FormatError,
        "norm_epsilon is impossible",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_an_error(name: str) -> None:
    values, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        build_model({**SIZES, **values}, Tensors({}))


@pytest.mark.parametrize("kind", DECODERS)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(kind: str) -> None:
    """The defaults of both are the same model."""
    make_config, _ = DECODERS[kind]
    family = find_family(kind)
    shortest = {"model_type": kind, "num_hidden_layers": 7}
    whole = json.loads(make_config(num_hidden_layers=7).to_json_string(use_diff=False))
    spec = family.read_spec(complete_config(shortest))
    assert isinstance(spec, DecoderSpec)
    assert spec == family.read_spec(complete_config(whole))
