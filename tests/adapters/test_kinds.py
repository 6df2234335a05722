"""Each kind of adapter that PEFT saves computes what PEFT's own forward does, alone and mixed."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import everystep as es
from everystep.adapters import Adapter, AdapterUse, adapted, read_adapter
from everystep.adapters.peft_adapter import _IDLE
from everystep.adapters.peft_kinds import KINDS
from everystep.errors import FormatError, UnsupportedError
from everystep.models import Model
from tests.models.tiny import ours, reference_decoder

READ = torch.tensor([[5, 9, 17, 40, 6, 9, 17, 3, 22]])
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "down_proj"]


def _lora(**more: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(
        **{"r": 3, "target_modules": TARGETS, "init_lora_weights": False, **more}
    )


def _of(kind: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, kind)(**{"target_modules": TARGETS, **more})


MADE: Mapping[str, Callable[[], Any]] = {
    "lora": _lora(),
    "rslora": _lora(use_rslora=True),
    "patterns": _lora(
        rank_pattern={"q_proj": 5, r"layers\.1\.self_attn\.v_proj": 2},
        alpha_pattern={"down_proj": 3, "layers.0.*o_proj": 20},
    ),
    "dora": _lora(use_dora=True),
    "lora with biases": _lora(lora_bias=True, target_modules=SOME),
    "begun orthogonal": _lora(init_lora_weights="gaussian"),
    "loha": _of("LoHaConfig", r=3, alpha=5, init_weights=False),
    "loha, patterns": _of(
        "LoHaConfig",
        r=3,
        init_weights=False,
        rank_pattern={"v_proj": 2},
        alpha_pattern={"k_proj": 2},
    ),
    "lokr": _of("LoKrConfig", r=2, alpha=5, init_weights=False),
    "lokr, both": _of("LoKrConfig", r=2, init_weights=False, decompose_both=True),
    "lokr, whole": _of(
        "LoKrConfig", r=16, init_weights=False, alpha_pattern={"q_proj": 40, "o_proj": 3}
    ),
    "shira": _of("ShiraConfig", r=2, random_seed=5),
    "shira, unseeded": _of("ShiraConfig", r=3, target_modules=["v_proj"], init_weights=False),
    "adalora": _of("AdaLoraConfig", init_r=4, target_r=2, total_step=9, init_lora_weights=False),
    "vera": _of("VeraConfig", r=4, target_modules=SOME, init_weights=False),
    "oft": _of("OFTConfig", r=0, oft_block_size=8, init_weights=False),
    "oft, exact": _of(
        "OFTConfig", r=0, oft_block_size=8, init_weights=False, use_cayley_neumann=False
    ),
    "oft, few terms": _of(
        "OFTConfig", r=0, oft_block_size=8, init_weights=False, num_cayley_neumann_terms=3
    ),
    "oft, many terms": _of(
        "OFTConfig", r=0, oft_block_size=8, init_weights=False, num_cayley_neumann_terms=7
    ),
    "oft, by blocks": _of("OFTConfig", r=4, oft_block_size=0, init_weights=False),
    "oft, shared": _of("OFTConfig", r=0, oft_block_size=8, init_weights=False, block_share=True),
    "oft, bounded": _of("OFTConfig", r=0, oft_block_size=8, init_weights=False, coft=True, eps=0.5),
    "ia3": _of("IA3Config", feedforward_modules=["down_proj", "gate_proj"], init_ia3_weights=False),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[9, 5, 40]),
    "ia3, outputs": _of("IA3Config", feedforward_modules=[], init_ia3_weights=False),
}
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
}


@cache
def base(form: str) -> Any:
    """transformers' model, in float64."""
    kind, config = FORMS[form]
    torch.manual_seed(1)
    return reference_decoder(kind, torch.float64, **config)


def strong(module: Any, seed: int = 2) -> Any:
    """The same with adapters of random numbers, far from doing nothing."""
    generator = torch.Generator().manual_seed(seed)
    marks = ("lora_", "hada_", "lokr_", "oft_", "ia3_", "vera_lambda", "shira_")
    marks += ("trainable_tokens_",)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if any(mark in name for mark in marks):
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                about = 1.0 if "ia3_" in name else 0.0
                weight.copy_(about + 0.3 * noise.to(weight))
    return module


@cache
def trained(form: str, name: str) -> tuple[Path, Tensor]:
    """The folder of an adapter, and the logits of PEFT's own forward with it."""
    folder = Path(mkdtemp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = strong(peft.get_peft_model(copy.deepcopy(base(form)), MADE[name]()).eval().double())
        made.save_pretrained(folder)
        with torch.no_grad():
            return folder, made(READ).logits


def logits(model: Model, mix: Sequence[tuple[str, Adapter, float]]) -> Tensor:
    """Of a prompt whose positions all ask for the mix."""
    uses = tuple(AdapterUse(name, weight, adapter) for name, adapter, weight in mix)
    network = adapted(model.network, [(uses, torch.arange(READ.shape[1]))])
    return Model(model.config, model.spec, network).forward(READ)


def close(found: Tensor, expected: Tensor, bound: float = 1e-6) -> bool:
    return bool((found - expected).abs().max() <= bound * expected.abs().max())


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_what_peft_computes(form: str, name: str) -> None:
    folder, expected = trained(form, name)
    model = ours(base(form))
    found = logits(model, [("a", read_adapter(folder, model).now(), 1.0)])
    assert close(found, expected)
    assert not close(model.forward(READ), expected, 1e-2)


@pytest.mark.parametrize("name", MADE)
def test_merged_equals_unmerged(name: str, tmp_path: Path) -> None:
    """What is written with the adapter in its weights is what transformers reads."""
    folder, expected = trained("qwen2", name)
    model = es.LanguageModel(ours(base("qwen2")))
    model.load_adapter(folder, "a")
    if name == "lora with biases":
        with pytest.raises(UnsupportedError, match="a bias to a projection that has none"):
            model.save_pretrained(tmp_path, adapters=["a"])
        return
    model.save_pretrained(tmp_path, adapters=["a"])
    again = es.load_model(tmp_path, dtype=torch.float64)
    assert close(again(READ).logits, expected)
    half = logits(model.core, [("a", read_adapter(folder, model.core).now(), 0.5)])
    model.save_pretrained(tmp_path, adapters=[("a", 0.5)])
    assert close(es.load_model(tmp_path, dtype=torch.float64)(READ).logits, half)


@pytest.mark.parametrize("name", MADE)
def test_a_weight_of_zero_is_the_model_without_it(name: str) -> None:
    folder, _ = trained("llama", name)
    model = ours(base("llama"))
    found = logits(model, [("a", read_adapter(folder, model).now(), 0.0)])
    assert close(found, model.forward(READ), 1e-12)


def test_keys_of_an_adapter_in_memory_are_read_too(tmp_path: Path) -> None:
    folder, expected = trained("llama", "lora")
    held = load_file(folder / "adapter_model.safetensors")
    named = {name.replace(".weight", ".default.weight"): one for name, one in held.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    model = ours(base("llama"))
    assert close(logits(model, [("a", read_adapter(tmp_path, model).now(), 1.0)]), expected)


# --- mixes ----------------------------------------------------------------------------------------

MIXED = ("lora", "dora", "loha", "lokr", "adalora", "oft")
"""The kinds that PEFT mixes in any order; SHiRA beside them, which it wants innermost."""
THREE = (
    ("lora", "lokr", "loha"),
    ("oft", "lora", "loha"),
    ("lora", "oft", "loha"),
    ("dora", "oft", "adalora"),
)
MIXES = (
    *permutations(MIXED, 2),
    *(("shira", one) for one in MIXED),
    ("shira", "oft", "lokr"),
    ("lora", "rslora"),
    ("oft", "oft, exact"),
    *THREE,
    ("loha", "lora", "oft", "lokr"),
    *(
        pytest.param(names, marks=pytest.mark.slow)
        for names in permutations(MIXED, 3)
        if names not in THREE
    ),
)


@cache
def mixture(names: tuple[str, ...]) -> Tensor:
    """The logits of PEFT's mixed model with these adapters, the first one innermost."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(
            copy.deepcopy(base("llama")), MADE[names[0]](), adapter_name=names[0], mixed=True
        )
        for name in names[1:]:
            made.add_adapter(name, MADE[name]())
        made = made.eval().double()
        for name in names:
            folder, _ = trained("llama", name)
            held = load_file(folder / "adapter_model.safetensors")
            own = dict(made.named_parameters())
            with torch.no_grad():
                for key, value in held.items():
                    if key.endswith("shira_indices"):  # which the same seed gives
                        continue
                    own[_placed(own, key, name)].copy_(value)
        made.set_adapter([*names])
        with torch.no_grad():
            return made(READ).logits


def _placed(own: Mapping[str, Any], key: str, name: str) -> str:
    """Return the name in a mixed model of a tensor that was saved as `key`."""
    module, _, rest = _split(key)
    rest = rest.removesuffix(".weight")
    for candidate in own:
        if not any(mark in candidate for mark in _MARKS):
            continue
        there, _, tail = _split(candidate)
        plain = there.replace(".base_layer", "")  # of the adapters inside
        if plain == module and tail.removesuffix(".weight") == f"{rest}.{name}":
            return candidate
    raise AssertionError((key, name))


_MARKS = (".lora_", ".hada_", ".lokr_", ".oft_", ".shira_")


def _split(key: str) -> tuple[str, str, str]:
    mark = next(one for one in _MARKS if one in key)
    module, _, rest = key.partition(mark)
    return module, mark, mark[1:] + rest


@pytest.mark.parametrize("names", MIXES, ids=lambda names: " in ".join(names))
def test_a_mix_is_what_pefts_mixed_model_computes(names: tuple[str, ...]) -> None:
    model = ours(base("llama"))
    mix = [(name, read_adapter(trained("llama", name)[0], model).now(), 1.0) for name in names]
    # transformers takes root mean squares in float32, which strong adapters amplify.
    assert close(logits(model, mix), mixture(names), 1e-6 if len(names) == 2 else 2e-6)


# --- what a configuration declares ----------------------------------------------------------------


def configured(tmp_path: Path, name: str, **changed: Any) -> Path:
    """The folder of an adapter with other settings."""
    folder, _ = trained("llama", name)
    settings = json.loads((folder / "adapter_config.json").read_text()) | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    held = load_file(folder / "adapter_model.safetensors")
    save_file(held, tmp_path / "adapter_model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "begun", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", "anything", 3]
)
def test_an_adapter_for_other_weights_is_refused(tmp_path: Path, begun: Any) -> None:
    folder = configured(tmp_path, "lora", init_lora_weights=begun)
    with pytest.raises(UnsupportedError, match=r"init_lora_weights.*path_initial_model"):
        read_adapter(folder, ours(base("llama")))


CONFIGS = {
    "LORA": peft.LoraConfig,
    "LOHA": peft.LoHaConfig,
    "LOKR": peft.LoKrConfig,
    "ADALORA": peft.AdaLoraConfig,
    "VERA": peft.VeraConfig,
    "OFT": peft.OFTConfig,
    "IA3": peft.IA3Config,
    "SHIRA": peft.ShiraConfig,
    "TRAINABLE_TOKENS": peft.TrainableTokensConfig,
}


def test_every_key_that_peft_declares_is_known_or_refused(tmp_path: Path) -> None:
    """A key that is neither idle nor computed by is refused as soon as it says something."""
    names = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr", "ADALORA": "adalora"}
    names |= {
        "SHIRA": "shira",
        "VERA": "vera",
        "OFT": "oft",
        "IA3": "ia3",
        "TRAINABLE_TOKENS": "tokens",
    }
    assert {*CONFIGS} == {*KINDS} == {*names}
    model = ours(base("llama"))
    for kind, config in CONFIGS.items():
        declared = {*config.__dataclass_fields__}
        known = _IDLE | KINDS[kind].keys | {"bias", "init_lora_weights"}
        assert KINDS[kind].keys <= declared
        for key in sorted(declared - known):
            folder = configured(tmp_path, names[kind], **{key: ["something"]})
            with pytest.raises(UnsupportedError, match=key):
                read_adapter(folder, model)
        if "bias" in declared:
            refused = FormatError if kind in ("LORA", "ADALORA") else UnsupportedError
            with pytest.raises(refused, match="bias"):
                read_adapter(configured(tmp_path, names[kind], bias="all"), model)


def test_a_key_of_a_peft_to_come_is_refused_once_it_says_something(tmp_path: Path) -> None:
    model = ours(base("llama"))
    read_adapter(configured(tmp_path, "lora", use_tomorrow=False, more={}), model)
    with pytest.raises(UnsupportedError, match="use_tomorrow"):
        read_adapter(configured(tmp_path, "lora", use_tomorrow=True), model)


WRONG: Mapping[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "a kind that is not read": ("lora", {"peft_type": "BOFT"}, UnsupportedError, "everystep.wrap"),
    "no kind": ("lora", {"peft_type": 3}, UnsupportedError, "peft_type"),
    "lengths without dora": ("dora", {"use_dora": False}, FormatError, "use_dora"),
    "dora without lengths": ("lora", {"use_dora": True}, FormatError, "use_dora"),
    "biases without a word": ("lora with biases", {"lora_bias": False}, FormatError, "lora_bias"),
    "a pattern that takes long": (
        "lora", {"alpha_pattern": {"(a+)+b": 3}}, FormatError, "alpha_pattern"
    ),
    "a pattern of many repeats": (
        "lora", {"alpha_pattern": {".*.*.*.*q_proj": 3}}, FormatError, "at most 3 repeats"
    ),
    "a pattern that is none": ("lora", {"rank_pattern": {"[": 3}}, FormatError, "rank_pattern"),
    "patterns that are none": ("lora", {"rank_pattern": ["q_proj"]}, FormatError, "rank_pattern"),
    "ranks as AdaLoRA has them": (
        "lora", {"rank_pattern": {"q_proj": [True, False]}}, FormatError, "rank_pattern"
    ),
    "a scale beyond all": ("lora", {"alpha_pattern": {"q_proj": 10**400}}, FormatError, "alpha"),
    "endless terms": (
        "oft", {"num_cayley_neumann_terms": 10**9}, FormatError, "num_cayley_neumann_terms"
    ),
    "a scale that is no number": (
        "lora", {"alpha_pattern": {"q_proj": "3"}}, FormatError, "alpha_pattern"
    ),
    "another rank": ("lora", {"r": 4}, FormatError, "do not fit"),
    "another block": ("oft", {"oft_block_size": 16}, FormatError, "do not fit"),
    "a block that does not divide": ("oft", {"oft_block_size": 7}, FormatError, "oft_block_size"),
    "another number of values": ("shira", {"r": 3}, FormatError, "do not fit"),
    "a rank of another vera": ("vera", {"r": 3}, FormatError, "do not fit"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    made, changed, error, told = WRONG[name]
    with pytest.raises(error, match=told):
        read_adapter(configured(tmp_path, made, **changed), ours(base("llama")))


def test_a_rotation_of_an_older_peft_is_refused(tmp_path: Path) -> None:
    folder = configured(tmp_path, "oft")
    settings = json.loads((folder / "adapter_config.json").read_text())
    del settings["use_cayley_neumann"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(FormatError, match="use_cayley_neumann is missing"):
        read_adapter(folder, ours(base("llama")))


@pytest.mark.parametrize(
    "changed, told",
    [
        (lambda held: held.index_fill(1, torch.tensor([0]), -1), "outside of the projection"),
        (lambda held: held.index_fill(1, torch.tensor([3]), 1 << 20), "outside of the projection"),
        (lambda held: held.double(), "has no places"),
        (lambda held: held[:, 1:].contiguous(), "do not fit"),
        (lambda held: held[0].contiguous(), "do not fit"),
    ],
)
def test_places_that_mean_nothing_are_refused(
    changed: Callable[[Tensor], Tensor], told: str, tmp_path: Path
) -> None:
    folder = configured(tmp_path, "shira")
    held = load_file(folder / "adapter_model.safetensors")
    key = next(one for one in held if one.endswith("indices"))
    save_file(held | {key: changed(held[key])}, folder / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=told):
        read_adapter(folder, ours(base("llama")))


def test_values_at_one_place_add(tmp_path: Path) -> None:
    """As in PEFT's sparse product, where a mask of one's own names a place twice."""
    folder = configured(tmp_path, "shira")
    held = load_file(folder / "adapter_model.safetensors")
    key = next(one for one in held if one.endswith("indices"))
    twice = held[key].clone()
    twice[:, 1] = twice[:, 0]
    save_file(held | {key: twice}, folder / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.PeftModel.from_pretrained(copy.deepcopy(base("llama")), folder)
        with torch.no_grad():
            expected = made.eval().double()(READ).logits
    model = ours(base("llama"))
    found = logits(model, [("a", read_adapter(folder, model).now(), 1.0)])
    assert close(found, expected)


@pytest.mark.parametrize("name", ["loha", "lokr", "adalora", "vera", "oft", "ia3", "dora", "shira"])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    folder = configured(tmp_path, name)
    held = load_file(folder / "adapter_model.safetensors")
    model = ours(base("llama"))
    for key in [key for key in held if ".layers.0.self_attn.q_proj." in key]:
        for shape in ((2, 2, 2), (0, 3), (7,), (5, 5)):
            wrong = held[key].new_zeros(shape)
            changed = held | {key: wrong}
            save_file(changed, folder / "adapter_model.safetensors")
            with pytest.raises((FormatError, UnsupportedError)):
                read_adapter(folder, model)
        save_file(
            {one: value for one, value in held.items() if one != key},
            folder / "adapter_model.safetensors",
        )
        if len([one for one in held if ".layers.0.self_attn.q_proj." in one]) > 1:
            with pytest.raises(FormatError):
                read_adapter(folder, model)
