"""Checkpoints of a run: folders that are whole or absent, and that say whether they are whole.

A folder `checkpoint-N` has the trained model as its own library reads it, the optimizer's numbers
as safetensors, and JSON. `checkpoint.json` has the size and the digest of every file: so a folder
that a disk or a copy has damaged is known, named and passed over. Nothing in it is code.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from everystep.errors import FileError, FormatError, MissingFileError, RequestError
from everystep.files.atomic import atomic_folder, remove_leftovers

MANIFEST, STATE, OPTIMIZER, GROUPS = (
    "checkpoint.json",
    "trainer_state.json",
    "optimizer.safetensors",
    "optimizer.json",
)
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{1,12})")
_PIECE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class KeptRun:
    """The rest of a run in a checkpoint, beside its model.

    `state`: the fields of its `TrainerState`. `optimizer`: its `state_dict`, None where only the
    model was kept. `more`: sums since the last log and states of schedule and callbacks, as JSON
    holds them.
    """

    state: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    more: Mapping[str, Any]


def step_of(folder: Path) -> int | None:
    """Return the step of a folder's name, None for another name."""
    found = _NAME.fullmatch(folder.name)
    return None if found is None else int(found[1])


def checkpoints_in(root: Path) -> list[Path]:
    """Return the folders of checkpoints, the oldest first."""
    if not root.is_dir():
        return []
    found = [one for one in root.iterdir() if step_of(one) is not None and one.is_dir()]
    return sorted(found, key=lambda one: step_of(one) or 0)


def write_checkpoint(folder: Path, save_model: Callable[[Path], object], kept: KeptRun) -> None:
    """Write a checkpoint, whole or not at all; one of the same name gives way to it.

    `save_model`: writes the model's files into a folder. FileError where the disk refuses.
    """
    try:
        remove_leftovers(folder.parent)
        if folder.exists():  # of a run that was resumed before it
            shutil.rmtree(folder)
        with atomic_folder(folder) as new:
            save_model(new)
            _write_json(new / STATE, kept.state)
            if kept.optimizer is not None:
                _write_optimizer(new, kept.optimizer)
            files = {one.name: _described(one) for one in sorted(new.iterdir())}
            _write_json(new / MANIFEST, {"format": _FORMAT, "more": kept.more, "files": files})
    except OSError as error:
        raise FileError(
            f"the checkpoint {folder} could not be written, and nothing of it is left",
            got=error,
            do="Make room, and go on from the checkpoint before it with resume_from_checkpoint",
        ) from error


def fault_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, None for one that is whole."""
    try:
        manifest = _read_json(folder / MANIFEST)
        files = manifest["files"]
        if manifest.get("format") != _FORMAT:
            return f"its format is {manifest.get('format')!r}, and this version reads {_FORMAT}"
        for name, described in files.items():
            if Path(name).name != name:
                return f"{MANIFEST} names {name!r}, which is no file of the folder"
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _described(folder / name) != described:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def newest_whole(root: Path) -> Path:
    """Return the newest checkpoint that is whole; warn of each newer one that is not.

    MissingFileError where there is none.
    """
    for folder in reversed(checkpoints_in(root)):
        fault = fault_of(folder)
        if fault is None:
            return folder
        warnings.warn(f"{folder} is passed over: {fault}", stacklevel=3)
    do = "Leave resume_from_checkpoint out to begin anew"
    raise MissingFileError(f"{root} has no checkpoint that is whole", do=do)


def require_whole(folder: Path) -> Path:
    """Return the folder; FileError where it is no checkpoint, or a broken one."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder} is no folder", wanted="the folder of a checkpoint")
    fault = fault_of(folder)
    if fault is not None:
        do = "Pass resume_from_checkpoint=True for the newest one that is whole"
        raise FormatError(f"{folder} is no whole checkpoint: {fault}", do=do)
    return folder


def read_kept_run(folder: Path) -> KeptRun:
    """Return what a run goes on with; FormatError for a checkpoint of the model alone."""
    require_whole(folder)
    if not (folder / GROUPS).is_file():
        do = "Load the model from it, and begin anew"
        raise FormatError(f"{folder} has the model alone, as save_only_model asked", do=do)
    more = _read_json(folder / MANIFEST)["more"]
    return KeptRun(_read_json(folder / STATE), _read_optimizer(folder), more)


def keep_newest(root: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond so many, but never the best one."""
    if limit is None:
        return
    others = [one for one in checkpoints_in(root) if str(one) != best]
    room = limit - (best is not None and len(others) < len(checkpoints_in(root)))
    for folder in others[: max(0, len(others) - max(room, 1))]:
        shutil.rmtree(folder)


# --- the optimizer --------------------------------------------------------------------------------


def _write_optimizer(folder: Path, values: Mapping[str, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, held in values["state"].items():
        for name, value in held.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = value.detach().contiguous()
            else:
                plain.setdefault(str(number), {})[name] = value
    save_file(tensors, folder / OPTIMIZER)
    groups = [{key: _plain(value) for key, value in one.items()} for one in values["param_groups"]]
    _write_json(folder / GROUPS, {"param_groups": groups, "plain": plain})


def _read_optimizer(folder: Path) -> dict[str, Any]:
    told = _read_json(folder / GROUPS)
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in load_file(folder / OPTIMIZER).items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    for number, held in told["plain"].items():
        state.setdefault(int(number), {}).update(held)
    groups = [
        {key: tuple(one) if key == "betas" else one for key, one in group.items()}
        for group in told["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# --- files ----------------------------------------------------------------------------------------


def _described(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(_PIECE), b""):
            digest.update(piece)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_json(path: Path, values: object) -> None:
    try:
        text = json.dumps(values, indent=2, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        what = f"{path.name} cannot hold the state of a callback, a schedule or an optimizer"
        raise RequestError(what, wanted="what JSON holds", got=error) from error
    path.write_text(text + "\n", encoding="utf-8")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], folder: Path) -> None:
    """Copy values into the tensors of the same names; FormatError where one lacks or differs."""
    with torch.no_grad():
        for name, target in targets.items():
            found = values.get(name)
            if found is None or found.shape != target.shape:
                got = "nothing" if found is None else f"shape {tuple(found.shape)}"
                raise FormatError(
                    f"the checkpoint {folder} is of another model or other trained weights",
                    wanted=f"{name} of shape {tuple(target.shape)}",
                    got=got,
                    do="Make the model and the Trainer as in the run that wrote it",
                )
            target.copy_(found)
