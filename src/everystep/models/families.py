"""The families of models that can be built, by the `model_type` of their configuration.

A family is one file with a `FAMILY`; it is imported when a model of it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from everystep.errors import UnsupportedError, message, nearest
from everystep.models.names import Filled, Slot
from everystep.nn.linear import Matrix
from everystep.nn.network import Network

_MODULES: Mapping[str, str] = {
    "llama": "everystep.models.llama",
    "mamba": "everystep.models.mamba",
    "mistral": "everystep.models.mistral",
    "qwen2": "everystep.models.qwen2",
    "t5": "everystep.models.t5",
}


@dataclass(frozen=True)
class Family:
    """How a configuration becomes a spec, a spec slots, and filled slots a network.

    `defaults`: what the configuration may leave out. `unused`: whether a name in a checkpoint is
    known to hold nothing that is needed. `tensors`: the inverse of `assemble`.
    """

    defaults: Mapping[str, Any]
    read_spec: Callable[[Mapping[str, Any]], Any]
    slots: Callable[[Any], list[Slot]]
    assemble: Callable[[Any, Filled], Network]
    tensors: Callable[[Any], Iterator[tuple[str, Matrix]]]
    unused: Callable[[Any, str], bool]


def known_families() -> tuple[str, ...]:
    """Every `model_type` that can be built."""
    return tuple(_MODULES)


def find_family(model_type: object) -> Family:
    """The family of a `model_type`; UnsupportedError when there is none."""
    if not isinstance(model_type, str) or model_type not in _MODULES:
        close = nearest(str(model_type), _MODULES)
        raise UnsupportedError(
            message(
                "this kind of model has no implementation here",
                wanted=f"model_type of {', '.join(known_families())}",
                got=repr(model_type),
                do=f"The nearest is {close!r}" if close else None,
            )
        )
    family: Family = import_module(_MODULES[model_type]).FAMILY
    return family
