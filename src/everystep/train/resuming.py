"""What a run that goes on has in common with the one that wrote its checkpoint.

To the bit it goes on only with the same seeds, data, schedule and optimizer. What is other and
would have no effect, or would be read from the wrong place, is an error; what is other and has one
is a warning.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from everystep.errors import RequestError, shown
from everystep.nn.digests import add_tensor
from everystep.train.arguments import TrainingArguments

_OF_ORDER = ("data_seed", "train_sampling_strategy", "dataloader_drop_last")
"""Choices that say which example comes when."""
_OF_SCHEDULE = ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs")
_OF_STEPS = ("seed", *_OF_SCHEDULE, "max_grad_norm", "label_smoothing_factor", "bf16")
"""Choices that change what a step gives; those of the optimizer lie in its groups."""
_SETTINGS = {
    "initial_lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1 or adam_beta2",
    "eps": "adam_epsilon",
    "momentum": "momentum",
    "fused": "optim",
}
"""Keys of an optimizer's groups that stay as they begin, and the arguments that say them."""
_DATA = "train_dataset"


def digest_of(read: Callable[[int], Mapping[str, object]], places: Sequence[int]) -> str:
    """Return a text that is equal for rows that agree in every bit."""
    digest = hashlib.sha256()
    for place in places:
        for name, one in sorted(read(place).items()):
            if isinstance(one, Tensor):
                add_tensor(digest, name, one)
            else:
                digest.update(f"{name} {one!r}\n".encode())
    return digest.hexdigest()


def described(
    args: TrainingArguments, count: int, digest: str, *, own_schedule: bool
) -> dict[str, Any]:
    """Return what a checkpoint says of the choices and the data of its run, as JSON holds it."""
    every = args.to_dict()
    found = {name: every[name] for name in (*_OF_ORDER, *_OF_STEPS)}
    found["data_seed"] = args.seed if args.data_seed is None else args.data_seed
    if own_schedule:
        found = {name: one for name, one in found.items() if name not in _OF_SCHEDULE}
    found[_DATA] = {"examples": count, "digest": digest}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def compare(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any], *, skips: bool) -> None:
    """Refuse, or warn of, what makes a run another one than that of a checkpoint.

    `skips`: the run finds its place in the data again, which other data do not have.
    """
    other = [name for name in now if name in then and not _same(name, then, now)]
    order = [name for name in other if name in (*_OF_ORDER, _DATA)]
    if order and skips:
        name = order[0]
        raise RequestError(
            f"the checkpoint {folder} is of a run of another {name}, so its place in the data is "
            "none here",
            wanted=_told(then[name]),
            got=_told(now[name]),
            do="Pass what that run had, or ignore_data_skip=True to begin the epoch anew with this",
        )
    steps = [one for one in other if one not in order]
    if steps:
        each = ", ".join(f"{one} {shown(now[one])} (was {shown(then[one])})" for one in steps)
        warnings.warn(
            f"the run goes on from {folder} in another way than it began: {each}", stacklevel=4
        )
    if not now[_DATA]["digest"]:
        warnings.warn(
            "train_dataset makes other examples each time they are read, whatever the seed: the "
            f"run goes on from {folder}, but not to the bit",
            stacklevel=4,
        )
    if not then:
        warnings.warn(
            f"{folder} does not say of which seed, data and schedule it is: the run goes on with "
            "those of now",
            stacklevel=4,
        )


def _same(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a choice is the same; of data without a digest the number decides."""
    if name == _DATA and "" in (then[_DATA]["digest"], now[_DATA]["digest"]):
        return bool(then[_DATA]["examples"] == now[_DATA]["examples"])
    return bool(then[name] == now[name])


def _told(value: Any) -> str:
    """Return a choice in words; data by their number, and by the digest where that is the same."""
    if not isinstance(value, Mapping):
        return shown(value)
    return f"{value['examples']} examples, digest {value['digest'][:12]}"


def require_alike(
    folder: Path, then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse groups of an optimizer whose settings are not those of a checkpoint, which they would
    have afterwards. The rate of a step is the schedule's."""
    for old, new in zip(then, now, strict=False):
        if unknown := new.keys() - old.keys():
            _refuse(folder, "optim", f"no {min(unknown)}", f"{min(unknown)} in it")
        for name in _SETTINGS.keys() & new.keys():
            if _plain(old[name]) != _plain(new[name]):
                _refuse(folder, _SETTINGS[name], old[name], new[name])


def _plain(value: Any) -> Any:
    plain = value.tolist() if isinstance(value, Tensor) else value
    return list(plain) if isinstance(plain, tuple) else plain  # as JSON holds it


def _refuse(folder: Path, name: str, then: object, now: object) -> NoReturn:
    raise RequestError(
        f"the checkpoint {folder} is of a run of another {name}, which a run that goes on keeps",
        wanted=shown(then),
        got=shown(now),
        do="Pass what that run had; or begin a new run, with another output_dir, from the model "
        "in the checkpoint",
    )
