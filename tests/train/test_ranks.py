"""Runs of two processes, which do what one does; all of them share one start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import everystep as es
from everystep.errors import RequestError
from everystep.train.checkpoints import fault_of
from everystep.train.ranks import Ranks
from tests.ranks import found_together
from tests.train import ranks
from tests.train.runs import outcome, require_equal

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*of the evaluation are trained on",
    "ignore:.*runs on torch operators",
    "ignore:.*answers ended by their length",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of one process, to which two add theirs."""
    found = tmp_path_factory.mktemp("ranks")
    ranks.noisy(found / "one", 1).train()
    return found


@pytest.fixture(scope="module")
def together(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return found_together("tests.train.ranks", folder)


def logged(found: dict[str, Any], *names: str) -> list[float]:
    return [one[name] for one in found["logs"] for name in names if name in one]


def require_near(found: dict[str, Any], wanted: dict[str, Any], within: float) -> None:
    """Fail unless two outcomes agree in losses, norms, rates, tokens and weights."""
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"):
        assert logged(found, name) == pytest.approx(logged(wanted, name), rel=within, abs=within)
    assert found["seen"] == wanted["seen"]
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, one in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], one, rtol=0, atol=within, msg=name)


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_processes_take_the_steps_of_one(
    case: str, together: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With as many examples in a step; the module's norms round to float32."""
    alone = ranks.found_in(case, tmp_path, 1)
    assert len(logged(alone, "loss")) >= 8 and alone["logs"][0]["loss"] > 1
    for one in together:
        require_near(one[case], alone, 2e-6 if case == "a module" else 1e-9)
    first, second = (one[case]["weights"] for one in together)
    assert all(torch.equal(first[name], one) for name, one in second.items())


@pytest.mark.parametrize("case", ranks.SHARDED)
def test_weights_in_parts_take_the_steps_of_one_process(
    case: str, together: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With half of the weights each, and layers that are gathered when they run; what is saved is
    whole."""
    alone = ranks.found_of(ranks.SHARDED[case](), tmp_path, 1)
    whole = sum(one.nbytes for one in alone["weights"].values())
    for one in together:
        require_near(one["sharded"][case], alone, 1e-9)
        assert one["sharded"][case]["bytes"] <= 0.6 * whole


@pytest.mark.parametrize("case", ["plain", "accumulated", "by length"])
def test_each_process_reads_its_rows_alone(
    case: str, together: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Every second one of each batch; with none of its own it reads one of another's, which counts
    for nothing."""
    wanted = ranks.found_in(case, tmp_path, 1)["rows"][1:]
    each = [one[case]["rows"][1:] for one in together]
    assert len(each[0]) == len(each[1]) == len(wanted) >= 8
    for batch, first, second in zip(wanted, *each, strict=True):
        assert first == batch[::2] and second == (batch[1::2] or batch[:1])
    assert case != "plain" or [1] in [[len(batch)] for batch in wanted]


def test_the_first_process_writes_alone(together: list[dict[str, Any]], folder: Path) -> None:
    for case in ("plain", "early"):
        lines = (folder / case / "log.jsonl").read_text(encoding="utf-8").splitlines()
        logs = [json.loads(line) for line in lines]
        steps = [one["step"] for one in logs if "loss" in one]
        assert steps == [*range(1, len(steps) + 1)]
    assert [one["early"]["first"] for one in together] == [[True, True], [False, False]]


@pytest.mark.parametrize("generates", ["True", "False"])
@pytest.mark.parametrize("how", ["evaluated", "evaluated in parts"])
def test_an_evaluation_is_that_of_one_process(
    how: str, generates: str, together: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Loss, what is generated and sampled with seeds, logits, the metrics of them, and the file of
    answers."""
    alone = ranks.evaluated(tmp_path, 1)
    (metrics, texts, samples, told) = alone[generates]
    for number, one in enumerate(together):
        assert one[how]["written"] == alone["written"] and len(alone["written"]) == 10
        found = one[how][generates]
        assert found[0] == pytest.approx(metrics, rel=1e-6)
        assert found[1] == texts and found[2] == samples
        if number == 0 and generates == "True":
            assert found[3] == told
        assert (found[3] != "[]") == (number == 0), "metrics are computed once"


def test_early_stopping_and_the_best_checkpoint_agree(
    together: list[dict[str, Any]], tmp_path: Path, folder: Path
) -> None:
    alone = ranks.stopped_early(tmp_path, 1)
    step, best, metric, where = alone["state"]
    assert best < step < ranks.STEPS and where == f"checkpoint-{best}"
    for one in together:
        assert one["early"]["state"] == [step, best, pytest.approx(metric, rel=1e-9), where]
        require_near(one["early"], alone, 1e-9)
    assert fault_of(folder / "early" / where) is None


def test_the_wish_of_one_process_is_that_of_all(together: list[dict[str, Any]]) -> None:
    assert [one["wish"] for one in together] == [3, 3]


@pytest.mark.parametrize(
    "what, error",
    [
        ("loss", "TrainingError: the loss of step 1 is no number"),
        ("arguments", "RequestError: the processes of this run differ in learning_rate"),
        ("data", "RequestError: the processes of this run differ in train_dataset"),
        ("metrics", "compute_metrics gave a 'worth' that is no number"),
        ("size", "is of a run of another number of examples in a step; wanted 8; got 4"),
    ],
)
def test_an_error_is_one_of_all_processes(
    what: str, error: str, together: list[dict[str, Any]]
) -> None:
    assert all(error in one["broken"][what] for one in together)
    if what == "loss":
        assert all(one["broken"]["rows"] == "0" for one in together)
        assert "17" in together[0]["broken"]["loss"]  # which the other process has read


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["resumed", "resumed in parts"])
def test_two_processes_go_on_to_the_bit(how: str, together: list[dict[str, Any]]) -> None:
    for one in together:
        found = one[how]
        ended, wanted = (
            {**each, "logs": [log for log in each["logs"] if "train_loss" not in log]}
            for each in (found["again"], found["whole"])
        )
        require_equal(ended, wanted)


def test_each_process_writes_its_part(together: list[dict[str, Any]], folder: Path) -> None:
    """And a checkpoint whose part is damaged is known."""
    own = folder / "cut-2" / "checkpoint-7"
    parts = sorted(one.name for one in own.glob("optimizer*.safetensors"))
    assert parts == [f"optimizer-0000{one}-of-00002.safetensors" for one in (1, 2)]
    sizes = [(own / name).stat().st_size for name in parts]
    assert min(sizes) > 0.3 * max(sizes) and fault_of(own) is None
    damaged = own / parts[1]
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    assert fault_of(own) == f"{parts[1]} is not as it was written"
    data[-5] ^= 1
    damaged.write_bytes(data)


def test_another_number_of_processes_goes_on(together: list[dict[str, Any]], folder: Path) -> None:
    """From one to two, and from two to one."""
    run = ranks.noisy(folder / "alone", 1)
    run.train()
    wanted = outcome(run)
    for one in together:
        require_near(one["gone on"], wanted, 1e-9)
        require_near(one["gone on in parts"], wanted, 1e-9)
    for name, cut in (("back", folder / "cut-2"), ("from parts", folder / "parts" / "cut-2")):
        run = ranks.noisy(folder / name, 1)
        run.train(resume_from_checkpoint=cut / "checkpoint-7")
        found = outcome(run)
        found["logs"] = [log for log in found["logs"] if log["step"] != 7]
        require_near(found, wanted, 1e-9)


def test_a_checkpoint_of_parts_is_a_folder_that_others_read(
    together: list[dict[str, Any]], folder: Path
) -> None:
    own = folder / "parts" / "cut-2" / "checkpoint-7"
    names = {one.name for one in own.glob("*.safetensors")}
    assert names == {
        f"{stem}-0000{one}-of-00002.safetensors"
        for stem in ("model", "optimizer")
        for one in (1, 2)
    }
    whole, _ = AutoModelForCausalLM.from_pretrained(own, output_loading_info=True)
    held = es.load_model(own).state_dict()
    found = whole.state_dict()
    assert all(torch.equal(found[name], one) for name, one in held.items())


def test_each_part_of_a_checkpoint_is_where_its_process_had_it(
    together: list[dict[str, Any]], folder: Path
) -> None:
    """Parts that were filled with the numbers of their processes, read by one and by two: of
    weights, and of what the optimizer keeps."""
    held = es.load_model(folder / "marked" / "checkpoint-3").state_dict()
    first, second = (one["marked"]["own"] for one in together)
    assert first.keys() == second.keys() <= held.keys() and len(first) > 10
    for name, rows in first.items():
        assert len(held[name]) == rows + second[name] and rows > 0
        assert (held[name][:rows] == 1).all() and (held[name][rows:] == 2).all(), name
    for number, one in enumerate(together, 1):
        read = one["marked"]["read"]
        assert len(read) == 3 * len(first), "weights, and two numbers of the optimizer for each"
        assert {*map(tuple, read.values())} <= {(number,), ()}
    alone = ranks.noisy(folder / "of marks", 1, max_steps=3)
    alone.train(resume_from_checkpoint=folder / "marked" / "checkpoint-3")
    kept = ranks.moments(alone)
    assert len(kept) == 2 * len(first)
    for name, one in kept.items():
        rows = first[name.split()[0]]
        assert (one[:rows] == 1).all() and (one[rows:] == 2).all(), name


def test_models_that_cannot_lie_in_parts_are_refused(together: list[dict[str, Any]]) -> None:
    for one in together:
        assert all("UnsupportedError: fsdp" in told for told in one["refused"].values())
    with pytest.raises(RequestError, match="fsdp shares weights among several processes"):
        ranks.run_of(Path("nowhere"), 1, fsdp=True)


def test_one_process_is_alone() -> None:
    alone = Ranks.met(60)
    assert alone == Ranks() and alone.is_first and alone.number_here == 0
    assert alone.own([4, 5, 6]) == [4, 5, 6] and alone.sums([1.5]) == [1.5]
    assert alone.told("a") == ["a"] and alone.together(lambda: 3) == [3]
