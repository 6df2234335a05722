"""The choices of a training run, under transformers' names and with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, final, get_args

from everystep.config import GenerationConfig
from everystep.config.kinds import is_integer, is_number
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.train.other_names import without_others
from everystep.train.schedules import SCHEDULES

Strategy = Literal["no", "steps", "epoch"]
SaveStrategy = Literal["no", "steps", "epoch", "best"]
Optimiser = Literal["adamw_torch", "adamw_torch_fused", "sgd"]
Counted = Literal["all", "non_padding", "no"]
Sampling = Literal["random", "sequential", "group_by_length"]

_COUNTS = """per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
    generation_num_beams"""
_AT_LEAST_0 = """learning_rate warmup_steps weight_decay max_grad_norm eval_delay
    adam_epsilon"""
_CHECKPOINTING = "activation_checkpointing gradient_checkpointing"
_SHARES = "adam_beta1 adam_beta2 label_smoothing_factor"
_FLAGS = """bf16 logging_first_step eval_on_start
    save_only_model load_best_model_at_end dataloader_drop_last
    predict_with_generate disable_tqdm ignore_data_skip
    use_cpu"""
_INTERVALS = "logging_steps eval_steps save_steps"

REPORTS = ("tensorboard", "plot")
"""Who can be told of what is logged, beside the file of lines."""
_REPORTS = " and ".join(map(repr, REPORTS))

_Made = TypeVar("_Made", bound=type[Any])


def _taking_others(made: _Made) -> _Made:
    """Return the class, which takes transformers' arguments that say what happens anyway."""
    own = made.__init__

    @wraps(own)
    def begin(self: object, *args: object, **given: object) -> None:
        own(self, *args, **without_others(given, {one.name for one in fields(made) if one.init}))

    made.__init__ = begin
    return made


@final
@_taking_others
@dataclass(frozen=True)
class TrainingArguments:
    """The choices of a `Trainer`: transformers' names, meanings and defaults, checked at once.

    `num_train_epochs`, `max_steps`: the length, in rounds over the data or, where it is not
    negative, in steps. `gradient_accumulation_steps`: batches of a step, which give the gradient
    of one large batch. `activation_checkpointing`, `gradient_checkpointing`: layers are computed
    once more for gradients, in less memory. `warmup_steps`: steps, or below 1 a share of all.
    `..._strategy`: when to log, evaluate and save; `..._steps`: after how many steps, or below 1
    which share of all.
    `include_num_input_tokens_seen`: whether logs say how many ids were read, "all" (True), those
    that are no padding ("non_padding") or "no" (False).
    `save_total_limit`: the newest checkpoints that stay, the best beside them. `seed`, `data_seed`:
    of dropout and of the order of the data. `predict_with_generate`: evaluation generates too, with
    `generation_config`, at most `generation_max_length` new tokens, and `generation_num_beams`, and
    writes each answer to `answers.jsonl` in `output_dir` as it ends.
    `trainable`: regular expressions; weights whose name one of them matches somewhere are trained,
    the others stay. `report_to`: "none", or a list of "tensorboard" and "plot", which draws the
    losses into `plot.png` and `plot.svg` at the end. A run writes the lines that it logs to
    `log.jsonl` in `output_dir` in any case. `ddp_timeout`: the seconds after which another process
    of a run that does not answer is taken for lost. `ddp_find_unused_parameters`: whether to look,
    in each step, for trained weights that one of the processes did not use; None: where the model,
    or a loss of your own, may leave out some. `fsdp=True`: each process has a part of the weights,
    of their gradients and of the optimizer (FSDP2), and layers are gathered when they are used.
    `use_cpu=True`: a model elsewhere is refused. Other arguments of transformers' are taken where
    their value says what happens here anyway, as `fp16=False`, and refused with a way out else.
    """

    output_dir: str | Path = "trainer_output"
    _: KW_ONLY
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    activation_checkpointing: bool | None = None
    gradient_checkpointing: bool | None = None
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    optim: Optimiser = "adamw_torch_fused"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = 0.0
    bf16: bool = False
    trainable: tuple[str, ...] | None = None
    logging_strategy: Strategy = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    include_num_input_tokens_seen: Counted | bool = "no"
    disable_tqdm: bool = False
    report_to: str | tuple[str, ...] = "none"
    eval_strategy: Strategy = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    predict_with_generate: bool = False
    generation_config: GenerationConfig | None = None
    generation_max_length: int | None = None
    generation_num_beams: int | None = None
    save_strategy: SaveStrategy = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    resume_from_checkpoint: str | bool | None = None
    ignore_data_skip: bool = False
    seed: int = 42
    data_seed: int | None = None
    train_sampling_strategy: Sampling = "random"
    dataloader_drop_last: bool = False
    ddp_find_unused_parameters: bool | None = None
    ddp_timeout: int = 1800
    fsdp: bool | str | None = None
    use_cpu: bool = False

    def __post_init__(self) -> None:
        def set_(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in _NAMED:
            set_(name, _plain_name(getattr(self, name)))
        for name, usual in (("disable_tqdm", False), ("report_to", "none")):
            if getattr(self, name) is None:  # as scripts of transformers pass them
                set_(name, usual)
        counted = self.include_num_input_tokens_seen
        if isinstance(counted, bool):
            set_("include_num_input_tokens_seen", "all" if counted else "no")
        for name in ("trainable", "report_to"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                set_(name, tuple(value))
        _check_values(self)
        if self.eval_steps is None and self.eval_strategy == "steps":
            set_("eval_steps", self.logging_steps)
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            set_("metric_for_best_model", "loss")
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            set_("greater_is_better", not self.metric_for_best_model.endswith("loss"))
        _check_together(self)

    @property
    def recomputes(self) -> bool:
        """True where layers are computed once more for gradients."""
        return bool(self.activation_checkpointing or self.gradient_checkpointing)

    @property
    def shards(self) -> bool:
        """True where each process has a part of the weights."""
        return bool(self.fsdp)

    @property
    def folder(self) -> Path:
        """The folder that the run writes into."""
        return Path(self.output_dir)

    @property
    def best_metric(self) -> str | None:
        """The key under which evaluation gives the metric that checkpoints are compared by."""
        name = self.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    @property
    def reports(self) -> tuple[str, ...]:
        """Who is told of what is logged, beside the file of lines."""
        named = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        return tuple(one for one in named if one != "none")

    def to_dict(self) -> dict[str, Any]:
        """Return every choice as JSON holds it."""
        return {one.name: _as_json(getattr(self, one.name)) for one in fields(self) if one.init}

    def steps_of(self, name: Literal["logging", "eval", "save"], all_steps: int) -> int:
        """Return after how many steps that happens, of so many."""
        given = getattr(self, f"{name}_steps") or 0
        return int(given) if given >= 1 else max(1, -int(-all_steps * given // 1))

    def warmup_of(self, all_steps: int) -> int:
        """Return how many steps the learning rate grows, of so many."""
        given = self.warmup_steps
        return int(given) if given >= 1 else -int(-all_steps * given // 1)


def _plain_name(value: object) -> object:
    """Return the text of a member of an enumeration, such as transformers has."""
    return getattr(value, "value", value)


def _as_json(value: Any) -> Any:
    if isinstance(value, GenerationConfig):
        return value.to_diff_dict()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


_Test = Callable[[Any], bool]


def _whole(least: int) -> _Test:
    return lambda value: is_integer(value) and value >= least


def _number(least: float, below: float = float("inf")) -> _Test:
    return lambda value: is_number(value) and least <= value < below


def _is(*kinds: type[object]) -> _Test:
    return lambda value: isinstance(value, kinds)


def _optional(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _is_interval(value: Any) -> bool:
    return is_number(value) and value > 0 and (value < 1 or value == int(value))


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


_FSDP = ("", "full_shard", "full_shard auto_wrap")
"""Texts that stand for no and yes in transformers."""
_RULES: tuple[tuple[str, str, _Test], ...] = (
    (_FLAGS, "True or False", _is(bool)),
    (_CHECKPOINTING, "True, False or None", _optional(_is(bool))),
    (_COUNTS, "an integer of at least 1", _optional(_whole(1))),
    (_AT_LEAST_0, "a number of at least 0", _number(0)),
    (_SHARES, "a number of at least 0 and below 1", _number(0, 1)),
    (_INTERVALS, "a whole number of steps, or a share of all below 1", _optional(_is_interval)),
    ("num_train_epochs", "a number above 0", lambda value: is_number(value) and value > 0),
    ("max_steps", "an integer, negative for as many as epochs have", is_integer),
    ("seed", "an integer of at least 0", _whole(0)),
    ("data_seed generation_max_length", "an integer of at least 0", _optional(_whole(0))),
    ("save_total_limit", "an integer of at least 1", _optional(_whole(1))),
    ("ddp_timeout", "an integer of at least 1", _whole(1)),
    ("ddp_find_unused_parameters", "True, False or None", _optional(_is(bool))),
    (
        "fsdp",
        f"True, False or None, or one of {', '.join(map(repr, _FSDP))}",
        lambda value: value is None or isinstance(value, bool) or value in _FSDP,
    ),
    ("trainable", "a list of regular expressions", _optional(_are_texts)),
    ("metric_for_best_model", "the name of a metric", _optional(_is(str))),
    ("output_dir", "the path of a folder", _is(str, Path)),
    ("generation_config", "an everystep.GenerationConfig", _optional(_is(GenerationConfig))),
    (
        "report_to",
        f"'none', or a list of {_REPORTS}",
        lambda value: isinstance(value, str) or _are_texts(value),
    ),
)
"""Names, what their values have to be, and the test of that."""
_NAMED: Mapping[str, tuple[str, ...]] = {
    "lr_scheduler_type": tuple(SCHEDULES),
    "optim": get_args(Optimiser),
    "logging_strategy": get_args(Strategy),
    "eval_strategy": get_args(Strategy),
    "save_strategy": get_args(SaveStrategy),
    "train_sampling_strategy": get_args(Sampling),
    "include_num_input_tokens_seen": get_args(Counted),
}
"""Names whose values are one of these."""


def _check_values(given: TrainingArguments) -> None:
    """Refuse a value that is none of those that its name can have."""
    for names, wanted, fits in _RULES:
        for name in names.split():
            value = getattr(given, name)
            if not fits(value):
                raise RequestError(f"{name} is not valid", wanted=wanted, got=shown(value))
    for name, known in _NAMED.items():
        value = getattr(given, name)
        if value not in known:
            wanted = "one of " + ", ".join(map(repr, known))
            raise RequestError(f"{name} is not valid", wanted=wanted, got=shown(value))
    unknown = {*given.reports} - {*REPORTS}
    if unknown:
        raise UnsupportedError(
            "report_to names who is not known here",
            wanted=f"'none', or a list of {_REPORTS}",
            got=shown(sorted(unknown)),
            do="Pass callbacks=[...] with an on_log of your own",
        )


def _check_together(given: TrainingArguments) -> None:
    """Refuse choices that contradict one another."""
    names = given.activation_checkpointing, given.gradient_checkpointing
    if None not in names and names[0] != names[1]:
        do = "Pass activation_checkpointing alone"
        raise RequestError("activation_checkpointing and gradient_checkpointing disagree", do=do)
    if given.load_best_model_at_end:
        if given.eval_strategy == "no" or given.save_strategy == "no":
            raise RequestError(
                "load_best_model_at_end compares checkpoints that were evaluated",
                wanted="an eval_strategy and a save_strategy",
                got=f"{given.eval_strategy!r} and {given.save_strategy!r}",
                do="Pass eval_strategy='epoch' and save_strategy='epoch', say",
            )
        if given.save_strategy not in (given.eval_strategy, "best"):
            raise RequestError(
                "load_best_model_at_end needs an evaluation before each save",
                wanted=f"save_strategy={given.eval_strategy!r} or 'best'",
                got=repr(given.save_strategy),
            )
    if given.save_strategy == "best" and given.metric_for_best_model is None:
        do = "Pass metric_for_best_model='loss', say"
        raise RequestError("save_strategy='best' needs a metric", wanted="its name", do=do)
    for name in ("generation_config", "generation_max_length", "generation_num_beams"):
        if getattr(given, name) is not None and not given.predict_with_generate:
            do = f"Pass predict_with_generate=True, or leave {name} out"
            raise RequestError(f"{name} has no effect without predict_with_generate", do=do)
    if given.resume_from_checkpoint and given.save_only_model:
        do = "Leave save_only_model out"
        raise RequestError("a run of save_only_model cannot be resumed", do=do)
