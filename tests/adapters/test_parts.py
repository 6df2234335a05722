"""Adapters that change heads, embeddings, whole modules, rows of tokens and experts are PEFT's."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import everystep as es
from everystep.adapters import read_adapter
from everystep.api.model import LanguageModel
from everystep.errors import FormatError, UnsupportedError
from tests.adapters.test_kinds import READ, close, configured, logits
from tests.models.tiny import ours, reference_decoder, with_norms

FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"attention_bias": True, "num_hidden_layers": 2}),
    "tied": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "scaled": ("gemma2", {"num_hidden_layers": 2}),
    "layer norms": ("gpt2", {"num_hidden_layers": 2}),
    "mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": [1]}),
}


def _lora(**more: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(
        **{"r": 3, "target_modules": ["q_proj"], "init_lora_weights": False, **more}
    )


BOTH = ["embed_tokens", "lm_head"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE: Mapping[str, Callable[[], Any]] = {
    "embeddings": _lora(target_modules=["embed_tokens"], lora_alpha=5),
    "a head": _lora(target_modules=["lm_head", "v_proj"], use_rslora=True),
    "both": _lora(target_modules=BOTH, rank_pattern={"lm_head": 2}),
    "a dora of the head": _lora(target_modules=["lm_head"], use_dora=True),
    "a loha of the head": lambda: peft.LoHaConfig(
        r=2, target_modules=["lm_head", "q_proj"], init_weights=False
    ),
    "whole frame": _lora(modules_to_save=BOTH),
    "whole head": _lora(modules_to_save=["lm_head"]),
    "whole norms": _lora(modules_to_save=["input_layernorm", "model.norm"]),
    "whole layers": _lora(modules_to_save=["mlp", "o_proj", "k_proj"]),
    "tokens": _lora(trainable_token_indices=[9, 5, 40]),
    "tokens of both": _lora(trainable_token_indices={"lm_head": [3, 17], "embed_tokens": [9]}),
    "the same tokens of both": _lora(
        trainable_token_indices={"lm_head": [9, 5], "embed_tokens": [9, 5]}
    ),
    "tokens alone": lambda: peft.TrainableTokensConfig(token_indices=[17, 9], init_weights=False),
    "kept tied": _lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "ranks kept tied": _lora(target_modules=BOTH, ensure_weight_tying=True),
    "a parameter": _lora(target_modules=[], target_parameters=["o_proj.weight"]),
}
MADE: Mapping[tuple[str, str], Callable[[], Any]] = {
    **{(form, name): made for form in ("untied", "tied") for name, made in DENSE.items()},
    **{
        ("scaled", name): DENSE[name]
        for name in ("embeddings", "both", "whole frame", "whole norms", "tokens", "tokens alone")
    },
    ("layer norms", "frame"): _lora(target_modules=["wte", "lm_head", "c_attn"]),
    ("layer norms", "whole"): _lora(
        target_modules=["c_attn"], modules_to_save=["ln_1", "ln_f", "c_fc"]
    ),
    **{
        (form, name): made
        for form in ("mixtral", "qwen3_moe")
        for name, made in {
            "experts": _lora(target_parameters=EXPERTS, lora_alpha=5),
            "one stack": _lora(target_parameters=["experts.down_proj"], use_rslora=True),
            "ranks by stack": _lora(
                target_parameters=EXPERTS, rank_pattern={"experts.down_proj": 2}
            ),
            "a router": _lora(target_parameters=["gate.weight", "experts.gate_up_proj"]),
            "whole experts": _lora(modules_to_save=["experts"]),
        }.items()
    },
}
IDS = [f"{form}, {name}" for form, name in MADE]


@cache
def base(form: str) -> Any:
    """transformers' model, in float64."""
    kind, config = FORMS[form]
    torch.manual_seed(1)
    return with_norms(reference_decoder(kind, torch.float64, **config))


def quiet(call: Callable[[], Any]) -> Any:
    """What a call of PEFT gives, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def wrapped(form: str, config: Any) -> Any:
    """PEFT's model with a new adapter."""
    module = copy.deepcopy(base(form))
    return quiet(lambda: peft.get_peft_model(module, config, autocast_adapter_dtype=False).double())


def shaken(module: Any, seed: int = 2) -> Any:
    """The same, with random numbers added to all that learns."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in module.named_parameters():
            if weight.requires_grad:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.add_(0.3 * noise)
    return module


@cache
def trained(form: str, name: str) -> tuple[Path, Tensor]:
    """The folder of an adapter, and the logits of PEFT's own forward with it."""
    folder = Path(mkdtemp())
    made = shaken(wrapped(form, MADE[form, name]())).eval()
    quiet(lambda: made.save_pretrained(folder))
    with torch.no_grad():
        return folder, made(READ).logits


@pytest.mark.parametrize(("form", "name"), MADE, ids=IDS)
def test_it_is_what_peft_computes(form: str, name: str) -> None:
    folder, expected = trained(form, name)
    model = ours(base(form))
    found = logits(model, [("a", read_adapter(folder, model).now(), 1.0)])
    assert close(found, expected)
    assert not close(model.forward(READ), expected, 1e-2)
