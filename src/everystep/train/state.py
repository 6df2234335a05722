"""Where a run of training stands, and what its callbacks may change of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, final

from everystep.errors import FormatError


@final
@dataclass
class TrainerState:
    """The point that a run has reached; fields and their names in files are transformers'.

    `epoch`: rounds over the data, with the share of the one that is going on. `global_step`: steps
    that are done. `log_history`: what was logged, each with its step.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON holds them."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the state with these fields; FormatError where one is not known or lacks."""
        known = {one.name for one in fields(cls)}
        if values.keys() != known:
            other = sorted(values.keys() ^ known)
            raise FormatError("trainer_state.json has other fields", got=", ".join(other))
        return cls(**values)


@final
@dataclass
class TrainerControl:
    """Wishes of callbacks; the trainer clears each flag when it has done it."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def begin_step(self) -> None:
        """Ask for nothing after the step that begins."""
        self.should_log = self.should_evaluate = self.should_save = False


@final
@dataclass(frozen=True)
class TrainOutput:
    """`training_loss`: the mean of the steps. `metrics`: times and rates by name."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
