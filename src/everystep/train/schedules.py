"""Learning rates over steps: what each is multiplied by, under transformers' names.

A factor depends on the step alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

from everystep.config.kinds import is_number
from everystep.errors import RequestError, UnknownArgumentError, nearest, shown

Factor = Callable[[int], float]
"""A step, the first is 0 -> what learning rates are multiplied by."""


def _warming(step: int, warmup: int) -> float | None:
    """Return the factor of a step of the warmup, None after it."""
    return step / max(1, warmup) if step < warmup else None


def _done(step: int, warmup: int, steps: int) -> float:
    """Return which share of the steps after the warmup lies behind."""
    return (step - warmup) / max(1, steps - warmup)


def _constant(step: int, warmup: int, steps: int) -> float:
    return 1.0


def _warmed(step: int, warmup: int, steps: int) -> float:
    early = _warming(step, warmup)
    return 1.0 if early is None else early


def _linear(step: int, warmup: int, steps: int) -> float:
    early = _warming(step, warmup)
    return max(0.0, (steps - step) / max(1, steps - warmup)) if early is None else early


def _cosine(step: int, warmup: int, steps: int, num_cycles: float = 0.5) -> float:
    early = _warming(step, warmup)
    if early is not None:
        return early
    return max(0.0, 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * _done(step, warmup, steps))))


def _restarted(step: int, warmup: int, steps: int, num_cycles: int = 1) -> float:
    early = _warming(step, warmup)
    if early is not None:
        return early
    done = _done(step, warmup, steps)
    return 0.0 if done >= 1 else max(0.0, 0.5 * (1 + math.cos(math.pi * (num_cycles * done % 1))))


def _polynomial(
    step: int,
    warmup: int,
    steps: int,
    learning_rate: float,
    lr_end: float = 1e-7,
    power: float = 1.0,
) -> float:
    early = _warming(step, warmup)
    if early is not None:
        return early
    if step > steps:
        return lr_end / learning_rate
    left = 1 - (step - warmup) / (steps - warmup)
    return ((learning_rate - lr_end) * left**power + lr_end) / learning_rate


def _inverse_sqrt(step: int, warmup: int, steps: int, timescale: int | None = None) -> float:
    early = _warming(step, warmup)
    if early is not None:
        return early
    scale = timescale or warmup or 10_000
    return 1 / math.sqrt((step + scale - warmup) / scale)


def _cosine_to(
    step: int,
    warmup: int,
    steps: int,
    learning_rate: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    early = _warming(step, warmup)
    if early is not None:
        return early
    floor = min_lr_rate if min_lr_rate is not None else (min_lr or 0.0) / learning_rate
    wave = 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * _done(step, warmup, steps)))
    return max(0.0, wave * (1 - floor) + floor)


def _stable(
    step: int,
    warmup: int,
    steps: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    early = _warming(step, warmup)
    if early is not None:
        return early * (1 - min_lr_ratio) + min_lr_ratio
    level = steps - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    if step < warmup + level:
        return 1.0
    if step < warmup + level + num_decay_steps:
        done = (step - warmup - level) / max(1, num_decay_steps)
        wave = max(0.0, 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * done)))
        return wave * (1 - min_lr_ratio) + min_lr_ratio
    return min_lr_ratio


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _restarted,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _warmed,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_to,
    "warmup_stable_decay": _stable,
}
"""The formulas of transformers' `get_scheduler`, by its names."""

_OWN = ("step", "warmup", "steps", "learning_rate")


def factor_of(
    name: str,
    warmup: int,
    steps: int,
    learning_rate: float,
    settings: Mapping[str, Any] | None = None,
) -> Factor:
    """Return the factor of each step of a run of so many; `settings`: what the schedule is told.

    RequestError for settings that it does not have, or lacks.
    """
    formula, given = SCHEDULES[name], dict(settings or {})
    known = {key: one for key, one in signature(formula).parameters.items() if key not in _OWN}
    for key, value in given.items():
        if key not in known:
            near = nearest(key, known)
            do = f"Perhaps you meant {near}" if near else "Leave it out"
            raise UnknownArgumentError(f"the schedule {name!r} has no {key!r}", do=do)
        if value is not None and not is_number(value):
            what = f"{key} of the schedule {name!r} is no number"
            raise RequestError(what, wanted="a number", got=shown(value))
    for key, one in known.items():
        if one.default is Parameter.empty and key not in given:
            do = f"Pass lr_scheduler_kwargs={{{key!r}: ...}}"
            raise RequestError(f"the schedule {name!r} needs {key}", wanted="a number", do=do)
    if name == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & given.keys()) != 1:
        do = "Pass lr_scheduler_kwargs={'min_lr': ...}"
        raise RequestError(f"the schedule {name!r} needs min_lr or min_lr_rate", do=do)
    if name == "constant" and warmup:
        do = "Pass lr_scheduler_type='constant_with_warmup'"
        raise RequestError("the schedule 'constant' has no warmup", got=f"{warmup} steps", do=do)
    if name == "polynomial" and given.get("lr_end", 1e-7) >= learning_rate:
        what = "the schedule 'polynomial' ends at a lower rate than it begins with"
        raise RequestError(what, wanted=f"lr_end below {learning_rate}", got=given.get("lr_end"))
    if "learning_rate" in signature(formula).parameters:
        given["learning_rate"] = learning_rate
    return partial(formula, warmup=warmup, steps=steps, **given)
