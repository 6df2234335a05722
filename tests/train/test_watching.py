"""What a person sees of a run: an estimate of memory, samples, a plot, TensorBoard's files."""

from __future__ import annotations

import gc
import json
import multiprocessing
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import CapacityError, FileError, RequestError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.train.callbacks import log_of
from everystep.train.evaluation import AnswerFile
from tests.train.runs import padded

DATA = [
    {"prompt": "one", "completion": " two"},
    {"prompt": "three", "completion": " four five six seven eight nine ten eleven twelve"},
]


def made(folder: Path, **given: Any) -> es.Trainer:
    names = ("sample_prompts", "peft_config", "eval_dataset", "compute_loss_func", "optimizers")
    names += ("compute_metrics",)
    of_trainer = {name: given.pop(name) for name in names if name in given}
    said = {"max_steps": 3, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    args = es.TrainingArguments(output_dir=folder, **{**said, **given})
    model = tiny_llama(vocab_size=320, dtype=torch.float32)
    rest = {"processing_class": tiny_tokenizer(), **of_trainer}
    return es.Trainer(model, args, None, DATA, **rest)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What is in the file of answers, each line of which is whole."""
    text = (folder / "answers.jsonl").read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(one) for one in text.splitlines()]


def live_bytes() -> int:
    """Bytes of all tensors that Python knows."""
    gc.collect()
    found = (one for one in gc.get_objects() if isinstance(one, torch.Tensor))
    return sum({one.data_ptr(): one.nbytes for one in found}.values())


def test_the_estimate_is_what_a_step_keeps(tmp_path: Path) -> None:
    run = made(tmp_path, per_device_train_batch_size=4)
    found = run.estimate()
    weights = sum(one.nbytes for one in run.weights.named().values())
    assert found.weights == found.gradients == weights
    assert found.optimizer == 2 * weights
    assert found.total == found.weights + found.more
    assert "activations" in str(found) and "weights" in str(found)
    # A graph of the same batch, counted by hooks of the test's own.
    rows = [run._train_rows[1]] * 4 if run._train_rows else []
    batch, kept = padded(rows), {}
    own = {one.untyped_storage().data_ptr() for one in run.model.parameters()}

    def pack(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = run.model(**batch, use_cache=False).loss
    size = sum(size for place, size in kept.items() if place not in own)
    assert loss.requires_grad and found.activations == pytest.approx(size, rel=0.15)


def test_the_estimate_knows_the_batch_the_optimizer_and_what_is_computed_again(
    tmp_path: Path,
) -> None:
    small = made(tmp_path, per_device_train_batch_size=2).estimate()
    large = made(tmp_path, per_device_train_batch_size=6, optim="sgd").estimate()
    assert large.activations == 3 * small.activations and large.optimizer == 0
    again = made(tmp_path, per_device_train_batch_size=2, activation_checkpointing=True)
    assert 0 < again.estimate().activations < small.activations
    adapter = made(tmp_path, peft_config=es.LoraConfig(r=2, target_modules="all-linear"))
    found, trained = adapter.estimate(), adapter.weights.count() * 4
    assert found.gradients == trained and found.weights == small.weights + trained
    before = torch.get_rng_state()
    adapter.estimate()
    assert torch.equal(torch.get_rng_state(), before) and not adapter.model.training


def test_what_cannot_be_held_is_known_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path)
    monkeypatch.setattr("everystep.memory._SMALL", 0)
    monkeypatch.setattr("everystep.memory.memory_left", lambda device=None: 1000)
    with pytest.raises(CapacityError, match=r"training needs more memory.*Train a LoRA"):
        run.train()
    assert run.state.global_step == 0


def test_samples_are_what_the_model_writes_at_each_evaluation(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Seeing(es.TrainerCallback):
        def on_evaluate(self, *_: Any, **given: Any) -> None:
            seen.append(given["samples"])

    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.01}
    given |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    chat = [{"role": "user", "content": "three"}]
    given |= {"sample_prompts": ["one", chat], "eval_dataset": DATA[:1]}
    with pytest.warns(UserWarning, match="are trained on"):
        run = made(tmp_path, **given)
        run.add_callback(Seeing())
        run.train()
    now = run.generate(["one", chat], max_new_tokens=64, do_sample=False)
    assert [text for _, text in seen[-1]] == now and seen[0] != seen[-1]
    lines = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["step"] for one in lines] == [2, 2, 4, 4]
    assert [one["text"] for one in lines[2:]] == now and lines[1]["prompt"] == chat
    with pytest.warns(UserWarning, match="are trained on"):
        again = made(tmp_path, **given)
        again.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()] == lines
    for wrong in ("one", [3], [[3]], 5):
        with pytest.raises(RequestError, match="sample_prompts are no prompts"):
            made(tmp_path, sample_prompts=wrong)


def test_a_plot_and_files_for_tensorboard(tmp_path: Path) -> None:
    """What other programs read there is what was logged."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made(tmp_path, report_to=["plot", "tensorboard"]).train()
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (1050, 600) and len(image.convert("RGB").getcolors(1 << 20) or ()) > 9
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    logged = [one for one in log_of(tmp_path) if "loss" in one]
    found = events.Scalars("train/loss")
    assert [one.step for one in found] == [one["step"] for one in logged] == [1, 2, 3]
    assert [one.value for one in found] == pytest.approx([one["loss"] for one in logged])
    with pytest.raises(RequestError, match="report_to"):
        es.TrainingArguments(report_to=["plots"])


def test_the_speed_is_told_where_tokens_are_counted(tmp_path: Path) -> None:
    result = made(tmp_path, include_num_input_tokens_seen=True).train()
    seen = log_of(tmp_path)[-1]["num_input_tokens_seen"]
    metrics = result.metrics
    assert metrics["train_tokens_per_second"] == pytest.approx(seen / metrics["train_runtime"])


GENERATES: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 5}


def answer(folder: str, count: int) -> None:
    """Evaluate so many prompts by generation."""
    torch.set_num_threads(1)
    rows = [{"prompt": f"{one} ü", "completion": " two"} for one in range(count)]
    made(Path(folder), eval_dataset=rows, **{**GENERATES, "generation_max_length": 30}).evaluate()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*ended by their length")
def test_answers_are_in_a_file_before_the_evaluation_ends(tmp_path: Path) -> None:
    """A process that is killed in the middle of one leaves those that it had, as whole lines."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.runs", "everystep.train.trainer"])
    child = context.Process(target=answer, args=(str(tmp_path), 2000))
    child.start()
    while not (tmp_path / "answers.jsonl").exists() and child.is_alive():
        time.sleep(0.01)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    lines = lines_of(tmp_path)
    assert 0 < len(lines) < 2000 and len({one["example"] for one in lines}) == len(lines)
    assert all(one["prompt"] == f"{one['example']} ü" for one in lines)
    assert all(one["target"].startswith(" two") for one in lines)


@pytest.mark.filterwarnings("ignore:.*are trained on", "ignore:.*ended by their length")
def test_answers_of_each_evaluation_are_those_of_the_metrics(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(found: es.EvalPrediction) -> dict[str, float]:
        seen.append(found)
        return {}

    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, **GENERATES}
    given |= {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.02}
    given |= {"eval_dataset": {"a": DATA, "b": DATA[1:]}, "compute_metrics": metrics}
    (tmp_path / "answers.jsonl").write_text('{"step": 1}\n')  # of another run
    run = made(tmp_path, **given)
    run.evaluate()
    run.train()
    lines = lines_of(tmp_path)
    told = [
        (0, "eval_a"),
        (0, "eval_b"),
        (2, "eval_a"),
        (2, "eval_b"),
        (4, "eval_a"),
        (4, "eval_b"),
    ]
    assert len(seen) == len(told)
    for place, found in zip(told, seen, strict=True):
        own = [one for one in lines if (one["step"], one["evaluation"]) == place]
        own.sort(key=lambda one: one["example"])
        assert [one["answer"] for one in own] == found.texts
        assert [one["finish_reason"] for one in own] == [
            one.finish_reason.kind for one in found.generated
        ]
        assert [one["example"] for one in own] == [*range(len(found.texts))]
    assert len(lines) == 9 and lines[-1]["prompt"] == "three"
    run.predict(DATA[:1])
    assert lines_of(tmp_path)[:-1] == lines and lines_of(tmp_path)[-1]["evaluation"] == "test"
    # A run that goes on drops what came after its checkpoint, and a line that was cut.
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"step": 2, "evalu')
    made(tmp_path, **given).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert sorted(map(str, lines_of(tmp_path))) == sorted(map(str, lines))
    by_ids = made(tmp_path / "ids", eval_dataset=[{"input_ids": [5, 6], "labels": [-100, 6]}])
    assert not (tmp_path / "ids").exists() and by_ids.evaluate()  # nothing is generated
    assert not (tmp_path / "ids" / "answers.jsonl").exists()


def test_a_line_that_the_disk_refuses_leaves_whole_ones(tmp_path: Path) -> None:
    own = AnswerFile(tmp_path)
    own.add({"step": 0, "answer": "a"})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = (tmp_path / "answers.jsonl").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, limit[1]))
        with pytest.raises(FileError, match=r"answers\.jsonl could not be written.*Make room"):
            own.add({"step": 0, "answer": "b" * 99})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    own.add({"step": 0, "answer": "c"})
    assert [one["answer"] for one in lines_of(tmp_path)] == ["a", "c"]
