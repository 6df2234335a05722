"""The adapters of a model, by the names that requests ask for."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import torch

from everystep.adapters.adapter import Adapter
from everystep.adapters.peft_folder import read_adapter
from everystep.errors import RequestError, shown
from everystep.models import Model

Adapters = Mapping[str, Adapter]


def with_adapter(known: Adapters, name: str, folder: str | PathLike[str], model: Model) -> Adapters:
    """Return these and the adapter in a PEFT folder.

    Raise RequestError for a name taken or invalid.
    """
    if not isinstance(name, str) or not name or name in known:
        raise RequestError(
            "an adapter cannot have this name",
            wanted="a string, not the name of an adapter that is loaded",
            got=shown(name),
            do="Choose another, or call delete_adapter first",
        )
    return {**known, name: read_adapter(folder, model)}


def without_adapter(known: Adapters, name: str) -> Adapters:
    """Return these but the one of this name; raise RequestError where there is none."""
    require_adapter(known, name)
    return {key: one for key, one in known.items() if key != name}


def moved_adapters(known: Adapters, device: torch.device, dtype: torch.dtype) -> Adapters:
    """Return these on a device, in a type."""
    return {name: one.to(device, dtype) for name, one in known.items()}


def require_adapter(known: Adapters, name: str) -> None:
    """Raise RequestError where there is no adapter of this name."""
    if not isinstance(name, str) or name not in known:
        do = "Call load_adapter first"
        raise RequestError("there is no such adapter", wanted=list(known), got=shown(name), do=do)
