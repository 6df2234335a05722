"""One Adapter on a tiny Llama: on for one row of a batch and off for its neighbour."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from everystep.adapters import Adapter, AdapterUse, Delta, adapted
from everystep.adapters.changes import Replacement, Rotation
from everystep.api.model import LanguageModel
from everystep.engine import Engine, Lockstep
from everystep.errors import RequestError, UnsupportedError
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import convert_model
from everystep.nn.rounding import Rounding
from everystep.strategies import Greedy
from everystep.types import Prompt, Request
from tests.adapters.making import PROJECTIONS, merge, random_lora, write_folder
from tests.executors.models import narrow_model, random_model, with_attention
from tests.executors.requests import ENDS, MAX_NEW, ids, request
from tests.judges.drive import run_together
from tests.models.tiny import ours, reference_decoder


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """transformers' model, in float64."""
    return reference_decoder("llama", torch.float64)


@pytest.fixture(scope="module")
def folder(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for all its projections."""
    tensors = random_lora(reference.state_dict(), 1, PROJECTIONS)
    return write_folder(tmp_path_factory.mktemp("adapter"), tensors)


@pytest.fixture
def model(reference: PreTrainedModel, folder: Path) -> LanguageModel:
    """Our model, which knows the adapter as "style"."""
    model = LanguageModel(ours(reference))
    model.load_adapter(folder, "style")
    return model


def asking(model: LanguageModel, name: str, *adapters: tuple[str, float]) -> Request:
    """A greedy request for these adapters."""
    known = model.resolved([one for one, _ in adapters])
    resolved = tuple(known[one] for one, _ in adapters)
    plain = request(name, Greedy(), Prompt(ids(1, 7)))
    return replace(plain, adapters=adapters, resolved=resolved)


def continued(model: PreTrainedModel) -> tuple[int, ...]:
    """What transformers says to the same prompt."""
    read = torch.from_numpy(ids(1, 7))[None]
    out = model.generate(
        read, max_new_tokens=MAX_NEW, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0
    )
    return tuple(out[0, 7:].tolist())


def test_it_is_on_for_one_row_and_off_for_its_neighbour(
    reference: PreTrainedModel, model: LanguageModel
) -> None:
    merged = copy.deepcopy(reference)
    merge(merged.state_dict(), random_lora(reference.state_dict(), 1, PROJECTIONS))
    asked = [
        asking(model, "on", ("style", 1.0)),
        asking(model, "off"),
        asking(model, "none of it", ("style", 0.0)),
    ]
    executor = model.executor(frozenset().union(*(one.needs for one in asked)))
    results = run_together(asked, executor).results
    assert results["on"][0].tokens == continued(merged)
    assert results["off"][0].tokens == continued(reference)
    assert results["none of it"] == results["off"]
    assert results["on"] != results["off"]


def test_an_unknown_adapter_is_refused_before_any_compute(model: LanguageModel) -> None:
    engine = Engine(model.executor({"adapters"}), Lockstep())
    with pytest.raises(UnsupportedError, match="adapters: 'other'"):
        engine.submit(replace(asking(model, "wrong"), adapters=(("other", 1.0),)))
    assert not engine.pending


def test_names_are_given_once_and_taken_back(model: LanguageModel, folder: Path) -> None:
    with pytest.raises(RequestError, match="this name"):
        model.load_adapter(folder, "style")
    assert model.adapters == ("style",)
    wanted = asking(model, "on", ("style", 1.0))
    model.delete_adapter("style")
    assert model.adapters == ()
    with pytest.raises(RequestError, match="no such adapter"):
        model.delete_adapter("style")
    assert run_together([wanted], model.executor({"adapters"})).results
    with pytest.raises(RequestError, match="no such adapter"):
        asking(model, "on", ("style", 1.0))


def test_it_follows_the_model_to_another_type(model: LanguageModel) -> None:
    before = run_together(
        [asking(model, "on", ("style", 1.0))], model.executor({"adapters"})
    ).results
    model.to(torch.float32)
    after = run_together(
        [asking(model, "on", ("style", 1.0))], model.executor({"adapters"})
    ).results
    assert after["on"][0].tokens == before["on"][0].tokens


def test_the_native_executor_leaves_whole_modules_to_torch(folder: Path) -> None:
    held = LanguageModel(narrow_model("llama", None, panels=True))
    whole = Adapter({"layers.0.out": (Replacement(torch.eye(32)),)})
    turns = Adapter({"layers.0.out": (Rotation(torch.eye(4).expand(8, 4, 4), 32),)})
    assert whole.needs == {"adapters", "whole modules"}
    assert isinstance(held.executor(whole.needs), TorchExecutor)
    assert isinstance(held.executor({"adapters"}), NativeExecutor)
    assert isinstance(held.executor(turns.needs), NativeExecutor)
    with pytest.raises(UnsupportedError, match="it has no whole modules"):
        LanguageModel(held.core, executor="native").executor(whole.needs)


@pytest.mark.parametrize("rounding", [None, "int8", "int4"])
@pytest.mark.parametrize("panels", [False, True])
def test_the_weights_below_may_be_packed_or_quantised(
    rounding: Rounding | None, panels: bool
) -> None:
    """The base product is that of the storage, and what is added does not depend on it."""
    packed = narrow_model("llama", rounding, panels)
    plain = convert_model(packed, dtype=torch.float32, exact_activations=True)
    layer, x = packed.network.layers[0], torch.randn(5, 32)
    delta = Delta(torch.randn(2, 32), torch.randn(8, 2), 0.5, start=32)
    lora, places = Adapter({"layers.0.qkv": (delta,)}), torch.tensor([3, 1])
    for model in (packed, plain):
        changed = adapted(model.network, [((AdapterUse("a", 2.0, lora),), places)])
        base = model.network.layers[0].qkv(x)
        found = changed.layers[0].qkv(x) - base
        wanted = torch.zeros_like(base)
        wanted[places, 32:40] = x[places] @ delta.a.T @ delta.b.T
        assert torch.allclose(found, wanted, atol=1e-5)
        assert changed.layers[1].qkv is model.network.layers[1].qkv
        assert changed.layers[0].qkv.matrix() is not None
    assert layer.qkv.bias is changed.layers[0].qkv.bias is None


def test_it_learns_where_the_weights_below_are_plain() -> None:
    model = random_model(with_attention(qk_norm="heads"), dtype=torch.float32, learns=True)
    delta = Delta(torch.randn(2, 32, requires_grad=True), torch.randn(64, 2), 0.5)
    delta.b.requires_grad_()
    lora, places = Adapter({"layers.0.qkv": (delta,), "layers.1.out": ()}), torch.arange(5)
    network = adapted(model.network, [((AdapterUse("a", 1.0, lora),), places)])
    replace(model, network=network).forward(torch.arange(5)[None]).square().sum().backward()
    for leaf in (delta.a, delta.b, model.network.table):
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
