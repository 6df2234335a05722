"""PEFT models: several active adapters of different kinds, and positions of three axes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import everystep as es
from everystep.types import Extra, Verb, Work
from tests.bridge.families import model_of, randomise
from tests.bridge.pictures import TEXT, configured

WIDTH, LENGTH = TEXT["hidden_size"], 9


def vision_language_model() -> Any:
    """A tiny Qwen3-VL without a vision tower, in float64."""
    config = configured()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.Qwen3VLForConditionalGeneration(config).to(torch.float64)
        model.model.visual = nn.Identity()
        randomise(model)
    return model


def mixed(model: Any) -> Any:
    """The model with a LoRA and a LoHa adapter, both active."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        loha = peft.LoHaConfig(r=4, target_modules=["k_proj", "v_proj"], init_weights=False)
        wrapped = peft.PeftMixedModel(model, lora, "lora")
        wrapped.add_adapter("loha", loha)
        wrapped.set_adapter(["lora", "loha"])
    return wrapped


def features() -> dict[str, Tensor]:
    """Embeddings of two rows, one padded, with positions that stand still within a picture."""
    generator = torch.Generator().manual_seed(3)
    embeds = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :3] = 0
    positions = torch.arange(LENGTH).expand(3, 2, LENGTH).clone()
    positions[1, :, 4:7] = 3
    positions[2, :, 4:7] += 2
    positions[:, 0] = (positions[:, 0] - 3).clamp(min=0)
    return {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions}


@torch.no_grad()
def textbook(model: Any, given: dict[str, Tensor], row: int, count: int) -> list[int]:
    """Greedy tokens of one row without padding, cache or batch."""
    first = int((given["attention_mask"][row] == 0).sum())
    embeds = given["inputs_embeds"][row : row + 1, first:]
    positions = given["position_ids"][:, row : row + 1, first:]
    tokens: list[int] = []
    for _ in range(count):
        logits = model(inputs_embeds=embeds, position_ids=positions, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
        new = model.get_input_embeddings()(torch.tensor([tokens[-1:]]))
        embeds = torch.cat([embeds, new], dim=1)
        positions = torch.cat([positions, (positions.max() + 1).expand(3, 1, 1)], dim=-1)
    return tokens


@pytest.mark.parametrize("count", [40, pytest.param(512, marks=pytest.mark.slow)])
def test_a_mixed_model_reads_embeddings_at_positions_of_three_axes(count: int) -> None:
    model, given = mixed(vision_language_model()), features()
    model.train()
    out = es.generate(model, **given, max_new_tokens=count, do_sample=False)
    assert all(module.training for module in model.modules())
    model.eval()
    assert out.tolist() == [textbook(model, given, row, count) for row in range(2)]
    assert len({tuple(row) for row in out.tolist()}) == 2


def test_both_adapters_take_part() -> None:
    model, given = mixed(vision_language_model()), features()
    both = es.generate(model, **given, max_new_tokens=12)
    model.set_adapter(["lora"])
    one = es.generate(model, **given, max_new_tokens=12)
    assert one.tolist() != both.tolist()


def lora_model() -> Any:
    """A tiny Llama with two LoRA adapters."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(2)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(copy.deepcopy(model_of("llama")), lora, "formal")
        model.add_adapter("terse", lora)
    return model


@pytest.mark.parametrize("beams", [1, 3])
def test_a_peft_model_gives_what_it_gives_itself(beams: int) -> None:
    model = lora_model()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "num_beams": beams}
    expected = model.eval().generate(input_ids=ids, **given)
    assert es.generate(model, input_ids=ids, **given).tolist() == expected.tolist()


def test_rows_of_one_step_have_adapters_of_their_own() -> None:
    model = lora_model().eval()
    executor = es.wrap(model).executor()
    ids = np.array([5, 6, 7])
    asked = [(("formal", 1.0),), (("terse", 1.0),), ()]
    work = Work(
        tuple(Verb("allocate", row) for row in range(3)),
        np.arange(3),
        np.zeros(3, dtype=np.int64),
        np.full(3, 3),
        np.ones(3, dtype=np.int64),
        np.tile(ids, 3),
        {row: Extra(adapters=names) for row, names in enumerate(asked[:2])},
    )
    found = executor.run(work).logits
    for row, name in enumerate(["formal", "terse"]):
        model.set_adapter(name)
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0, -1]
        torch.testing.assert_close(found[row], wanted, rtol=1e-9, atol=1e-9)


def test_adapters_are_asked_for_by_row() -> None:
    model = lora_model().eval()
    ids = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    names = ["formal", "terse", "__base__"]
    found = es.wrap(model).generate(ids, **given, adapter_names=names).tolist()
    expected = model.generate(input_ids=ids, **given, adapter_names=names)
    assert found == expected.tolist() and len({tuple(row) for row in found}) == 3
    with pytest.raises(es.EverystepError, match="casual"):
        es.wrap(model).generate(ids, **given, adapter_names="casual")
    with pytest.raises(es.EverystepError, match="adapter_names does not fit"):
        es.wrap(model).generate(ids, **given, adapter_names=names[:2])


FIXED: dict[str, Callable[[], Any]] = {
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"], init_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=["q_proj"], feedforward_modules=[], init_ia3_weights=False
    ),
}
"""Kinds that PEFT gives no row of its own; it ignores `adapter_names` for some of them."""


def fixed_model(kind: str) -> Any:
    """A model whose rows cannot choose among its adapters."""
    if kind == "mixed":
        return mixed(copy.deepcopy(model_of("llama")))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(4)
        model = copy.deepcopy(model_of("llama"))
        if kind == "injected":
            model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False), "lora")
            return model
        return peft.get_peft_model(model, FIXED[kind](), kind)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("mixed", "lora, loha"), ("injected", "lora"), *((kind, kind) for kind in FIXED)],
)
def test_rows_that_cannot_choose_say_what_to_do(kind: str, names: str) -> None:
    """Of a mixed model, of kinds other than LoRA, and of what transformers itself injects."""
    model = fixed_model(kind).eval()
    own, ids = es.wrap(model), torch.tensor([[5, 6, 7], [5, 6, 7]])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    name = names.split(", ")[0]
    told = (
        rf"active take part in every row.*set_adapter on the module.*it has {names}\..*load_model"
    )
    asked: list[dict[str, Any]] = [
        *({"adapter_names": one} for one in (name, "__base__", [name, None], "casual")),
        {"adapters": {name: 1.0}},
    ]
    for one in asked:
        with pytest.raises(es.EverystepError, match=told):
            own.generate(ids, **given, **one)
        with pytest.raises(es.EverystepError, match=told):
            model_asked = {"max_new_tokens": 8, **one}
            es.generate(own, None, [[5, 6, 7], [5, 6, 7]], **model_asked)
    answer = own.can("model.generate", adapter_names=name)
    assert not answer and "take part in every row" in answer.reason
    # What the error advises: the active ones are in each row, until others are.
    found = own.generate(ids, **given, adapter_names=[None, None]).tolist()
    assert found == own.generate(ids, **given).tolist() == model.generate(ids, **given).tolist()


def test_virtual_tokens_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(model_of("llama")), config)
    with pytest.raises(es.EverystepError, match="virtual tokens"):
        es.wrap(model)
