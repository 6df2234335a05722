"""Filling a model's slots from a source: joined, converted, quantised and placed.

Each slot is made when it is taken, part by part, so that the peak is the model and one tensor. What
a source is made of and what a slot is used for is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from everystep.models.names import Slot, SlotPart
from everystep.nn.linear import Matrix, Weight, joined, weights_of
from everystep.nn.panels import Arena, Panels
from everystep.nn.quantized import QuantizedWeight
from everystep.nn.rounding import Rounding, quantize


class TensorSource(Protocol):
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


Kept = Callable[[str], QuantizedWeight | None]
"""A weight as its source has it, in memory of its own; None where it is not quantised."""

InPanels = Callable[[Any], bool]
"""Whether a model of this specification, in float32 or codes on the CPU, is held in panels."""


def nothing_kept(name: str) -> QuantizedWeight | None:
    """None: every weight is read as values."""
    return None


def never_in_panels(spec: Any) -> bool:
    """False: torch operators alone read the weights."""
    return False


@dataclass(frozen=True)
class Storage:
    """How a model holds its weights.

    `rounding`: matrices are quantised when they are loaded. `exact_activations`: quantised matrices
    read activations as they are. `panels`: matrices lie in panels, which float32 and codes can.
    `learns`: all weights are plain float tensors that require gradients.
    """

    dtype: torch.dtype
    device: torch.device
    rounding: Rounding | None = None
    exact_activations: bool = False
    panels: bool = False
    learns: bool = False


class Slots:
    """A source as slots, see `Filled`."""

    def __init__(
        self, slots: list[Slot], source: TensorSource, storage: Storage, kept: Kept = nothing_kept
    ) -> None:
        self._slots = {slot.key: slot for slot in slots}
        self._source = source
        self._storage = storage
        self._kept = kept
        self._arena = Arena()

    @property
    def exact_activations(self) -> bool:
        """Whether quantised matrices are to read activations as they are."""
        return self._storage.exact_activations

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def take(self, key: str) -> Tensor:
        """The values of a slot."""
        return self._values(self._slots.pop(key))

    def matrix(self, key: str) -> Matrix:
        """The weight of a slot, quantised where its source keeps it so or the storage asks."""
        found = self._matrix(self._slots.pop(key))
        if not self._storage.panels:
            return found
        packed = tuple(self._packed(weight) for weight in weights_of(found))
        return packed if len(packed) > 1 else packed[0]

    def _matrix(self, slot: Slot) -> Matrix:
        kept = [self._kept(part.name) for part in slot.parts]
        if any(one is not None for one in kept):
            return joined([self._weight(*pair) for pair in zip(slot.parts, kept, strict=True)])
        values, rounding = self._values(slot), self._storage.rounding
        return values if rounding is None else quantize(values, rounding)

    def _values(self, slot: Slot) -> Tensor:
        storage = self._storage
        tensor = torch.empty(slot.shape, dtype=storage.dtype, device=storage.device)
        for part in slot.parts:
            # What a source returns may be a view of a mapped file: the copy is the model's own.
            tensor[part.start : part.stop].copy_(self._source.load(part.name, storage.dtype))
        return tensor.requires_grad_(storage.learns)

    def _packed(self, weight: Weight) -> Panels:
        return weight if isinstance(weight, Panels) else Panels.of(weight, self._arena)

    def _weight(self, part: SlotPart, kept: QuantizedWeight | None) -> Weight:
        if kept is not None:
            return kept.to(self._storage.device)
        values = self._source.load(part.name, self._storage.dtype)
        return values.to(self._storage.device, copy=True)
