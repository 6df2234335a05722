"""New adapters begin and learn as PEFT's do: draws, gradients, dropout, and what is saved."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import FormatError, RequestError, UnsupportedError
from everystep.executors.native import read_rows
from everystep.models import convert_model
from everystep.testing.models import tiny_llama
from tests.adapters.test_kinds import MADE, SOME, TARGETS, base, close, trained
from tests.executors.models import narrow_model
from tests.models.tiny import ours

IDS = torch.tensor([[5, 9, 17, 40, 6, 9], [17, 4, 22, 8, 8, 11]])
LABELS = torch.tensor([[-100, 9, 17, 40, 6, 9], [17, 4, 22, -100, 8, 11]])

CONFIGS: Mapping[str, Any] = {
    "default modules": es.LoraConfig(),
    "lora": es.LoraConfig(r=3, target_modules=TARGETS),
    "all": es.LoraConfig(r=3, target_modules="all-linear"),
    "rslora": es.LoraConfig(r=4, target_modules=SOME, use_rslora=True, lora_alpha=3),
    "dora": es.LoraConfig(r=3, target_modules=TARGETS, use_dora=True),
    "dora at random": es.LoraConfig(
        r=3, target_modules=SOME, use_dora=True, init_lora_weights=False
    ),
    "biases": es.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_bias=True),
    "gaussian": es.LoraConfig(r=3, target_modules=SOME, init_lora_weights="gaussian"),
    "an expression": es.LoraConfig(r=2, target_modules=r".*layers\.1\..*_proj"),
    "patterns": es.LoraConfig(
        r=3, target_modules=TARGETS, rank_pattern={"q_proj": 5}, alpha_pattern={"down_proj": 3}
    ),
    "layers": es.LoraConfig(
        r=3, target_modules=TARGETS, layers_to_transform=[1], exclude_modules=["v_proj"]
    ),
    "a layer by its pattern": es.LoraConfig(
        r=3, target_modules=SOME, layers_to_transform=0, layers_pattern="layers"
    ),
    "loha": es.LoHaConfig(r=3, target_modules=TARGETS),
    "loha at random": es.LoHaConfig(r=3, alpha=5, target_modules=SOME, init_weights=False),
}


def theirs(config: Any, seed: int) -> Any:
    """PEFT's model with a new adapter of this configuration."""
    kind = peft.LoraConfig if isinstance(config, es.LoraConfig) else peft.LoHaConfig
    module = copy.deepcopy(base("llama"))
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(module, kind(**asdict(config)))


def apart(one: Tensor, other: Tensor) -> float:
    """How far two losses are from each other."""
    return abs(float((one - other).detach()))


def strengthened(tensors: Mapping[str, Tensor]) -> None:
    """Values far from doing nothing, the same for both sides."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, one in sorted(tensors.items()):
            one.add_(0.2 * torch.randn(one.shape, generator=generator).to(one))


def named(made: Any) -> dict[str, Tensor]:
    """The tensors that learn in PEFT's model, by the names that it saves."""
    found = {}
    for name, one in made.named_parameters():
        if one.requires_grad:
            name = name.replace(".default", "")
            if "magnitude" in name or "hada_" in name:
                name = name.removesuffix(".weight")
            found[name] = one
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_it_begins_with_pefts_values(name: str) -> None:
    made = named(theirs(CONFIGS[name], 3))
    model = LanguageModel(ours(base("llama")))
    torch.manual_seed(3)
    adapter = model.add_adapter("new", CONFIGS[name])
    own = dict(adapter.named_parameters())
    assert {*own} == {*made}
    for key, value in own.items():
        assert value.is_leaf and value.requires_grad and value.dtype == torch.float64
        assert close(value.detach(), made[key].detach(), 1e-12) or not value.any(), key
    assert model.adapters == ("new",)


@pytest.mark.parametrize("name", CONFIGS)
def test_its_gradients_are_pefts(name: str) -> None:
    made = theirs(CONFIGS[name], 3)
    model = LanguageModel(ours(base("llama")))
    torch.manual_seed(3)
    adapter = model.add_adapter(CONFIGS[name])
    strengthened(named(made))
    strengthened(dict(adapter.named_parameters()))
    expected = made(IDS, labels=LABELS)
    expected.loss.backward()
    found = model(IDS, labels=LABELS, adapter_names="default")
    assert close(found.logits.detach(), expected.logits.detach())
    # transformers takes the loss in float32.
    assert apart(found.loss, expected.loss) <= 1e-5
    found.loss.backward()
    wanted = {key: one.grad for key, one in named(made).items()}
    for key, one in adapter.named_parameters():
        assert one.grad is not None and wanted[key] is not None
        # transformers takes root mean squares in float32, gradients included.
        assert close(one.grad, wanted[key], 1e-5), key
    with pytest.raises(UnsupportedError, match="requires_grad_"):
        list(model.parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_draws_as_pefts_does(dora: bool) -> None:
    config = es.LoraConfig(
        r=3, target_modules="all-linear", lora_dropout=0.4, use_dora=dora, init_lora_weights=False
    )
    made, model = theirs(config, 3), LanguageModel(ours(base("llama")))
    torch.manual_seed(3)
    adapter = model.add_adapter(config)
    made.train()
    adapter.train()
    torch.manual_seed(5)
    expected = made(IDS, labels=LABELS).loss
    torch.manual_seed(5)
    found = model(IDS, labels=LABELS, adapters="default").loss
    expected.backward()
    found.backward()
    assert apart(found, expected) <= 1e-6
    wanted = {key: one.grad for key, one in named(made).items()}
    assert all(close(one.grad, wanted[key]) for key, one in adapter.named_parameters())
    plain = model(IDS, labels=LABELS, adapters="default")
    assert apart(plain.loss, found) > 1e-6
    adapter.eval()
    made.eval()
    quiet = model(IDS, labels=LABELS, adapters="default").loss
    assert apart(quiet, made(IDS, labels=LABELS).loss) <= 1e-6


@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize("codes", [None, "int8", "int4"])
@pytest.mark.parametrize("targets", ["all-linear", ["down_proj"]])
def test_gradients_pass_through_weights_that_are_frozen(
    targets: Any, codes: Any, panels: bool
) -> None:
    """They are those of the same values as plain floats, where activations are not rounded; where
    they are, the rounding counts as none."""
    frozen = narrow_model("llama", codes, panels=panels)
    exact = convert_model(
        frozen, exact_activations=True, in_panels=lambda spec: read_rows if panels else None
    )
    config = es.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    grads = []
    for core in (exact, convert_model(frozen, dtype=torch.float32, learns=True), frozen):
        model = LanguageModel(core)
        torch.manual_seed(3)
        adapter = model.add_adapter(config)
        assert all(one.dtype == torch.float32 for one in adapter.parameters())
        model(IDS % 32, labels=IDS % 32, adapters="default").loss.backward()
        grads.append({key: one.grad for key, one in adapter.named_parameters()})
    for key, one in grads[0].items():
        assert close(one, grads[1][key], 1e-4), key
        assert torch.cosine_similarity(one.flatten(), grads[2][key].flatten(), 0) > 0.8, key


def test_a_step_of_an_optimizer_changes_later_calls_and_no_digest_is_stale() -> None:
    model = tiny_llama(dtype=torch.float64, vocab_size=320)
    adapter = model.add_adapter(adapter_config=es.LoraConfig(r=4, target_modules="all-linear"))
    plain = model.generate(IDS, max_new_tokens=6, do_sample=False)
    before = model.digest(["default"])
    options = {"max_new_tokens": 6, "do_sample": False, "adapter_names": "default"}
    assert torch.equal(model.generate(IDS, **options), plain)  # it adds nothing yet
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.03)
    losses = []
    for _ in range(15):
        loss = model(IDS, labels=IDS, adapter_names="default").loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert model.digest(["default"]) != before
    learned = model.generate(IDS, **options)
    assert not torch.equal(learned, plain)
    logits = model(IDS, adapter_names="default").logits
    # The engine and the forward compute the same, and rows without it are as they were.
    scores = model.generate(
        IDS, **options, output_logits=True, return_dict_in_generate=True
    ).logits[0]
    # Norms are rounded to float32, which strong adapters amplify.
    assert close(scores, logits[:, -1].detach(), 1e-4)
    mixed = model(IDS, adapters=[None, {"default": 0.5}]).logits
    assert torch.equal(mixed[:1], model(IDS).logits[:1])
    half = model(IDS[1:], adapters={"default": 0.5}).logits
    assert close(mixed[1:].detach(), half.detach(), 1e-12)
    model.to(torch.float32)
    assert model(IDS, adapters="default").logits.dtype == torch.float32
    assert next(iter(adapter.parameters())).dtype == torch.float64


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CONFIGS])
def test_peft_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    model = LanguageModel(ours(base("llama")))
    adapter = model.add_adapter("a", CONFIGS[name])
    strengthened(dict(adapter.named_parameters()))
    model.save_adapter(tmp_path, "a")
    assert {one.name for one in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as for keys that are missing or not expected
        for kind in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=kind)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base("llama")), tmp_path)
    with torch.no_grad():
        expected = loaded(IDS).logits
    found = model(IDS, adapters="a").logits
    assert close(found.detach(), expected)
    again = LanguageModel(ours(base("llama")))
    again.load_adapter(tmp_path)
    assert again.adapters == ("default",)
    assert torch.equal(again(IDS, adapters="default").logits, found.detach())


@pytest.mark.parametrize("name", MADE)
def test_what_peft_saved_is_saved_again_tensor_for_tensor(name: str, tmp_path: Path) -> None:
    folder, expected = trained("llama", name)
    model = LanguageModel(ours(base("llama")))
    model.load_adapter(folder, "a")
    model.save_adapter(tmp_path, "a")
    files = [load_file(one / "adapter_model.safetensors") for one in (folder, tmp_path)]
    assert {*files[0]} == {*files[1]}
    assert all(torch.equal(one, files[1][key]) for key, one in files[0].items())
    settings = [json.loads((one / "adapter_config.json").read_text()) for one in (folder, tmp_path)]
    assert settings[0] | {"inference_mode": True} == settings[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base("llama")), tmp_path).double()
    read = torch.tensor([[5, 9, 17, 40, 6, 9, 17, 3, 22]])
    with torch.no_grad():
        assert close(loaded(read).logits, expected)


FIXED = ("adalora", "oft, bounded")
"""What PEFT changes by other means than gradients while it learns."""


@pytest.mark.parametrize("name", FIXED)
def test_what_cannot_learn_is_refused(name: str) -> None:
    model = LanguageModel(ours(base("llama")))
    with pytest.raises(UnsupportedError, match="not supported while an adapter learns"):
        model.load_adapter(trained("llama", name)[0], is_trainable=True)
    assert model.adapters == ()


@pytest.mark.parametrize("name", [one for one in MADE if one not in FIXED])
def test_adapters_of_every_kind_learn_as_pefts_do(name: str) -> None:
    folder, _ = trained("llama", name)
    model = LanguageModel(ours(base("llama")))
    adapter = model.load_adapter(folder, is_trainable=True)
    assert adapter is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.PeftModel.from_pretrained(
            copy.deepcopy(base("llama")), folder, is_trainable=True
        ).double()
    made.eval()
    made(IDS, labels=LABELS).loss.backward()
    model(IDS, labels=LABELS, adapters="default").loss.backward()
    wanted = [one.grad for one in made.parameters() if one.requires_grad]
    found = [one.grad for one in adapter.parameters()]
    assert len(wanted) == len(found) > 0
    sums = [sorted(float(one.square().sum()) for one in each) for each in (found, wanted)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


# --- words ----------------------------------------------------------------------------------------


def test_both_orders_and_the_names_of_others_say_the_same(tmp_path: Path) -> None:
    model, config = LanguageModel(ours(base("llama"))), es.LoraConfig(r=2)
    model.add_adapter("a", config)
    model.add_adapter(config, "b")
    model.add_adapter(adapter_config=config, adapter_name="c")
    model.add_adapter("d", peft_config=config)
    assert model.adapters == ("a", "b", "c", "d")
    model.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, "e")
    model.load_adapter(peft_model_id=tmp_path, adapter_name="f", hotswap="auto")
    model.load_adapter(model_id=tmp_path, adapter_name="g", low_cpu_mem_usage=False)
    assert model.adapters[4:] == ("e", "f", "g")


def test_methods_of_others_say_what_to_do() -> None:
    model = LanguageModel(ours(base("llama")))
    for name, do in (
        ("set_adapter", "adapter_names"),
        ("disable_adapters", "adapter_names"),
        ("merge_and_unload", "merge_adapter"),
        ("print_trainable_parameters", r"adapter.parameters\(\)"),
        ("resize_token_embeddings", "transformers"),
    ):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'.*{do}"):
            getattr(model, name)


REFUSED: Mapping[str, tuple[Any, type[Exception], str]] = {
    "no config": (lambda m: m.add_adapter("a"), RequestError, "es.LoraConfig"),
    "two configs": (
        lambda m: m.add_adapter("a", es.LoraConfig(), peft_config=es.LoraConfig()),
        RequestError, "given twice",
    ),
    "a config of peft": (
        lambda m: m.add_adapter("a", peft.LoraConfig()), RequestError, "es.LoraConfig"
    ),
    "a name that is taken": (
        lambda m: m.add_adapter("taken", es.LoraConfig()), RequestError, "cannot have this name"
    ),
    "a keyword of nobody": (
        lambda m: m.add_adapter("a", es.LoraConfig(), trainable=True), RequestError, "trainable"
    ),
    "no folder": (lambda m: m.load_adapter(), RequestError, "reads a folder"),
    "two folders": (lambda m: m.load_adapter("a", model_id="b"), RequestError, "given twice"),
    "a state dict": (
        lambda m: m.load_adapter("a", adapter_state_dict={}), UnsupportedError, "adapter_state_dict"
    ),
    "hot swapping": (lambda m: m.load_adapter("a", hotswap=True), UnsupportedError, "hotswap"),
    "no module": (
        lambda m: m.add_adapter("a", es.LoraConfig(target_modules="nothing")),
        RequestError, "names no projection",
    ),
    "a module that is not there": (
        lambda m: m.add_adapter("a", es.LoraConfig(target_modules=["q_proj", "k_prj"])),
        UnsupportedError, "k_proj",
    ),
    "a loha of embeddings": (
        lambda m: m.add_adapter("a", es.LoHaConfig(target_modules=["embed_tokens"])),
        UnsupportedError, "a LoHa of embeddings",
    ),
    "a dora of embeddings": (
        lambda m: m.add_adapter("a", es.LoraConfig(target_modules=["embed_tokens"], use_dora=True)),
        UnsupportedError, "use_dora of embeddings",
    ),
    "a module in two ways": (
        lambda m: m.add_adapter(
            "a", es.LoraConfig(target_modules=["lm_head"], modules_to_save=["lm_head"])
        ),
        RequestError, "in two ways",
    ),
    "rows of what learns": (
        lambda m: m.add_adapter(
            "a", es.LoraConfig(modules_to_save=["embed_tokens"], trainable_token_indices=[3])
        ),
        RequestError, "in two ways",
    ),
    "a whole module that is not there": (
        lambda m: m.add_adapter("a", es.LoraConfig(modules_to_save=["lm_haed"])),
        UnsupportedError, "lm_head",
    ),
    "a token beyond": (
        lambda m: m.add_adapter("a", es.LoraConfig(trainable_token_indices=[97])),
        FormatError, "ids from 0 to 96",
    ),
    "a token twice": (
        lambda m: m.add_adapter("a", es.LoraConfig(trainable_token_indices=[9, 9])),
        FormatError, "each once",
    ),
    "tokens of a projection": (
        lambda m: m.add_adapter("a", es.LoraConfig(trainable_token_indices={"q_proj": [9]})),
        UnsupportedError, "neither embeddings nor a head",
    ),
    "no tokens": (
        lambda m: es.LoraConfig(trainable_token_indices=[]), RequestError, "trainable_token_indices"
    ),
    "a parameter that is not there": (
        lambda m: m.add_adapter("a", es.LoraConfig(target_parameters=["experts.down_proj"])),
        UnsupportedError, "target_parameters",
    ),
    "dropout of parameters": (
        lambda m: es.LoraConfig(target_parameters=["a.weight"], lora_dropout=0.1),
        UnsupportedError, "beside target_parameters",
    ),
    "tying what is not tied": (
        lambda m: m.add_adapter("a", es.LoraConfig(ensure_weight_tying=True)),
        RequestError, "has no effect",
    ),
    "an expression that is none": (
        lambda m: m.add_adapter("a", es.LoraConfig(target_modules="(")), RequestError, "expression"
    ),
    "layers beside an expression": (
        lambda m: m.add_adapter("a", es.LoraConfig(target_modules=".*", layers_to_transform=1)),
        RequestError, "layers_to_transform",
    ),
    "a pattern without layers": (
        lambda m: m.add_adapter("a", es.LoraConfig(layers_pattern="layers")),
        RequestError, "layers_pattern",
    ),
    "no layer": (
        lambda m: m.add_adapter("a", es.LoraConfig(layers_to_transform=[99])),
        RequestError, "names no projection",
    ),
    "biases of nobody": (lambda m: es.LoraConfig(bias="some"), RequestError, "'lora_only'"),
    "biases in two ways": (
        lambda m: es.LoraConfig(bias="all", modules_to_save=["norm"]), RequestError, "both train"
    ),
    "whole modules that are no list": (
        lambda m: es.LoraConfig(modules_to_save="lm_head"), RequestError, "modules_to_save"
    ),
    "no rank": (lambda m: es.LoraConfig(r=0), RequestError, "r is not valid"),
    "all dropped": (lambda m: es.LoraConfig(lora_dropout=1), RequestError, "lora_dropout"),
    "no alpha": (lambda m: es.LoHaConfig(alpha=0), RequestError, "alpha"),
    "pissa": (lambda m: es.LoraConfig(init_lora_weights="pissa"), RequestError, "gaussian"),
    "training what is fixed": (
        lambda m: m.load_adapter(trained("llama", "lora")[0]).train(), RequestError, "is_trainable"
    ),
    "nobody to save": (lambda m: m.save_adapter("a", "nobody"), RequestError, "no such adapter"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = LanguageModel(ours(base("llama")))
    model.add_adapter("taken", es.LoraConfig(r=2))
    call, error, told = REFUSED[name]
    with pytest.raises(error, match=told):
        call(model)
    assert not [*tmp_path.iterdir()]
