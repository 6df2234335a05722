"""Who watches a run, and may stop it: transformers' callbacks, and those that show and write."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, final

from everystep.config.kinds import is_integer, is_number, require
from everystep.errors import MissingExtraError, RequestError
from everystep.memory import peak_memory
from everystep.shown import counted_bytes, cut
from everystep.train.arguments import TrainingArguments
from everystep.train.state import TrainerControl, TrainerState

LOG = "log.jsonl"
SAMPLES = "samples.jsonl"
_GREY = "#94a3b8"
_CURVES = (("loss", "#0f172a", "-"), ("eval_loss", "#c2410c", "o-"))
"""What a plot shows: the name of a number, a colour and a style."""


class TrainerCallback:
    """Calls at every event of a run; derive from it and override those that you want.

    Each is given arguments, state and control, and by keyword `model`, `processing_class`,
    `optimizer`, `lr_scheduler`, and `metrics` or `logs` where there are any. What it changes in the
    control holds; it may return the control, as in transformers, or nothing.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A trainer was made."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Training begins, or goes on."""

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Training is over."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A round over the data begins."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A round over the data is over."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A step begins."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A batch of a step of several was read."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Gradients are there, clipped."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Weights have changed, and gradients are still there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A step is done."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A batch of an evaluation was read."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """An evaluation is over."""

    def on_predict(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A prediction is over."""

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """A checkpoint is whole."""

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Something was logged."""

    def state(self) -> dict[str, Any] | None:
        """Return what checkpoints keep of it, as JSON holds it; None for nothing."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint kept."""

    def close(self) -> None:
        """Let go of what training needed: called after `on_train_end`, and where training ended by
        an error or an interrupt, which leaves that out."""


@final
class Callbacks:
    """The callbacks of a run, called in order."""

    def __init__(self, given: Iterable[TrainerCallback | type[TrainerCallback]]) -> None:
        self._all = [one() if isinstance(one, type) else one for one in given]
        for one in self._all:
            require_callback(one)

    def __iter__(self) -> Any:
        return iter(self._all)

    def add(self, one: TrainerCallback | type[TrainerCallback]) -> None:
        """Call this one too, after the others."""
        made = one() if isinstance(one, type) else one
        require_callback(made)
        self._all.append(made)

    def remove(self, one: TrainerCallback | type[TrainerCallback]) -> TrainerCallback:
        """Call the first that is this one, or of this class, no more; return it."""
        for held in self._all:
            if held is one or (isinstance(one, type) and isinstance(held, one)):
                self._all.remove(held)
                return held
        raise RequestError("there is no such callback", got=repr(one))

    def call(
        self,
        event: str,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Tell all of them of an event."""
        for one in self._all:
            found = getattr(one, event)(args, state, control, **given)
            if found is not None and found is not control:
                _refuse_control(one, event, found)

    def closing(self) -> ExitStack:
        """Return what lets each let go of what training needed, also where another fails to."""
        held = ExitStack()
        for one in reversed(self._all):
            held.callback(one.close)
        return held

    def states(self) -> dict[str, Any]:
        """Return what checkpoints keep, by class and number."""
        kept = {self._name(one): one.state() for one in self._all}
        return {name: one for name, one in kept.items() if one is not None}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Let those that a checkpoint kept something of go on with it."""
        for one in self._all:
            if self._name(one) in states:
                one.load_state(states[self._name(one)])

    def _name(self, one: TrainerCallback) -> str:
        alike = [held for held in self._all if type(held) is type(one)]
        return f"{type(one).__name__}.{next(i for i, held in enumerate(alike) if held is one)}"


def require_callback(one: object) -> None:
    """Refuse what does not have the methods of a callback."""
    wanted = [name for name in vars(TrainerCallback) if not name.startswith("_")]
    missing = [name for name in wanted if not callable(getattr(one, name, None))]
    if missing:
        raise RequestError(
            "this is no callback",
            wanted="an object of a class derived from everystep.TrainerCallback",
            got=f"{type(one).__name__} without {missing[0]}",
        )


def _refuse_control(one: TrainerCallback, event: str, found: object) -> NoReturn:
    raise RequestError(
        f"{type(one).__name__}.{event} returned something else than the control",
        wanted="the control that it was given, or None",
        got=type(found).__name__,
    )


@final
class DefaultFlow(TrainerCallback):
    """Asks for logs, evaluations and checkpoints when the arguments say, and for the end."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        evaluates = args.eval_strategy == "steps" and args.eval_delay <= step
        if args.logging_strategy == "steps" and step % state.logging_steps == 0:
            control.should_log = True
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if evaluates and (last or step % state.eval_steps == 0):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or step % state.save_steps == 0):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


@final
class EarlyStoppingCallback(TrainerCallback):
    """Stops a run whose metric got no better by more than a threshold for so many evaluations."""

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0
    ) -> None:
        whole = is_integer(early_stopping_patience) and early_stopping_patience >= 1
        name = "early_stopping_patience"
        require(whole, name, "an integer of at least 1", early_stopping_patience)
        real = is_number(early_stopping_threshold) and early_stopping_threshold >= 0
        name = "early_stopping_threshold"
        require(real, name, "a number of at least 0", early_stopping_threshold)
        self._patience, self._threshold = early_stopping_patience, early_stopping_threshold
        self._waited = 0

    def on_train_begin(self, args: TrainingArguments, *_: Any, **given: Any) -> None:
        if args.eval_strategy == "no" or args.metric_for_best_model is None:
            raise RequestError(
                "early stopping compares evaluations by a metric",
                wanted="an eval_strategy, and metric_for_best_model",
                got=f"{args.eval_strategy!r} and {args.metric_for_best_model!r}",
            )

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        found = given["metrics"][args.best_metric]
        sign = 1 if args.greater_is_better else -1
        best = state.best_metric
        better = best is None or sign * (found - best) > self._threshold
        self._waited = 0 if better else self._waited + 1
        if self._waited >= self._patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {"waited": self._waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._waited = state["waited"]


@final
class LogFile(TrainerCallback):
    """Writes what is logged as lines of JSON into `log.jsonl` of the run's folder.

    A resumed run first drops the lines after the step that it goes on from.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        path = args.folder / LOG
        args.folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(one) + "\n" for one in state.log_history]
        path.write_text("".join(lines), encoding="utf-8")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        args.folder.mkdir(parents=True, exist_ok=True)
        with (args.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(state.log_history[-1]) + "\n")


@final
class TensorBoardCallback(TrainerCallback):
    """Writes numbers that are logged for TensorBoard, into the folder `runs` of the run's."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError.of("report_to='tensorboard'", "tensorboard", "train") from error
        self._make = SummaryWriter
        self._writer: Any = None

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._writer is None:
            self._writer = self._make(str(args.folder / "runs"))
        for name, value in given["logs"].items():
            if is_number(value):
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                self._writer.add_scalar(tag, value, state.global_step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@final
class PlotCallback(TrainerCallback):
    """Draws the losses of a run and its learning rate over its steps, when it ends, into
    `plot.png` and `plot.svg` of the run's folder."""

    def __init__(self) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError.of("report_to='plot'", "matplotlib", "train") from error
        self._figure = Figure

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        figure = self._figure(figsize=(7, 4), layout="constrained")
        losses = figure.subplots()
        rates = losses.twinx()
        for axes, name, colour, style, width in (
            *((losses, *curve, 1.5) for curve in _CURVES),
            (rates, "learning_rate", _GREY, "-", 1),
        ):
            points = [(one["step"], one[name]) for one in state.log_history if name in one]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour, label=name, lw=width)
        rates.set_ylabel("learning rate", color=_GREY)
        rates.set_ylim(bottom=0)
        losses.set_xlabel("step")
        losses.set_ylabel("loss")
        if losses.lines:
            losses.legend(frameon=False)
        args.folder.mkdir(parents=True, exist_ok=True)
        for ending in ("png", "svg"):
            figure.savefig(args.folder / f"plot.{ending}", dpi=150)


@final
class SampleFile(TrainerCallback):
    """Writes what the model generates at each evaluation, a line for each prompt, into
    `samples.jsonl` of the run's folder.

    A resumed run first drops the lines after the step that it goes on from.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        path = args.folder / SAMPLES
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [one for one in lines if json.loads(one)["step"] <= state.global_step]
            path.write_text("".join(kept) if state.global_step else "", encoding="utf-8")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        args.folder.mkdir(parents=True, exist_ok=True)
        with (args.folder / SAMPLES).open("a", encoding="utf-8") as file:
            for prompt, text in given["samples"]:
                line = {"step": state.global_step, "prompt": prompt, "text": text}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


@final
class ProgressCallback(TrainerCallback):
    """Shows on a terminal how far a run is, its loss, its speed and the time that is left."""

    def __init__(self) -> None:
        try:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
        except ImportError as error:
            do = "pass disable_tqdm=True"
            raise MissingExtraError.of("a progress bar", "rich", "cli", do=do) from error
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._task: Any = None
        self._began = 0.0
        self._first = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._task is not None:  # of a training before this one
            self._progress.remove_task(self._task)
        self._progress.start()
        self._began, self._first = time.monotonic(), state.num_input_tokens_seen
        self._task = self._progress.add_task(
            "training", total=state.max_steps, completed=state.global_step, told=""
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = (state.num_input_tokens_seen - self._first) / seconds
        told = f"{rate:,.0f} tokens/s"
        most = peak_memory(given["model"].device)
        if most is not None:
            told += f", {counted_bytes(most)} at most"
        self._progress.update(self._task, completed=state.global_step, told=told)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        logs = given["logs"]
        shown = [f"{key} {logs[key]:.4g}" for key in ("loss", "eval_loss") if key in logs]
        if shown:
            self._progress.console.print(f"step {state.global_step}: {', '.join(shown)}")

    def on_evaluate(self, *_: Any, **given: Any) -> None:
        for prompt, text in given.get("samples", ()):
            asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            # What a model writes is no markup.
            told = f"  {cut(asked)} → {cut(' '.join(text.split()), 200)}"
            self._progress.console.print(told, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()  # which gives the terminal its cursor back


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Return what a run has logged into its folder, line by line."""
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
