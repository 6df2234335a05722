"""One adapter of several is PEFT's, for each way of combining them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from everystep.adapters.weighted import COMBINATIONS
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnsupportedError
from tests.adapters.test_kinds import READ, base, close, strong, trained
from tests.models.tiny import ours

GIVEN: Mapping[str, dict[str, Any]] = {
    "a": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "b": {"r": 3, "target_modules": ["q_proj", "o_proj"], "alpha_pattern": {"o_proj": 20}},
    "wide": {"r": 5, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
}
WAYS: Mapping[str, tuple[list[str], list[float], dict[str, Any]]] = {
    "svd": (["a", "wide"], [0.7, 0.4], {}),
    "svd of a small rank": (["a", "b"], [0.7, 0.4], {"svd_rank": 2}),
    "svd, clamped": (["a", "b"], [0.7, -0.4], {"svd_clamp": 0.9, "svd_full_matrices": False}),
    "linear": (["a", "b"], [0.7, 0.4], {"combination_type": "linear"}),
    "linear, minus": (["a", "b"], [0.7, -0.4], {"combination_type": "linear"}),
    "cat": (["a", "b", "wide"], [0.7, 0.4, -1.5], {"combination_type": "cat"}),
    **{
        f"{name} {sign}".rstrip(): (
            ["a", "b"],
            [0.7, 1.2],
            {"combination_type": name, "density": 0.4}
            | ({"majority_sign_method": sign} if sign else {}),
        )
        for name in COMBINATIONS
        if name not in ("cat", "linear", "svd")
        for sign in (["", "frequency"] if "ties" in name else [""])
    },
    "all kept": (["a", "b"], [0.7, 1.2], {"combination_type": "ties", "density": 1.0}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the given adapters, one folder in it for each."""
    place = tmp_path_factory.mktemp("given")
    for seed, (name, config) in enumerate(GIVEN.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = peft.get_peft_model(copy.deepcopy(base("llama")), peft.LoraConfig(**config))
            strong(made, seed).save_pretrained(place / name)
    return place


@pytest.mark.parametrize("way", WAYS)
def test_it_is_pefts(way: str, folder: Path, monkeypatch: Any) -> None:
    names, weights, options = WAYS[way]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(
            copy.deepcopy(base("llama")), folder / names[0], names[0]
        )
        for name in names[1:]:
            theirs.load_adapter(folder / name, name)
        # A new adapter of PEFT's draws first values; what is pruned is drawn after them.
        inject = theirs.base_model.inject_adapter
        monkeypatch.setattr(
            theirs.base_model,
            "inject_adapter",
            lambda *given: (inject(*given), torch.manual_seed(5))[0],
        )
        theirs.add_weighted_adapter(names, weights, "made", **options)
        theirs.set_adapter("made")
    model = LanguageModel(ours(base("llama")))
    for name in names:
        model.load_adapter(folder / name, name)
    torch.manual_seed(5)
    model.add_weighted_adapter(names, weights, "made", **options)
    with torch.no_grad():
        expected = theirs.eval()(READ).logits
    found = model(READ, adapters="made").logits
    # PEFT decomposes in float32.
    assert close(found, expected, 1e-4 if "svd" in way else 1e-5)
    assert not close(found, model(READ).logits, 1e-3)


def test_cat_is_the_mix_and_is_saved(folder: Path, tmp_path: Path) -> None:
    model = LanguageModel(ours(base("llama")))
    for name in GIVEN:
        model.load_adapter(folder / name, name)
    weights = [0.7, 0.4, -1.5]
    made = model.add_weighted_adapter([*GIVEN], weights, "made", "cat")
    assert made is not None and made.settings["r"] == 11
    mixed = model(READ, adapters=dict(zip(GIVEN, weights, strict=True))).logits
    assert close(model(READ, adapters="made").logits, mixed, 1e-10)
    model.save_adapter(tmp_path, "made")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base("llama")), tmp_path)
    with torch.no_grad():
        assert close(mixed, loaded(READ).logits)


REFUSED: Mapping[str, tuple[list[str], Any, dict[str, Any], type[Exception], str]] = {
    "a way of nobody": (["a"], [1.0], {"combination_type": "mean"}, RequestError, "dare"),
    "no weights": (["a", "b"], [1.0], {}, RequestError, "one for each"),
    "weights that are none": (["a"], ["1"], {}, RequestError, "weights"),
    "nobody": ([], [], {}, RequestError, "weights"),
    "a stranger": (["c"], [1.0], {}, RequestError, "no such adapter"),
    "a kind of no factors": (["oft"], [1.0], {}, UnsupportedError, "plain LoRAs"),
    "lengths": (["dora"], [1.0], {}, UnsupportedError, "use_dora"),
    "ranks": (["a", "wide"], [1, 1], {"combination_type": "linear"}, RequestError, "ranks"),
    "no density": (["a", "b"], [1, 1], {"combination_type": "ties"}, RequestError, "density"),
    "density of nothing": (["a"], [1], {"density": 0.5}, RequestError, "density has no effect"),
    "signs of nothing": (
        ["a"], [1], {"majority_sign_method": "frequency"}, RequestError, "has no effect"
    ),
    "a rank of nothing": (
        ["a"], [1], {"combination_type": "cat", "svd_rank": 2}, RequestError, "svd_rank has no"
    ),
    "one name": ("ab", [1, 1], {}, RequestError, "a list of names"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_refused(name: str, folder: Path) -> None:
    model = LanguageModel(ours(base("llama")))
    for one in GIVEN:
        model.load_adapter(folder / one, one)
    for one in ("oft", "dora"):
        model.load_adapter(trained("llama", one)[0], one)
    names, weights, options, error, told = REFUSED[name]
    with pytest.raises(error, match=told):
        model.add_weighted_adapter(names, weights, "made", **options)
    with pytest.raises(RequestError, match="this name"):
        model.add_weighted_adapter(["a"], [1.0], "b")
    assert "made" not in model.adapters
