"""A LoRA and a LoHa of a vision-language model without its tower, trained here on embeddings, both
active: what PEFT's mixed model says with the same files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.testing.tokenizer import tiny_tokenizer
from tests.bridge.test_peft import WIDTH, features, textbook, vision_language_model
from tests.models.tiny import farthest

CONFIGS = {
    "lora": es.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"]),
    "loha": es.LoHaConfig(r=2, target_modules=["k_proj", "v_proj", "down_proj"]),
}


def examples() -> list[dict[str, Tensor]]:
    """Rows of embeddings, as a tower or another model might have made them, with labels."""
    generator, found = torch.Generator().manual_seed(2), []
    for length in (6, 9, 7, 8):
        embeds = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, 40, (length,), generator=generator)
        labels[:3] = -100
        found.append({"inputs_embeds": embeds, "labels": labels})
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, and a folder of each adapter after its training."""
    place = tmp_path_factory.mktemp("mixed")
    vision_language_model().save_pretrained(place / "model")
    for name, config in CONFIGS.items():
        torch.manual_seed(7)
        run = es.Trainer(
            loaded(place),
            es.TrainingArguments(
                output_dir=place / f"run {name}",
                max_steps=6,
                per_device_train_batch_size=2,
                learning_rate=0.05,
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
            ),
            data_collator=es.DataCollatorForSeq2Seq(tiny_tokenizer()),
            train_dataset=examples(),
            peft_config=config,
        )
        run.train()
        losses = [one["loss"] for one in run.state.log_history if "loss" in one]
        assert losses[-1] < losses[0]
        run.save_model(place / name)
    return place


def loaded(place: Path) -> es.LanguageModel:
    return es.load_model(
        place / "model", dtype=torch.float64, without=("vision",), executor="torch"
    )


def mixed(place: Path) -> Any:
    """PEFT's model with both files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
        found = peft.PeftMixedModel.from_pretrained(vision_language_model(), place / "lora", "lora")
        found.load_adapter(place / "loha", "loha")
        found.set_adapter(["lora", "loha"])
    return found.eval()


def ours(place: Path) -> es.LanguageModel:
    model = loaded(place)
    for name in CONFIGS:
        model.load_adapter(place / name, name)
    return model


def test_logits_are_those_of_the_mixed_model(place: Path) -> None:
    given = features()
    del given["attention_mask"]
    own, reference, names = ours(place), mixed(place), ["lora", "loha"]
    with torch.no_grad():
        wanted = reference(**given).logits
        found = own(**given, adapters=dict.fromkeys(names, 1.0), use_cache=False).logits
        alone = own(**given, adapter_names="lora", use_cache=False).logits
    assert farthest(found, wanted) < 1e-6
    assert farthest(alone, wanted) > 1e-3


@pytest.mark.parametrize("count", [48, pytest.param(512, marks=pytest.mark.slow)])
def test_it_says_what_the_mixed_model_says(place: Path, count: int) -> None:
    given, reference = features(), mixed(place)
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    out = ours(place).generate(**given, **options, adapters={"lora": 1.0, "loha": 1.0})
    assert out[:, -count:].tolist() == [textbook(reference, given, row, count) for row in range(2)]
