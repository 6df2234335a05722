"""The Trainer: what it trains, what it tells, how it evaluates, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import (
    AbsentAttributeError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
)
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.train.callbacks import log_of
from everystep.train.other_names import OTHER_ARGUMENTS, OTHER_METHODS, OTHER_PARTS
from tests.executors.models import narrow_model
from tests.models.tiny import ours, reference_decoder, reference_t5
from tests.train.runs import padded, trainer

ROWS = [
    {"input_ids": [5, 9, one, 2], "labels": [-100, -100, one, 2]}
    for one in (11, 12, 13, 14, 15, 16, 17, 18)
]
QUICK = {"max_steps": 3, "gradient_accumulation_steps": 1, "save_strategy": "no"}


def made(tmp_path: Path, model: Any = None, rows: Any = ROWS, **given: Any) -> es.Trainer:
    names = ("eval_dataset", "compute_loss", "compute_loss_func", "compute_metrics", "callbacks")
    names += ("processing_class", "peft_config", "optimizers", "preprocess_logits_for_metrics")
    names += ("adapter_name",)
    of_trainer = {name: given.pop(name) for name in names if name in given}
    said = {"disable_tqdm": True, **QUICK, **given}
    args = es.TrainingArguments(output_dir=tmp_path, **said)
    model = model or tiny_llama(vocab_size=97, dtype=torch.float32)
    return es.Trainer(model, args, padded, rows, **of_trainer)


def test_what_no_pattern_names_stays(tmp_path: Path) -> None:
    run = made(tmp_path, trainable=[r"layers\.1\.", "lm_head"], learning_rate=0.01)
    before = {name: one.clone() for name, one in run.model.state_dict().items()}
    assert {name.split(".")[2] for name in run.weights.named() if "layers" in name} == {"1"}
    run.train()
    changed = {
        name for name, one in run.model.state_dict().items() if not torch.equal(one, before[name])
    }
    assert changed == {*run.weights.named()}
    with pytest.raises(RequestError, match=r"matches no weight.*'layers.77'"):
        made(tmp_path, trainable=["layers.77"])
    with pytest.raises(RequestError, match="no regular expression"):
        made(tmp_path, trainable=["layers.(1"])


class Told(es.TrainerCallback):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[str] = []
        for name in [one for one in dir(es.TrainerCallback) if one.startswith("on_")]:
            setattr(self, name, lambda *_, name=name, **given: self.events.append(name))


class TheirTold(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []
        for name in [one for one in dir(es.TrainerCallback) if one.startswith("on_")]:
            setattr(self, name, lambda *_, name=name, **given: self.events.append(name))


def test_callbacks_are_told_what_transformers_tells(tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}
    given |= {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3}
    given |= {"save_strategy": "steps", "save_steps": 3, "disable_tqdm": True}
    theirs, own = TheirTold(), Told()
    reference = reference_decoder("llama", torch.float32)
    transformers.Trainer(
        reference,
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", **given
        ),
        padded,
        ROWS,
        ROWS[:3],
        callbacks=[theirs],
    ).train()
    made(
        tmp_path / "ours",
        LanguageModel(ours(reference_decoder("llama", torch.float32))),
        eval_dataset=[{**ROWS[0], "input_ids": [6, 9, 11, 2]}],
        callbacks=[own],
        **given,
    ).train()
    assert own.events == theirs.events


def test_what_is_logged_has_the_names_of_transformers(tmp_path: Path) -> None:
    """And as many operations of numbers are counted."""
    given = {"per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 2}
    given |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    given |= {"disable_tqdm": True}
    unseen = [{**one, "input_ids": [6, *one["input_ids"][1:]]} for one in ROWS[:3]]
    reference = reference_decoder("llama", torch.float32)
    model = LanguageModel(ours(reference))
    theirs = transformers.Trainer(
        reference,
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", **given
        ),
        padded,
        ROWS,
        {"near": unseen},
    )
    run = made(tmp_path / "ours", model, eval_dataset={"near": unseen}, **given)
    results = theirs.train(), run.train()
    own = {*results[1].metrics} - {"total_flos"}  # what prints theirs takes that away
    assert {*results[0].metrics} - {"epoch"} == own
    histories = [[{*one} for one in each.state.log_history] for each in (theirs, run)]
    assert histories[0] == histories[1] and len(histories[0]) == 5
    assert run.state.total_flos == theirs.state.total_flos > 0
    told = theirs.predict(unseen).metrics, run.predict(unseen).metrics
    assert told[0].keys() == told[1].keys()


OTHER_DEFAULTS: dict[str, tuple[Any, Any, str]] = {
    "output_dir": ("trainer_output", None, "theirs becomes trainer_output too"),
    "disable_tqdm": (False, None, "theirs becomes False but where transformers logs errors alone"),
}
"""Defaults that differ: ours, theirs, and why that makes no difference."""


@pytest.fixture
def usual_logging() -> Iterator[None]:
    """How transformers logs where nobody set anything, which decides a default of its own."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


@pytest.mark.usefixtures("usual_logging")
def test_every_default_is_that_of_transformers() -> None:
    """But for those that a list names, which come to the same."""
    theirs = {one.name: one for one in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    usual = transformers.Seq2SeqTrainingArguments()
    compared, own = set(), es.TrainingArguments()
    for one in dataclasses.fields(es.TrainingArguments):
        if not one.init or one.name not in theirs:
            continue
        other = theirs[one.name]
        plain = other.default
        if other.default_factory is not dataclasses.MISSING:
            plain = other.default_factory()
        plain = getattr(plain, "value", plain)  # of an enumeration
        wanted = OTHER_DEFAULTS.get(one.name, (plain, plain, ""))
        assert (one.default, plain) == wanted[:2], one.name
        assert type(one.default) is type(wanted[0]) or plain == one.default, one.name
        found = getattr(usual, one.name)
        if plain is not None or one.name in OTHER_DEFAULTS:  # None: as others, or the model, say
            found = {"report_to": found or "none"}.get(one.name, getattr(found, "value", found))
            assert getattr(own, one.name) == found, one.name
        compared.add(one.name)
    mine = {one.name for one in dataclasses.fields(es.TrainingArguments) if one.init}
    assert mine - compared == {"trainable"} and OTHER_DEFAULTS.keys() <= compared
    # What is none here is taken, or refused in the test below.
    assert theirs.keys() - compared - {*OTHER_ARGUMENTS} <= {
        one.name for one in theirs.values() if not one.init
    } | {"sortish_sampler"}


def test_a_script_of_transformers_changes_by_its_import(tmp_path: Path) -> None:
    """Whatever an argument's default says is taken where it is what happens here."""
    theirs = transformers.TrainingArguments(str(tmp_path))
    refused, taken = {}, set()
    for one in dataclasses.fields(transformers.TrainingArguments):
        if not one.init or one.name == "output_dir":
            continue
        usual = one.default
        if usual is dataclasses.MISSING:
            usual = getattr(theirs, one.name)
        try:
            es.TrainingArguments(str(tmp_path), **{one.name: usual})
            taken.add(one.name)
        except UnsupportedError as error:
            refused[one.name] = str(error)
    assert len(taken) + len(refused) == 113
    # Their defaults say something that does not happen here, or nothing at all.
    assert {*refused} == {
        *("dataloader_pin_memory", "do_train", "do_eval", "do_predict", "log_on_each_node"),
        *("logging_nan_inf_filter", "remove_unused_columns"),
        "restore_callback_states_from_checkpoint",
    }
    assert es.TrainingArguments("x", fp16=False, report_to=None, disable_tqdm=None).reports == ()
    assert es.TrainingArguments("x", use_cpu=True).output_dir == "x"
    written = es.TrainingArguments("x", fp16=False).to_dict()
    assert es.TrainingArguments(**written) == es.TrainingArguments("x")
    with pytest.raises(RequestError, match="use_cpu is not valid"):
        es.TrainingArguments(use_cpu=1)


def test_logits_may_be_reduced_before_they_are_kept(tmp_path: Path) -> None:
    def accuracy(found: es.EvalPrediction) -> dict[str, float]:
        best, labels = found
        assert best.shape == labels.shape == (8, 4)
        return {"accuracy": float((best[:, 1:-1] == labels[:, 2:]).mean())}

    def best(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert logits.shape[:2] == labels.shape
        return logits.argmax(-1)

    given = {"eval_dataset": ROWS, "compute_metrics": accuracy}
    run = made(tmp_path, preprocess_logits_for_metrics=best, **given)
    assert 0 <= run.evaluate()["eval_accuracy"] <= 1
    whole = made(tmp_path, run.model).predict(ROWS).predictions
    assert (run.predict(ROWS).predictions == whole.argmax(-1)).all()
    with pytest.raises(RequestError, match="gave something else"):
        made(tmp_path, preprocess_logits_for_metrics=lambda *_: None, **given).evaluate()
    with pytest.raises(RequestError, match="has no effect where answers are generated"):
        made(tmp_path, preprocess_logits_for_metrics=best, predict_with_generate=True, **given)


def test_names_of_transformers_say_what_to_do(tmp_path: Path) -> None:
    for name, do in OTHER_PARTS.items():
        with pytest.raises(UnsupportedError, match=re.escape(do)):
            es.Trainer(tiny_llama(vocab_size=97), **{name: object()})
    with pytest.raises(UnknownArgumentError, match="Perhaps you meant train_dataset"):
        es.Trainer(tiny_llama(vocab_size=97), train_data=ROWS)
    run = made(tmp_path)
    for name, do in OTHER_METHODS.items():
        assert not hasattr(es.Trainer, name)
        with pytest.raises(AbsentAttributeError, match=re.escape(do)):
            getattr(run, name)
    assert not hasattr(run, "nothing")


def test_a_callback_that_gives_something_else_is_refused(tmp_path: Path) -> None:
    class Wrong(es.TrainerCallback):
        def on_step_end(self, *_: Any, **given: Any) -> Any:
            return {"should_stop": True}

    with pytest.raises(RequestError, match=r"Wrong.on_step_end returned something else.*dict"):
        made(tmp_path, callbacks=[Wrong]).train()
    with pytest.raises(RequestError, match="this is no callback"):
        made(tmp_path, callbacks=[object()])


def test_training_again_begins_anew_from_the_weights_as_they_are(tmp_path: Path) -> None:
    """With rates that begin where those of the first run did."""
    run = made(tmp_path, logging_steps=1, learning_rate=0.01)
    first = run.train()
    rates = [one["learning_rate"] for one in run.state.log_history if "loss" in one]
    second = run.train()
    again = [one["learning_rate"] for one in run.state.log_history if "loss" in one]
    assert again == rates and second.training_loss < first.training_loss


def test_a_callback_may_end_a_run_before_its_first_epoch(tmp_path: Path) -> None:
    class Ending(es.TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = True

    run = made(tmp_path, callbacks=[Ending], max_steps=5)
    run.train()
    assert run.state.global_step == 1


def test_what_is_logged_is_in_a_file(tmp_path: Path) -> None:
    run = made(tmp_path, logging_steps=1, include_num_input_tokens_seen=True)
    run.train()
    assert log_of(tmp_path) == run.state.log_history
    assert [one["num_input_tokens_seen"] for one in log_of(tmp_path)] == [32, 64, 96, 96]


@pytest.mark.parametrize("counted", [True, "all", "non_padding", False])
def test_tokens_are_counted_as_by_transformers(counted: Any, tmp_path: Path) -> None:
    """With padding, and without it."""
    rows = [{"input_ids": [5] * one + [2], "labels": [-100] * one + [2]} for one in (2, 7, 3, 5)]
    given = {"per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1}
    given |= {"include_num_input_tokens_seen": counted, "disable_tqdm": True}
    theirs = transformers.Trainer(
        reference_decoder("llama", torch.float32),
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", **given
        ),
        padded,
        rows,
    )
    run = made(tmp_path / "ours", rows=rows, **given)
    theirs.train()
    run.train()
    own, other = (
        [one.get("num_input_tokens_seen") for one in each.state.log_history if "loss" in one]
        for each in (run, theirs)
    )
    assert own == other and (own[-1] is None) == (counted is False)


class Metrics(es.TrainerCallback):
    """Says what evaluations have found, one after another."""

    def __init__(self, values: list[float], first: int = 0) -> None:
        self._values = iter(values[first:])

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["metrics"]["eval_speed"] = next(self._values)


@pytest.mark.parametrize(
    ("values", "greater", "given", "evaluations"),
    [
        ([5, 4, 3.95, 3.9, 1], False, (2, 0.2), 4),  # better by less than the threshold, twice
        ([5, 4.9, 4, 3.9, 3.85], False, (2, 0.2), 5),  # the third counts anew
        ([5, 6, 4, 4.5, 4], False, (1,), 2),
        ([1, 2, 3, 2.5, 2.9], True, (2,), 5),
        ([5, 5, 4, 3, 2], False, (2,), None),
        ([3, 3, 3, 4, 5], False, (3,), 4),  # the same is no better
    ],
)
def test_a_run_stops_where_its_metric_got_no_better(
    values: list[float], greater: bool, given: Any, evaluations: int | None, tmp_path: Path
) -> None:
    """Where transformers' own callback says so, and as well where it was resumed before."""
    said: dict[str, Any] = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 1}
    said |= {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
    said |= {"metric_for_best_model": "speed", "greater_is_better": greater}
    unseen = [{"input_ids": [7, 8, 2], "labels": [-100, 8, 2]}]

    def run(first: int = 0) -> es.Trainer:
        stops = es.EarlyStoppingCallback(*given)
        told = [Metrics(values, first), stops]
        return made(tmp_path, eval_dataset=unseen, callbacks=told, **said)

    whole = run()
    whole.train()
    assert whole.state.global_step == (evaluations or 5)
    theirs = transformers.EarlyStoppingCallback(*given)
    best, stopped = None, None
    for number, value in enumerate(values, 1):
        state, control = transformers.TrainerState(best_metric=best), transformers.TrainerControl()
        args = transformers.TrainingArguments(
            metric_for_best_model="speed", greater_is_better=greater
        )
        theirs.on_evaluate(args, state, control, {"eval_speed": value})
        if best is None or (value > best if greater else value < best):
            best = value
        if control.should_training_stop:
            stopped = number
            break
    assert stopped == evaluations
    again = run(first=2)
    if whole.state.global_step > 2:
        again.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
        assert again.state.global_step == whole.state.global_step


def test_evaluation_generates_what_the_model_would(tmp_path: Path) -> None:
    """After the prompt alone, with any strategy; nothing else changes by it."""
    tokenizer, seen = tiny_tokenizer(), []
    words = [("one", " two"), ("three", " four five"), ("six", " seven")]
    data = [{"prompt": first, "completion": second} for first, second in words]

    def compute_metrics(found: es.EvalPrediction) -> dict[str, float]:
        seen.append(found)
        assert found.texts is not None and found.target_texts is not None
        pairs = zip(found.texts, found.target_texts, strict=True)
        return {"exact": sum(one == other for one, other in pairs) / len(found.texts)}

    model = tiny_llama(vocab_size=len(tokenizer), dtype=torch.float32)
    run = es.Trainer(
        model,
        es.TrainingArguments(
            output_dir=tmp_path,
            disable_tqdm=True,
            max_steps=90,
            learning_rate=5e-3,
            predict_with_generate=True,
            generation_max_length=14,
            generation_num_beams=2,
            save_strategy="no",
        ),
        None,
        data,
        data,
        tokenizer,
        compute_metrics=compute_metrics,
    )
    with pytest.warns(UserWarning, match="of the evaluation are trained on"):
        run.train()
    config, state = model.generation_config.to_dict(), torch.get_rng_state()
    run.model.train()
    python = random.getstate()
    metrics = run.evaluate()
    assert run.model.training and random.getstate() == python
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generation_config.to_dict() == config
    found = seen[-1]
    assert found.target_texts == [second for _, second in words]
    for prompt, text, reply in zip(words, found.texts, found.generated, strict=True):
        ids = tokenizer(prompt[0], return_tensors="pt")
        wanted = model.generate(**ids, max_new_tokens=14, num_beams=2, do_sample=False)
        new = wanted[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == text
        assert reply.logprobs is not None
    assert metrics["eval_exact"] == 1.0 and metrics["eval_loss"] < 0.2
    assert found.predictions.shape[0] == found.label_ids.shape[0] == 3


def test_answers_that_end_by_their_length_are_told(tmp_path: Path) -> None:
    """A model that was never taught its end writes on and on, which takes long."""
    run = made(tmp_path, eval_dataset=ROWS, predict_with_generate=True, generation_max_length=2)
    run.model.generation_config.eos_token_id = None
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="8 of 8 answers ended by their length"):
        run.evaluate()
    sampled = es.GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=3)
    given = {"eval_dataset": ROWS, "predict_with_generate": True, "generation_config": sampled}
    with pytest.warns(UserWarning, match="ended by their length"):
        found = made(tmp_path, run.model, **given).predict(ROWS)
    assert found.predictions is not None and found.predictions.shape == (8, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_metrics_of_logits(tmp_path: Path) -> None:
    def compute_metrics(found: es.EvalPrediction) -> dict[str, float]:
        logits, labels = found
        assert logits.shape == (5, 6, 97) and labels.shape == (5, 6)
        assert (labels[:4, 4:] == -100).all() and found.texts is None
        hits = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
        return {"accuracy": float(hits.mean())}

    longer = {"input_ids": [5, 9, 11, 12, 13, 2], "labels": [-100, 9, 11, 12, 13, 2]}
    run = made(
        tmp_path,
        eval_dataset=[{**one, "input_ids": [6, *one["input_ids"][1:]]} for one in ROWS[:4]]
        + [longer],
        compute_metrics=compute_metrics,
        per_device_eval_batch_size=2,
    )
    metrics = run.evaluate()
    assert 0 <= metrics["eval_accuracy"] <= 1
    # The loss is the mean over labels, whatever the batches are.
    alone = made(tmp_path, run.model, eval_dataset=run._eval_rows["eval"]).evaluate()
    assert metrics["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "found, what",
    [
        ({"a": float("nan")}, "gave a 'a' that is no number"),
        ({"a": "much"}, "gave a 'a' that is no number"),
        (3.0, "gave no metrics"),
    ],
)
def test_metrics_that_are_none(found: Any, what: str, tmp_path: Path) -> None:
    run = made(tmp_path, eval_dataset=ROWS, compute_metrics=lambda _: found)
    with pytest.raises(RequestError, match=what):
        run.evaluate()


def test_several_evaluations_and_the_best_checkpoint(tmp_path: Path) -> None:
    sets = {"near": ROWS[:2], "far": [{"input_ids": [7, 8, 2], "labels": [-100, 8, 2]}]}
    run = made(
        tmp_path,
        eval_dataset=sets,
        max_steps=6,
        eval_strategy="steps",
        save_strategy="best",
        eval_steps=2,
        learning_rate=0.01,
        metric_for_best_model="far_loss",
        callbacks=[es.EarlyStoppingCallback(1)],
    )
    with pytest.warns(UserWarning, match="of the evaluation are trained on"):
        run.train()
    told = [one for one in run.state.log_history if "eval_far_loss" in one]
    assert all({"eval_near_loss", "eval_far_runtime"} <= one.keys() for one in told)
    losses = [one["eval_far_loss"] for one in told]
    assert run.state.best_metric == min(losses)
    worse = [one > min(losses[:place]) for place, one in enumerate(losses) if place]
    assert run.state.global_step == (2 * (worse.index(True) + 2) if True in worse else 6)
    with pytest.raises(RequestError, match="evaluation gave no 'eval_speed'"):
        made(
            tmp_path / "other",
            eval_dataset=sets["far"],
            eval_strategy="epoch",
            metric_for_best_model="speed",
        ).train()


@pytest.mark.filterwarnings("ignore:.*rows teach no end token")
def test_a_module_of_transformers_is_trained_as_by_its_own(tmp_path: Path) -> None:
    quiet = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    own = reference_decoder("gpt2", torch.float32, **quiet)
    other = copy.deepcopy(own)
    usual = {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    usual |= {"adam_epsilon": 1e-5, "logging_steps": 1, "save_strategy": "no"}
    theirs = transformers.Trainer(
        other,
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            **usual,
        ),
        padded,
        ROWS,
    )
    run = made(tmp_path / "ours", own, **usual)
    theirs.train()
    run.train()
    wanted = [one["loss"] for one in theirs.state.log_history if "loss" in one]
    found = [one["loss"] for one in run.state.log_history if "loss" in one]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_an_encoder_and_its_decoder_learn(tmp_path: Path) -> None:
    model = LanguageModel(ours(reference_t5(torch.float32)))
    model.generation_config = es.GenerationConfig(
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
    )
    rows = [{"input_ids": [5, 6, one], "labels": [one, 7, 1]} for one in range(10, 18)]

    def collate(given: Any) -> Any:
        batch = padded([{**row, "labels": row["labels"]} for row in given])
        start = torch.zeros(len(given), 1, dtype=torch.int64)
        return {**batch, "decoder_input_ids": torch.cat([start, batch["labels"][:, :-1]], 1)}

    args = es.TrainingArguments(
        output_dir=tmp_path,
        disable_tqdm=True,
        max_steps=60,
        learning_rate=5e-3,
        save_strategy="no",
        logging_steps=20,
        predict_with_generate=True,
    )
    run = es.Trainer(model, args, collate, rows, rows)
    with pytest.warns(UserWarning, match="of the evaluation are trained on"):
        run.train()
    losses = [one["loss"] for one in run.state.log_history if "loss" in one]
    assert losses[-1] < 0.5 * losses[0]
    found = run.predict(rows)
    assert found.predictions is not None and found.predictions.shape[0] == 8


def test_losses_of_your_own(tmp_path: Path) -> None:
    plain = made(tmp_path / "a", logging_steps=1)
    plain.train()

    def compute_loss(model: Any, batch: Any, items: int) -> Any:
        return model(**batch, num_items_in_batch=items).loss

    def of_outputs(outputs: Any, labels: Any, num_items_in_batch: int) -> Any:
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        found = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        return found / num_items_in_batch

    for name, given in (
        ("b", {"compute_loss": compute_loss}),
        ("c", {"compute_loss_func": of_outputs}),
    ):
        run = made(tmp_path / name, logging_steps=1, **given)
        run.train()
        for one, other in zip(run.state.log_history[:-1], plain.state.log_history, strict=False):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    for wrong in (None, 3.0, torch.ones(2), torch.tensor(3)):
        with pytest.raises(RequestError, match="the loss of your own is none"):
            made(tmp_path / "d", compute_loss=lambda *_, wrong=wrong: wrong).train()
    with pytest.raises(RequestError, match="two losses"):
        made(tmp_path, compute_loss=compute_loss, compute_loss_func=of_outputs)
    with pytest.raises(RequestError, match="label_smoothing_factor"):
        made(tmp_path, compute_loss=compute_loss, label_smoothing_factor=0.1)


def test_rollouts_are_of_the_weights_as_they_are_now(tmp_path: Path) -> None:
    """And have the log-probabilities that the training forward gives."""
    run = made(tmp_path, learning_rate=0.01)
    options = {"max_new_tokens": 5, "seed": 3, "return_dict_in_generate": True, "logprobs": 0}
    before = run.generate([[5, 9], [5, 9, 11]], n=4, **options)
    run.train()
    after = run.generate([[5, 9], [5, 9, 11]], n=4, **options)
    assert [len(one) for one in after] == [4, 4]
    assert [[one.tokens for one in each] for each in before] != [
        [one.tokens for one in each] for each in after
    ]
    for prompt, each in zip(([5, 9], [5, 9, 11]), after, strict=True):
        for one in each:
            ids = torch.tensor([[*prompt, *one.tokens]])
            with torch.no_grad():
                logits = run.model(ids).logits.log_softmax(-1)
            new = ids[0, len(prompt) :, None]
            own = logits[0, len(prompt) - 1 : -1].gather(1, new)[:, 0]
            assert torch.allclose(one.logprobs.logprobs, own, atol=1e-4)


def apart(model: Any, tokenizer: Any, prompts: list[list[int]], count: int) -> torch.Tensor:
    """How far samples are, token by token, from the log-probabilities of the training forward."""
    torch.manual_seed(1)
    adapter = model.add_adapter("policy", es.LoraConfig(r=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, one in adapter.named_parameters():
            if "lora_B" in name:
                one.normal_(0, 0.02)
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": count, "seed": 3}
    options |= {"adapter_names": "policy", "logprobs": 0, "return_dict_in_generate": True}
    found = []
    for prompt, each in zip(
        prompts, es.generate(model, tokenizer, prompts, **options), strict=True
    ):
        for one in each:
            ids = torch.tensor([[*prompt, *one.tokens]])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            told = {"output_logits": False, "output_logprobs": True, "adapter_names": "policy"}
            learned = model(ids, labels=labels, **told).logprobs[0, len(prompt) :].detach()
            found.append((learned - one.logprobs.logprobs).abs())
    return torch.cat(found)


@pytest.mark.parametrize("codes", [None, "int8", "int4"])
def test_samples_are_near_what_the_training_forward_says(codes: Any) -> None:
    """By rounding alone in float32; over codes an activation may be rounded to either side."""
    model = LanguageModel(narrow_model("llama", codes, panels=True))
    model.generation_config.eos_token_id = None
    found = apart(model, None, [[5, 9], [7, 8, 9]], 16)
    assert len(found) == 2 * 4 * 16 and model.runs_on.startswith("native")
    mean, most = (1e-6, 1e-4) if codes is None else (0.02, 0.2)
    assert found.mean() < mean and found.max() < most


@pytest.mark.model
def test_samples_of_the_default_model_are_near_what_the_training_forward_says() -> None:
    """As far as the guide says, in its 4 bits."""
    model, tokenizer = es.load("smollm2-135m-instruct")
    texts = ("The sky is", "Once upon a time", "Who are you?")
    found = apart(model, tokenizer, [tokenizer.encode(one) for one in texts], 24)
    assert model.runs_on.startswith("native")
    assert 0.005 < found.mean() < 0.15 and found.max() < 1.0


def test_a_frozen_copy_is_of_the_weights_of_now_and_runs_natively() -> None:
    model = tiny_llama(vocab_size=97, dtype=torch.float32).requires_grad_()
    ids = torch.tensor([[5, 9, 11]])
    frozen = model.frozen()
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(frozen.generate(ids, max_new_tokens=6, do_sample=False), wanted)
    assert model.runs_on.startswith("torch") and not frozen.runs_on.startswith("torch")
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(-0.5)
    assert torch.equal(frozen.generate(ids, max_new_tokens=6, do_sample=False), wanted)
    assert not torch.equal(model(ids).logits, frozen(ids).logits)
    with pytest.raises(UnsupportedError, match="wrapped model"):
        es.wrap(reference_decoder("llama", torch.float32)).frozen()


def test_an_adapter_is_trained_resumed_and_generates(tmp_path: Path) -> None:
    """Over weights of 4 bits too, which stay as they are."""
    config = es.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2)

    def run(folder: str, **given: Any) -> es.Trainer:
        model = tiny_llama(vocab_size=97, dtype=torch.float32, quantize="int4")
        torch.manual_seed(1)
        return trainer(tmp_path / folder, model=model, peft_config=config, **given)

    whole, before = run("whole"), None
    before = whole.model.digest()
    whole.train()
    assert whole.model.digest() == before

    class Stop(es.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 5:
                control.should_save = control.should_training_stop = True

    run("cut", callbacks=[Stop]).train()
    again = run("cut")
    again.train(resume_from_checkpoint=True)
    for name, one in whole.weights.named().items():
        assert torch.equal(one, again.weights.named()[name])
    tokens = whole.generate([[5, 9]], max_new_tokens=6, do_sample=False, **_IDS)
    loaded = tiny_llama(vocab_size=97, dtype=torch.float32, quantize="int4")
    loaded.load_adapter(tmp_path / "whole" / "checkpoint-14", "mine")
    assert loaded.train().training and not loaded.eval().training  # one that is fixed stays so
    options = {"max_new_tokens": 6, "do_sample": False, "adapter_names": "mine", **_IDS}
    assert es.generate(loaded, None, [[5, 9]], **options)[0].tokens == tokens[0].tokens


NEW = {
    "lora": es.LoraConfig(r=4, target_modules="all-linear"),
    "dora of a few": es.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "parts": es.LoraConfig(r=4, target_modules=["o_proj"], modules_to_save=["norm"]),
    "loha": es.LoHaConfig(r=2, target_modules=["v_proj", "down_proj"]),
}


@pytest.mark.parametrize("name", NEW)
def test_an_adapter_goes_on_learning(name: str, tmp_path: Path) -> None:
    """SGD keeps nothing between steps, so four steps are two of one run and two of the next."""
    said: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 2,
    }

    def run(folder: str, rows: Any, **given: Any) -> es.Trainer:
        found = made(tmp_path / folder, rows=rows, **said, **given)
        found.train()
        return found

    torch.manual_seed(3)
    whole = run("whole", ROWS, peft_config=NEW[name], adapter_name="mine", max_steps=4)
    torch.manual_seed(3)
    first = run("first", ROWS[:4], peft_config=NEW[name], max_steps=2)
    held = first.save_model(tmp_path / "held")
    model = tiny_llama(vocab_size=97, dtype=torch.float32)
    model.load_adapter(held, "again")
    before = model.digest()
    given = {"model": model, "adapter_name": "again", "save_strategy": "steps", "save_steps": 1}
    second = run("second", ROWS[4:], max_steps=2, **given)
    assert model.digest() == before and second.weights.adapter_names == ("again",)
    wanted = whole.weights.named()
    assert {*second.weights.named()} == {*wanted}
    for one, tensor in second.weights.named().items():
        torch.testing.assert_close(tensor, wanted[one], atol=1e-7, rtol=1e-6)
        assert not torch.equal(tensor, first.weights.named()[one])
    fresh = tiny_llama(vocab_size=97, dtype=torch.float32)
    fresh.load_adapter(held, "again", is_trainable=True)
    resumed = made(
        tmp_path / "second", rows=ROWS[4:], max_steps=2, **said, **{**given, "model": fresh}
    )
    resumed.train(resume_from_checkpoint=tmp_path / "second" / "checkpoint-1")
    for one, tensor in resumed.weights.named().items():
        assert torch.equal(tensor, second.weights.named()[one])


def test_whether_an_adapter_is_trained_is_never_guessed(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=97, dtype=torch.float32)
    model.add_adapter("mine", es.LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(RequestError, match=r"adapter_name='mine'.*trainable=\['\.'\]"):
        made(tmp_path, model=model)
    with pytest.raises(RequestError, match="there is no such adapter"):
        made(tmp_path, model=model, adapter_name="other")
    with pytest.raises(RequestError, match="cannot have this name"):
        made(tmp_path, model=model, adapter_name="mine", peft_config=es.LoraConfig(r=2))
    with pytest.raises(RequestError, match="Leave trainable out"):
        made(tmp_path, model=model, adapter_name="mine", trainable=["norm"])
    wrapped = es.wrap(reference_decoder("llama", torch.float32))
    with pytest.raises(UnsupportedError, match="by its own library"):
        made(tmp_path, model=wrapped, adapter_name="mine")
    with pytest.raises(UnsupportedError, match="belong to its own library"):
        wrapped.adapter("mine")
    every = made(tmp_path, model=model, trainable=["."])
    assert {*every.weights.named()} == {name for name, _ in model.named_parameters()}
    assert made(tmp_path, model=model, adapter_name="mine").weights.adapter_names == ("mine",)


_IDS = {"return_dict_in_generate": True}

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"learning_rates": 1e-3}, UnknownArgumentError, "Perhaps you meant learning_rate"),
    ({"fp16": True}, UnsupportedError, "bf16"),
    ({"deepspeed": "x.json"}, UnsupportedError, "torchrun"),
    ({"push_to_hub": True}, UnsupportedError, "huggingface_hub"),
    ({"remove_unused_columns": True}, UnsupportedError, "error by name"),
    ({"evaluation_strategy": "steps"}, UnsupportedError, "eval_strategy"),
    ({"warmup_ratio": 0.1}, UnsupportedError, "warmup_steps"),
    ({"learning_rate": -1}, RequestError, "learning_rate"),
    ({"learning_rate": "fast"}, RequestError, "learning_rate"),
    ({"learning_rate": float("nan")}, RequestError, "learning_rate"),
    ({"num_train_epochs": 0}, RequestError, "num_train_epochs"),
    ({"max_steps": 2.5}, RequestError, "max_steps"),
    ({"per_device_train_batch_size": 0}, RequestError, "per_device_train_batch_size"),
    ({"gradient_accumulation_steps": 0}, RequestError, "gradient_accumulation_steps"),
    ({"adam_beta1": 1.0}, RequestError, "adam_beta1"),
    ({"label_smoothing_factor": 1}, RequestError, "label_smoothing_factor"),
    ({"bf16": "yes"}, RequestError, "bf16"),
    ({"optim": "lion"}, RequestError, "optim"),
    ({"lr_scheduler_type": "cosines"}, RequestError, "lr_scheduler_type"),
    ({"logging_steps": 1.5}, RequestError, "logging_steps"),
    ({"save_steps": 0}, RequestError, "save_steps"),
    ({"save_total_limit": 0}, RequestError, "save_total_limit"),
    ({"seed": -1}, RequestError, "seed"),
    ({"trainable": "layers"}, RequestError, "trainable"),
    ({"report_to": "wandb"}, RequestError, "report_to"),
    ({"eval_strategy": "sometimes"}, RequestError, "eval_strategy"),
    ({"eval_strategy": "steps"}, RequestError, "nothing to evaluate"),
    ({"load_best_model_at_end": True}, RequestError, "compares checkpoints"),
    ({"save_strategy": "best"}, RequestError, "needs a metric"),
    (
        {
            "load_best_model_at_end": True,
            "eval_strategy": "epoch",
            "save_strategy": "steps",
        },
        RequestError,
        "an evaluation before each save",
    ),
    ({"generation_num_beams": 2}, RequestError, "predict_with_generate"),
    ({"resume_from_checkpoint": True, "save_only_model": True}, RequestError, "save_only_model"),
    (
        {"activation_checkpointing": True, "gradient_checkpointing": False},
        RequestError,
        "disagree",
    ),
]


@pytest.mark.parametrize("given, kind, what", WRONG, ids=lambda one: str(one)[:40])
def test_choices_that_cannot_be(
    given: dict[str, Any], kind: type[Exception], what: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=what):
        made(tmp_path, **given)


RUNS: list[tuple[dict[str, Any], str]] = [
    ({"rows": []}, "no example|nothing to train on"),
    ({"rows": None}, "nothing to train on"),
    ({"rows": [{"input_ids": [5, 6], "labels": [-100, -100]}]}, "example 0"),
    ({"rows": [{"input_ids": [5, 6], "labels": [5]}]}, "example 0"),
    ({"rows": [{"input_ids": [5, 600], "labels": [5, 2]}]}, "example 0"),
    ({"rows": [{**ROWS[0], "bbox": [[0] * 4] * 4}]}, "bbox"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 2}, "has no warmup"),
    ({"lr_scheduler_kwargs": {"num_cycle": 2}}, "has no 'num_cycle'"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "needs num_decay_steps"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs min_lr"),
    ({"per_device_train_batch_size": 9, "dataloader_drop_last": True}, "no batch is full"),
]


@pytest.mark.parametrize("given, what", RUNS, ids=lambda one: str(one)[:40])
def test_runs_that_cannot_be_are_known_before_the_first_step(
    given: dict[str, Any], what: str, tmp_path: Path
) -> None:
    steps = Told()
    with pytest.raises(RequestError, match=what):
        made(tmp_path, callbacks=[steps], **given).train()
    assert "on_step_begin" not in steps.events


def test_there_are_no_subclasses() -> None:
    with pytest.raises(RequestError, match="no subclasses"):
        type("Mine", (es.Trainer,), {})


def ragged(count: int) -> list[dict[str, list[int]]]:
    """Rows of 3 to 9 ids, the first of which is not learned."""
    rows = []
    for number in range(count):
        ids = [5 + (number * 7 + place * 11) % 80 for place in range(3 + number % 7)]
        rows.append({"input_ids": [*ids, 2], "labels": [-100, *ids[1:], 2]})
    return rows


def stepped(
    tmp_path: Path, collator: Any, dtype: torch.dtype = torch.float64, **given: Any
) -> tuple[dict[str, Any], list[float]]:
    said = {"max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no"}
    args = es.TrainingArguments(
        output_dir=tmp_path, disable_tqdm=True, **{**said, "adam_epsilon": 1e-5, **given}
    )
    model = tiny_llama(vocab_size=97, dtype=dtype)
    run = es.Trainer(model, args, collator, ragged(32))
    run.train()
    losses = [one["loss"] for one in run.state.log_history if "loss" in one]
    return {name: one.detach() for name, one in run.weights.named().items()}, losses


def test_packed_and_cut_batches_take_the_same_steps(tmp_path: Path) -> None:
    """Rows in one packed row do not see each other, and eight in two batches are eight in one."""
    wanted, losses = stepped(tmp_path / "a", padded, per_device_train_batch_size=8)
    for name, collator, given in (
        ("packed", es.DataCollatorWithFlattening(), {"per_device_train_batch_size": 8}),
        (
            "cut",
            padded,
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
        (
            "packed and cut",
            es.DataCollatorWithFlattening(),
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ),
    ):
        weights, found = stepped(tmp_path / name, collator, **given)
        assert found == pytest.approx(losses, rel=1e-9), name
        for key, one in wanted.items():
            assert torch.allclose(weights[key], one, rtol=0, atol=1e-9), (name, key)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """Weights and optimizer stay float32, and what is computed between is not."""
    _, exact = stepped(tmp_path / "a", padded, torch.float32)
    run = made(tmp_path / "b", bf16=True)
    run.train()
    assert {one.dtype for one in run.weights.named().values()} == {torch.float32}
    _, rounded = stepped(tmp_path / "c", padded, torch.float32, bf16=True)
    assert rounded == pytest.approx(exact, rel=3e-2) and rounded != exact
