"""One of several processes that a Trainer runs in: `python -m tests.train.ranks`.

Each case is a small run that one process makes too; `per_step` examples are of all processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import everystep as es
from everystep.errors import EverystepError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.train.runs import Noisy, StopAt, outcome, padded

STEPS = 20
SHORT = {"max_steps": 8}


def ragged(count: int, *, unlearned: int = 0) -> list[dict[str, list[int]]]:
    """Rows of 3 to 9 ids whose first is the row's number; of every `unlearned`-th row nothing but
    its end is learned."""
    rows = []
    for number in range(count):
        ids = [number, *(5 + (number * 7 + place * 11) % 80 for place in range(2 + number % 7))]
        none = unlearned and number % unlearned == 0
        rows.append(
            {
                "input_ids": [*ids, 2],
                "labels": [*([-100] * len(ids)), 2] if none else [-100, *ids[1:], 2],
            }
        )
    return rows


def tiny(seed: int = 3, dtype: torch.dtype = torch.float64) -> es.LanguageModel:
    torch.manual_seed(seed)
    return tiny_llama(vocab_size=97, dtype=dtype)


def lora() -> dict[str, Any]:
    return {"peft_config": es.LoraConfig(r=4, target_modules="all-linear")}


def own_loss(model: Any, batch: Any, items: int) -> Tensor:
    loss: Tensor = model(**batch, num_items_in_batch=items).loss
    return loss


def sometimes(model: Any, batch: Any, items: int) -> Tensor:
    """A loss in which only two of three rows ask for the adapter, so that a process may have
    none that does."""
    asking = [batch["adapter_names"] if int(one) % 3 else None for one in batch["input_ids"][:, 0]]
    return own_loss(model, {**batch, "adapter_names": asking}, items)


def module() -> Any:
    from tests.models.tiny import reference_decoder

    torch.manual_seed(3)
    return reference_decoder("llama", torch.float64)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"rows": ragged(41)},
    "accumulated": lambda: {"rows": ragged(45), "gradient_accumulation_steps": 3, "per_step": 4},
    "clipped": lambda: {**SHORT, "max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 0.1},
    "frozen": lambda: {**SHORT, "trainable": [r"layers\.1\.", "lm_head"], "weight_decay": 0.1},
    "smoothed": lambda: {**SHORT, "label_smoothing_factor": 0.2, "rows": ragged(40, unlearned=2)},
    "a loss of one's own": lambda: {**SHORT, "compute_loss": own_loss},
    "LoRA": lora,
    "by length": lambda: {**SHORT, "train_sampling_strategy": "group_by_length", **lora()},
    "a LoRA that few use": lambda: {
        **SHORT,
        **lora(),
        "compute_loss": sometimes,
        "per_step": 4,
        "rows": ragged(40),
    },
    "a module": lambda: {**SHORT, "model": module()},
}


class Seen:
    """A collator that writes down which rows come together."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        self.rows.append([int(row["input_ids"][0]) for row in rows])
        return padded(rows)


def run_of(folder: Path, count: int, **given: Any) -> tuple[es.Trainer, Seen]:
    """A run whose steps have as many examples, however many processes make it."""
    names = ("compute_loss", "peft_config", "callbacks", "eval_dataset", "compute_metrics")
    names += ("processing_class", "sample_prompts")
    of_trainer = {name: given.pop(name) for name in names if name in given}
    model = given.pop("model", None) or tiny()
    rows, size = given.pop("rows", None) or ragged(41), given.pop("per_step", 8)
    usual: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 1e-3, "adam_epsilon": 1e-5}
    usual |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    usual |= {"per_device_train_batch_size": size // count}
    seen = Seen()
    args = es.TrainingArguments(output_dir=folder, **{**usual, **given})
    return es.Trainer(model, args, seen, rows, **of_trainer), seen


def found_in(case: str, folder: Path, count: int, **more: Any) -> dict[str, Any]:
    """What a run of a case does: its logs, its weights, and the rows of this process."""
    return found_of({**CASES[case](), **more}, folder / case, count)


def found_of(given: dict[str, Any], folder: Path, count: int) -> dict[str, Any]:
    run, seen = run_of(folder, count, **given)
    run.train()
    return {**outcome(run), "rows": seen.rows}


SHARDED: dict[str, Callable[[], dict[str, Any]]] = {
    name: CASES[name]
    for name in ("plain", "accumulated", "clipped", "frozen", "smoothed", "a loss of one's own")
} | {"recomputed": lambda: {**SHORT, "activation_checkpointing": True}}
"""Runs in which each process has a part of the weights."""


def sharded_in(case: str, folder: Path, count: int) -> dict[str, Any]:
    """The same of a run whose weights lie in parts."""
    run, _ = run_of(folder / f"sharded-{case}", count, **SHARDED[case](), fsdp=True)
    before = sum(one.to_local().nbytes for one in run.weights.named().values())
    run.train()
    names = list(run.weights.named())
    run.save_model(folder / f"sharded-{case}" / "end")
    dist.barrier()
    held = es.load_model(folder / f"sharded-{case}" / "end").state_dict()
    return {**outcome(run), "weights": {name: held[name] for name in names}, "bytes": before}


# --- what is decided once -------------------------------------------------------------------------


def evaluated(folder: Path, count: int, **more: Any) -> dict[str, Any]:
    """An evaluation by generation, of more rows than a batch has, and of logits."""
    tokenizer = tiny_tokenizer()
    words = ["one two", "three", "four five six", "seven", "eight nine"]
    data = [{"prompt": word, "completion": f" {word}"} for word in words]
    told: list[Any] = []

    def metrics(found: es.EvalPrediction) -> dict[str, float]:
        told.append((found.predictions.tolist(), found.label_ids.tolist(), found.texts))
        if found.generated is not None:
            told.append([(one.tokens, one.finish_reason, one.score) for one in found.generated])
            told.append([one.logprobs.logprobs.tolist() for one in found.generated])
        return {"number": float(found.predictions.shape[1])}

    found: dict[str, Any] = {}
    for generates in (True, False):
        torch.manual_seed(3)
        run = es.Trainer(
            tiny_llama(vocab_size=len(tokenizer), dtype=torch.float64),
            es.TrainingArguments(
                output_dir=folder / f"evaluated-{generates}",
                disable_tqdm=True,
                per_device_eval_batch_size=4 // count,
                predict_with_generate=generates,
                generation_config=es.GenerationConfig(do_sample=True) if generates else None,
                generation_max_length=9 if generates else None,
                **more,
            ),
            None,
            None,
            data,
            tokenizer,
            compute_metrics=metrics,
            sample_prompts=["four"],
        )
        result = {k: v for k, v in run.evaluate().items() if not k.endswith(("runtime", "second"))}
        answers = run.predict(data).texts
        found[str(generates)] = [result, answers, [text for _, text in run.samples], repr(told)]
        if generates:  # the first process has written all of them down by now
            file = folder / "evaluated-True" / "answers.jsonl"
            found["written"] = sorted(file.read_text().splitlines())
        told.clear()
    return found


class Wish(es.TrainerCallback):
    """Stops a run in one process."""

    def __init__(self, wishes: bool) -> None:
        self.wishes = wishes

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.wishes and state.global_step == 3:
            control.should_training_stop = control.should_save = True


def stopped_early(folder: Path, count: int, **more: Any) -> dict[str, Any]:
    """A run that gets worse, and ends with the weights of its best checkpoint."""
    run, _ = run_of(
        folder / "early",
        count,
        eval_dataset=[{"input_ids": [7, 8, one, 2], "labels": [-100, 8, one, 2]} for one in (5, 6)],
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        learning_rate=0.03,
        load_best_model_at_end=True,
        callbacks=[es.EarlyStoppingCallback(2)],
        **more,
    )
    run.train()
    state = run.state
    where = Path(state.best_model_checkpoint or "").name
    return {
        **outcome(run),
        "state": [state.global_step, state.best_global_step, state.best_metric, where],
        "first": [state.is_world_process_zero, state.is_local_process_zero],
    }


def told_of(call: Callable[[], object]) -> str:
    """The name and text of the error that a call ends by."""
    try:
        call()
    except EverystepError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def broken(rank: int, count: int, folder: Path) -> dict[str, str]:
    """The errors of runs that cannot go on."""

    def not_a_number(model: Any, batch: Any, items: int) -> Tensor:
        loss = own_loss(model, batch, items)
        return loss * torch.nan if 17 in batch["input_ids"][:, 0] else loss

    def no_metrics(found: es.EvalPrediction) -> Any:
        return {"worth": float("nan")}

    rows = ragged(3)
    runs: dict[str, dict[str, Any]] = {
        "loss": {"compute_loss": not_a_number},
        "arguments": {"learning_rate": 1e-3 * (1 + rank)},
        "data": {"rows": ragged(20 + rank)},
        "metrics": {"compute_metrics": no_metrics, "eval_dataset": rows, "eval_on_start": True},
        "size": {
            "resume_from_checkpoint": str(folder / "one" / "checkpoint-6"),
            "rows": Noisy(31),
            "per_step": 4,
            "max_steps": 14,
        },
    }
    found = {}
    for name, given in runs.items():
        given |= {"eval_strategy": "epoch"} if name == "metrics" else {}
        run, _ = run_of(folder / f"broken-{name}", count, **given)
        found[name] = told_of(run.train)
        if name == "loss":
            found["rows"] = str(run.state.global_step)
    return found


# --- checkpoints ----------------------------------------------------------------------------------


def noisy(folder: Path, count: int, **given: Any) -> es.Trainer:
    """A run over examples that draw random numbers, which keeps checkpoints."""
    run, _ = run_of(
        folder,
        count,
        rows=Noisy(31),
        per_step=4,
        **{"max_steps": 14, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
        | {"save_steps": 3, "logging_steps": 4}
        | given,
    )
    return run


def resumed(folder: Path, count: int, **given: Any) -> dict[str, Any]:
    """A run that is never stopped, one that goes on from this many processes' own checkpoint, and
    one that goes on from another number's."""
    whole = noisy(folder / f"whole-{count}", count, **given)
    whole.train()
    noisy(folder / f"cut-{count}", count, callbacks=[StopAt(7)], **given).train()
    again = noisy(folder / f"cut-{count}", count, **given)
    again.train(resume_from_checkpoint=True)
    return {"whole": whole_outcome(whole), "again": whole_outcome(again)}


def gone_on(folder: Path, count: int, **given: Any) -> dict[str, Any]:
    """A run from a checkpoint that lies in a folder."""
    run = noisy(folder / f"other-{count}", count, **given)
    run.train(resume_from_checkpoint=folder / "one" / "checkpoint-6")
    return whole_outcome(run)


def whole_outcome(run: es.Trainer) -> dict[str, Any]:
    """What two runs agree in, with weights that lie in parts gathered."""
    found = outcome(run)
    found["weights"] = {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in found["weights"].items()
    }
    return found


class Marks(es.TrainerCallback):
    """Fills the parts of weights, and of what the optimizer keeps of them, that this process has,
    after the third step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.run: es.Trainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 3:
            self.fill()

    def fill(self) -> None:
        assert self.run is not None
        with torch.no_grad():
            for one in [*self.run.weights.named().values(), *moments(self.run).values()]:
                one.to_local().fill_(self.number)


def moments(run: es.Trainer) -> dict[str, Any]:
    """What the optimizer keeps of each weight, by the name of both; nothing before a run."""
    found: dict[str, Any] = {}
    state = {} if run.optimizer is None else run.optimizer.state
    for name, one in run.weights.named().items():
        held = state.get(one, {})
        found |= {f"{name} {key}": held[key] for key in ("exp_avg", "exp_avg_sq") if held}
    return found


def marked(folder: Path, rank: int) -> dict[str, Any]:
    """A checkpoint whose parts are filled with the numbers of their processes: how many rows of
    each weight are this one's, and what it finds there, and in the optimizer, that has read them
    over zeros."""
    marks, zeros = Marks(rank + 1), Marks(0)
    for one in (marks, zeros):
        one.run = noisy(folder / "marked", 2, fsdp=True, callbacks=[marks], max_steps=3)
    assert marks.run is not None and zeros.run is not None
    marks.run.train()
    own = {name: len(one.to_local()) for name, one in marks.run.weights.named().items()}
    zeros.fill()
    zeros.run.train(resume_from_checkpoint=True)
    held = {**zeros.run.weights.named(), **moments(zeros.run)}
    return {"own": own, "read": {k: one.to_local().unique().tolist() for k, one in held.items()}}


def refused(folder: Path) -> dict[str, str]:
    """The errors of models whose weights cannot be shared so."""
    return {
        "LoRA": told_of(lambda: run_of(folder / "refused", 2, fsdp=True, **lora())),
        "a module": told_of(lambda: run_of(folder / "refused", 2, fsdp=True, model=module())),
    }


def main(folder: Path, rank: int, count: int) -> Mapping[str, Any]:
    found: dict[str, Any] = {case: found_in(case, folder, count) for case in CASES}
    found["sharded"] = {case: sharded_in(case, folder, count) for case in SHARDED}
    found["evaluated"] = evaluated(folder, count)
    found["evaluated in parts"] = evaluated(folder / "parts", count, fsdp=True)
    found["early"] = stopped_early(folder, count)
    wish, _ = run_of(folder / "wish", count, callbacks=[Wish(rank == 1)])
    wish.train()
    found["wish"] = wish.state.global_step
    found["broken"] = broken(rank, count, folder)
    found["resumed"] = resumed(folder, count)
    found["gone on"] = gone_on(folder, count)
    found["gone on in parts"] = gone_on(folder, count, fsdp=True)
    found["resumed in parts"] = resumed(folder / "parts", count, fsdp=True)
    found["marked"] = marked(folder, rank)
    found["refused"] = refused(folder)
    return found


if __name__ == "__main__":
    place, number, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'meeting'}",
        rank=number,
        world_size=processes,
        timeout=timedelta(seconds=60),
    )
    torch.save(main(place, number, processes), place / f"{number}.pt")
    dist.barrier()
    dist.destroy_process_group()
