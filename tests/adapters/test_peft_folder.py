"""PEFT folders: what is read is what was trained, and what would be something else is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from everystep.adapters import AdapterUse, adapted, read_adapter
from everystep.api.model import LanguageModel
from everystep.errors import FileError, FormatError, MissingFileError, UnsupportedError
from everystep.files import safetensors
from everystep.models import Model, named_weights
from tests.adapters.making import PROJECTIONS, merge, random_lora, write_folder
from tests.executors.models import SPECS, random_model
from tests.models.tiny import ours, reference_decoder, reference_t5

SPEC = SPECS["biases"]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def tensors(rank: int = 3, projections: tuple[str, ...] = PROJECTIONS) -> dict[str, Tensor]:
    return random_lora(dict(named_weights(random_model(SPEC))), 4, projections, rank)


def logits(model: Model, folder: Path) -> Tensor:
    """Of a prompt whose positions all ask for the adapter."""
    read = torch.arange(9)
    lora = read_adapter(folder, model).now()
    network = adapted(model.network, [((AdapterUse("a", 1.0, lora),), read)])
    return Model(model.config, model.spec, network).forward(read[None])


@pytest.mark.parametrize(
    ("config", "alpha", "rslora"),
    [
        ({}, 7, False),
        ({"lora_alpha": 2.5}, 2.5, False),
        ({"use_rslora": True}, 7, True),
        ({"rank_pattern": {".*_proj": 3}, "r": 8}, 7, False),
        ({"modules_to_save": [], "alpha_pattern": {}}, 7, False),
    ],
)
@pytest.mark.parametrize("projections", [PROJECTIONS, ("v_proj",), ("k_proj", "up_proj", "o_proj")])
def test_it_is_what_merging_gives(
    tmp_path: Path, config: dict[str, Any], alpha: float, rslora: bool, projections: tuple[str, ...]
) -> None:
    given = tensors(projections=projections)
    folder = write_folder(tmp_path, given, **config)
    merged = random_model(SPEC)
    merge(dict(named_weights(merged)), given, alpha=alpha, rslora=rslora)
    wanted = merged.forward(torch.arange(9)[None])
    found = logits(random_model(SPEC), folder)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    plain = random_model(SPEC).forward(torch.arange(9)[None])
    assert (found - plain).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("gpt_neox", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ("falcon", ["query_key_value", "dense"]),
        ("opt", ["q_proj", "v_proj", "fc1", "fc2"]),
    ],
)
def test_it_is_what_peft_computes(kind: str, targets: list[str], tmp_path: Path) -> None:
    """Where projections lie transposed, and where queries, keys and values take turns."""
    config = {"new_decoder_architecture": True, "num_kv_heads": 2} if kind == "falcon" else {}
    reference = reference_decoder(kind, torch.float64, **config)
    model = ours(reference)
    wanted = peft.LoraConfig(
        r=3, target_modules=targets, init_lora_weights=False, fan_in_fan_out=kind == "gpt2"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(reference, wanted).eval()
        theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.arange(9)[None]).logits
    assert (logits(model, tmp_path) - expected).abs().max() <= 1e-6 * expected.abs().max()
    plain = model.forward(torch.arange(9)[None])
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["rotary_emb"]}, "modules_to_save"),
        ({"trainable_token_indices": {"q_proj": [3]}}, "neither embeddings nor a head"),
        ({"peft_type": "BOFT"}, "peft_type"),
        ({"bias": "some"}, "bias"),
    ],
)
def test_what_computes_something_else_is_refused(
    tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    folder = write_folder(tmp_path, tensors(), **config)
    with pytest.raises(UnsupportedError, match=text):
        read_adapter(folder, random_model(SPEC))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 4}, "rank"),
        ({"r": 0}, "r is impossible"),
        ({"r": "3"}, "r is impossible"),
        ({"lora_alpha": -1}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "does not hold"),
        ({"modules_to_save": "lm_head"}, "a list of names"),
        ({"trainable_token_indices": [3]}, "do not agree"),
    ],
)
def test_a_configuration_that_cannot_be_is_an_error(
    tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    folder = write_folder(tmp_path, tensors(), **config)
    with pytest.raises(FormatError, match=text):
        read_adapter(folder, random_model(SPEC))


@pytest.mark.parametrize(
    ("name", "shape", "kind", "text"),
    [
        ("base_model.model.lm_head.lora_A.weight", (3, 32), FormatError, "half"),
        (f"{FIRST}.lora_magnitude_vector", (32,), FormatError, "use_dora"),
        (f"{FIRST}.hada_w1_a", (32, 3), UnsupportedError, "not part of a LoRA"),
        (f"{FIRST}.lora_A.weight", (3, 31), FormatError, "do not fit"),
        (f"{FIRST}.lora_B.weight", (16, 3), FormatError, "do not fit"),
        (f"{FIRST}.lora_A.weight", (3,), FormatError, "do not fit"),
    ],
)
def test_a_tensor_that_does_not_fit_is_an_error(
    tmp_path: Path, name: str, shape: tuple[int, ...], kind: type[Exception], text: str
) -> None:
    folder = write_folder(tmp_path, {**tensors(), name: torch.zeros(shape)})
    with pytest.raises(kind, match=text):
        read_adapter(folder, random_model(SPEC))


@pytest.mark.parametrize("module", ["score", "model.layers.9.mlp.up_proj", "model.rotary_emb"])
def test_a_target_that_cannot_be_adapted_is_refused(tmp_path: Path, module: str) -> None:
    pair = {f"base_model.model.{module}.lora_{x}.weight": torch.zeros(3, 3) for x in "AB"}
    folder = write_folder(tmp_path, {**tensors(), **pair})
    with pytest.raises(UnsupportedError, match=module):
        read_adapter(folder, random_model(SPEC))


def test_a_folder_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"adapter_config\.json"):
        read_adapter(tmp_path, random_model(SPEC))
    write_folder(tmp_path, {})
    with pytest.raises(FormatError, match="no tensors"):
        read_adapter(tmp_path, random_model(SPEC))
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises((FormatError, MissingFileError)):
        read_adapter(tmp_path, random_model(SPEC))


def test_an_adapter_that_fails_in_any_read_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LanguageModel(random_model(SPEC), executor="torch")
    folder, ids = write_folder(tmp_path, tensors()), torch.arange(5)[None]
    before, read = model(ids).logits, safetensors.stored_bytes
    for last in range(10**9):
        left = iter(range(last))

        def reading(stored: Any, left: Any = left) -> Any:
            if next(left, None) is None:
                raise OSError(5, "Input/output error")
            return read(stored)

        with monkeypatch.context() as patch:
            patch.setattr(safetensors, "stored_bytes", reading)
            try:
                model.load_adapter(folder, "a")
                break
            except FileError:
                assert (model.adapters, torch.equal(model(ids).logits, before)) == ((), True)
    assert last == len(tensors()) and model.adapters == ("a",)
    assert torch.equal(model(ids).logits, before)


def test_an_encoder_takes_no_adapter(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tensors())
    with pytest.raises(UnsupportedError, match="only decoders"):
        read_adapter(folder, ours(reference_t5(torch.float64)))
