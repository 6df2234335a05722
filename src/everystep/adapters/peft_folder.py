"""Folders of adapters as the PEFT library has them: adapter_config.json and
adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from everystep.adapters.peft_adapter import AdapterPlan, PeftAdapter
from everystep.adapters.peft_kinds import KINDS
from everystep.errors import FormatError, MissingFileError
from everystep.files.atomic import atomic_files
from everystep.files.opening import as_path
from everystep.files.safetensors import Weights, open_weights
from everystep.files.safetensors_writer import Entry, is_of_weights, write_weights
from everystep.files.strict_json import read_json
from everystep.models import Model
from everystep.models.config import Fields

CONFIG = "adapter_config.json"
STEM = "adapter_model"


@dataclass(frozen=True, slots=True)
class AdapterContents:
    """The contents of an adapter's folder, before any model is asked.

    `settings`: the values of its configuration. `shapes`: those of its tensors, by PEFT's names.
    """

    settings: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def kind(self) -> str | None:
        """The name of its kind, None for one that is not read."""
        given = self.settings.get("peft_type", "LORA")
        return KINDS[given].name if isinstance(given, str) and given in KINDS else None


def adapter_contents(folder: str | PathLike[str]) -> AdapterContents:
    """Return what is in the folder of an adapter; MissingFileError and FormatError as
    `read_adapter`."""
    values, weights = _opened(as_path(folder))
    return AdapterContents(values, {one: weights.shape(one) for one in weights.names()})


def _opened(folder: Path) -> tuple[dict[str, object], Weights]:
    """Return the configuration and the weights in a folder."""
    values = read_json(folder / CONFIG)
    if values is None:
        raise MissingFileError(f"{folder} is not the folder of an adapter", wanted=CONFIG)
    return values, open_weights(folder, STEM)


def read_adapter(folder: str | PathLike[str], model: Model) -> PeftAdapter:
    """Return the adapter in a folder, for this model.

    Raise MissingFileError, FormatError (a broken file; tensors that do not fit each other, the
    configuration or the model) and UnsupportedError (see `AdapterPlan.of`).
    """
    folder = as_path(folder)
    values, weights = _opened(folder)
    # Some files have the names of an adapter in memory, with its own name among them.
    there = {re.sub(r"\.default(?=\.|$)", "", name): name for name in weights.names()}
    if len(there) < len(weights.names()):
        got = f"{len(there)} of {len(weights.names())}"
        raise FormatError(f"{folder}: names of tensors stand for the same one", got=got)
    plan = AdapterPlan.of(Fields(values, str(folder / CONFIG)), there, model)
    tensors = {
        name: (_whole if name in plan.places else _finite)(name, weights.load(one))
        for name, one in there.items()
    }
    found = PeftAdapter(plan, tensors)
    found.now()  # which finds shapes that do not fit
    return found


def _whole(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor; FormatError unless its values are whole numbers."""
    if tensor.dtype not in (torch.int32, torch.int64):
        wanted, got = "int32 or int64", str(tensor.dtype)
        raise FormatError(f"the adapter's tensor {name!r} has no places", wanted=wanted, got=got)
    return tensor


def _finite(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor; FormatError unless its values are finite floats."""
    if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
        raise FormatError(
            f"the adapter's tensor {name!r} cannot be computed with",
            wanted="finite floating-point values",
            got=str(tensor.dtype) if not tensor.is_floating_point() else "inf or nan",
            do="Train it anew, with a smaller rate of learning or in float32",
        )
    return tensor


def write_adapter(folder: str | PathLike[str], adapter: PeftAdapter) -> None:
    """Write the adapter into a folder that PEFT and `read_adapter` read.

    Files of an adapter that was there are replaced, others stay; where writing fails, the folder
    is as it was.
    """
    tensors = adapter.tensors
    entries = [Entry(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
    config = json.dumps({**adapter.settings, "inference_mode": True}, indent=2, sort_keys=True)
    with atomic_files(as_path(folder), CONFIG, partial(is_of_weights, stem=STEM)) as new:
        write_weights(new, entries, (one.detach() for one in tensors.values()), stem=STEM)
        (new / CONFIG).write_text(config + "\n", encoding="utf-8")
