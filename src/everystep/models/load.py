"""From a configuration and a source of weights to a model, and back to named weights.

Names and shapes are compared before the first value is read. Then each slot is allocated in the
wanted type on the wanted device, filled part by part, and laid out before the next one is, so that
the peak is the model and one tensor. What a source is made of is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from everystep.errors import FormatError, UnsupportedError, message
from everystep.models.config import ModelConfig
from everystep.models.families import Family, find_family
from everystep.models.model import Model
from everystep.models.names import Slot
from everystep.nn.network import Network

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class Source(Protocol):
    """Named tensors that are read one by one."""

    def names(self) -> Iterable[str]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ...

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The values of a tensor."""
        ...


def build_model(
    config: Mapping[str, Any],
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """A model with the weights of `source`; without `dtype`, of the type its configuration names.

    Raises UnsupportedError (a family, a type, a value without implementation) and FormatError
    (impossible values; missing, unexpected or misshaped weights).
    """
    family = find_family(config.get("model_type"))
    values = complete_config(config)
    wanted = _dtype(config) if dtype is None else _supported(dtype)
    spec = family.read_spec(values)
    _check_names(family.slots(spec), source, lambda name: family.unused(spec, name))
    return Model(ModelConfig(values), spec, _network(family, spec, source, wanted, device))


def named_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its checkpoint name; parts of fused tensors are views of one copy."""
    family = find_family(model.config.model_type)
    slots = {slot.key: slot for slot in family.slots(model.spec)}
    for key, tensor in family.tensors(model.network):
        for part in slots[key].parts:
            yield part.name, tensor[part.start : part.stop]


def convert_model(
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """The same weights in another type or on another device; the given model stays as it is."""
    network = _network(
        find_family(model.config.model_type),
        model.spec,
        _Converted(model),
        model.dtype if dtype is None else _supported(dtype),
        model.device if device is None else device,
    )
    return Model(model.config, model.spec, network)


class _Converted:
    """A model as a source of its own weights."""

    def __init__(self, model: Model) -> None:
        self._tensors = dict(named_weights(model))

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._tensors[name].to(dtype)


def _network(
    family: Family, spec: Any, source: Source, dtype: torch.dtype, device: torch.device | str
) -> Network:
    with torch.inference_mode():
        slots = _Slots(family.slots(spec), source, dtype, torch.device(device))
        return family.assemble(spec, slots)


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json with its family's defaults; UnsupportedError without a family."""
    family = find_family(config.get("model_type"))
    # A null stays only where the family has no value for it, as in the reference.
    given = {key: value for key, value in config.items() if value is not None}
    absent = {key: None for key in config if key not in given}
    return {"is_encoder_decoder": False} | absent | dict(family.defaults) | given


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The type that the configuration names, float32 if it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = _DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise FormatError(
            message("config.json: dtype is unknown", wanted=", ".join(_DTYPES), got=repr(name))
        )
    return found


def _supported(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES.values():
        raise UnsupportedError(
            message("no model runs in this type", wanted=", ".join(_DTYPES), got=dtype)
        )
    return dtype


def _check_names(slots: list[Slot], source: Source, unused: Any) -> None:
    wanted = {part.name: (part.stop - part.start, *slot.shape[1:]) for slot, part in _parts(slots)}
    found = set(source.names())
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in sorted(found - set(wanted)) if not unused(name)]
    if missing:
        near = f"; there are also unknown ones: {_some(unexpected)}" if unexpected else ""
        raise FormatError(message(f"weights are missing: {_some(missing)}{near}"))
    if unexpected:
        raise FormatError(
            message(
                f"there are weights that this model has no place for: {_some(unexpected)}",
                do="Check that config.json and weights belong together",
            )
        )
    for name, shape in wanted.items():
        if tuple(source.shape(name)) != shape:
            raise FormatError(
                message(
                    f"the weight {name!r} does not fit config.json",
                    wanted=shape,
                    got=tuple(source.shape(name)),
                )
            )


def _parts(slots: list[Slot]) -> Iterator[tuple[Slot, Any]]:
    return ((slot, part) for slot in slots for part in slot.parts)


def _some(names: list[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


class _Slots:
    """A source as slots: names are joined, values converted, when a slot is taken."""

    def __init__(
        self, slots: list[Slot], source: Source, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._slots = {slot.key: slot for slot in slots}
        self._source = source
        self._dtype = dtype
        self._device = device

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def take(self, key: str) -> Tensor:
        slot = self._slots.pop(key)
        tensor = torch.empty(slot.shape, dtype=self._dtype, device=self._device)
        for part in slot.parts:
            # What a source returns may be a view of a mapped file: the copy is the model's own.
            tensor[part.start : part.stop].copy_(self._source.load(part.name, self._dtype))
        return tensor
