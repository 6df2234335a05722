"""A model as a folder that both this library and transformers load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from everystep.adapters import Adapters, merged, require_adapter
from everystep.config import GenerationConfig
from everystep.config.kinds import is_number
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.files.atomic import atomic_files
from everystep.files.model_folder import CONFIG, GENERATION_CONFIG
from everystep.files.opening import as_path
from everystep.files.safetensors_writer import Entry, is_of_weights, write_some, write_weights
from everystep.models import Model, exported_config, named_shapes, named_weights, stored_weights
from everystep.nn.quantized import QuantizedWeight

Folder = str | PathLike[str]
Merged = Sequence[str | tuple[str, float]]
"""Names of adapters, or pairs of a name and a weight."""


class Saving(NamedTuple):
    """The choices of `LanguageModel.save_pretrained`, which says what they are."""

    dtype: torch.dtype | None = None
    adapters: Merged | None = None
    max_shard_size: int | str = "5GB"


_UNITS = {
    unit: base**power
    for base, end in ((1000, "B"), (1024, "iB"))
    for power, letter in ((1, "K"), (2, "M"), (3, "G"))
    for unit in (f"{letter}{end}",)
}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def save_model(core: Model, settings: GenerationConfig, folder: Folder, saving: Saving) -> None:
    """Write a model, its adapters merged already; see `LanguageModel.save_pretrained`."""
    most_bytes = _bytes_of(saving.max_shard_size)
    wanted = _type_of(core, saving.dtype)
    config = _json_of(exported_config(core, wanted))
    entries = [Entry(name, shape, wanted) for name, shape in named_shapes(core)]
    with atomic_files(as_path(folder), last=CONFIG, stale=is_of_weights) as new:
        write_weights(new, entries, _converted(core, wanted), most_bytes)
        settings.to_json_file(new / GENERATION_CONFIG)
        (new / CONFIG).write_text(config, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class WeightsPart:
    """The number of a process among those that write a model together."""

    number: int
    count: int


@contextmanager
def begun_folder(folder: Folder) -> Iterator[Path]:
    """Yield a folder whose files are those of a model in `folder` when the block ends."""
    with atomic_files(as_path(folder), last=CONFIG, stale=is_of_weights) as new:
        yield new


def save_part(
    core: Model, settings: GenerationConfig, new: Path, part: WeightsPart
) -> Exception | None:
    """Write some weights of a model, and in the first process what stands beside them; return an
    error of this process.

    Weights may lie in parts: one after another is gathered, by all processes together, which this
    process takes part in whether its own files can be written or not.
    """
    wanted = _type_of(core, None)
    entries = [Entry(name, shape, wanted) for name, shape in named_shapes(core)]
    values = _converted(core, wanted)
    try:
        write_some(new, entries, values, part.number, part.count)
        if part.number == 0:
            settings.to_json_file(new / GENERATION_CONFIG)
            (new / CONFIG).write_text(_json_of(exported_config(core, wanted)), encoding="utf-8")
    except Exception as error:
        return error
    finally:
        for _ in values:  # the others wait for this process
            pass
    return None


def with_merged(core: Model, known: Adapters, asked: Merged | None) -> Model:
    """Return the model with the adapters that are asked for in its weights.

    RequestError for one that is not known, and where some are known and nothing is said of them.
    """
    if asked is None:
        if known:
            raise RequestError(
                "adapters are loaded, and are no part of the model's weights",
                wanted="which of them to merge into the weights that are written",
                got=f"{', '.join(map(repr, known))} and no choice",
                do="Pass adapters=[...], which may be empty",
            )
        return core
    given: Sequence[object] = asked if isinstance(asked, list | tuple) else [asked]
    each = [(one, 1.0) if isinstance(one, str) else one for one in given]
    pairs = [one for one in each if isinstance(one, tuple) and len(one) == 2 and is_number(one[1])]
    if len(pairs) < len(each):
        wanted = "a list of names, or of pairs (name, weight)"
        raise RequestError("adapters are not named", wanted=wanted, got=shown(asked))
    mix = [(require_adapter(known, name).now(), float(weight)) for name, weight in pairs]
    return merged(core, mix)


def _type_of(core: Model, asked: torch.dtype | None) -> torch.dtype:
    """Return the type that is written; UnsupportedError for codes that no type was asked for."""
    if asked is not None:
        if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
            what = "weights cannot be written in this type"
            raise RequestError(what, wanted="torch.float32, torch.bfloat16, ...", got=shown(asked))
        return asked
    if any(isinstance(one, QuantizedWeight) for _, one in stored_weights(core)):
        raise UnsupportedError(
            "quantised weights have no form that transformers reads",
            wanted="a dtype in which their values are written",
            got="no dtype",
            do="Pass dtype=torch.float32, say; `everystep quantize` writes folders of codes",
        )
    return core.float_type


def _converted(core: Model, dtype: torch.dtype) -> Iterator[Tensor]:
    for name, one in named_weights(core):
        found = one.to(dtype)
        if dtype == torch.float16 and not torch.equal(one.isfinite(), found.isfinite()):
            raise RequestError(
                f"{name} has values that float16 cannot hold",
                wanted="values up to 65504",
                got=float(one.abs().max()),
                do="Pass dtype=torch.bfloat16 or torch.float32",
            )
        yield found


def _json_of(config: Mapping[str, object]) -> str:
    try:
        return json.dumps(config, indent=2, sort_keys=True) + "\n"
    except TypeError as error:
        what = "the model's configuration holds what JSON cannot"
        raise RequestError(what, got=error, do="Make the model of plain values") from error


def _bytes_of(size: int | str) -> int:
    """Return the bytes that a shard may have, of a number or "5GB"."""
    if isinstance(size, str) and (found := _SIZE.fullmatch(size)) is not None:
        size = int(float(found[1]) * _UNITS[found[2]])
    if type(size) is not int or size < 1:
        raise RequestError(
            "max_shard_size is no size",
            wanted=f"a number of bytes, or one with a unit of {', '.join(_UNITS)}",
            got=shown(size),
            do="Pass '5GB', say",
        )
    return size
