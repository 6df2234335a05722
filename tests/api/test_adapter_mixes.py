"""Rows with different mixes of adapters: each is what it is alone, whatever stands beside it."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from everystep.models import named_weights
from everystep.testing.models import tiny_llama
from tests.adapters.making import PROJECTIONS, random_lora, write_folder

ROWS = torch.tensor([[5, 9, 30, 7, 5, 9], [11, 4, 8, 30, 2, 6], [3, 3, 40, 41, 3, 3]])
MIXES: list[Any] = [
    None,
    "style",
    {"style": 0.5},
    {"style": 0.7, "turn": 1.0},
    {"turn": 1.0, "style": 0.7},
    {"other": 1.0, "turn": 0.5},
    {"style": 0.3, "other": 0.3},
    ["style", "other"],
    "__base__",
    {"turn": 0.25},
    {"style": -0.5},
    {"other": 2.0},
    {"other": 0.4, "style": 0.2, "turn": 0.6},
    {"turn": 1.0, "other": 1.0},
    "turn",
    {"style": 0.0},
]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "seed": list(range(16))},
    "beams": {"num_beams": 3},
    "copied drafts": {"prompt_lookup_num_tokens": 3},
    "first layers": {"assistant_early_exit": 1},
    "chunks": {"prefill_chunk_size": 2},
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}


def hadamard(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A LoHa of random numbers for some projections."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for one in (1, 2):
                for side, shape in (("a", (len(weight), 2)), ("b", (2, weight.shape[1]))):
                    drawn = torch.randn(shape, generator=generator)
                    found[f"{module}.hada_w{one}_{side}"] = drawn * 0.4
    return found


def rotation(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """An OFT of random numbers for some projections, in blocks of four."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            drawn = torch.randn(weight.shape[1] // 4, 6, generator=generator)
            found[f"{module}.oft_R.weight"] = drawn * 0.5
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    made = tiny_llama(dtype=torch.float64, vocab_size=320)
    weights = dict(named_weights(made.core))  # type: ignore[arg-type]
    folders = [tmp_path_factory.mktemp(name) for name in ("style", "other", "turn")]
    write_folder(folders[0], random_lora(weights, 3, PROJECTIONS, 3))
    nothing = {"lora_alpha": None, "use_rslora": None, "use_dora": None}
    write_folder(folders[1], hadamard(weights, 4), peft_type="LOHA", r=2, alpha=3, **nothing)
    turned = {"r": 0, "oft_block_size": 4, "use_cayley_neumann": True}
    write_folder(folders[2], rotation(weights, 5), peft_type="OFT", **nothing | turned)
    for name, folder in zip(("style", "other", "turn"), folders, strict=True):
        made.load_adapter(folder, name)
    return made


def sixteen() -> torch.Tensor:
    return ROWS[torch.arange(16) % 3]


@pytest.mark.parametrize("way", WAYS)
def test_sixteen_mixes_in_a_batch_are_sixteen_rows_alone(model: LanguageModel, way: str) -> None:
    options = {**OPTIONS, **WAYS[way]}
    together = model.generate(sixteen(), **options, adapters=MIXES).tolist()
    for row, mix in enumerate(MIXES):
        own = options | ({"seed": [options["seed"][row]]} if "seed" in options else {})
        alone = model.generate(sixteen()[row : row + 1], **own, adapters=[mix]).tolist()
        assert alone == [together[row]], (row, mix)


def test_each_mix_is_another_model(model: LanguageModel) -> None:
    ids = ROWS[:1].expand(16, -1)
    logits = model.generate(
        ids, max_new_tokens=1, adapters=MIXES, output_logits=True, return_dict_in_generate=True
    ).logits[0]
    alike = {(0, 8), (0, 15), (8, 15)}  # none, "__base__", and a weight of zero
    for one in range(16):
        for two in range(one):
            same = torch.allclose(logits[one], logits[two], atol=1e-9)
            assert same == ((two, one) in alike), (MIXES[two], MIXES[one])


def test_a_mix_is_the_model_with_it_in_its_weights(model: LanguageModel, tmp_path: Path) -> None:
    for number, mix in enumerate(MIXES):
        if not isinstance(mix, dict):
            continue
        model.save_pretrained(tmp_path / str(number), adapters=[*mix.items()])
        merged = es.load_model(tmp_path / str(number), dtype=torch.float64)
        found = model.generate(ROWS, **OPTIONS, adapters=mix)
        assert found.tolist() == merged.generate(ROWS, **OPTIONS).tolist()


def test_calls_about_prompts_take_a_mix_for_each(model: LanguageModel, tmp_path: Path) -> None:
    prompts, mixes = ROWS.tolist(), [{"style": 0.7, "turn": 1.0}, None, {"other": 0.5}]
    expected = model.generate(ROWS, **OPTIONS, adapters=mixes)[:, 6:].tolist()
    options = [{"adapters": mix} for mix in mixes]
    assert es.generate(model, None, prompts, options=options, **OPTIONS) == expected
    run = es.open(model, None, prompts[0], adapters=mixes[0], **OPTIONS)
    assert len([*islice(run, 3)]) == 3
    run.save(tmp_path / "a.run")
    assert list(es.resume(tmp_path / "a.run", model, None).result().tokens) == expected[0]
    prefix = es.prefill(model, prompt=prompts[0][:3], adapter_names={"style": 0.7, "turn": 1.0})
    ended = es.generate(model, None, [prompts[0][3:]], prefix=prefix, adapters=mixes[0], **OPTIONS)
    assert ended == expected[:1]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"adapters": "style", "adapter_names": "style"}, "both say which adapters"),
    "unknown": ({"adapters": {"style": 1.0, "none": 1.0}}, "adapters has one that the model does"),
    "unknown in a row": ({"adapter_names": ["style", ["no"], None]}, "adapter_names has one"),
    "too few": ({"adapters": [{"style": 1.0}]}, "adapter_names does not fit the call.*options="),
    "a word as a weight": ({"adapters": {"style": "much"}}, "does not say which adapters"),
    "a flag as a weight": ({"adapters": {"style": True}}, "does not say which adapters"),
    "no number": ({"adapters": {"style": math.nan}}, "does not say which adapters"),
    "a number": ({"adapters": 3}, "does not say which adapters"),
    "a number in a row": ({"adapters": [3, None, None]}, "does not say which adapters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_mix_is_refused(model: LanguageModel, name: str) -> None:
    given, told = WRONG[name]
    with pytest.raises(RequestError, match=f"(?s){told}"):
        model.generate(ROWS, **OPTIONS, **given)
