"""A run that stopped, was killed or failed goes on to the bit; what is broken is named."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import everystep as es
from everystep.errors import FileError, FormatError, MissingFileError, RequestError, TrainingError
from everystep.testing.models import tiny_llama
from everystep.train.checkpoints import checkpoints_in, fault_of
from everystep.train.order import epoch_order
from tests.train.runs import StopAt, outcome, padded, require_equal, train_in_process, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = trainer(tmp_path_factory.mktemp("whole"))
    run.train()
    return outcome(run)


@pytest.mark.few(2)
@pytest.mark.parametrize("step", [1, 3, 4, 7, 13])
def test_a_run_that_stopped_goes_on_to_the_bit(
    step: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Also in the middle of an epoch and between logs, where examples draw random numbers, and
    whatever the global generators hold."""
    first = trainer(tmp_path, callbacks=[StopAt(step)])
    first.train()
    assert first.state.global_step == step
    torch.manual_seed(step)
    random.seed(step)
    second = trainer(tmp_path)
    second.train(resume_from_checkpoint=True)
    found = outcome(second)
    # The run that stopped logged its times, which is one line more.
    ended = [one for one in found["logs"] if "train_loss" not in one]
    wanted = [one for one in whole["logs"] if "train_loss" not in one]
    require_equal({**found, "logs": ended}, {**whole, "logs": wanted})


class Short(es.TrainerCallback):
    """Ends each epoch after its third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_epoch_stop = (state.epoch % 1) > 0.7


@pytest.mark.few(2)
@pytest.mark.parametrize("step", [2, 3, 4, 6, 8])
def test_a_run_of_short_epochs_with_evaluations_goes_on_to_the_bit(
    step: int, tmp_path: Path
) -> None:
    """Where an epoch ended before its last step, and where a checkpoint was written at its end."""
    given: dict[str, Any] = {"max_steps": 11, "eval_strategy": "epoch", "save_steps": 1}
    given |= {"eval_dataset": [{"input_ids": [1, 3, 2], "labels": [-100, 3, 2]}]}
    whole = trainer(tmp_path / "whole", callbacks=[Short], **given)
    whole.train()
    epochs = [one["epoch"] for one in whole.state.log_history if "eval_loss" in one]
    assert len(epochs) == 3 and whole.state.global_step == 9
    trainer(tmp_path / "cut", callbacks=[Short, StopAt(step)], **given).train()
    again = trainer(tmp_path / "cut", callbacks=[Short], **given)
    again.train(resume_from_checkpoint=tmp_path / "cut" / f"checkpoint-{step}")
    found, wanted = outcome(again), outcome(whole)
    assert all(torch.equal(found["weights"][name], one) for name, one in wanted["weights"].items())
    told = [[one for one in each["logs"] if "train_loss" not in one] for each in (found, wanted)]
    assert told[0] == told[1]


def test_a_run_leaves_global_generators_as_they_were(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=2)
    torch.manual_seed(5)
    random.seed(5)
    wanted = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    run.train()
    assert torch.equal(torch.rand(3), wanted[0]) and random.random() == wanted[1]


def killed_until_it_ends(folder: Path, kills: int, steps: int, draw: random.Random) -> int:
    """Kill the run in a folder at most so many times at random moments, then let it end; return
    how often it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.runs", "everystep.train.trainer"])
    done = 0
    while True:
        child = context.Process(target=train_in_process, args=(str(folder), steps))
        child.start()
        if done < kills:
            child.join(draw.uniform(0.1, 1.2))
            if child.is_alive():
                child.kill()
        child.join()
        if child.exitcode == 0:
            return done
        assert child.exitcode == -signal.SIGKILL
        done += 1


def killed(tmp_path: Path, kills: int, seed: int) -> None:
    steps = 60
    train_in_process(str(tmp_path / "whole"), steps)
    wanted = load_file(tmp_path / "whole" / "end" / "model.safetensors")
    draw, count, runs = random.Random(seed), 0, 0
    while count < kills:
        folder = tmp_path / f"killed-{runs}"
        count += killed_until_it_ends(folder, kills - count, steps, draw)
        runs += 1
        assert runs <= 2 * kills, f"{count} of {runs} runs were killed before they ended"
        found = load_file(folder / "end" / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], one) for name, one in wanted.items())
        logs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [one["step"] for one in logs if "loss" in one] == [*range(4, steps + 1, 4)]
        assert len(checkpoints_in(folder)) <= 3
        assert all(fault_of(one) is None for one in checkpoints_in(folder))
        assert not list(folder.glob(".*"))


def test_twenty_kills_change_no_bit(tmp_path: Path) -> None:
    killed(tmp_path, 20, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_five_hundred_kills_change_no_bit(seed: int, tmp_path: Path) -> None:
    killed(tmp_path, 50, 100 + seed)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "removed"])
def test_a_broken_checkpoint_is_named_and_passed_over(
    name: str, how: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    trainer(tmp_path, callbacks=[StopAt(7)]).train()
    assert [one.name for one in checkpoints_in(tmp_path)] == [
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-7",
    ]
    broken = tmp_path / "checkpoint-7" / name
    data = bytearray(broken.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
    broken.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "removed":
        broken.unlink()
    second = trainer(tmp_path)
    with pytest.raises(FormatError, match="checkpoint-7 is no whole checkpoint"):
        second.train(resume_from_checkpoint=tmp_path / "checkpoint-7")
    with pytest.warns(UserWarning, match="checkpoint-7 is passed over"):
        second.train(resume_from_checkpoint=True)
    found, wanted = outcome(second)["weights"], whole["weights"]
    assert all(torch.equal(found[key], one) for key, one in wanted.items())
    faulty = [one.name for one in checkpoints_in(tmp_path) if fault_of(one) is not None]
    assert faulty == ["checkpoint-7"] and (tmp_path / "checkpoint-14").exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=3).train()
    with pytest.raises(RequestError, match=r"has checkpoints of another run.*checkpoint-3"):
        trainer(tmp_path, max_steps=3).train()
    with pytest.raises(RequestError, match="another max_steps"):
        trainer(tmp_path, max_steps=9).train(resume_from_checkpoint=True)
    with pytest.raises(MissingFileError, match="no checkpoint that is whole"):
        trainer(tmp_path / "other").train(resume_from_checkpoint=True)
    with pytest.raises(MissingFileError, match="is no folder"):
        trainer(tmp_path / "other").train(resume_from_checkpoint=tmp_path / "checkpoint-99")
    some = trainer(tmp_path, trainable=["layers.0"], max_steps=3)
    with pytest.raises(ValueError, match=r"parameter group|other trained"):
        some.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_the_model_alone_does_not_resume(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=3, save_only_model=True)
    run.train()
    folder = tmp_path / "checkpoint-3"
    assert not (folder / "optimizer.safetensors").exists()
    assert torch.equal(
        es.load_model(folder).state_dict()["model.norm.weight"],
        run.model.state_dict()["model.norm.weight"],
    )
    with pytest.raises(FormatError, match="has the model alone"):
        trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=folder)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_before_the_step(what: str, tmp_path: Path) -> None:
    """Weights and checkpoints are as before it."""
    calls = 0

    def compute_loss(model: Any, batch: Any, items: int) -> Any:
        nonlocal calls
        calls += 1
        loss = model(**batch, num_items_in_batch=items).loss
        if calls <= 12:  # the fifth step breaks in its second batch
            return loss
        return loss * torch.nan if what == "loss" else (loss * 0 + 1e-9).sqrt() + (loss * 0).sqrt()

    run = trainer(tmp_path, compute_loss=compute_loss, save_steps=4)
    with pytest.raises(TrainingError, match=rf"the {what} of step 5.*checkpoint-4 is whole"):
        run.train()
    held = es.load_model(tmp_path / "checkpoint-4").state_dict()
    assert all(torch.equal(one, held[name]) for name, one in run.model.state_dict().items())
    assert all(one.grad is None for one in run.model.parameters())
    assert fault_of(tmp_path / "checkpoint-4") is None


def out_of_room(folder: str) -> None:
    """Save where no file may be larger than half the weights."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = trainer(Path(folder), max_steps=6, save_steps=2)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(es.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))

    run.add_callback(Full)
    told = "nothing"
    try:
        run.train()
    except FileError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    Path(folder, "told").write_text(told)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=out_of_room, args=(str(tmp_path),))
    child.start()
    child.join()
    told = (tmp_path / "told").read_text()
    what = f"the checkpoint {tmp_path / 'checkpoint-4'} could not be written"
    assert told.startswith(f"{what}, and nothing of it is left") and "File too large" in told
    assert "Make room, and go on from the checkpoint before it with resume" in told
    assert [one.name for one in checkpoints_in(tmp_path)] == ["checkpoint-2"]
    assert fault_of(tmp_path / "checkpoint-2") is None
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


def test_a_limit_keeps_the_newest_checkpoints_and_the_best(tmp_path: Path) -> None:
    """The newest stay, and the best beside them."""
    losses = iter([5.0, 1.0, 4.0, 3.0, 2.0])

    class Told(es.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["metrics"]["eval_loss"] = next(losses)

    run = trainer(
        tmp_path,
        max_steps=10,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        eval_dataset=[{"input_ids": [1, 3, 2], "labels": [-100, 3, 2]}],
        save_total_limit=2,
        load_best_model_at_end=True,
        callbacks=[Told],
    )
    run.train()
    assert [one.name for one in checkpoints_in(tmp_path)] == ["checkpoint-4", "checkpoint-10"]
    assert run.state.best_global_step == 4 and run.state.best_metric == 1.0
    best = es.load_model(tmp_path / "checkpoint-4").state_dict()
    assert all(torch.equal(one, best[name]) for name, one in run.model.state_dict().items())


# --- what makes a run another one -----------------------------------------------------------------

ROWS = [{"input_ids": [5, 9, one, 2], "labels": [-100, 9, one, 2]} for one in range(10, 22)]


def over(folder: Path, rows: Any = ROWS, **given: Any) -> es.Trainer:
    """A run of 6 steps over rows in memory, 2 to a step."""
    usual: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "logging_steps": 1}
    usual |= {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "disable_tqdm": True}
    model = tiny_llama(vocab_size=97, dtype=torch.float32)
    optimizers = given.pop("optimizers", (None, None))
    args = es.TrainingArguments(folder, **{**usual, **given})
    return es.Trainer(model, args, padded, rows, optimizers=optimizers)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after 2, 4 and 6 steps."""
    folder = tmp_path_factory.mktemp("begun")
    over(folder).train()
    return folder


CHANGED = [*ROWS[:7], {"input_ids": [5, 9, 33, 2], "labels": [-100, 9, 33, 2]}, *ROWS[8:]]


@pytest.mark.parametrize(
    ("given", "rows", "told"),
    [
        ({"seed": 7}, ROWS, r"another data_seed.*wanted 42.*7.*ignore_data_skip=True"),
        ({"data_seed": 7}, ROWS, "another data_seed"),
        ({"train_sampling_strategy": "sequential"}, ROWS, "another train_sampling_strategy"),
        ({"dataloader_drop_last": True}, ROWS, "another dataloader_drop_last"),
        ({}, CHANGED, r"another train_dataset.*12 examples, digest.*12 examples, digest"),
        ({}, ROWS[:11], r"another train_dataset.*12 examples.*11 examples"),
        ({"learning_rate": 2e-2}, ROWS, r"another learning_rate.*0\.01.*0\.02.*another output_dir"),
        ({"weight_decay": 0.1}, ROWS, "another weight_decay"),
        ({"adam_beta2": 0.9}, ROWS, "another adam_beta1 or adam_beta2"),
        ({"adam_epsilon": 1e-6}, ROWS, "another adam_epsilon"),
        ({"optim": "sgd"}, ROWS, "another optim"),
        ({"optim": "adamw_torch"}, ROWS, "another optim"),
    ],
)
def test_a_resumed_run_that_would_be_another_is_refused(
    given: dict[str, Any], rows: Any, told: str, begun: Path, tmp_path: Path
) -> None:
    """What would be read from the wrong place, and what a checkpoint's optimizer would undo."""
    run = over(tmp_path, rows, **given)
    before = {name: one.clone() for name, one in run.model.state_dict().items()}
    with pytest.raises(RequestError, match=told):
        run.train(resume_from_checkpoint=begun / "checkpoint-4")
    assert run.state.global_step == 0 and not checkpoints_in(tmp_path)
    assert all(torch.equal(one, before[name]) for name, one in run.model.state_dict().items())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seed": 7, "data_seed": 42}, r"seed 7 \(was 42\)"),
        ({"lr_scheduler_type": "cosine"}, r"lr_scheduler_type 'cosine' \(was 'linear'\)"),
        ({"warmup_steps": 3}, r"warmup_steps 3 \(was 0\)"),
        ({"max_grad_norm": 0.1}, r"max_grad_norm 0\.1 \(was 1\.0\)"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}},
            r"lr_scheduler_type 'polynomial'.*lr_scheduler_kwargs .*power.* \(was None\)",
        ),
    ],
)
def test_a_resumed_run_with_other_choices_says_so(
    given: dict[str, Any], told: str, begun: Path, tmp_path: Path
) -> None:
    run = over(tmp_path, **given)
    with pytest.warns(UserWarning, match=f"another way than it began: {told}"):
        run.train(resume_from_checkpoint=begun / "checkpoint-4")
    assert run.state.global_step == 6


def test_a_resumed_run_with_the_same_choices_says_nothing(begun: Path, tmp_path: Path) -> None:
    """Also where a data set makes its examples anew, and where others say when to log."""
    run = over(tmp_path, tuple(ROWS), data_seed=42, logging_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(resume_from_checkpoint=begun / "checkpoint-4")
    logged = [one["step"] for one in run.state.log_history if "loss" in one]
    assert logged == [1, 2, 3, 4, 6] and run.state.logging_steps == 2
    noisy = trainer(tmp_path / "noisy", max_steps=3)
    noisy.train()
    with pytest.raises(RequestError, match=r"another data_seed"):
        trainer(tmp_path / "noisy", max_steps=3, seed=1).train(resume_from_checkpoint=True)


def test_other_data_may_be_gone_on_with(begun: Path, tmp_path: Path) -> None:
    """With `ignore_data_skip` the epoch begins anew, and all steps are taken."""
    read: list[int] = []

    class Longer:
        """So many examples that six steps are less than an epoch of them."""

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return {"input_ids": [6, 9, 11 + index, 2], "labels": [-100, 9, 11 + index, 2]}

    run = over(tmp_path, Longer(), ignore_data_skip=True, save_strategy="no")
    run.check()
    read.clear()
    run.train(resume_from_checkpoint=begun / "checkpoint-4")
    assert run.state.global_step == 6
    wanted = epoch_order(40, 42, 0, "random")[:4]
    assert read[-4:] == wanted


def test_examples_that_are_other_ones_each_time_may_be_gone_on_with(tmp_path: Path) -> None:
    """Their own generator is none that a seed reaches: the run says that it is not to the bit."""

    class Drawn:
        def __init__(self) -> None:
            self._own = random.Random(3)

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            ids = [5, 9, self._own.randrange(10, 90), 2]
            return {"input_ids": ids, "labels": [-100, *ids[1:]]}

    over(tmp_path, Drawn(), max_steps=4).train()
    with pytest.warns(UserWarning, match=r"other examples each time.*not to the bit"):
        run = over(tmp_path, Drawn(), max_steps=4)
        run.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert run.state.global_step == 4


def test_an_optimizer_of_your_own_keeps_its_rate(tmp_path: Path) -> None:
    def with_rate(rate: float) -> es.Trainer:
        run = over(tmp_path)
        own = torch.optim.SGD(run.model.parameters(), lr=rate)
        args = run.args
        return es.Trainer(run.model, args, padded, ROWS, optimizers=(own, None))

    with_rate(0.1).train()
    with pytest.raises(RequestError, match=r"another learning_rate.*0\.1.*0\.2"):
        with_rate(0.2).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert with_rate(0.1).train(resume_from_checkpoint=True).global_step == 6


def test_a_checkpoint_that_says_nothing_of_its_data_is_told(begun: Path, tmp_path: Path) -> None:
    """Those of versions before this one do not."""
    shutil.copytree(begun / "checkpoint-4", tmp_path / "checkpoint-4")
    path = tmp_path / "checkpoint-4" / "checkpoint.json"
    held = json.loads(path.read_text())
    del held["more"]["choices"]
    path.write_text(json.dumps(held))
    with pytest.warns(UserWarning, match="does not say of which seed, data and schedule"):
        over(tmp_path).train(resume_from_checkpoint=True)
