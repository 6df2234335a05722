"""Pairs of answers: the loss is that of the formula, and the better answer becomes more likely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.train.runs import padded

TOKENIZER = tiny_tokenizer()
PAIRS = [
    {"prompt": "one", "chosen": " two", "rejected": " nine"},
    {"prompt": "three", "chosen": " four", "rejected": " eight"},
    {"prompt": "five", "chosen": " six", "rejected": " seven"},
]


def likelihood(model: Any, row: Any, **given: Any) -> Tensor:
    """The log-probability of what a row teaches, by whole logits."""
    ids, labels = row["input_ids"][None], row["labels"][None, 1:]
    logits = model(ids, **given).logits[:, :-1].log_softmax(-1)
    own = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (own * (labels != -100)).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("of_adapter", [True, False])
def test_the_loss_is_that_of_the_formula(of_adapter: bool, smoothing: float) -> None:
    model = tiny_llama(vocab_size=320, dtype=torch.float64)
    rows = es.read_rows(PAIRS, model, TOKENIZER)
    if of_adapter:
        config = es.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapter = model.add_adapter("default", config)
        told, other, learning = {"adapter_names": "default"}, model, list(adapter.parameters())
    else:
        other = tiny_llama(vocab_size=320, dtype=torch.float64, seed=5)
        told, learning = {}, list(model.requires_grad_().parameters())
    loss = es.PreferenceLoss(0.3, smoothing, None if of_adapter else other)
    batch = {**padded([rows[i] for i in range(6)]), "use_cache": False, **told}
    assert loss.items_of(batch) == 3
    found = loss(model, batch, 5)
    wanted = torch.zeros((), dtype=torch.float64)
    for number in range(3):
        gain = [
            likelihood(model, rows[2 * number + i], **told)
            - likelihood(other, rows[2 * number + i]).detach()
            for i in range(2)
        ]
        margin = 0.3 * (gain[0] - gain[1])
        wanted = wanted - (1 - smoothing) * margin.sigmoid().log() / 5
        wanted = wanted - smoothing * (-margin).sigmoid().log() / 5
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-9)
    for one, two in zip(
        torch.autograd.grad(found, learning), torch.autograd.grad(wanted, learning), strict=True
    ):
        assert torch.allclose(one, two, atol=1e-9)


def test_the_better_answer_becomes_more_likely(tmp_path: Path) -> None:
    """Pairs stay together in any order, and a step of two batches is that of one."""
    seen: list[Tensor] = []

    def noted(rows: Any) -> dict[str, Tensor]:
        seen.extend(row["input_ids"] for row in rows)
        return padded(rows)

    found = []
    for name, given in (
        ("a", {"per_device_train_batch_size": 3}),
        ("b", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}),
    ):
        model = tiny_llama(vocab_size=320, dtype=torch.float64)
        torch.manual_seed(1)
        args = es.TrainingArguments(
            output_dir=tmp_path / name,
            max_steps=8,
            learning_rate=1e-2,
            adam_epsilon=1e-5,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            **given,
        )
        run = es.Trainer(
            model,
            args,
            noted,
            PAIRS,
            processing_class=TOKENIZER,
            peft_config=es.LoraConfig(r=4, target_modules="all-linear"),
            compute_loss=es.PreferenceLoss(0.5),
        )
        run.train()
        losses = [one["loss"] for one in run.state.log_history if "loss" in one]
        assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.4
        found.append(losses)
        rows = es.read_rows(PAIRS, model, TOKENIZER)
        with torch.no_grad():
            for number in range(3):
                better, worse = (
                    likelihood(model, rows[2 * number + i], adapter_names="default")
                    - likelihood(model, rows[2 * number + i])
                    for i in range(2)
                )
                assert better > worse
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    beginnings = {tuple(ids[:2].tolist()) for ids in seen}
    assert len(beginnings) <= 4


def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=320, dtype=torch.float32)
    args = es.TrainingArguments(
        output_dir=tmp_path, max_steps=1, save_strategy="no", disable_tqdm=True
    )
    whole = es.Trainer(
        model,
        args,
        None,
        PAIRS,
        processing_class=TOKENIZER,
        compute_loss=es.PreferenceLoss(),
    )
    with pytest.raises(RequestError, match="no reference"):
        whole.train()
    with pytest.raises(RequestError, match=r"no pairs of answers.*3 rows"):
        es.PreferenceLoss().items_of({"labels": torch.zeros(3, 4)})
    for wrong in ({"beta": 0}, {"label_smoothing": 0.5}, {"beta": "much"}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            es.PreferenceLoss(**wrong)


def test_a_loss_that_forgets_the_adapter_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=320, dtype=torch.float32)

    def forgetful(model: Any, batch: Any, items: int) -> Tensor:
        ids = batch["input_ids"]
        return model(ids, labels=batch["labels"]).loss + torch.zeros(()).requires_grad_()

    run = es.Trainer(
        model,
        es.TrainingArguments(output_dir=tmp_path, save_strategy="no", disable_tqdm=True),
        None,
        PAIRS,
        processing_class=TOKENIZER,
        peft_config=es.LoraConfig(r=4, target_modules="all-linear"),
        compute_loss=forgetful,
    )
    with pytest.raises(RequestError, match="does not depend on what is trained"):
        run.train()
