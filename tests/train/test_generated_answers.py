"""Evaluation by generation asks what the rows ask: without what is hidden, row by row the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine.engine import Engine
from everystep.engine.events import Event
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from everystep.train.checkpoints import checkpoints_in, keep_newest
from everystep.train.evaluation import answers_of, asked_of
from tests.models.tiny import ours, reference_t5
from tests.train.runs import Noisy, padded

FIVE: dict[str, Any] = {"generation_max_length": 5, "predict_with_generate": True}


def answered(folder: Path, rows: Any, collate: Any = None) -> Any:
    """What a metric is given of these rows."""
    seen: list[es.EvalPrediction] = []

    def metrics(found: es.EvalPrediction) -> dict[str, float]:
        seen.append(found)
        return {}

    model = tiny_llama(vocab_size=96, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    asked = es.TrainingArguments(output_dir=folder, disable_tqdm=True, **FIVE)
    run = es.Trainer(model, asked, collate, eval_dataset=rows, compute_metrics=metrics)
    before = global_states()
    with pytest.warns(UserWarning, match="ended by their length"):
        run.evaluate()
    assert global_states() == before
    return seen[-1]


def global_states() -> tuple[Any, ...]:
    """Where the global generators are."""
    numbers = np.random.get_state(legacy=True)[1]
    return random.getstate(), list(numbers), torch.get_rng_state().tolist()


def test_hidden_ids_are_not_read_as_text(tmp_path: Path) -> None:
    ids, labels = [5, 60, 7, 80, 9], [-100, -100, -100, 80, 9]
    plain = answered(tmp_path, [{"input_ids": ids, "labels": labels}])
    mask = [0, 0, 0, *[1] * 5]
    hidden = {"input_ids": [3, 3, 3, *ids], "labels": [*[-100] * 3, *labels]}
    padded = answered(tmp_path, [{**hidden, "attention_mask": mask}])
    as_text = answered(tmp_path, [hidden])
    assert padded.predictions.tolist() == plain.predictions.tolist()
    assert as_text.predictions.tolist() != plain.predictions.tolist()


def test_an_encoder_does_not_read_hidden_ids() -> None:
    model = LanguageModel(ours(reference_t5(torch.float32)))
    ids, labels = [5, 60, 7, 80, 9], torch.tensor([7, 8])
    mask = torch.tensor([*[1] * 5, 0, 0])
    plain = {"input_ids": torch.tensor(ids), "labels": labels}
    padded = {"input_ids": torch.tensor([*ids, 3, 3]), "attention_mask": mask, "labels": labels}
    asked = [
        asked_of(row, 0, True) for row in (plain, padded, {**padded, "attention_mask": mask | 1})
    ]
    starts = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    given = {**starts, "max_new_tokens": 6}
    found = answers_of(model, None, asked, given, lambda number, answer: None)
    one, other, as_text = (answer.logprobs.logprobs for answer in found if answer.logprobs)
    assert found[0].tokens == found[1].tokens and torch.allclose(one, other, atol=1e-6)
    assert found[0].tokens != found[2].tokens or not torch.allclose(one, as_text, atol=1e-4)


def test_prompts_of_an_evaluation_share_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight answers of five tokens take about as many steps of the engine as one of them, and not
    as many as all of them one by one."""
    # Rows of one length, whose prompts have one to eight ids.
    rows = [
        {"input_ids": [*range(40 + one, 50 + one)], "labels": [*[-100] * one, *range(10 - one)]}
        for one in range(1, 9)
    ]
    steps, step = 0, Engine.step

    def counted(engine: Engine) -> list[Event]:
        nonlocal steps
        steps += 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    found = answered(tmp_path, rows)
    assert [len(one.tokens) for one in found.generated] == [5] * 8
    assert 5 <= steps < 10


def test_what_should_come_is_what_is_labelled(tmp_path: Path) -> None:
    ids = [5, 60, 7, 80, 9, 11, 12, 13]
    labels = [-100, -100, 7, 80, -100, -100, 12, 13]
    found = answered(tmp_path, [{"input_ids": ids, "labels": labels}])
    assert found.label_ids.tolist() == [[7, 80, 12, 13]] and found.prompts == [[5, 60]]


def test_examples_that_draw_are_asked_as_their_loss_has_them(tmp_path: Path) -> None:
    found = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        seen = answered(tmp_path, _Asking(5), padded)
        found.append((seen.prompts, seen.predictions.tolist()))
    assert found[0] == found[1]


class _Asking(Noisy):
    """The same with the first three ids as what is asked."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": [-100, -100, -100, *ids[3:]]}


class _Lengths(Noisy):
    """Examples whose lengths are drawn each time they are read."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = super().__getitem__(index)["input_ids"] * random.randrange(1, 5)
        return {"input_ids": ids, "labels": [-100, *ids[1:]]}


def test_lengths_that_are_drawn_are_the_same_in_each_run(tmp_path: Path) -> None:
    losses = []
    for seed in (1, 2):
        random.seed(seed)
        asked = es.TrainingArguments(
            output_dir=tmp_path / str(seed),
            disable_tqdm=True,
            max_steps=6,
            logging_steps=1,
            per_device_train_batch_size=2,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
        )
        run = es.Trainer(tiny_llama(vocab_size=96), asked, padded, _Lengths(24))
        run.train()
        losses.append([one["loss"] for one in run.state.log_history if "loss" in one])
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_the_best_checkpoint_stays_by_whatever_path_it_is_named(tmp_path: Path) -> None:
    for number in (2, 4, 6, 8):
        (tmp_path / "run" / f"checkpoint-{number}").mkdir(parents=True)
    elsewhere = tmp_path / "other" / ".." / "run" / "checkpoint-4"
    keep_newest(tmp_path / "run", 2, str(elsewhere))
    names = [one.name for one in checkpoints_in(tmp_path / "run")]
    assert names == ["checkpoint-4", "checkpoint-8"]


def test_embeddings_without_ids_cannot_be_gone_on_from() -> None:
    row = {"inputs_embeds": torch.zeros(4, 32), "labels": torch.tensor([-100, -100, 5, 6])}
    with pytest.raises(RequestError, match="has no ids, from which an answer could go on"):
        asked_of(row, 3, False)
