"""Adapters that change heads, embeddings, whole modules, rows of tokens and experts are PEFT's."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
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
from everystep.adapters.adapter import AdaptedRows
from everystep.adapters.learning import _LearningLinear
from everystep.api.model import LanguageModel
from everystep.errors import FileError, FormatError, UnsupportedError
from everystep.models import convert_model
from everystep.nn.norm import Norm
from tests.adapters.making import write_folder
from tests.adapters.test_kinds import READ, close, logits
from tests.executors.models import narrow_model
from tests.models.pictures import GREEDY, model_of, prompt_of, reference_of
from tests.models.pictures import ROWS as ROWS_OF_PICTURES
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
    "all biases": _lora(target_modules=["q_proj", "down_proj"], bias="all"),
    "its biases": _lora(target_modules=["q_proj", "down_proj"], bias="lora_only"),
    "its biases beside a dora": _lora(bias="lora_only", use_dora=True),
}
MADE: Mapping[tuple[str, str], Callable[[], Any]] = {
    **{(form, name): made for form in ("untied", "tied") for name, made in DENSE.items()},
    ("untied", "biases of its own, too"): _lora(bias="all", lora_bias=True),
    ("untied", "adalora, biases"): lambda: peft.AdaLoraConfig(
        init_r=4,
        target_r=2,
        total_step=9,
        init_lora_weights=False,
        target_modules=["q_proj"],
        bias="lora_only",
    ),
    **{
        ("scaled", name): DENSE[name]
        for name in ("embeddings", "both", "whole frame", "whole norms", "tokens", "tokens alone")
    },
    ("layer norms", "frame"): _lora(target_modules=["wte", "lm_head", "c_attn"]),
    ("layer norms", "whole"): _lora(
        target_modules=["c_attn"], modules_to_save=["ln_1", "ln_f", "c_fc"]
    ),
    ("layer norms", "all biases"): _lora(target_modules=["c_attn"], bias="all"),
    ("layer norms", "its biases"): _lora(target_modules=["c_attn"], bias="lora_only"),
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
        for name, weight in module.named_parameters():
            if weight.requires_grad and "ranknum" not in name:  # a count, which no file holds
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


@pytest.mark.parametrize(("form", "name"), MADE, ids=IDS)
def test_merged_equals_unmerged_and_the_bits_come_back(
    form: str, name: str, tmp_path: Path
) -> None:
    folder, expected = trained(form, name)
    model = LanguageModel(ours(base(form)))
    plain = model(READ).logits
    model.load_adapter(folder, "a")
    half = model(READ, adapters={"a": 0.5}).logits
    model.merge_adapter(["a"])
    assert close(model(READ).logits, expected)
    said = model.generate(READ, max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
    assert close(said.logits[0], expected[:, -1], 1e-5)
    model.unmerge_adapter()
    assert torch.equal(model(READ).logits, plain)
    model.save_pretrained(tmp_path, adapters=[("a", 0.5)])
    assert close(es.load_model(tmp_path, dtype=torch.float64)(READ).logits, half)


def test_what_is_written_merged_is_what_transformers_reads(tmp_path: Path) -> None:
    for name in ("embeddings", "tokens", "whole frame"):
        folder, expected = trained("tied", name)
        model = LanguageModel(ours(base("tied")))
        model.load_adapter(folder, "a")
        model.save_pretrained(tmp_path / name, adapters=["a"])
        settings = json.loads((tmp_path / name / "config.json").read_text())
        assert settings["tie_word_embeddings"] == (name == "tokens")
        theirs = type(base("tied")).from_pretrained(tmp_path / name, dtype=torch.float64)
        with torch.no_grad():
            assert close(theirs(READ).logits, expected)


# --- rows -----------------------------------------------------------------------------------------

ROWS: Mapping[str, tuple[tuple[str, dict[str, float] | None], ...]] = {
    "tied": (
        ("both", {"both": 1.0}),
        ("tokens", {"tokens": 0.7, "whole norms": 0.5}),
        ("none", None),
        ("whole frame", {"whole frame": 1.0}),
        ("turned", {"oft": 1.0, "both": 0.5}),
        ("dora", {"a dora of the head": 0.6, "tokens": 1.0}),
    ),
    "qwen3_moe": (
        ("experts", {"experts": 1.0}),
        ("none", None),
        ("two", {"one stack": 0.5, "experts": 0.8}),
        ("router", {"a router": 1.0}),
        ("whole", {"whole experts": 0.4, "a router": 0.3}),
    ),
}
LENGTHS = (9, 4, 7, 5, 8, 6)


@cache
def with_rows(form: str) -> LanguageModel:
    """A model with every adapter that the rows ask for."""
    model = LanguageModel(ours(base(form)))
    names = dict.fromkeys(name for _, mix in ROWS[form] if mix for name in mix)
    for name in names:
        if name == "oft":
            made = wrapped(
                form,
                peft.OFTConfig(
                    r=0, oft_block_size=8, target_modules=["q_proj", "lm_head"], init_weights=False
                ),
            )
            folder = Path(mkdtemp())
            quiet(lambda made=made, folder=folder: shaken(made).save_pretrained(folder))
            model.load_adapter(folder, name)
        else:
            model.load_adapter(trained(form, name)[0], name)
    return model


@pytest.mark.parametrize("form", ROWS)
def test_a_row_of_a_forward_is_that_row_alone(form: str) -> None:
    model, mixes = with_rows(form), [mix for _, mix in ROWS[form]]
    torch.manual_seed(3)
    ids = torch.randint(4, 97, (len(mixes), 7))
    whole = model(ids, adapters=mixes, output_hidden_states=True)
    last = model(ids, adapters=mixes, logits_to_keep=2).logits
    losses = model(ids, adapters=mixes, labels=ids, output_logprobs=True).logprobs
    for row, mix in enumerate(mixes):
        own = {"adapters": mix} if mix else {}
        alone = model(ids[row : row + 1], **own, labels=ids[row : row + 1], output_logprobs=True)
        assert close(whole.logits[row], alone.logits[0], 1e-12)
        assert close(last[row], alone.logits[0, -2:], 1e-12)
        assert close(losses[row], alone.logprobs[0], 1e-6)


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 5}])
def test_a_row_of_a_generation_is_that_row_alone(form: str, how: dict[str, Any]) -> None:
    """With prompts of several lengths, whose positions an engine packs one after another."""
    model, mixes = with_rows(form), [mix for _, mix in ROWS[form]]
    torch.manual_seed(4)
    longest = max(LENGTHS)
    ids = torch.randint(4, 97, (len(mixes), longest))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS[: len(mixes)]):
        mask[row, : longest - length] = 0
    limits = {"max_new_tokens": 5, "min_new_tokens": 5, "output_logits": True, **how}
    limits |= {"return_dict_in_generate": True, "pad_token_id": 3, "output_hidden_states": True}
    if how.get("do_sample"):
        limits["seed"] = [*range(len(mixes))]
    said = model.generate(ids, attention_mask=mask, adapters=mixes, **limits)
    for row, (length, mix) in enumerate(zip(LENGTHS, mixes, strict=False)):
        own = {**limits, **({"adapters": mix} if mix else {})}
        if how.get("do_sample"):
            own["seed"] = row
        alone = model.generate(ids[row : row + 1, longest - length :], **own)
        assert torch.equal(said.sequences[row, longest:], alone.sequences[0, length:])
        if not how.get("num_beams"):
            for one, other in zip(said.logits, alone.logits, strict=True):
                assert close(one[row], other[0], 1e-6)
            last = said.hidden_states[-1][-1][row], alone.hidden_states[-1][-1][0]
            assert close(*last, 1e-6)


# --- learning -------------------------------------------------------------------------------------

SOME = {"r": 3, "target_modules": ["q_proj"]}
LEARNING: Mapping[tuple[str, str], Any] = {
    ("untied", "both"): es.LoraConfig(r=3, target_modules=["lm_head", "embed_tokens", "v_proj"]),
    ("tied", "both"): es.LoraConfig(r=3, target_modules=BOTH, init_lora_weights="gaussian"),
    ("untied", "a dora"): es.LoraConfig(r=3, target_modules=["lm_head"], use_dora=True),
    ("tied", "rows at random"): es.LoraConfig(
        r=3, target_modules=["embed_tokens"], init_lora_weights=False
    ),
    ("scaled", "rows"): es.LoraConfig(r=3, target_modules=["embed_tokens"]),
    ("untied", "whole"): es.LoraConfig(
        **SOME, modules_to_save=["lm_head", "embed_tokens", "norm", "o_proj", "k_proj"]
    ),
    ("tied", "whole"): es.LoraConfig(**SOME, modules_to_save=["lm_head", "input_layernorm"]),
    ("tied", "kept tied"): es.LoraConfig(
        **SOME, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    ("untied", "loha"): es.LoHaConfig(
        r=3, target_modules=["lm_head"], modules_to_save=["embed_tokens"]
    ),
    ("layer norms", "whole"): es.LoraConfig(
        r=3, target_modules=["c_attn"], modules_to_save=["ln_1", "c_fc"]
    ),
    ("untied", "all biases"): es.LoraConfig(r=3, target_modules=["q_proj"], bias="all"),
    ("layer norms", "all biases"): es.LoraConfig(r=3, target_modules=["c_attn"], bias="all"),
    ("layer norms", "its biases"): es.LoraConfig(
        r=3, target_modules=["c_attn"], bias="lora_only", use_dora=True
    ),
    ("untied", "tokens"): es.LoraConfig(**SOME, trainable_token_indices=[9, 5]),
    ("tied", "tokens"): es.LoraConfig(**SOME, trainable_token_indices=[9, 5]),
    ("untied", "tokens of both"): es.LoraConfig(
        **SOME, trainable_token_indices={"lm_head": [9, 5], "embed_tokens": [17]}
    ),
    ("mixtral", "experts"): es.LoraConfig(**SOME, target_parameters=EXPERTS),
    ("mixtral", "one stack"): es.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.down_proj", "gate.weight"]
    ),
    ("qwen3_moe", "experts"): es.LoraConfig(
        r=2,
        target_modules=["v_proj"],
        target_parameters=EXPERTS,
        rank_pattern={"experts.down_proj": 3},
        use_rslora=True,
    ),
    ("qwen3_moe", "whole"): es.LoraConfig(**SOME, modules_to_save=["experts"]),
}
LEARNS = [f"{form}, {name}" for form, name in LEARNING]
IDS_READ = torch.tensor([[5, 9, 17, 40, 6, 9], [17, 4, 22, 8, 8, 11]])
LABELS = torch.tensor([[-100, 9, 17, 40, 6, 9], [17, 4, 22, -100, 8, 11]])


def theirs(form: str, config: Any) -> Any:
    """PEFT's model with a new adapter of this configuration."""
    kind = peft.LoraConfig if isinstance(config, es.LoraConfig) else peft.LoHaConfig
    base(form)  # which draws, the first time
    torch.manual_seed(3)
    return wrapped(form, kind(**copy.deepcopy(asdict(config))))


def named(made: Any) -> dict[str, Tensor]:
    """The tensors that learn in PEFT's model, by the names that it saves."""
    found = {}
    for name, one in made.named_parameters():
        if one.requires_grad:
            name = name.replace(".modules_to_save.default", "").replace(".default", "")
            if "magnitude" in name or "hada_" in name:
                name = name.removesuffix(".weight")
            found[name] = one
    return found


@pytest.mark.parametrize(("form", "name"), LEARNING, ids=LEARNS)
def test_it_begins_and_learns_as_pefts_does(form: str, name: str, tmp_path: Path) -> None:
    config = LEARNING[form, name]
    made = theirs(form, config)
    model = LanguageModel(ours(base(form)))
    torch.manual_seed(3)
    adapter = model.add_adapter(config)
    own, wanted = dict(adapter.named_parameters()), named(made)
    assert {*own} == {*wanted}
    for key, value in own.items():
        assert value.is_leaf and value.dtype == torch.float64
        assert close(value.detach(), wanted[key].detach(), 1e-12) or not value.any(), key
    shaken_alike(wanted)
    shaken_alike(own)
    expected = made(IDS_READ, labels=LABELS)
    expected.loss.backward()
    found = model(IDS_READ, labels=LABELS, adapter_names="default")
    assert close(found.logits.detach(), expected.logits.detach())
    found.loss.backward()
    for key, one in own.items():
        assert one.grad is not None and wanted[key].grad is not None
        # transformers takes root mean squares in float32, gradients included.
        assert close(one.grad, wanted[key].grad, 1e-5), key
    # And what is saved is read, here and there.
    model.save_adapter(tmp_path, "default")
    with torch.no_grad():
        loaded = quiet(lambda: peft.PeftModel.from_pretrained(copy.deepcopy(base(form)), tmp_path))
        assert close(loaded.double()(IDS_READ).logits, expected.logits.detach())
    again = LanguageModel(ours(base(form)))
    again.load_adapter(tmp_path)
    logits = again(IDS_READ, adapters="default").logits
    assert close(logits, found.logits.detach(), 1e-12)


@pytest.mark.parametrize("targets", [["embed_tokens", "lm_head"], ["lm_head"], ["embed_tokens"]])
def test_low_ranks_that_are_to_stay_tied_are_refused_by_name(targets: list[str]) -> None:
    """PEFT trains two tensors in one memory there."""
    model = LanguageModel(ours(base("tied")))
    config = es.LoraConfig(r=2, target_modules=targets, ensure_weight_tying=True)
    with pytest.raises(UnsupportedError, match="ensure_weight_tying is not supported"):
        model.add_adapter("a", config)
    with pytest.raises(UnsupportedError, match="ensure_weight_tying is not supported"):
        es.Trainer(
            model,
            es.TrainingArguments("unused", save_strategy="no"),
            train_dataset=[{"input_ids": [5, 9], "labels": [5, 9]}],
            peft_config=config,
        )
    assert model.adapters == ()


def shaken_alike(tensors: Mapping[str, Tensor]) -> None:
    """Values far from doing nothing, the same for both sides."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, one in sorted(tensors.items()):
            one.add_(0.2 * torch.randn(one.shape, generator=generator).to(one))


FIXED = {
    ("tied", "ranks kept tied"): "ensure_weight_tying",
    ("untied", "adalora, biases"): "target_r",
}


@pytest.mark.parametrize(("form", "name"), MADE, ids=IDS)
def test_what_peft_saved_learns_and_is_saved_again(form: str, name: str, tmp_path: Path) -> None:
    folder, expected = trained(form, name)
    model = LanguageModel(ours(base(form)))
    model.load_adapter(folder, "a")
    model.save_adapter(tmp_path, "a")
    files = [load_file(one / "adapter_model.safetensors") for one in (folder, tmp_path)]
    assert {*files[0]} == {*files[1]}
    assert all(torch.equal(one, files[1][key]) for key, one in files[0].items())
    with torch.no_grad():
        loaded = quiet(lambda: peft.PeftModel.from_pretrained(copy.deepcopy(base(form)), tmp_path))
        assert close(loaded.double()(READ).logits, expected)
    if (form, name) in FIXED:
        with pytest.raises(UnsupportedError, match=FIXED[form, name]):
            model.load_adapter(folder, "b", is_trainable=True)
        return
    adapter = model.load_adapter(folder, "b", is_trainable=True)
    assert adapter is not None
    made = quiet(
        lambda: peft.PeftModel.from_pretrained(
            copy.deepcopy(base(form)), folder, is_trainable=True
        ).double()
    )
    made.eval()
    made(IDS_READ, labels=LABELS).loss.backward()
    model(IDS_READ, labels=LABELS, adapters="b").loss.backward()
    wanted = [one.grad for one in made.parameters() if one.requires_grad]
    own = [one.grad for one in adapter.parameters()]
    assert len(wanted) == len(own) > 0
    sums = [sorted(float(one.square().sum()) for one in each) for each in (own, wanted)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5, abs=1e-20)


# --- executors, rounded weights, hooks ------------------------------------------------------------


def test_what_the_native_executor_lacks_runs_on_torch_operators_with_a_reason() -> None:
    """Beside rows without an adapter, and adapters of projections, which run natively."""
    folder = {name: trained("tied", name)[0] for name in DENSE}
    model = LanguageModel(ours(base("tied"), torch.float32))
    native = LanguageModel(ours(base("tied"), torch.float32), executor="native")
    reasons = {
        "embeddings": "no changed embeddings",
        "a head": "no changed heads",
        "whole norms": "no changed norms",
        "whole layers": "no whole modules",
        "tokens": "no changed embeddings",
    }
    for name, told in reasons.items():
        native.load_adapter(folder[name], name)
        with pytest.raises(UnsupportedError, match=told):
            native.generate(READ, adapter_names=name, max_new_tokens=2)
        model.load_adapter(folder[name], name)
        said = model.generate(
            READ.repeat(2, 1),
            adapter_names=[name, None],
            max_new_tokens=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert close(said.logits[0][0].double(), trained("tied", name)[1][0, -1], 1e-4)
    read_adapter(folder["a parameter"], native.core)
    native.load_adapter(folder["a parameter"], "plain")
    native.generate(READ, adapter_names="plain", max_new_tokens=2)


def test_biases_of_projections_run_natively_row_by_row() -> None:
    """Beside a row without, and where a DoRA leaves the bias as long as it is."""
    names = ("its biases", "its biases beside a dora", "all biases")
    model = LanguageModel(ours(base("untied"), torch.float32), executor="native")
    for name in names:
        model.load_adapter(trained("untied", name)[0], name)
    said = model.generate(
        READ.repeat(5, 1),
        adapters=[*names, None, {"its biases": 0.5, "all biases": -1.0}],
        max_new_tokens=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for row, name in enumerate(names):
        assert close(said.logits[0][row].double(), trained("untied", name)[1][0, -1], 1e-4)
    mixed = model(READ, adapters={"its biases": 0.5, "all biases": -1.0}).logits
    assert close(said.logits[0][3], model(READ).logits[0, -1], 1e-4)
    assert close(said.logits[0][4], mixed[0, -1], 1e-4)


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_weights_in_codes_take_every_part(codes: Any, tmp_path: Path) -> None:
    """What is computed is that of the values that the codes stand for."""
    model = narrow_model("llama", codes)
    config = es.LoraConfig(
        r=2,
        target_modules=["embed_tokens", "q_proj"],
        modules_to_save=["lm_head", "norm", "o_proj"],
    )
    exact = convert_model(model, exact_activations=True)
    held = LanguageModel(exact, executor="torch")
    adapter = held.add_adapter("a", config)
    plain = held(IDS_READ % 32).logits
    assert close(held(IDS_READ % 32, adapters="a").logits.detach(), plain, 1e-5)
    shaken_alike(dict(adapter.named_parameters()))
    found = held(IDS_READ % 32, adapters="a").logits.detach()
    held(IDS_READ % 32, labels=IDS_READ % 32, adapters="a").loss.backward()
    assert all(one.grad is not None for one in adapter.parameters())
    assert not close(plain, found, 1e-2)
    held.save_adapter(tmp_path, "a")
    floats = LanguageModel(convert_model(model, dtype=torch.float32))
    floats.load_adapter(tmp_path, "a")
    assert close(floats(IDS_READ % 32, adapters="a").logits, found, 1e-4)
    held.merge_adapter(["a"])
    # What stays in codes meets activations that are rounded.
    assert close(held(IDS_READ % 32).logits, found, 0.1)
    held.unmerge_adapter()
    assert torch.equal(held(IDS_READ % 32).logits, plain)


def test_the_models_own_weights_may_learn_beside_a_whole_module(tmp_path: Path) -> None:
    """A whole module stays what it is when the model below it changes."""
    folder, _ = trained("untied", "whole head")
    model = LanguageModel(ours(base("untied")))
    model.load_adapter(folder, "a")
    model.requires_grad_(True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "lm_head.weight":
                weight.add_(1.0)
    loss = model(IDS_READ, labels=LABELS, adapters="a").loss
    loss.backward()
    head = dict(model.named_parameters())["lm_head.weight"]
    assert head.grad is None or float(head.grad.abs().max()) < 1e-12
    with torch.no_grad():
        made = quiet(lambda: peft.PeftModel.from_pretrained(copy.deepcopy(base("untied")), folder))
        expected = made.double()(IDS_READ, labels=LABELS).loss
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)


class Giving(es.Hook):
    """Gives what the model would read anyway."""

    gives = ("embeds",)

    def before_step(self, step: Any) -> Any:
        return {"embeds": step.embeds}


def test_a_hook_does_not_undo_changed_embeddings_in_silence() -> None:
    model = LanguageModel(ours(base("tied")))
    model.load_adapter(trained("tied", "embeddings")[0], "rows")
    model.load_adapter(trained("tied", "whole norms")[0], "norms")
    with pytest.raises(UnsupportedError, match="an adapter changes those of ids"):
        model.generate(READ, hooks=[Giving()], adapter_names="rows", max_new_tokens=2)
    said = model.generate(READ, hooks=[Giving()], adapter_names="norms", max_new_tokens=2)
    assert torch.equal(said, model.generate(READ, adapter_names="norms", max_new_tokens=2))


# --- folders that lie -----------------------------------------------------------------------------

Tensors = dict[str, Tensor]
HEAD, ROWS_A = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
EXPERT = "base_model.model.model.layers.0.mlp.experts"


def _cut(key: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name: one for name, one in held.items() if name != key}


def _with(key: str, made: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda held: held | {key: made(held[key])}


def _same(held: Tensors) -> Tensors:
    return held


TOKEN_ROWS = f"{ROWS_A}.token_adapter.trainable_tokens_delta"
PROJECTED = "base_model.model.model.layers.0.self_attn"
WRONG: Mapping[str, tuple[str, str, dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "a value that is no number": (
        "tied", "both", {}, _with(f"{HEAD}.lora_A.weight", lambda x: x * torch.nan), "finite"
    ),
    "a value without end": (
        "tied", "whole norms", {},
        _with("base_model.model.model.norm.weight", lambda x: x / 0), "finite",
    ),
    "whole numbers": (
        "tied", "both", {}, _with(f"{HEAD}.lora_A.weight", lambda x: x.long()), "finite"
    ),
    "a table of another vocabulary": (
        "tied", "embeddings", {},
        _with(f"{ROWS_A}.lora_embedding_A", lambda x: x[:, :90].contiguous()), "do not fit",
    ),
    "half of a table": (
        "tied", "embeddings", {}, _cut(f"{ROWS_A}.lora_embedding_B"), "half of"
    ),
    "a base of another vocabulary": (
        "tied", "embeddings", {},
        _with(f"{ROWS_A}.base_layer.weight", lambda x: x[:90].contiguous()), "does not fit",
    ),
    "a rank beyond": ("tied", "both", {"r": 10**9}, _same, "do not fit"),
    "a head of another width": (
        "untied", "whole head", {}, _with(f"{HEAD}.weight", lambda x: x[:, :9].contiguous()),
        "does not fit",
    ),
    "a whole module that is missing": (
        "untied", "whole frame", {}, _cut(f"{HEAD}.weight"), "does not hold"
    ),
    "a norm that is missing": (
        "tied", "whole norms", {}, _cut("base_model.model.model.norm.weight"), "does not hold"
    ),
    "a norm of another width": (
        "tied", "whole norms", {},
        _with("base_model.model.model.norm.weight", lambda x: x[:5].contiguous()), "does not fit",
    ),
    "a whole module that nobody named": (
        "untied", "whole layers", {"modules_to_save": ["mlp", "k_proj"]}, _same, "not part of"
    ),
    "a token beyond": (
        "tied", "tokens", {"trainable_token_indices": [9, 5, 97]}, _same, "ids from 0 to 96"
    ),
    "a token below": (
        "tied", "tokens", {"trainable_token_indices": [9, 5, -1]}, _same, "ids from 0 to 96"
    ),
    "a token twice": (
        "tied", "tokens", {"trainable_token_indices": [9, 5, 9]}, _same, "each once"
    ),
    "a token that is a flag": (
        "tied", "tokens", {"trainable_token_indices": [9, 5, True]}, _same, "ids from"
    ),
    "a token fewer": ("tied", "tokens", {"trainable_token_indices": [9, 5]}, _same, "does not fit"),
    "no tokens": ("tied", "tokens", {"trainable_token_indices": None}, _same, "ids from"),
    "rows that are missing": ("tied", "tokens", {}, _cut(TOKEN_ROWS), "do not agree"),
    "rows of a projection": (
        "tied", "tokens", {"trainable_token_indices": {"q_proj": [3]}}, _same, "neither embeddings"
    ),
    "experts that nobody named": (
        "mixtral", "experts", {"target_parameters": None}, _same, "do not agree"
    ),
    "a stack that is missing": (
        "mixtral", "one stack", {"target_parameters": EXPERTS}, _same, "do not agree"
    ),
    "half of the experts": (
        "mixtral", "experts", {}, _cut(f"{EXPERT}.lora_B.weight"), "half of"
    ),
    "experts of another number": (
        "mixtral", "experts", {},
        _with(f"{EXPERT}.lora_A.weight", lambda x: x[:12].contiguous()), "does not fit",
    ),
    "a bias that is missing": (
        "untied", "all biases", {}, _cut(f"{PROJECTED}.k_proj.bias"), "bias names biases"
    ),
    "a bias of another size": (
        "untied", "its biases", {},
        _with(f"{PROJECTED}.q_proj.base_layer.bias", lambda x: x[:5].contiguous()), "does not fit",
    ),
    "biases that nobody named": ("untied", "its biases", {"bias": "none"}, _same, "not part of"),
    "a key of tomorrow": ("tied", "both", {"use_tomorrow": True}, _same, "use_tomorrow"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_lies_is_refused_before_any_compute(name: str, tmp_path: Path) -> None:
    form, made, changed, edit, told = WRONG[name]
    folder, _ = trained(form, made)
    settings = json.loads((folder / "adapter_config.json").read_text()) | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    held = edit(load_file(folder / "adapter_model.safetensors"))
    save_file(
        {key: one.clone() for key, one in held.items()}, tmp_path / "adapter_model.safetensors"
    )
    model = LanguageModel(ours(base(form)))
    with pytest.raises((FormatError, UnsupportedError), match=told):
        model.load_adapter(tmp_path, "a")
    assert model.adapters == ()


def test_an_adapter_of_another_model_is_refused() -> None:
    model = LanguageModel(ours(base("qwen3_moe")))
    for form, name in (("tied", "whole layers"), ("mixtral", "experts"), ("layer norms", "frame")):
        with pytest.raises((FormatError, UnsupportedError)):
            model.load_adapter(trained(form, name)[0], "a")
    assert model.adapters == ()


def test_an_adapter_that_changes_the_tower_too_says_what_to_do(tmp_path: Path) -> None:
    """All linear layers of a model that sees: the error names those of the tower, and both of what
    it advises is PEFT's own forward."""
    theirs, given = reference_of("qwen3_vl"), prompt_of(ROWS_OF_PICTURES["an image"])
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    made = shaken(quiet(lambda: peft.get_peft_model(copy.deepcopy(theirs), config).double()))
    quiet(lambda: made.save_pretrained(tmp_path))
    model = model_of(theirs)
    with pytest.raises(UnsupportedError) as raised:
        model.load_adapter(tmp_path, "a")
    told = str(raised.value)
    assert "other than a projection, a head or embeddings" in told and model.adapters == ()
    assert "'model.visual.blocks.0.attn.proj' (one of 3)" in told and "more kinds" in told
    assert "language_model" not in told  # what could be changed is not named
    assert "Merge the adapter into the whole model" in told and "everystep.wrap" in told
    with torch.no_grad():
        wanted, plain = made(**given).logits, theirs(**given).logits
        tokens = made.generate(**given, **GREEDY)
    assert es.wrap(made).generate(**given, **GREEDY).tolist() == tokens.tolist()
    merged = model_of(quiet(made.merge_and_unload))
    assert close(merged(**given).logits, wanted) and not close(plain, wanted, 1e-2)


def test_a_misspelled_projection_is_told_the_nearest(tmp_path: Path) -> None:
    held = {
        f"base_model.model.model.layers.0.self_attn.q_projs.lora_{side}.weight": torch.ones(3, 3)
        for side in "AB"
    }
    model = LanguageModel(ours(base("tied")))
    told = r"nearest is 'model\.layers\.0\.self_attn\.q_proj'.*wrap"
    with pytest.raises(UnsupportedError, match=told):
        model.load_adapter(write_folder(tmp_path, held), "a")


def test_links_are_followed_to_files_and_to_nothing_else(tmp_path: Path) -> None:
    """As in the cache of the hub, whose files are links."""
    folder, expected = trained("tied", "both")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    model = LanguageModel(ours(base("tied")))
    model.load_adapter(tmp_path, "a")
    assert close(model(READ, adapters="a").logits, expected)
    weights = tmp_path / "adapter_model.safetensors"
    for target in (tmp_path / "nothing", Path("/dev/zero"), weights, tmp_path):
        weights.unlink()
        weights.symlink_to(target)
        with pytest.raises(FileError):
            model.load_adapter(tmp_path, "b")
    assert model.adapters == ("a",)


# --- mutants --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", ["a head of all rows", "rows of all", "norms of all", "experts"])
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that reach a neighbour are noticed where rows are compared with themselves."""
    if mutant in ("a head of all rows", "experts"):
        monkeypatch.setattr(_LearningLinear, "at", lambda self, places: self)
    elif mutant == "rows of all":
        monkeypatch.setattr(
            AdaptedRows,
            "__call__",
            lambda self, rows, ids: rows + sum(one.rows_at(ids) for one, *_ in self.added),
        )
    else:
        monkeypatch.setattr(Norm, "__call__", lambda self, x: _last_norm(self, x))
    form = "qwen3_moe" if mutant == "experts" else "tied"
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        test_a_row_of_a_forward_is_that_row_alone(form)


def _last_norm(norm: Norm, x: Tensor) -> Tensor:
    return (norm.others[-1][1] if norm.others else norm)._normalised(x)
