"""The arguments of `load_adapter` and `add_adapter`, by the names of transformers and PEFT too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

from everystep.adapters.peft_config import AdapterConfig, LoHaConfig, LoraConfig
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError, nearest, shown

DEFAULT_NAME = "default"

Given = Mapping[str, object]
"""Arguments by names of other libraries."""

_FOLDERS = ("peft_model_id", "model_id")
_CONFIGS = ("adapter_config", "peft_config")
_NEVER: Mapping[str, tuple[object, str]] = {
    "adapter_state_dict": (None, "Write it into a folder with its adapter_config.json"),
    "low_cpu_mem_usage": (False, "Leave it out: tensors are made once"),
    "hotswap": ("auto", "Call delete_adapter first"),
    "local_files_only": (False, "Leave it out: only folders are read"),
    "adapter_kwargs": (None, "Leave it out"),
    "load_config": (None, "Leave it out"),
    "torch_device": (None, "Leave it out: adapters lie where the model does"),
    "autocast_adapter_dtype": (True, "Leave it out: what learns is float32"),
    "ephemeral_gpu_offload": (False, "Leave it out"),
    "key_mapping": (None, "Write the names of the model's modules into the file"),
}
"""What the others take beside, the values that say nothing, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The folder of an adapter to load, a name for it, and whether it `learns`."""

    folder: str | PathLike[str]
    name: str
    learns: bool


@dataclass(frozen=True, slots=True)
class Adding:
    """The configuration of an adapter to make, and a name for it."""

    config: AdapterConfig
    name: str


def read_loading(folder: object, name: object, learns: object, rest: Given) -> Loading:
    """Return what `load_adapter` is asked for; RequestError for what cannot be."""
    left = dict(rest)
    folder = _one(folder, left, *_FOLDERS)
    name = _one(name, left, "adapter_name")
    if _one(None, left, "peft_config") is not None:
        do = "Call add_adapter with the config, or name a folder"
        raise UnsupportedError("load_adapter reads the config that is in the folder", do=do)
    _refuse_rest("load_adapter", left, ("folder", "name", "is_trainable", *_FOLDERS))
    if not isinstance(learns, bool):
        raise RequestError("is_trainable is no flag", wanted="True or False", got=shown(learns))
    if not isinstance(folder, str | PathLike):
        what, got = "load_adapter reads a folder", shown(folder)
        raise RequestError(what, wanted="a path", got=got, do="Pass load_adapter(folder, name)")
    return Loading(folder, DEFAULT_NAME if name is None else name, learns)  # type: ignore[arg-type]


def read_adding(name: object, config: object, rest: Given) -> Adding:
    """Return what `add_adapter` is asked for, in either order; RequestError for what cannot be."""
    left, kinds = dict(rest), (LoraConfig, LoHaConfig)
    if isinstance(name, kinds) or isinstance(config, str):
        name, config = config, name
    config = _one(config, left, *_CONFIGS)
    name = _one(name, left, "adapter_name")
    _refuse_rest("add_adapter", left, ("name", "config", "adapter_name", *_CONFIGS))
    if not isinstance(config, kinds):
        raise RequestError(
            "add_adapter makes an adapter of a configuration",
            wanted="an es.LoraConfig or es.LoHaConfig",
            got=shown(config),
            do='Pass es.LoraConfig(r=8, target_modules="all-linear"), say',
        )
    return Adding(config, DEFAULT_NAME if name is None else name)  # type: ignore[arg-type]


def _one(own: object, left: dict[str, object], *others: str) -> object:
    """Return a value that has several names, taking those out; RequestError for two values."""
    given = [one for name in others if (one := left.pop(name, None)) is not None]
    given += [own] if own is not None else []
    if len(given) > 1:
        wanted, got = "one of these", shown(given)
        raise RequestError(f"{others[0]} is given twice", wanted=wanted, got=got)
    return given[0] if given else None


def _refuse_rest(call: str, left: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name, value in left.items():
        if name not in _NEVER:
            near = nearest(name, known)
            do = f"Perhaps you meant {near}" if near else f"Arguments are {', '.join(known)}"
            raise UnknownArgumentError(f"{call} knows no {name!r}", do=do)
        idle, do = _NEVER[name]
        if value != idle:
            what = f"{name} has no effect on an adapter of this library"
            raise UnsupportedError(what, wanted=shown(idle), got=shown(value), do=do)
