"""Digests of models: equal for equal weights however they lie in memory, and for no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from everystep.nn.linear import weights_of
from everystep.nn.panels import Panels
from everystep.nn.quantized import QuantizedWeight
from everystep.testing.models import tiny_llama
from tests.adapters.making import PROJECTIONS, random_lora, write_folder

IDS = [5, 6, 7, 8]
HOW: list[dict[str, Any]] = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"quantize": "int8"},
    {"quantize": "int4"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = tiny_llama(vocab_size=100, dtype=torch.float32, intermediate_size=64)
    made.save_pretrained(folder)
    return folder


def loaded(folder: Path, **more: Any) -> LanguageModel:
    return es.load_model(folder, **more)


@pytest.mark.parametrize("how", HOW)
def test_it_does_not_depend_on_where_the_weights_lie(folder: Path, how: dict[str, Any]) -> None:
    models = [loaded(folder, **how, executor=executor) for executor in ("auto", "torch", "auto")]
    assert models[0].digest() == models[2].digest()
    # Natively weights of 16 bits are computed with in float32, so runs cannot be exchanged.
    assert (models[0].digest() == models[1].digest()) == ("bfloat16" not in str(how))


def memory_of(model: LanguageModel) -> list[Tensor]:
    """Where the weights of the model lie."""
    core, found = model.core, []
    for layer in core.network.layers:
        for role in ("qkv", "out", "up", "down"):
            for weight in weights_of(getattr(layer, role).matrix()):
                if isinstance(weight, Panels):
                    found.append(weight.data)
                elif isinstance(weight, QuantizedWeight):
                    found += weight.tensors().values()
                else:
                    found.append(weight)
    return found


@pytest.mark.parametrize("executor", ["auto", "torch"])
@pytest.mark.parametrize("how", HOW)
def test_it_depends_on_every_bit(folder: Path, how: dict[str, Any], executor: str) -> None:
    """Also on one in the middle of a weight."""
    if executor == "torch" and "dtype" in how:
        # These lie in a layout of oneDNN's own, bfloat16 where the processor computes in it.
        how = {"dtype": torch.float64 if how["dtype"] == torch.float32 else torch.float16}
    digests = {loaded(folder, **how, executor=executor).digest()}
    parts = len(memory_of(loaded(folder, **how, executor=executor)))
    for n in range(parts):
        model = loaded(folder, **how, executor=executor)
        part = memory_of(model)[n]
        place = part.data_ptr() - part.untyped_storage().data_ptr()
        memory = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
        memory[place + part.nbytes // 3] ^= 1
        digests.add(model.digest())
    assert len(digests) == 1 + parts > 8


def test_a_configuration_counts_too(folder: Path) -> None:
    other = tiny_llama(vocab_size=100, dtype=torch.float32, rope_theta=5000.0)
    assert loaded(folder).digest() != other.digest()


def test_a_run_does_not_go_on_in_a_model_with_another_row(tmp_path: Path) -> None:
    def model(changed: bool) -> LanguageModel:
        made = tiny_llama(vocab_size=100, dtype=torch.float32)
        if changed:
            made = made.requires_grad_()
            with torch.no_grad():
                weight = dict(made.named_parameters())["model.layers.1.mlp.down_proj.weight"]
                weight[5] += 0.25
        return made

    run = es.open(model(False), None, IDS, max_new_tokens=5)
    next(run)
    run.save(tmp_path / "run")
    assert es.resume(tmp_path / "run", model(False)).result() == run.result()
    with pytest.raises(RequestError, match="another model"):
        es.resume(tmp_path / "run", model(True))


def test_a_run_does_not_go_on_with_another_adapter(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=100, dtype=torch.float32)
    for name, seed in (("a", 1), ("b", 2)):
        lora = random_lora(model.state_dict(), seed, PROJECTIONS[:2], 3)
        write_folder(tmp_path / name, {key: value.float() for key, value in lora.items()})
    model.load_adapter(tmp_path / "a", "style")
    run = es.open(model, None, IDS, max_new_tokens=5, adapter_names=["style"])
    next(run)
    run.save(tmp_path / "run")
    model.load_adapter(tmp_path / "b", "other")
    assert es.resume(tmp_path / "run", model).result() == run.result()
    model.delete_adapter("style")
    with pytest.raises(RequestError, match="no such adapter"):
        es.resume(tmp_path / "run", model)
    model.load_adapter(tmp_path / "b", "style")
    with pytest.raises(RequestError, match="another model"):
        es.resume(tmp_path / "run", model)


def test_every_bit_of_a_wrapped_module_counts() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    module: nn.Module = LlamaForCausalLM(config).eval()
    model = es.wrap(module)
    before = model.digest()
    assert model.digest() == es.wrap(module).digest() == before
    with torch.no_grad():
        weight = module.get_parameter("model.layers.0.mlp.up_proj.weight")
        weight[17, 3] += 1e-3
    assert model.digest() != before
