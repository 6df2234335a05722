"""The Trainer takes the steps of transformers' Trainer: losses, rates, norms and weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.trainer_utils import set_seed

import everystep as es
from everystep.api.model import LanguageModel
from everystep.train.schedules import SCHEDULES, factor_of
from tests.models.tiny import ours, reference_decoder
from tests.train.runs import padded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the evaluation are trained on"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),  # PEFT's use of transformers
]


def examples(count: int = 44, seed: int = 3) -> list[dict[str, list[int]]]:
    """Rows of 4 to 13 ids, whose first ones are not learned."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 14, (), generator=draw))
        ids = torch.randint(1, 90, (length,), generator=draw).tolist()
        known = int(torch.randint(0, 3, (), generator=draw))
        found.append({"input_ids": ids, "labels": [-100] * known + ids[known:]})
    return found


def theirs_and_ours(
    tmp_path: Path,
    steps: int = 50,
    collators: tuple[Any, Any] = (padded, padded),
    trainable: list[str] | None = None,
    **given: Any,
) -> tuple[Any, es.Trainer]:
    torch.manual_seed(0)
    reference = reference_decoder("llama", torch.float32)
    model = LanguageModel(ours(reference))
    for name, one in reference.named_parameters():
        one.requires_grad_(trainable is None or any(re.search(each, name) for each in trainable))
    usual = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 5e-4}
    # With the usual 1e-8 Adam takes whole steps along gradients that are rounding alone, which some
    # configurations make larger.
    usual |= {"adam_epsilon": 1e-5, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    said = {**usual, **given}
    theirs = transformers.Trainer(
        reference,
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", **said
        ),
        collators[0],
        examples(),
        examples(9, 4),
    )
    own = es.Trainer(
        model,
        es.TrainingArguments(output_dir=tmp_path / "ours", trainable=trainable, **said),
        collators[1],
        examples(),
        examples(9, 4),
    )
    set_seed(said.get("seed", 42))
    theirs.train()
    own.train()
    return theirs, own


def alike(theirs: Any, own: es.Trainer, within: float = 1e-5) -> None:
    wanted = [one for one in theirs.state.log_history if "loss" in one]
    found = [one for one in own.state.log_history if "loss" in one]
    assert len(found) == len(wanted) > 3
    for one, other in zip(found, wanted, strict=True):
        assert one["step"] == other["step"] and one["epoch"] == pytest.approx(other["epoch"])
        assert one["learning_rate"] == pytest.approx(other["learning_rate"], abs=1e-12)
        assert one["loss"] == pytest.approx(other["loss"], abs=within), one["step"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=20 * within)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the usual epsilon": {"adam_epsilon": 1e-8},
    "two and a half epochs": {"max_steps": -1, "num_train_epochs": 1.4},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation that ends early": {"gradient_accumulation_steps": 4, "max_steps": 20},
    "short clipping": {"max_grad_norm": 0.05},
    # Gradients are as large as they are, so what is rounding alone is larger too.
    "no clipping": {"max_grad_norm": 0.0, "adam_epsilon": 1e-4},
    "decay": {"weight_decay": 0.3},
    "momentum": {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
    "unfused": {"optim": "adamw_torch"},
    # At ten times this rate losses go up, and what is rounding alone grows with the rate.
    "sgd": {"optim": "sgd", "learning_rate": 0.05},
    "smoothing": {"label_smoothing_factor": 0.2},
    "smoothing and accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "warmup": {"warmup_steps": 3},
    "a share of warmup": {"warmup_steps": 0.2, "lr_scheduler_type": "cosine"},
    "dropped batches": {"dataloader_drop_last": True, "per_device_train_batch_size": 7},
    "in order": {"train_sampling_strategy": "sequential"},
    "another seed": {"seed": 7, "data_seed": 11},
    "checkpointing": {"activation_checkpointing": True},
    "parts": {"trainable": [r"layers\.1\.", "norm", "lm_head"]},
    "packing": {
        "collators": (transformers.DataCollatorWithFlattening(), es.DataCollatorWithFlattening())
    },
    "packing, parts and accumulation": {
        "collators": (transformers.DataCollatorWithFlattening(), es.DataCollatorWithFlattening()),
        "trainable": ["mlp"],
        "gradient_accumulation_steps": 2,
    },
    "stable, then decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 9},
        "warmup_steps": 3,
    },
    "a rate that ends above 0": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-4},
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_are_transformers(name: str, tmp_path: Path) -> None:
    given = {"steps": 6, **CONFIGURATIONS[name]}
    alike(*theirs_and_ours(tmp_path, **given))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_fifty_steps_are_transformers(name: str, tmp_path: Path) -> None:
    alike(*theirs_and_ours(tmp_path, **CONFIGURATIONS[name]))


@pytest.mark.parametrize("steps", [22, pytest.param(50, marks=pytest.mark.slow)])
def test_bfloat16_is_within_the_spread_of_transformers(steps: int, tmp_path: Path) -> None:
    """What comes of batches in another order, and how far from float32 their own rounding goes."""

    def losses(run: Any) -> torch.Tensor:
        logged = [one["loss"] for one in run.state.log_history if "loss" in one]
        return torch.tensor(logged, dtype=torch.float64)

    run, own = theirs_and_ours(tmp_path / "a", steps, bf16=True)
    theirs, found = losses(run), losses(own)
    exact = losses(theirs_and_ours(tmp_path / "b", steps)[1])
    epoch = -11  # batches of one
    orders = [
        losses(theirs_and_ours(tmp_path / f"c{seed}", steps, bf16=True, data_seed=seed)[0])
        for seed in (1, 2, 3)
    ]
    means = torch.stack([one[epoch:].mean() for one in (theirs, *orders)])
    assert (found[epoch:].mean() - theirs[epoch:].mean()).abs() < means.std() / 2
    rounding = (theirs - exact).abs()
    assert (found - exact).abs().mean() < 2 * rounding.mean()
    assert (found - theirs).abs().mean() < 2 * rounding.mean() and bool((found != exact).any())


ROUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen3", "gemma2", "phi3", "stablelm")},
    "a key head for each": ("llama", {"num_key_value_heads": 6}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_autocast_rounds_where_transformers_does(name: str) -> None:
    """Logits, losses and the gradient of the head are those of transformers, which is far from what
    rounding is; norms of heads, turns and softmaxes are in float32, in few positions too."""
    kind, config = ROUNDED[name]
    torch.manual_seed(0)
    reference = reference_decoder(kind, torch.float32, **config)
    model = LanguageModel(ours(reference)).requires_grad_()
    heads = []
    for one in (model, reference):
        heads.append(dict(one.named_parameters()).get("lm_head.weight"))
    for start in (0, 4, 8):
        batch = padded(examples()[start : start + 4])
        real = batch["attention_mask"].bool()
        exact = reference(**batch, use_cache=False).logits[real]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = reference(**batch, use_cache=False)
            found = model(**batch, use_cache=False, output_logits=True)
        rounding = (theirs.logits[real] - exact).abs().mean()
        assert rounding > 1e-3
        assert (found.logits[real] - theirs.logits[real]).abs().mean() < 0.02 * rounding
        assert abs(float(found.loss - theirs.loss)) < 1e-4
        theirs.loss.backward()
        found.loss.backward()
    if heads[1] is not None:
        torch.testing.assert_close(heads[0].grad, heads[1].grad, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_transformers(name: str) -> None:
    settings = {
        "warmup_stable_decay": {"num_decay_steps": 6, "min_lr_ratio": 0.1},
        "cosine_with_min_lr": {"min_lr": 0.01},
        "cosine_with_restarts": {"num_cycles": 3},
        "polynomial": {"power": 2.0, "lr_end": 1e-3},
        "inverse_sqrt": {"timescale": 5},
    }.get(name, {})
    warmup = 0 if name == "constant" else 5
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    theirs = transformers.get_scheduler(name, optimizer, warmup, 30, settings)
    factor = factor_of(name, warmup, 30, 0.25, settings)
    for step in range(33):
        assert 0.25 * factor(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        theirs.step()


KINDS = {
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora with a part": {"r": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["v_proj", "up_proj"]},
    "parts": {
        "r": 2,
        "target_modules": ["lm_head", "q_proj"],
        "modules_to_save": ["norm", "o_proj"],
        "trainable_token_indices": [5, 9],
    },
}


@pytest.mark.parametrize("steps", [8, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_steps_of_an_adapter_are_pefts(name: str, steps: int, tmp_path: Path) -> None:
    """From the same first values, with weights that stay as they are."""
    reference = reference_decoder("llama", torch.float32)
    model = LanguageModel(ours(reference))
    frozen = {key: one.clone() for key, one in model.state_dict().items()}
    usual = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 2e-3}
    usual |= {"gradient_accumulation_steps": 2, "adam_epsilon": 1e-5, "logging_steps": 1}
    usual |= {"save_strategy": "no", "disable_tqdm": True, "weight_decay": 0.1}
    torch.manual_seed(1)
    tuned = peft.get_peft_model(reference, peft.LoraConfig(**KINDS[name]))
    theirs = transformers.Trainer(
        tuned,
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", **usual
        ),
        padded,
        examples(),
    )
    own = es.Trainer(
        model,
        es.TrainingArguments(output_dir=tmp_path / "ours", **usual),
        padded,
        examples(),
        peft_config=es.LoraConfig(**KINDS[name]),
    )
    first = {
        re.sub(r"\.default|\.modules_to_save", "", key).replace("vector.weight", "vector"): (
            one.detach().clone()
        )
        for key, one in tuned.named_parameters()
        if one.requires_grad
    }
    with torch.no_grad():
        for key, one in own.weights.named().items():
            one.copy_(first.pop(key))
    assert not first and own.weights.count() == tuned.get_nb_trainable_parameters()[0]
    theirs.train()
    own.train()
    alike(theirs, own)
    assert all(torch.equal(one, frozen[key]) for key, one in model.state_dict().items())
    folder = own.save_model(tmp_path / "saved")
    again = reference_decoder("llama", torch.float32)
    again.load_state_dict({key: one for key, one in frozen.items() if key in again.state_dict()})
    loaded = peft.PeftModel.from_pretrained(again, folder).eval()
    batch = padded(examples(3, 9))
    del batch["labels"]
    with torch.no_grad():
        wanted = loaded(**batch).logits
        found = model(**batch, adapter_names="default").logits
    real = batch["attention_mask"].bool()
    assert (found[real] - wanted[real]).abs().max() < 1e-4
