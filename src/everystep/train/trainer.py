"""The Trainer: one loop over windows of batches, each of which is one step of an optimizer.

A step adds up the losses of all its labels and divides by their number, so that it is the gradient
of one large batch, however it is cut. What is random depends on the seed and on where it stands
alone (`order.py`); so a run that a checkpoint resumes goes on to the bit.
"""

from __future__ import annotations

import inspect
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from everystep.adapters import AdapterConfig
from everystep.api.many import generate
from everystep.api.model import LanguageModel, wrap
from everystep.api.quantize import export_gguf
from everystep.api.saving import WeightsPart, begun_folder, save_part
from everystep.config.kinds import is_number
from everystep.draws import seed_of
from everystep.drivers.generated import Generated
from everystep.errors import (
    AbsentAttributeError,
    FormatError,
    InvariantError,
    RequestError,
    TrainingError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.memory import require_memory
from everystep.models import Model
from everystep.models.gguf_mixes import GgufFormat
from everystep.nn.loss import NO_LABEL
from everystep.requests.arrays import require
from everystep.requests.prompts import TokenizerLike
from everystep.text import Tokenizer
from everystep.train.arguments import TrainingArguments
from everystep.train.callbacks import (
    Callbacks,
    DefaultFlow,
    LogFile,
    PlotCallback,
    ProgressCallback,
    SampleFile,
    TensorBoardCallback,
    TrainerCallback,
)
from everystep.train.checkpoints import (
    KeptRun,
    checkpoints_in,
    keep_newest,
    newest_whole,
    read_kept_run,
    require_whole,
    write_checkpoint,
)
from everystep.train.collators import DataCollatorForSeq2Seq, default_data_collator
from everystep.train.data_files import DataLike
from everystep.train.estimate import MemoryEstimate, estimated, kept_bytes
from everystep.train.evaluation import (
    AnswerFile,
    EvalPrediction,
    PredictionOutput,
    answers_of,
    as_json,
    asked_of,
    in_line,
    of_json,
    predicted,
    stacked,
    warn_of_cut,
)
from everystep.train.forms import DEFAULT_FORM, DataForm, TrainingRows, read_rows
from everystep.train.forwards import forwards_of
from everystep.train.inspection import Collator, Inspection, inspect_rows
from everystep.train.optimisers import optimiser_of
from everystep.train.order import batches_of, epoch_order, keyed_randomness
from everystep.train.other_names import OTHER_METHODS, OTHER_PARTS
from everystep.train.ranks import Ranks
from everystep.train.resuming import compare, described, digest_of, require_alike
from everystep.train.row import length_of, read_row
from everystep.train.schedules import factor_of
from everystep.train.state import TrainerControl, TrainerState, TrainOutput
from everystep.train.weights import TrainedWeights, name_without_numbers, trained_weights

Batch = dict[str, Tensor]
Prompt = str | Sequence[Mapping[str, Any]]
"""A text or a conversation."""
ComputeLoss = Callable[[LanguageModel, dict[str, Any], int], Tensor]
"""The model, a batch with what a forward is told beside it (`adapter_names`, `use_cache`), and how
many labels the whole step has -> the () loss of the batch, a sum divided by that number. An object
with `items_of(batch)` counts what the sum is divided by itself."""
ComputeMetrics = Callable[[EvalPrediction], Mapping[str, float]]

_REPORTERS: Mapping[str, type[TrainerCallback]] = {
    "tensorboard": TensorBoardCallback,
    "plot": PlotCallback,
}
_SAMPLE_TOKENS = 64
_LOOKED_AT = 1000
"""Examples that are read before the first step of a data set that makes them anew each time."""
_DIGESTED = 100
"""Rows of such a data set that checkpoints know again."""
_OF_STEP, _OF_ROW, _OF_BATCH, _OF_CHECK = 1, 2, 3, 4


@dataclass
class _Sums:
    """Sums since the last log, and since the run began."""

    loss: float = 0.0
    logged_step: int = 0
    whole: float = 0.0


@dataclass(frozen=True, slots=True)
class _Place:
    """The epoch that a run is in, and how many steps of it are done."""

    epoch: int
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """The part of a batch that one process reads: rows at these places.

    `counts`: False where there are fewer rows than processes, and it reads one of another's so that
    all make as many forwards.
    """

    batch: Batch
    places: list[int]
    counts: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """The length of a run: batches and steps of an epoch, epochs, and steps of all of them."""

    batches: int
    steps: int
    epochs: int
    all_steps: int


@final
class Trainer:
    """Trains a model, evaluates it by its loss and by what it generates, and keeps checkpoints.

    Names and meanings are those of transformers' `Trainer`. `model`: one of this library, or a
    module of transformers or PEFT. `train_dataset`, `eval_dataset`: examples as `read_rows` takes
    them, or a mapping of names to such for several evaluations; `form` says how they become rows.
    `peft_config`: a `LoraConfig` or `LoHaConfig`; a new adapter is trained then, and the weights
    stay as they are stored. `adapter_name`: its name, "default" without one; without `peft_config`
    that of an adapter that the model has, which goes on learning. `compute_loss`,
    `compute_loss_func`: losses of your own, of a batch or of outputs and labels. `compute_metrics`:
    from an `EvalPrediction` to numbers by name, which holds what `preprocess_logits_for_metrics`
    makes of the logits and labels of a batch, if given. `optimizers`: an optimizer and a schedule
    of your own, or None for those of the arguments. `sample_prompts`: texts or conversations; what
    the model writes after each, greedily and at most 64 tokens, is shown at each evaluation,
    written to `samples.jsonl` and kept in `samples`.

    The first thing that `train` does is to look at the data; see `check`.

    Under `torchrun`, or in processes that have made a process group, each call but `check` is made
    by every process with the same arguments and data: they share the rows of each batch, evaluate
    and write together, and the first of them logs.
    """

    def __init__(
        self,
        model: LanguageModel | nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: DataLike | TrainingRows | None = None,
        eval_dataset: DataLike | TrainingRows | Mapping[str, DataLike | TrainingRows] | None = None,
        processing_class: TokenizerLike | None = None,
        *,
        peft_config: AdapterConfig | None = None,
        adapter_name: str | None = None,
        form: DataForm = DEFAULT_FORM,
        compute_loss: ComputeLoss | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        sample_prompts: Sequence[Prompt] = (),
    ) -> None:
        chosen: object = args or TrainingArguments()
        if not isinstance(chosen, TrainingArguments):
            wanted, got = "everystep.TrainingArguments", type(chosen).__name__
            raise RequestError("args are of another kind", wanted=wanted, got=got)
        self.args = chosen
        self.model = wrap(model)
        self.processing_class = processing_class
        self._form = form
        code = {
            "compute_loss": compute_loss,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            "data_collator": data_collator,
        }
        own_loss = compute_loss or compute_loss_func
        _require_sense(self.args, self.model, code)
        self._compute_loss, self._loss_func = compute_loss, compute_loss_func
        self._compute_metrics = compute_metrics
        self._preprocess = preprocess_logits_for_metrics
        self._collator: Collator = data_collator or default_data_collator
        if data_collator is None and processing_class is not None:
            self._collator = DataCollatorForSeq2Seq(processing_class, self.model)
        self._train_rows = self._rows(train_dataset)
        self._eval_rows = self._eval_sets(eval_dataset)
        if self.args.eval_strategy != "no" and not self._eval_rows:
            do = "Pass eval_dataset, or eval_strategy='no'"
            raise RequestError("there is nothing to evaluate", wanted="eval_dataset", do=do)
        self.weights: TrainedWeights = trained_weights(
            self.model, peft_config, self.args.trainable, adapter_name
        )
        self._ranks = Ranks.met(self.args.ddp_timeout)
        if self.args.recomputes:
            self.model.gradient_checkpointing_enable()
        unused = self.args.ddp_find_unused_parameters
        if unused is None:
            unused = bool(own_loss) or self.weights.may_be_unused
        with self._ranks.answering(self._what_is_whole):
            self._forwards = forwards_of(
                self._ranks, self.weights, looks_for_unused=unused, shards=self.args.shards
            )
        self._sample_prompts = _prompts(sample_prompts)
        self.samples: list[tuple[Prompt, str]] = []
        self.state, self.control = TrainerState(), TrainerControl()
        self._given = optimizers
        self._lengths: list[int] | None = None
        self._described: dict[str, Any] | None = None
        self.optimizer: Any = optimizers[0]
        self.lr_scheduler: Any = optimizers[1]
        shows = [] if self.args.disable_tqdm else [ProgressCallback]
        boards = [_REPORTERS[name] for name in self.args.reports]
        files = [LogFile, SampleFile] if self._sample_prompts else [LogFile]
        told = [*files, *boards, *shows] if self._ranks.is_first else []
        self._callbacks = Callbacks([DefaultFlow, *callbacks, *told])
        self._answers = AnswerFile(self.args.folder)
        self._sums, self._place = _Sums(), _Place(0, 0)
        self._norm, self._rate = 0.0, 0.0
        self._multiplied = _multiplied(self.model)
        self._tell("on_init_end")

    def __new__(cls, *args: object, **given: object) -> Self:
        known = {*inspect.signature(cls.__init__).parameters} - {"self"}
        for name in given.keys() - known:
            if (do := OTHER_PARTS.get(name)) is not None:
                raise UnsupportedError(f"{name} is no argument of this Trainer", do=do)
            near = nearest(name, known)
            do = f"Perhaps you meant {near}" if near else "See help(everystep.Trainer)"
            raise UnknownArgumentError(f"Trainer knows no {name!r}", do=do)
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            do = OTHER_METHODS.get(name)
            raise AbsentAttributeError(f"a Trainer has no attribute {name!r}", do=do)

    def __init_subclass__(cls) -> NoReturn:
        raise RequestError(
            "Trainer has no subclasses: what they override would be half of a loop",
            do="Pass compute_loss, compute_loss_func, compute_metrics or callbacks",
        )

    # --- data -------------------------------------------------------------------------------------

    def _rows(self, data: DataLike | TrainingRows | None) -> TrainingRows | None:
        if data is None:
            return None
        return read_rows(data, self.model, self.processing_class, self._form)

    def _eval_sets(self, data: Any) -> dict[str, TrainingRows]:
        """Return the rows of each evaluation by the prefix of its metrics."""
        if data is None:
            return {}
        if isinstance(data, Mapping):
            return {f"eval_{name}": rows for name, one in data.items() if (rows := self._rows(one))}
        rows = self._rows(data)
        return {} if rows is None else {"eval": rows}

    def check(self) -> Inspection:
        """Return what is trained on, of the first batch decoded, with trained tokens marked.

        An error says, before the first step, what cannot be meant: see `inspect_rows`.
        """
        rows = self._required_rows()
        with keyed_randomness(self._data_seed, _OF_CHECK), warnings.catch_warnings():
            if not self._ranks.is_first:
                warnings.simplefilter("ignore")  # the first says it
            return inspect_rows(
                rows,
                self.model,
                self.processing_class,
                eval_rows=next(iter(self._eval_rows.values()), None),
                collator=self._collator,
                batch_size=self.args.per_device_train_batch_size,
                most=None if rows.fixed else _LOOKED_AT,
            )

    def estimate(self) -> MemoryEstimate:
        """Return how much memory a step takes, from two forwards of one example each: the shortest
        and the longest of the first thousand. Nothing is trained."""
        rows, each = self._required_rows(), self._required_rows().per_example
        lengths = self._lengths_of(rows, _LOOKED_AT)
        ends = lengths.index(min(lengths)), lengths.index(max(lengths))
        shortest, longest = (
            self._fetched(rows, range(one * each, (one + 1) * each), (0, 0)) for one in ends
        )
        training = self.model.training
        self.weights.train(True)
        try:
            kept = self._kept(shortest, longest)
            if self.args.recomputes and isinstance(self.model.core, Model):
                # When gradients pass, what one layer keeps is there once more.
                self.model.gradient_checkpointing_disable()
                kept += self._kept(shortest, longest) // len(self.model.core.spec.layers)
                self.model.gradient_checkpointing_enable()
        finally:
            self.weights.train(training)
        trained = [*self.weights.named().values()]
        weights = sum(self.model.weight_bytes.values())
        if self.weights.is_beside:
            weights += sum(one.nbytes for one in trained)
        optimiser = None if self._given[0] is not None else self.args.optim
        size = self.args.per_device_train_batch_size
        return estimated(weights, trained, optimiser, kept * size)

    def _kept(self, shortest: Batch, longest: Batch) -> int:
        device = self.model.device
        with keyed_randomness(self._data_seed, _OF_CHECK, device=device):
            calls = (partial(self._loss, batch, 1) for batch in (shortest, longest))
            first, second = (partial(self._forwards.run, call) for call in calls)
            return kept_bytes(lambda: first()[0], lambda: second()[0])

    def _required_rows(self) -> TrainingRows:
        if self._train_rows is None or not len(self._train_rows):
            do = "Pass train_dataset with at least one example"
            raise RequestError("there is nothing to train on", do=do)
        return self._train_rows

    def _share(self, rows: TrainingRows, places: Sequence[int], epoch: int, number: int) -> _Share:
        """Return what this process reads of the batch of this number."""
        each = rows.per_example
        own = self._ranks.own(places[::each])
        found = [one + more for one in own or places[:1] for more in range(each)]
        key = epoch, number, *self._rank_key
        return _Share(self._fetched(rows, found, key), found if own else [], bool(own))

    def _fetched(self, rows: TrainingRows, places: Sequence[int], key: tuple[int, ...]) -> Batch:
        """Return a batch on the model's device; what its examples draw depends on the seed, the
        epoch, which the key begins with, and the example alone."""
        read: list[Mapping[str, object]] = [self._row(rows, place, key[0]) for place in places]
        with keyed_randomness(self._data_seed, _OF_BATCH, *key):
            made: object = self._collator(read)
        if not isinstance(made, Mapping) or not all(isinstance(x, Tensor) for x in made.values()):
            wanted, got = "a mapping of names to tensors", type(made).__name__
            raise RequestError("data_collator gave no batch", wanted=wanted, got=got)
        return {name: one.to(self.model.device) for name, one in made.items()}

    def _row(self, rows: TrainingRows, place: int, epoch: int) -> Mapping[str, Tensor]:
        """Return an example, whose draws depend on the seed, the epoch and its place alone."""
        with keyed_randomness(self._data_seed, _OF_ROW, epoch, place):
            return rows[place]

    def _lengths_of(self, rows: TrainingRows, most: int) -> list[int]:
        """Return the lengths of the first examples, at most so many, as epoch 0 has them."""
        firsts = range(0, len(rows), rows.per_example)[:most]
        return [
            length_of(self._row(rows, one, 0), f"example {one // rows.per_example}")
            for one in firsts
        ]

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    @property
    def _rank_key(self) -> tuple[int, ...]:
        """The rest of the key of randomness in this process's share of a batch."""
        return () if self._ranks.is_first else (self._ranks.number,)

    @property
    def _batch_size(self) -> int:
        """The examples of a batch of all processes."""
        return self.args.per_device_train_batch_size * self._ranks.count

    @property
    def _step_size(self) -> int:
        """The examples of a step of all processes."""
        return self._batch_size * self.args.gradient_accumulation_steps

    def _order(self, rows: TrainingRows, epoch: int) -> list[list[int]]:
        """Return the rows of each batch of an epoch; those of one example stay together."""
        args, each = self.args, rows.per_example
        size, drops = self._batch_size, args.dataloader_drop_last
        strategy = args.train_sampling_strategy
        if strategy == "group_by_length" and self._lengths is None:
            self._lengths = self._lengths_of(rows, len(rows))
        lengths = self._lengths
        count, most = len(rows) // each, self._step_size
        order = epoch_order(count, self._data_seed, epoch, strategy, lengths, most)
        return [
            [one * each + own for one in batch for own in range(each)]
            for batch in batches_of(order, size, drop_last=drops)
        ]

    def _plan(self, rows: TrainingRows) -> _Plan:
        args, examples = self.args, len(rows) // rows.per_example
        batches = examples // self._batch_size
        if not args.dataloader_drop_last:
            batches = math.ceil(examples / self._batch_size)
        if not batches:
            what = "no batch is full, and dataloader_drop_last drops the others"
            raise RequestError(what, got=f"{examples} examples", do="Take a smaller batch")
        steps = math.ceil(batches / args.gradient_accumulation_steps)
        if args.max_steps >= 0:
            return _Plan(batches, steps, math.ceil(args.max_steps / steps), args.max_steps)
        all_steps = math.ceil(args.num_train_epochs * steps)
        return _Plan(batches, steps, math.ceil(args.num_train_epochs), all_steps)

    # --- training ---------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train, and return how it went.

        `resume_from_checkpoint`: True goes on from the newest checkpoint in `output_dir` that is
        whole, a path from that one, to the bit of a run that was never stopped. TrainingError where
        a loss or a gradient is no number: weights and checkpoints are then as before that step.
        """
        with self._ranks.answering(self._what_is_whole):
            return self._train(resume_from_checkpoint)

    def _train(self, asked: str | Path | bool | None) -> TrainOutput:
        rows = self._required_rows()
        if asked is None:
            asked = self.args.resume_from_checkpoint
        start = self._checkpoint_of(asked)
        self.check()
        plan = self._plan(rows)
        self._require_memory()
        self._prepare(plan)
        self._require_alike(rows)
        self._described = None
        if start is not None:
            plan = self._go_on_from(start, plan)
        if self._ranks.is_first:
            self._answers.begin(self.state.global_step)
        with self._callbacks.closing():
            return self._run(rows, plan, is_new=start is None)

    def _run(self, rows: TrainingRows, plan: _Plan, *, is_new: bool) -> TrainOutput:
        """Take the steps of a plan from where the run stands."""
        began, first = time.monotonic(), self.state.global_step
        seen = self.state.num_input_tokens_seen
        self.control.should_training_stop = False
        self._tell("on_train_begin")
        if self.args.eval_on_start and is_new:
            self.evaluate()
        try:
            for epoch in range(self._place.epoch, plan.epochs):
                if self.state.global_step >= plan.all_steps and self._place.steps == 0:
                    break
                self._run_epoch(rows, epoch, plan)
                if self.control.should_training_stop:
                    break
        finally:
            self.weights.train(False)
        seconds, state = time.monotonic() - began, self.state
        tokens = state.num_input_tokens_seen - seen
        metrics = self._last_metrics(seconds, state.global_step - first, tokens)
        self._load_best()
        self._tell("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _require_memory(self) -> None:
        """Refuse weights whose gradients and optimizer states can never be held beside them."""
        optimiser = None if self._given[0] is not None else self.args.optim
        least = estimated(0, self.weights.named().values(), optimiser, 0)
        do = "Train a LoRA (peft_config), or fewer weights (trainable)"
        require_memory(least.more, "training", do, self.model.device)

    def _require_alike(self, rows: TrainingRows) -> None:
        """Refuse processes that were given different arguments, data or weights to train."""
        own = {
            **self.args.to_dict(),
            "train_dataset": len(rows),
            "eval_dataset": {name: len(one) for name, one in self._eval_rows.items()},
            "what is trained": {name: [*one.shape] for name, one in self.weights.named().items()},
        }
        for name, told in enumerate(self._ranks.told(own)):
            other = [key for key in own if json.loads(json.dumps(own[key])) != told[key]]
            if other:
                raise RequestError(
                    f"the processes of this run differ in {other[0]}",
                    wanted="the same arguments, data and weights in each",
                    got=f"{shown(own[other[0]])}, and {shown(told[other[0]])} at rank {name}",
                )

    def _what_is_whole(self) -> str:
        """Return what helps where the run cannot go on."""
        held = checkpoints_in(self.args.folder)
        whole = f"{held[-1]} is whole: " if held else ""
        return f"{whole}start all processes again, with resume_from_checkpoint=True"

    def _checkpoint_of(self, asked: str | Path | bool | None) -> Path | None:
        """Return the checkpoint to go on from, which the first process chooses."""
        found = self._ranks.once(lambda: self._chosen_checkpoint(asked))
        return None if found is None else Path(found)

    def _chosen_checkpoint(self, asked: str | Path | bool | None) -> str | None:
        """Return the checkpoint to go on from; an error where others would be mixed with it."""
        if asked is None or asked is False:
            held = checkpoints_in(self.args.folder)
            if held and self.args.save_strategy != "no" and not self.state.global_step:
                raise RequestError(
                    f"{self.args.folder} has checkpoints of another run",
                    wanted="a folder without any, or a run that goes on",
                    got=held[-1].name,
                    do="Pass resume_from_checkpoint=True, or another output_dir",
                )
            return None
        if asked is True:
            return str(newest_whole(self.args.folder))
        return str(require_whole(Path(asked)))

    def _prepare(self, plan: _Plan) -> None:
        args = self.args
        self.state = TrainerState(
            max_steps=plan.all_steps,
            num_train_epochs=plan.epochs,
            logging_steps=args.steps_of("logging", plan.all_steps),
            eval_steps=args.steps_of("eval", plan.all_steps),
            save_steps=args.steps_of("save", plan.all_steps),
            train_batch_size=args.per_device_train_batch_size,
        )
        self._know_ranks()
        self._sums, self._place = _Sums(), _Place(0, 0)
        if self._given[0] is None:
            self.optimizer = optimiser_of(self.weights.named(), args)
        if self._given[1] is None:
            factor = factor_of(
                args.lr_scheduler_type,
                args.warmup_of(plan.all_steps),
                plan.all_steps,
                args.learning_rate,
                args.lr_scheduler_kwargs,
            )
            self.lr_scheduler = LambdaLR(self.optimizer, factor)

    def _know_ranks(self) -> None:
        self.state.is_local_process_zero = self._ranks.number_here == 0
        self.state.is_world_process_zero = self._ranks.is_first

    def _run_epoch(self, rows: TrainingRows, epoch: int, plan: _Plan) -> None:
        self.control.should_epoch_stop = False
        self._tell("on_epoch_begin")
        batches, size = self._order(rows, epoch), self.args.gradient_accumulation_steps
        for step in range(self._place.steps, plan.steps):
            if self.state.global_step >= plan.all_steps:
                break
            numbers = range(step * size, min((step + 1) * size, len(batches)))
            self._step([self._share(rows, batches[one], epoch, one) for one in numbers])
            self.state.epoch = epoch + (numbers.stop / len(batches))
            self._tell("on_step_end")
            self._agree()
            ended = self.control.should_epoch_stop
            self._place = _Place(epoch, plan.steps if ended else step + 1)
            self._follow()
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self._tell("on_epoch_end")
        self._agree()
        if self._place.steps >= plan.steps or self.control.should_epoch_stop:
            self._place = _Place(epoch + 1, 0)
        self._follow()

    def _step(self, window: Sequence[_Share]) -> None:
        """Let the optimizer take one step down the mean loss of all labels of the batches."""
        self.control.begin_step()
        self._tell("on_step_begin")
        named, parameters = self.weights.named(), list(self.weights.named().values())
        items = self._items_of(window)
        total = self._backward(window, items, parameters)
        norm = self._clipped(parameters)
        if not math.isfinite(norm):
            places = [one for share in window for one in share.places]
            self._stop("gradient", name_without_numbers(named), places)
        self._tell("on_pre_optimizer_step")
        self.optimizer.step()
        self._tell("on_optimizer_step")
        self._norm, self._rate = norm, float(self.optimizer.param_groups[0]["lr"])
        self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.global_step += 1
        self._sums.loss += total

    def _backward(
        self, window: Sequence[_Share], items: int, parameters: Sequence[Tensor]
    ) -> float:
        """Return the loss of all labels of a step, whose gradients the parameters have then."""
        self.weights.train(True)
        total, broken, depends = 0.0, list[int](), False
        for number, share in enumerate(window):
            key = self.args.seed, _OF_STEP, self.state.global_step, number, *self._rank_key
            part = self._forwards.part(is_last=number == len(window) - 1)
            with keyed_randomness(*key, device=self.model.device), part:
                loss, reads = self._forwards.run(partial(self._joined_loss, share.batch, items))
                depends = depends or reads
                own = loss if share.counts else loss * 0
                if not bool(torch.isfinite(loss.detach())):
                    broken += share.places
                if own.requires_grad:
                    # Of gradients the processes take the mean, and the sum is wanted.
                    (own * self._ranks.count).backward()
            total += float(own.detach())
            if number < len(window) - 1:
                self._tell("on_substep_end")
        total, faults, graphs = self._ranks.sums([total, float(len(broken)), float(depends)])
        if faults or not math.isfinite(total):
            self._stop("loss", None, broken)
        if not graphs or all(one.grad is None for one in parameters):
            raise RequestError(
                "the loss does not depend on what is trained",
                wanted=f"a gradient of {next(iter(self.weights.named()))}, say",
                got="none",
                do="Call model(**batch) in a loss of your own: batch says with which adapter",
            )
        return total

    def _items_of(self, window: Sequence[_Share]) -> int:
        """Return how many labels a step of all processes has, and count the ids that it reads."""
        own = [share for share in window if share.counts]
        labels = sum(self._labels_of(share.batch) for share in own)
        ids = sum(_ids_of(share.batch) for share in own)
        places = sum(_places_of(share.batch) for share in own)
        items, read, whole = (int(one) for one in self._ranks.sums([labels, ids, places]))
        all_ = self.args.include_num_input_tokens_seen == "all"
        self.state.num_input_tokens_seen += whole if all_ else read
        self.state.total_flos += 6.0 * whole * self._multiplied
        if not items:
            raise RequestError(
                f"step {self.state.global_step + 1} has no label to learn from",
                got=f"examples {[share.places for share in window]}",
                do="Look at the data with trainer.check(), or take larger steps",
            )
        return items

    def _labels_of(self, batch: Batch) -> int:
        """Return how many labels of a batch are learned: the first of a row has nothing before it,
        unless an encoder stands there."""
        labels = batch.get("labels")
        counted = getattr(self._compute_loss, "items_of", None)
        if counted is not None:
            return int(counted(batch))
        if labels is None:
            if self._compute_loss is None:
                raise RequestError("a batch has no labels", wanted="labels", got=", ".join(batch))
            return 1
        own = labels if self.model.is_encoder_decoder else labels[:, 1:]
        return int((own != NO_LABEL).sum())

    def _loss(
        self, batch: Batch, items: int, *, wants_logits: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the () loss of a batch, the sum over its labels divided by `items`, and its
        logits where they are wanted and the loss is not one of the caller's own forward."""
        told = self.weights.arguments(wants_logits=wants_logits or self._loss_func is not None)
        with self._autocast():
            if self._compute_loss is not None:
                told.pop("output_logits", None)
                found = self._compute_loss(self.model, {**batch, **told}, items)
                return self._required_loss(found), None
            if self._loss_func is not None:
                inputs = {name: one for name, one in batch.items() if name != "labels"}
                outputs = self.model(**inputs, **told)
                labels = batch.get("labels")
                found = self._loss_func(outputs, labels, num_items_in_batch=items)
                return self._required_loss(found), outputs.logits
            if self.model.module is not None:
                own = self._labels_of(batch)
                outputs = self.model(**batch, **told)
                # A module gives the mean of the batch, whose share of the step this is.
                share = outputs.loss * (own / items) if own else outputs.logits.sum() * 0
                return share, outputs.logits
            told |= {"label_smoothing": self.args.label_smoothing_factor}
            outputs = self.model(**batch, **told, num_items_in_batch=items)
            return outputs.loss, outputs.logits

    def _joined_loss(self, batch: Batch, items: int) -> tuple[Tensor, bool]:
        """Return the loss of a batch, and whether it depends on what is trained.

        Where it does not, it has a graph all the same among several processes: the others wait for
        gradients of this one too.
        """
        loss, _ = self._loss(batch, items)
        depends = loss.requires_grad
        if not depends and self._ranks.count > 1:
            loss = sum((one.sum() * 0 for one in self.weights.named().values()), loss)
        return loss, depends

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.args.bf16:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16)

    def _required_loss(self, loss: object) -> Tensor:
        """Return a loss that a caller's code gave; RequestError where it is none."""
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return loss.sum() if loss.dim() else loss
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        wanted = "a tensor of one float, the sum over labels divided by num_items_in_batch"
        raise RequestError("the loss of your own is none", wanted=wanted, got=got)

    def _stop(self, what: str, name: str | None, places: Sequence[int]) -> NoReturn:
        self.optimizer.zero_grad(set_to_none=True)
        numbers = [one for each in self._ranks.told(list(places)) for one in each]
        held = checkpoints_in(self.args.folder)
        raise TrainingError(
            f"the {what} of step {self.state.global_step + 1} is no number",
            wanted="finite numbers",
            got=f"examples {numbers[:16]}" + ("" if name is None else f", in {name}"),
            do="Weights are as before this step"
            + (f", and {held[-1]} is whole" if held else "")
            + ": look at these examples, or lower learning_rate",
        )

    def _clipped(self, parameters: Sequence[Tensor]) -> float:
        """Return the norm of all gradients, which are shorter than `max_grad_norm` afterwards."""
        most = self.args.max_grad_norm or math.inf
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, most)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    # --- what happens between steps ---------------------------------------------------------------

    def _agree(self) -> None:
        """Do what a callback wishes in any process."""
        wishes = vars(self.control)
        found = self._ranks.any_of([bool(one) for one in wishes.values()])
        for name, wished in zip(list(wishes), found, strict=True):
            setattr(self.control, name, wished)

    def _follow(self) -> None:
        """Log, evaluate and save, where callbacks asked for it."""
        control, state, sums = self.control, self.state, self._sums
        if control.should_log and state.global_step > sums.logged_step:
            steps = state.global_step - sums.logged_step
            logs = {"loss": sums.loss / steps, "grad_norm": self._norm}
            sums.whole += sums.loss
            sums.loss, sums.logged_step = 0.0, state.global_step
            self._log({**logs, "learning_rate": self._rate})
            control.should_log = False
        if control.should_evaluate:
            metrics = self.evaluate()
            metrics = self._ranks.once(lambda: metrics)  # callbacks may have changed them
            better = self._judge(metrics)
            self._agree()
            control.should_evaluate = False
            if self.args.save_strategy == "best":
                control.should_save = better
        if control.should_save:
            self._save_checkpoint()
            control.should_save = False

    def _log(self, logs: Mapping[str, Any]) -> None:
        found = {**logs, "epoch": self.state.epoch}
        if self.args.include_num_input_tokens_seen != "no":
            found["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**found, "step": self.state.global_step})
        self._tell("on_log", logs=found)

    def _judge(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation is the best so far, and note that."""
        name = self.args.best_metric
        if name is None:
            return False
        if name not in metrics:
            raise RequestError(
                f"evaluation gave no {name!r}, which metric_for_best_model names",
                wanted=f"one of {', '.join(metrics)}",
                do="Let compute_metrics return it",
            )
        found, best = metrics[name], self.state.best_metric
        better = best is None or (found > best if self.args.greater_is_better else found < best)
        if better:
            self.state.best_metric, self.state.best_global_step = found, self.state.global_step
        return better

    def _tell(self, event: str, **given: Any) -> None:
        self._callbacks.call(
            event,
            self.args,
            self.state,
            self.control,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            **given,
        )

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Tell this one of events too, after the others."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback:
        """Tell the first that is this one, or of this class, of no more events; return it."""
        return self._callbacks.remove(callback)

    def _last_metrics(self, seconds: float, steps: int, tokens: int) -> dict[str, float]:
        whole = self._sums.whole + self._sums.loss
        samples = steps * self._step_size
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": samples / max(seconds, 1e-9),
            "train_steps_per_second": steps / max(seconds, 1e-9),
            "total_flos": self.state.total_flos,
            "train_loss": whole / max(self.state.global_step, 1),
        }
        if self.args.include_num_input_tokens_seen != "no":
            metrics["train_tokens_per_second"] = tokens / max(seconds, 1e-9)
        metrics = self._ranks.once(lambda: metrics)
        self._log(metrics)
        return metrics

    # --- checkpoints ------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write what is trained, and the tokenizer, into a folder; return it.

        An adapter is written as PEFT does, a model as transformers does.
        """
        folder = Path(output_dir or self.args.output_dir)
        with self._ranks.answering(self._what_is_whole):
            self._ranks.once(lambda: folder.mkdir(parents=True, exist_ok=True))
            self._save_into(folder)
        return folder

    def export(
        self,
        target: str | Path,
        format: GgufFormat | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Path:
        """Write the whole model with what was trained in its weights, and the tokenizer.

        A name that ends in .gguf makes such a file, of `format` or of the one that the name says,
        as in "mine.Q4_K_M.gguf" (`everystep.export_gguf`); another makes a folder that transformers
        loads, of `dtype`, the weights' own type, or float32 where they are stored in codes.
        """
        with self._ranks.answering(self._what_is_whole), self._forwards.whole():
            self._ranks.once(lambda: self._export(Path(target), format, dtype))
        return Path(target)

    def _export(self, target: Path, format: GgufFormat | None, dtype: torch.dtype | None) -> None:
        adapters = self.weights.adapter_names
        if self.model.module is not None:
            raise UnsupportedError(
                "a module is written by its own library",
                do="Call save_model, and merge adapters with that library",
            )
        if target.suffix == ".gguf":
            if dtype is not None:
                do = "Leave dtype out, and choose a format"
                raise RequestError("dtype has no effect in a GGUF file", do=do)
            tokenizer = self.processing_class
            if not isinstance(tokenizer, Tokenizer):
                wanted, got = "a tokenizer of everystep.load", type(tokenizer).__name__
                raise RequestError("a GGUF file holds a tokenizer", wanted=wanted, got=got)
            export_gguf(self.model, tokenizer, target, format, adapters=adapters)
            return
        if format is not None:
            do = "Give a name that ends in .gguf"
            raise RequestError(f"the format {format} is of a GGUF file", got=str(target), do=do)
        codes = {*self.model.weight_bytes} - {"float64", "float32", "float16", "bfloat16"}
        if dtype is None and codes:
            dtype = torch.float32
        self.model.save_pretrained(target, dtype=dtype, adapters=adapters)
        self._save_tokenizer(target)

    def _save_into(self, folder: Path) -> None:
        """Write what is trained, which all processes do together, and the tokenizer."""
        if self.args.shards:
            self._save_parts(folder)
        else:
            self._ranks.once(lambda: self.weights.save(folder))
        self._ranks.once(lambda: self._save_tokenizer(folder))

    def _save_parts(self, folder: Path) -> None:
        """Write weights that lie in parts: each process a file of some of them, one at a time."""
        model, ranks = self.model, self._ranks
        if not isinstance(model.core, Model):
            raise InvariantError("weights of another library lie in parts")
        part = WeightsPart(ranks.number, ranks.count)
        with ExitStack() as begun:
            place = ranks.once(lambda: str(begun.enter_context(begun_folder(folder))))
            fault = save_part(model.core, model.generation_config, Path(place), part)
            ranks.together(lambda: _require_none(fault))
            ranks.once(begun.close)

    def _save_tokenizer(self, folder: Path) -> None:
        save = getattr(self.processing_class, "save_pretrained", None)
        if callable(save):
            save(folder)

    def _save_checkpoint(self) -> None:
        folder = self.args.folder / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.state.stateful_callbacks = self._callbacks.states()
        sums, only_model = self._sums, self.args.save_only_model
        more = {
            "loss": sums.loss,
            "logged_step": sums.logged_step,
            "whole": sums.whole,
            "place": [self._place.epoch, self._place.steps],
            "schedule": None if only_model else self.lr_scheduler.state_dict(),
            "step_size": self._step_size,
            "choices": self._choices,
        }
        optimizer = None if only_model else self.optimizer.state_dict()
        kept = KeptRun(self.state.to_dict(), optimizer, more)
        write_checkpoint(folder, self._save_into, kept, self._ranks)
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        self._ranks.once(lambda: keep_newest(self.args.folder, limit, best))
        self._tell("on_save")

    @property
    def _choices(self) -> dict[str, Any]:
        """The choices and the data of this run, as checkpoints have them."""
        if self._described is None:
            rows = self._required_rows()
            step = 1 if rows.fixed else -(-len(rows) // _DIGESTED)
            read, places = partial(self._row, rows, epoch=0), range(0, len(rows), step)
            digest = digest_of(read, places)
            if not rows.fixed and digest != digest_of(read, places):
                digest = ""  # they draw from elsewhere than the global generators
            own = self._given[1] is not None
            count = len(rows) // rows.per_example
            self._described = described(self.args, count, digest, own_schedule=own)
        return self._described

    def _go_on_from(self, folder: Path, plan: _Plan) -> _Plan:
        """Take up the run of a checkpoint; return the plan of what is left of it."""
        trained = [one for group in self.optimizer.param_groups for one in group["params"]]

        def lay(number: int, *given: Any) -> Tensor:
            """Return what the optimizer keeps of a tensor, as this process holds that."""
            if number >= len(trained):
                raise FormatError(
                    f"the checkpoint {folder} is of another model or other trained weights",
                    wanted=f"{len(trained)} tensors",
                    got="more",
                    do="Make the model and the Trainer as in the run that wrote it",
                )
            return self._forwards.lay(trained[number], *given)

        kept = read_kept_run(folder, lay)
        self._require_same_run(folder, kept)
        state, more = TrainerState.of(kept.state), kept.more
        self.weights.restore(folder)
        self.optimizer.load_state_dict(dict(kept.optimizer or {}))
        self.lr_scheduler.load_state_dict(more["schedule"])
        for name in ("logging_steps", "eval_steps", "save_steps", "train_batch_size"):
            setattr(state, name, getattr(self.state, name))  # as they are asked for now
        self.state = state
        self._know_ranks()
        self._callbacks.load_states(state.stateful_callbacks)
        self._sums = _Sums(more["loss"], more["logged_step"], more["whole"])
        self._place = _Place(*more["place"])
        if not self.args.ignore_data_skip:
            return plan
        self._place = _Place(self._place.epoch, 0)
        left = math.ceil((plan.all_steps - state.global_step) / plan.steps)
        return replace(plan, epochs=self._place.epoch + left)

    def _require_same_run(self, folder: Path, kept: KeptRun) -> None:
        """Refuse to go on with what is of another run; warn of what has an effect from now on."""
        more = kept.more
        with warnings.catch_warnings():
            if not self._ranks.is_first:
                warnings.simplefilter("ignore")  # the first says it
            skips = not self.args.ignore_data_skip
            compare(folder, more.get("choices", {}), self._choices, skips=skips)
        then = {
            "max_steps": kept.state["max_steps"],
            "number of examples in a step": more["step_size"],
        }
        now = {"max_steps": self.state.max_steps, "number of examples in a step": self._step_size}
        for name, wanted in then.items():
            if now[name] != wanted:
                raise RequestError(
                    f"the checkpoint {folder} is of a run of another {name}",
                    wanted=wanted,
                    got=now[name],
                    do="Pass the arguments and data of the run that wrote it; with another number "
                    "of processes change per_device_train_batch_size or "
                    "gradient_accumulation_steps, so that a step has as many examples",
                )
        groups = dict(kept.optimizer or {}).get("param_groups", ())
        require_alike(folder, groups, self.optimizer.param_groups)

    def _load_best(self) -> None:
        """Take the weights of the best checkpoint, where that was asked for."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            best = Path(self.state.best_model_checkpoint)
            if not best.exists():  # the folder of the run was moved since
                best = self.args.folder / best.name
            self._ranks.once(lambda: str(require_whole(best)))
            self.weights.restore(best)

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of an evaluation: `eval_loss`, the mean over all labels, and those of
        `compute_metrics`; of several sets each under its name."""
        sets = self._eval_rows
        if eval_dataset is not None:
            given = self._eval_sets(eval_dataset)
            sets = {
                prefix.replace("eval", metric_key_prefix, 1): rows for prefix, rows in given.items()
            }
        if not sets:
            do = "Pass eval_dataset"
            raise RequestError("there is nothing to evaluate", wanted="eval_dataset", do=do)
        with self._ranks.answering(self._what_is_whole):
            return self._evaluate(sets)

    def _evaluate(self, sets: Mapping[str, TrainingRows]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for prefix, rows in sets.items():
            metrics.update(self._evaluated(rows, prefix).metrics)
        self._log(metrics)
        told: dict[str, Any] = {"metrics": metrics}
        if self._sample_prompts:
            asked = list(self._sample_prompts)
            texts = self._samples(asked)
            told["samples"] = self.samples = [*zip(asked, texts, strict=True)]
        self._tell("on_evaluate", **told)
        return metrics

    def _samples(self, asked: list[Prompt]) -> list[str]:
        """Return what the first process writes after each prompt."""
        model, own = self._generating()
        given = {**own, "do_sample": False, "max_new_tokens": _SAMPLE_TOKENS}
        tokenizer = self.processing_class
        made = self._ranks.once(lambda: [*generate(model, tokenizer, asked, **given)])
        return [str(one) for one in made]

    def _generating(self) -> tuple[LanguageModel, dict[str, Any]]:
        """Return a model with the weights of now, gathered where they lie in parts, and options."""
        with self._forwards.whole():
            return self.weights.generating()

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return predictions of a data set, its labels, and its metrics under a prefix."""
        rows = self._rows(test_dataset)
        if rows is None:
            raise RequestError("there is nothing to predict", wanted="test_dataset")
        with self._ranks.answering(self._what_is_whole):
            found = self._evaluated(rows, metric_key_prefix, keeps=True)
        self._tell("on_predict", metrics=found.metrics)
        return found

    def _evaluated(
        self, rows: TrainingRows, prefix: str, *, keeps: bool = False
    ) -> PredictionOutput:
        began = time.monotonic()
        training = self.model.training
        self.weights.train(False)
        generates = self.args.predict_with_generate
        wants_logits = (keeps or self._compute_metrics is not None) and not generates
        try:
            loss, logits, labels, batches = self._read_all(rows, wants_logits=wants_logits)
            seen: EvalPrediction | None = None
            if wants_logits:
                seen = EvalPrediction(stacked(logits), stacked(labels))
            elif generates:
                seen = self._generated(rows, prefix)
        finally:
            self.weights.train(training)
        metrics = {f"{prefix}_loss": loss}
        if seen is not None:
            metrics |= self._ranks.once(lambda: self._own_metrics(seen, prefix))
        seconds = max(time.monotonic() - began, 1e-9)
        metrics |= {
            f"{prefix}_runtime": seconds,
            f"{prefix}_samples_per_second": len(rows) / seconds,
            f"{prefix}_steps_per_second": batches / seconds,
        }
        metrics = self._ranks.once(lambda: metrics)
        if seen is None:
            return PredictionOutput(None, None, metrics)
        return PredictionOutput(seen.predictions, seen.label_ids, metrics, seen.texts)

    @torch.no_grad()
    def _read_all(
        self, rows: TrainingRows, *, wants_logits: bool
    ) -> tuple[float, list[Tensor], list[Tensor], int]:
        """Return the mean loss of all labels, logits and labels of each batch if they are wanted,
        and the number of batches."""
        total, items = 0.0, 0
        logits: list[Tensor] = []
        labels: list[Tensor] = []
        size = self.args.per_device_eval_batch_size * self._ranks.count * rows.per_example
        order = batches_of(range(len(rows)), size)
        for number, places in enumerate(order):
            share = self._share(rows, places, 0, number)
            own = self._labels_of(share.batch) if share.counts else 0
            call = partial(self._loss, share.batch, max(own, 1), wants_logits=wants_logits)
            loss, found = self._forwards.run(call)
            if wants_logits:
                if found is None:
                    found = self._forwards.run(partial(self._logits, share.batch))
                if self._preprocess is not None:
                    found = self._reduced(self._preprocess(found, share.batch["labels"]), found)
                logits.append(self._of_all(found, len(places), rows.per_example, share))
                given = share.batch["labels"]
                labels.append(self._of_all(given, len(places), rows.per_example, share))
            if own:
                total += float(loss) * own
                items += own
            self._tell("on_prediction_step")
        total, learned = self._ranks.sums([total, items])
        return total / max(learned, 1), logits, labels, len(order)

    def _reduced(self, made: object, logits: Tensor) -> Tensor:
        """Return what a caller's code made of logits (B, T, V); RequestError where it is no tensor
        with a place for each position."""
        if isinstance(made, Tensor) and made.shape[:2] == logits.shape[:2]:
            return made
        raise RequestError(
            "preprocess_logits_for_metrics gave something else",
            wanted=f"a tensor that begins with {tuple(logits.shape[:2])}",
            got=f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else shown(made),
        )

    def _of_all(self, own: Tensor, count: int, each: int, share: _Share) -> Tensor:
        """Return (count, T, ...) what all processes have of the rows of a batch, of own ones (B, T,
        ...), filled up with -100."""
        if self._ranks.count == 1:
            return own
        parts = self._ranks.gathered(own if share.counts else own[:0])
        length = max(one.shape[1] for one in parts if len(one))
        found = own.new_full((count, length, *own.shape[2:]), NO_LABEL, device="cpu")
        for number, part in enumerate(parts):
            for row in range(len(part)):
                place = (number + row // each * self._ranks.count) * each + row % each
                found[place, : part.shape[1]] = part[row]
        return found

    def _logits(self, batch: Batch) -> Tensor:
        inputs = {name: one for name, one in batch.items() if name != "labels"}
        with self._autocast():
            outputs = self.model(**inputs, **self.weights.arguments(wants_logits=True))
        found: Tensor = outputs.logits
        return found

    def _generated(self, rows: TrainingRows, prefix: str) -> EvalPrediction:
        source = self.model.is_encoder_decoder
        asked = []
        for number in range(len(rows)):
            row = self._row(rows, number, 0)  # as the loss has read it
            read = read_row(row, f"evaluation example {number}", aligned=not source)
            asked.append(asked_of(read, number, source))
        places = self._ranks.own(range(len(asked)))
        model, options = self._generating()
        args = self.args
        given: dict[str, Any] = {"generation_config": args.generation_config}
        given |= {"max_new_tokens": args.generation_max_length}
        given |= {"num_beams": args.generation_num_beams}
        options |= {name: one for name, one in given.items() if one is not None}
        # Each prompt's own, whichever process it comes to.
        options["seed"] = [seed_of(args.seed, one) for one in places]
        own = [asked[one] for one in places]

        def tell(number: int, answer: Generated) -> None:
            """Write an answer to an example down, where this process does."""
            if self._ranks.is_first:
                place = {"step": self.state.global_step, "evaluation": prefix, "example": number}
                self._answers.add(place | in_line(asked[number], answer, self.processing_class))

        def ended(number: int, answer: Generated) -> None:
            tell(places[number], answer)

        answers = answers_of(model, self.processing_class, own, options, ended) if own else []
        if self._ranks.count > 1:
            each = self._ranks.told([as_json(one) for one in answers])
            told = (each[one % len(each)][one // len(each)] for one in range(len(asked)))
            answers = [of_json(one) for one in told]
            for number in sorted({*range(len(asked))} - {*places}):
                tell(number, answers[number])
        if self._ranks.is_first:
            warn_of_cut(answers)
        return predicted(asked, answers, self.processing_class)

    def _own_metrics(self, seen: EvalPrediction, prefix: str) -> dict[str, float]:
        if self._compute_metrics is None:
            return {}
        found: object = self._compute_metrics(seen)
        if not isinstance(found, Mapping):
            wanted, got = "a mapping of names to numbers", type(found).__name__
            raise RequestError("compute_metrics gave no metrics", wanted=wanted, got=got)
        metrics: dict[str, float] = {}
        for name, value in found.items():
            number = value.item() if hasattr(value, "item") else value
            if not is_number(number):
                what = f"compute_metrics gave a {name!r} that is no number"
                raise RequestError(what, wanted="a finite number", got=shown(number))
            key = name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
            metrics[key] = float(number)
        return metrics

    # --- generation -------------------------------------------------------------------------------

    def generate(self, prompts: Any, n: int = 1, **options: Any) -> Any:
        """Return what the model writes after prompts, with its weights of now, as `es.generate`.

        `n`: continuations of each prompt, which are sampled where it is above 1. Modes, gradients
        and global generators stay as they are.
        """
        model, own = self._generating()
        if n > 1:
            options = {"do_sample": True, "num_return_sequences": n, **options}
        return generate(model, self.processing_class, prompts, **{**own, **options})


def _prompts(given: object) -> tuple[Prompt, ...]:
    """Return prompts that samples are generated after; RequestError for what is none."""
    found: list[Prompt] = []
    for one in given if isinstance(given, list | tuple) else [None]:
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, list | tuple) and all(isinstance(m, Mapping) for m in one):
            found.append([*one])
        else:
            wanted = "a list of texts, or of conversations"
            raise RequestError("sample_prompts are no prompts", wanted=wanted, got=shown(given))
    return tuple(found)


def _require_none(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


def _ids_of(batch: Batch) -> int:
    """Return how many ids of a batch are no padding."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


def _require_sense(args: TrainingArguments, model: LanguageModel, code: Mapping[str, Any]) -> None:
    """Refuse what a caller passes, arguments and code by name, where it would mean nothing."""
    for name, one in code.items():
        require(name, one, "__call__")
    if args.use_cpu and model.device.type != "cpu":
        do, got = "Load the model with device='cpu'", str(model.device)
        raise RequestError("use_cpu, but the model is elsewhere", wanted="cpu", got=got, do=do)
    losses = [name for name in ("compute_loss", "compute_loss_func") if code[name] is not None]
    if len(losses) > 1:
        do = "Pass one of them"
        raise RequestError("compute_loss and compute_loss_func are two losses", do=do)
    if args.label_smoothing_factor and (losses or model.module is not None):
        raise RequestError(
            "label_smoothing_factor belongs to the loss of a model of this library",
            do="Smooth labels in the loss of your own, with compute_loss_func",
        )
    if code["preprocess_logits_for_metrics"] is not None and args.predict_with_generate:
        what = "preprocess_logits_for_metrics has no effect where answers are generated"
        raise RequestError(what, do="Leave one of them out")


def _places_of(batch: Batch) -> int:
    """Return how many positions a batch has, padding among them."""
    named = (batch[name] for name in ("input_ids", "inputs_embeds") if name in batch)
    return sum(one.shape[0] * one.shape[1] for one in named)


def _multiplied(model: LanguageModel) -> int:
    """Return how many numbers of a model each position is multiplied by: all but the embeddings."""
    if model.module is not None:
        tables = (one for one in model.module.modules() if isinstance(one, nn.Embedding))
        return model.num_parameters() - sum(one.weight.numel() for one in tables)
    return model.num_parameters() - model.vocab_size * model.width
