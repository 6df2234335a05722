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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from everystep.errors import FileError, FormatError, MissingFileError, RequestError
from everystep.files.atomic import atomic_folder, remove_leftovers
from everystep.train.ranks import ALONE, Ranks

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


def write_checkpoint(
    folder: Path, save_model: Callable[[Path], object], kept: KeptRun, ranks: Ranks = ALONE
) -> None:
    """Write a checkpoint, whole or not at all; one of the same name gives way to it.

    All processes write their parts of the optimizer; when all are there, the first one writes what
    says so. `save_model`: writes the model's files into a folder, called by all of them. FileError
    where the disk refuses.
    """
    try:
        with ExitStack() as open_:
            new = Path(ranks.once(lambda: str(open_.enter_context(_begun(folder)))))
            save_model(new)
            own = [] if kept.optimizer is None else _parts_of(kept.optimizer["state"], ranks)
            parts = ranks.together(lambda: _write_part(new, own, ranks))
            ranks.once(lambda: _commit(new, kept, parts))
            ranks.once(open_.close)
    except OSError as error:
        raise FileError(
            f"the checkpoint {folder} could not be written, and nothing of it is left",
            got=error,
            do="Make room, and go on from the checkpoint before it with resume_from_checkpoint",
        ) from error


@contextmanager
def _begun(folder: Path) -> Iterator[Path]:
    """Yield a folder beside the checkpoint's place, which it takes when the block ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent)
    if folder.exists():  # of a run that was resumed before it
        shutil.rmtree(folder)
    with atomic_folder(folder) as new:
        yield new


def _commit(new: Path, kept: KeptRun, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write what makes a folder with all parts a checkpoint."""
    _write_json(new / STATE, kept.state)
    if kept.optimizer is not None:
        _write_groups(new, kept.optimizer, parts)
    written = {one["file"]: one["described"] for one in parts if one["file"] is not None}
    for name, described in written.items():
        if not (new / name).is_file() or (new / name).stat().st_size != described["bytes"]:
            raise FileError(
                f"{name} of another process is not in {new}",
                wanted="an output_dir that all processes share",
                do="Put output_dir on a file system that every machine of the run sees",
            )
    files = {one.name: written.get(one.name) or _described(one) for one in sorted(new.iterdir())}
    _write_json(new / MANIFEST, {"format": _FORMAT, "more": kept.more, "files": files})


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


def read_kept_run(folder: Path, lay: Lay | None = None) -> KeptRun:
    """Return what a run goes on with, from a checkpoint that is whole; `lay`: how this process
    holds tensors of the optimizer, None for whole.

    FormatError for a checkpoint of the model alone.
    """
    if not (folder / GROUPS).is_file():
        do = "Load the model from it, and begin anew"
        raise FormatError(f"{folder} has the model alone, as save_only_model asked", do=do)
    more = _read_json(folder / MANIFEST)["more"]
    return KeptRun(_read_json(folder / STATE), _read_optimizer(folder, lay or _as_it_is), more)


def keep_newest(root: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond so many, but never the best one, which may be named by
    another path to the folder."""
    if limit is None:
        return
    kept = None if best is None else Path(best).name
    others = [one for one in checkpoints_in(root) if one.name != kept]
    room = limit - (len(others) < len(checkpoints_in(root)))
    for folder in others[: max(0, len(others) - max(room, 1))]:
        shutil.rmtree(folder)


# --- the optimizer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _OptimizerPart:
    """A tensor of an optimizer, or rows of one from `first` on of as many as `shape` says."""

    name: str
    values: Tensor
    first: int
    shape: tuple[int, ...]


def _parts_of(state: Mapping[int, Mapping[str, Any]], ranks: Ranks) -> list[_OptimizerPart]:
    """Return what this process writes: its rows of tensors that lie in parts, and of the others,
    which all of them have, every `count`-th."""
    found = []
    for place, (number, held) in enumerate(state.items()):
        for name, value in held.items():
            if not isinstance(value, Tensor):
                continue
            if (own := rows_here(value)) is not None:
                found.append(_OptimizerPart(f"{number}.{name}", *own, tuple(value.shape)))
            elif place % ranks.count == ranks.number:
                found.append(
                    _OptimizerPart(f"{number}.{name}", value.detach(), 0, tuple(value.shape))
                )
    return found


def _write_part(folder: Path, parts: Sequence[_OptimizerPart], ranks: Ranks) -> dict[str, Any]:
    """Write these, and return the name, size and digest of the file, and where its rows belong."""
    if not parts:
        return {"file": None, "described": None, "rows": {}}
    name = OPTIMIZER
    if ranks.count > 1:
        stem, ending = OPTIMIZER.split(".")
        name = f"{stem}-{ranks.number + 1:05}-of-{ranks.count:05}.{ending}"
    save_file({one.name: one.values.contiguous() for one in parts}, folder / name)
    rows = {
        one.name: [one.first, *one.shape] for one in parts if tuple(one.values.shape) != one.shape
    }
    return {"file": name, "described": _described(folder / name), "rows": rows}


def _write_groups(
    folder: Path, values: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> None:
    plain: dict[str, dict[str, Any]] = {}
    for number, held in values["state"].items():
        for name, value in held.items():
            if not isinstance(value, Tensor):
                plain.setdefault(str(number), {})[name] = value
    groups = [{key: _plain(value) for key, value in one.items()} for one in values["param_groups"]]
    files = {one["file"]: one["rows"] for one in parts if one["file"] is not None}
    _write_json(folder / GROUPS, {"param_groups": groups, "plain": plain, "files": files})


Lay = Callable[[int, tuple[int, ...], Callable[[int, int], Tensor]], Tensor]
"""The number of a trained tensor, the shape of what the optimizer keeps of it, and what gives rows
[first, stop) of that -> it, as this process holds it."""


def _read_optimizer(folder: Path, lay: Lay) -> dict[str, Any]:
    told = _read_json(folder / GROUPS)
    state: dict[int, dict[str, Any]] = {}
    pieces: dict[str, list[tuple[Path, int, int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file, rows in told["files"].items():
        with safe_open(folder / file, "pt") as held:
            for key in held.keys():  # noqa: SIM118 - no mapping
                shape = held.get_slice(key).get_shape()
                first, *whole = rows.get(key, [0, *shape])
                stop = first + (shape[0] if shape else 1)
                pieces.setdefault(key, []).append((folder / file, first, stop))
                shapes[key] = tuple(whole)
    for key, found in pieces.items():
        number, name = key.split(".", 1)
        read = partial(_rows_of, key, sorted(found, key=lambda one: one[1]), shapes[key])
        state.setdefault(int(number), {})[name] = lay(int(number), shapes[key], read)
    for number, beside in told["plain"].items():
        state.setdefault(int(number), {}).update(beside)
    groups = [
        {key: tuple(one) if key == "betas" else one for key, one in group.items()}
        for group in told["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _rows_of(
    key: str,
    pieces: Sequence[tuple[Path, int, int]],
    shape: tuple[int, ...],
    first: int,
    stop: int,
) -> Tensor:
    """Return rows [first, stop) of a tensor whose rows lie in several files, all of them of one
    that has none."""
    found = []
    for path, begin, end in pieces:
        if begin < stop and first < end:
            with safe_open(path, "pt") as held:
                if not shape:
                    values: Tensor = held.get_tensor(key)
                    return values
                found.append(held.get_slice(key)[max(first - begin, 0) : min(stop, end) - begin])
    if not found:
        with safe_open(pieces[0][0], "pt") as held:
            return held.get_slice(key)[:0]
    if sum(len(one) for one in found) != stop - first:
        raise FormatError(f"rows {first} to {stop} of {key} are not all in the checkpoint")
    return torch.cat(found) if len(found) > 1 else found[0]


def _as_it_is(_: int, shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> Tensor:
    return read(0, shape[0] if shape else 1)


def rows_here(tensor: Any) -> tuple[Tensor, int] | None:
    """Return the rows of a tensor that this process has and the number of the first of them, None
    for one that does not lie in parts."""
    if not hasattr(tensor, "to_local"):
        return None
    count, mesh = tensor.shape[0], tensor.device_mesh
    first = mesh.get_local_rank() * -(-count // mesh.size())  # as torch cuts them
    return tensor.to_local().detach(), min(count, first)


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
            own = rows_here(target)
            if own is None:
                target.copy_(found)
            else:
                rows, first = own
                rows.copy_(found[first : first + len(rows)])
