"""Folders that transformers wrote, of every family of decoders, give its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import FormatError, UnsupportedError
from everystep.models import build_model
from everystep.models.families import MODULES, find_family
from everystep.models.load import complete_config
from everystep.models.spec import DecoderSpec
from tests.models.tiny import (
    DECODERS,
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
    assert {*DECODERS} == {*MODULES} - {"doclayllm", "mamba", "t5"}


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
