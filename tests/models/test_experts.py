"""Mixtures of experts: what torch operators read, the forms of checkpoints, and what goes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from everystep.errors import FormatError
from everystep.models import Model, build_model, named_weights
from everystep.models.decoder import Decoder
from everystep.nn.experts import Experts
from everystep.nn.linear import LinearMap, Matrix
from tests.models.tiny import OWN_SIZES, SIZES, Tensors, ids, ours, reference_decoder

KINDS = ("mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True, eq=False)
class Counted(LinearMap):
    """A map that notes how many rows it is given at a time."""

    base: LinearMap
    bias: Tensor | None = None
    rows: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.base(x)

    def matrix(self) -> Matrix:
        return self.base.matrix()


def counted(model: Model) -> tuple[Model, list[Experts]]:
    """The model with counted maps, and its experts."""
    decoder, found, layers = cast(Decoder, model.network), [], []
    for layer in decoder.layers:
        experts = layer.experts
        if experts is not None:
            up, down = (tuple(map(Counted, maps)) for maps in (experts.up, experts.down))
            experts = replace(experts, up=up, down=down)
            found.append(experts)
        layers.append(replace(layer, experts=experts))
    return replace(model, network=replace(decoder, layers=tuple(layers))), found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 9, 60])
def test_each_expert_that_was_chosen_multiplies_once(kind: str, count: int) -> None:
    model = ours(reference_decoder(kind, torch.float64))
    watched, every = counted(model)
    read = ids(1, count)
    assert torch.equal(watched.forward(read), model.forward(read))
    for experts, spec in zip(
        every, [one.experts for one in model.spec.layers if one.experts], strict=True
    ):
        for maps in (experts.up, experts.down):
            rows = [cast(Counted, one).rows for one in maps]
            assert all(len(one) <= 1 for one in rows) and [0] not in rows
            # Each position is multiplied by as many as it chooses.
            assert sum(map(sum, rows)) == count * spec.chosen
            assert sum(map(len, rows)) <= min(spec.count, count * spec.chosen)


def of_one_each(kind: str, model: Model, weights: dict[str, Tensor]) -> bool:
    """Whether these are the model's weights, each expert's by itself."""
    found = dict(named_weights(model))
    assert {*found} == {*weights}
    assert any(".experts.4." in name for name in found), kind
    return all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_of_a_checkpoint_are_the_same_model(kind: str, tmp_path: Path) -> None:
    """That of transformers' modules and that of its files, which is also what goes out."""
    reference = reference_decoder(kind, torch.float32)
    reference.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    of_modules = ours(reference)
    of_files = build_model(reference.config.to_dict(), Tensors(written), dtype=torch.float32)
    assert of_one_each(kind, of_modules, written) and of_one_each(kind, of_files, written)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_goes_out(kind: str, tmp_path: Path) -> None:
    reference = reference_decoder(kind, torch.float32)
    reference.config.save_pretrained(tmp_path)
    weights = {name: one.contiguous().clone() for name, one in named_weights(ours(reference))}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(theirs[name], one) for name, one in reference.state_dict().items())


def test_stacks_may_lie_turned() -> None:
    reference = reference_decoder("qwen3_moe", torch.float64)
    given = reference.state_dict()
    turned = {
        name: one.transpose(1, 2).contiguous() if ".experts." in name else one
        for name, one in given.items()
    }
    model = build_model(reference.config.to_dict(), Tensors(turned), dtype=torch.float64)
    read = ids(2, 9)
    assert torch.equal(model.forward(read), ours(reference).forward(read))


def broken(change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Loads a model whose configuration or weights were changed."""
    reference = reference_decoder("qwen3_moe", torch.float32)
    config, weights = reference.config.to_dict(), dict(reference.state_dict())
    change(config, weights)
    build_model(config, Tensors(weights))


UP = "model.layers.0.mlp.experts.gate_up_proj"


def test_a_stack_that_does_not_fit_is_an_error() -> None:
    for shape in [(6, 80, 48), (7, 78, 48), (7, 80, 47), (7, 80), (80, 48)]:
        with pytest.raises(FormatError, match="gate_up_proj' does not fit") as caught:
            broken(lambda config, weights, s=shape: weights.update({UP: torch.zeros(s)}))
        assert "(7, 80, 48)" in str(caught.value) and str(shape) in str(caught.value)


def test_weights_in_both_forms_at_once_are_an_error() -> None:
    def add(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for number in range(7):
            for role in ("gate_proj", "up_proj"):
                name = f"model.layers.0.mlp.experts.{number}.{role}.weight"
                weights[name] = torch.zeros(40, 48)

    with pytest.raises(FormatError, match=r"no place for: model.layers.0.*gate_up_proj"):
        broken(add)


def test_a_missing_expert_is_named() -> None:
    def remove(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        del weights[UP]

    with pytest.raises(FormatError, match=r"missing: model.layers.0.mlp.experts.0.gate_proj"):
        broken(remove)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more than there are": (
        {"model_type": "mixtral", "num_experts_per_tok": 9},
        "num_experts_per_tok is impossible; wanted at most 8, the number of experts",
    ),
    "none": ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts is impossible"),
    "two numbers": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 5},
        "num_experts is impossible; wanted num_local_experts = 5",
    ),
    "every zeroth layer": (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 0},
        "decoder_sparse_step is impossible",
    ),
    "no list": (
        {"model_type": "qwen3_moe", "mlp_only_layers": 1},
        "mlp_only_layers is impossible; wanted numbers of layers",
    ),
    "no numbers": (
        {"model_type": "qwen3_moe", "mlp_only_layers": [True]},
        "mlp_only_layers is impossible",
    ),
    "no flag": (
        {"model_type": "qwen3_moe", "norm_topk_prob": 1},
        "norm_topk_prob is impossible; wanted true or false",
    ),
    "no size": (
        {"model_type": "qwen3_moe", "moe_intermediate_size": 0},
        "moe_intermediate_size is impossible",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_an_error(name: str) -> None:
    values, text = WRONG[name]
    with pytest.raises(FormatError, match=text):
        build_model({**SIZES, **values}, Tensors({}))


def test_older_files_count_experts_under_another_key() -> None:
    reference = reference_decoder("qwen3_moe", torch.float64)
    config = reference.config.to_dict()
    config["num_experts"] = config.pop("num_local_experts")
    assert config["num_experts"] == OWN_SIZES["qwen3_moe"]["num_experts"]
    model = build_model(config, Tensors(reference.state_dict()), dtype=torch.float64)
    assert model.spec == ours(reference).spec
