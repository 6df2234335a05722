"""From a source of weights to the parts of a network, and back.

Each parameter is made when it is taken, part by part, so that the peak is the model and one tensor:
joined, converted, quantised and placed. What a source is made of is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from everystep.models.parameters import Parameter, ParameterPart
from everystep.models.spec import NormSpec
from everystep.nn.attention import RelativeBias
from everystep.nn.experts import Experts
from everystep.nn.linear import (
    Linear,
    LinearMap,
    Matrix,
    Rows,
    SideBySide,
    Weight,
    dense,
    joined,
    packed_linear,
    shared_linear,
    weights_of,
)
from everystep.nn.network import Network
from everystep.nn.norm import Norm
from everystep.nn.panels import Arena, Panels, ReadRows
from everystep.nn.quantized import QuantizedWeight
from everystep.nn.rounding import Rounding, quantize, require_numbers
from everystep.nn.split import Split


class TensorSource(Protocol):
    """Named tensors that are read one by one."""

    def names(self) -> Iterable[str]:
        """Return all names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of a tensor."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """A source that can read some rows of a tensor alone."""

    def load_rows(
        self, name: str, first: int, end: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the values of the rows from `first` to `end`."""
        ...


def load_rows(
    source: TensorSource, name: str, first: int, end: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the values of some rows of a tensor, reading no others where the source can do so."""
    if isinstance(source, RowSource):
        return source.load_rows(name, first, end, dtype)
    return source.load(name, dtype)[first:end]


Kept = Callable[[str], QuantizedWeight | None]
"""A weight as its source has it, in memory of its own; None where it is not quantised."""


T = TypeVar("T")


@dataclass(frozen=True)
class HeldWeights:
    """Weights in memory as a source."""

    weights: Mapping[str, Rows]

    def names(self) -> Iterable[str]:
        return self.weights

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.weights[name].shape)

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return dense(self.weights[name]).detach().to(dtype)

    def quantised(self, name: str) -> QuantizedWeight | None:
        """Return the weight of this name, None where it is floats."""
        weight = self.weights[name]
        return weight if isinstance(weight, QuantizedWeight) else None


@dataclass(frozen=True)
class WeightLoader:
    """The parameters of a network, filled from a source when they are taken, each once.

    `dtype`: the type of matrices that are not codes. `kept`: where the source has a quantised
    weight for a name, that is used as it is. `rounding`: matrices are quantised when they are
    loaded. `exact_activations`: quantised matrices read activations as they are. `panels`: matrices
    lie in panels, which are computed with in float32, and this reads their rows.
    `learns`: all weights are plain parameters that require gradients, one for each name. `split`:
    the process's part of the network, where the parameters and the source are those of a part.
    """

    parameters: dict[str, Parameter]
    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    kept: Kept | None = None
    rounding: Rounding | None = None
    exact_activations: bool = False
    panels: ReadRows | None = None
    learns: bool = False
    split: Split | None = None
    _arena: Arena = field(default_factory=Arena)

    def frame(self, spec: Any) -> tuple[Weight, Norm, LinearMap]:
        """Load the table of token embeddings, the last norm, and the head, maybe the table too."""
        table = self.table("embed")
        norm = self.norm(spec.norm, "norm")
        if not spec.tied:
            return table, norm, self.linear("head")
        bias = self.tensor_if("head.bias")
        head = shared_linear(table, bias, exact_activations=self.exact_activations)
        return table, norm, head

    def layers(self, kind: type[T], key: str, count: int, norm: NormSpec) -> tuple[T, ...]:
        """Load layers of a dataclass whose fields are named as their parameters are.

        A field without parameters is None.
        """
        roles = [role.name for role in fields(cast(Any, kind))]
        keys = [f"{key}.{index}" for index in range(count)]
        return tuple(
            kind(**{role: self._part(f"{one}.{role}", norm) for role in roles}) for one in keys
        )

    def table(self, key: str) -> Weight:
        """Load a table of token embeddings."""
        (table,) = weights_of(self._matrix(key))
        return table

    def norm(self, spec: NormSpec, key: str) -> Norm:
        """Load a norm."""
        weight, bias = self.tensor(f"{key}.weight"), self.tensor_if(f"{key}.bias")
        return Norm(spec.kind, spec.eps, weight, bias, spec.plus_one)

    def linear(self, key: str) -> LinearMap:
        """Load a linear map in the layout that this machine prefers; one that learns, with a weight
        for each name."""
        if self.learns and len(self.parameters[f"{key}.weight"].parts) > 1:
            return self._apart(key)
        weight, bias = self._matrix(f"{key}.weight"), self.tensor_if(f"{key}.bias")
        return packed_linear(weight, bias, exact_activations=self.exact_activations)

    def _apart(self, key: str) -> SideBySide:
        weights = self.parameters.pop(f"{key}.weight")
        biases = self.parameters.pop(f"{key}.bias", None)
        held = {} if biases is None else {one.start: one for one in biases.parts}
        return SideBySide(
            tuple(
                Linear(
                    self._values(weights.alone(part), self.dtype),
                    None
                    if biases is None or part.start not in held
                    else self._values(biases.alone(held[part.start]), self._computed),
                )
                for part in weights.parts
            )
        )

    def experts(self, key: str) -> Experts:
        """Load experts, but do not round their router: a choice that differs is no small error."""
        values = self.tensor(f"{key}.router.weight")
        router = packed_linear(self._in_panels(values) if self.panels else values)
        up, down = (
            tuple(self.linear(f"{key}.{role}.{number}") for number in range(len(values)))
            for role in ("up", "down")
        )
        return Experts(router, up, down)

    def tensor(self, key: str) -> Tensor:
        """Load the values of a parameter."""
        values = self._values(self.parameters.pop(key), self._computed)
        return values if self.rounding is None else require_numbers(values, key)

    def tensor_if(self, key: str) -> Tensor | None:
        """Load the values of a parameter that the network may not have."""
        return self.tensor(key) if key in self.parameters else None

    def _part(self, key: str, norm: NormSpec) -> Norm | LinearMap | Experts | Tensor | None:
        if f"{key}.router.weight" in self.parameters:
            return self.experts(key)
        if f"{key}.weight" not in self.parameters:
            return self.tensor_if(key)
        return self.norm(norm, key) if key.endswith("norm") else self.linear(key)

    def _matrix(self, key: str) -> Matrix:
        """Load a weight that is only multiplied by or looked up in: it may be quantised."""
        found = self._rows(self.parameters.pop(key))
        if not self.panels:
            return found
        if isinstance(found, tuple):
            return tuple(map(self._in_panels, found))
        return self._in_panels(found)

    def _in_panels(self, rows: Rows) -> Panels:
        return Panels.of(rows, self._arena, self.panels)

    def _rows(self, parameter: Parameter) -> Rows | tuple[Rows, ...]:
        kept = [self._kept(part) for part in parameter.parts]
        if all(one is None for one in kept):
            values = self._values(parameter, self.dtype)
            return values if self.rounding is None else quantize(values, self.rounding)
        return joined([self._one(*pair) for pair in zip(parameter.parts, kept, strict=True)])

    def _kept(self, part: ParameterPart) -> QuantizedWeight | None:
        if self.kept is None or part.codes_name not in self.names:
            return None
        found = self.kept(part.codes_name)
        if found is None:
            return None
        for factors in (found.scales, found.mins, found.super_scales):
            if factors is not None and factors.is_floating_point():
                require_numbers(factors, part.codes_name)
        return part.loaded(found)

    def _one(self, part: ParameterPart, kept: QuantizedWeight | None) -> Rows:
        if kept is not None:
            return kept.to(self.device)
        return self._read(part, self._computed).to(self.device, copy=True)

    def _values(self, parameter: Parameter, dtype: torch.dtype) -> Tensor:
        whole = parameter.named_rows == parameter.shape[0]
        empty = torch.empty if whole else torch.zeros
        tensor = empty(parameter.shape, dtype=dtype, device=self.device)
        if parameter.made is not None and parameter.parts[0].name not in self.names:
            return self._own(tensor.copy_(parameter.made()))
        for part in parameter.parts:
            # What a source returns may be a view of a mapped file: the copy is the model's own.
            tensor[part.start : part.stop].copy_(self._read(part, dtype))
        return self._own(tensor)

    def _own(self, values: Tensor) -> Tensor:
        return nn.Parameter(values) if self.learns else values

    def _read(self, part: ParameterPart, dtype: torch.dtype) -> Tensor:
        """Return the values of a part as the network has them."""
        if not part.transposed or part.codes_name in self.names:
            return part.loaded(self.source.load(part.codes_name, dtype))
        return part.loaded(self.source.load(part.name, dtype).T)

    @property
    def _computed(self) -> torch.dtype:
        """The type that the network computes in, and everything beside matrices is held in."""
        return torch.float32 if self.panels else self.dtype

    @cached_property
    def names(self) -> frozenset[str]:
        """The names that the source has."""
        return frozenset(self.source.names())


def network_weights(network: Network) -> Iterator[tuple[str, Matrix]]:
    """Yield every parameter's key and tensor, the inverse of loading, unpacked one at a time."""
    yield "embed", network.table
    for part in fields(network):
        if part.name == "head" and network.spec.tied:
            yield from held_weights("head.bias", network.head.bias)
        elif part.name != "table":
            yield from held_weights(part.name, getattr(network, part.name))


def held_weights(key: str, part: object) -> Iterator[tuple[str, Matrix]]:
    """Yield the keys and tensors of a part of a network, whose own key is `key`."""
    if isinstance(part, Weight):
        yield key, part
    elif isinstance(part, RelativeBias):
        yield key, part.table
    elif isinstance(part, SideBySide):
        yield f"{key}.weight", part.matrix()
        if biases := tuple(one.bias for one in part.parts if one.bias is not None):
            yield f"{key}.bias", biases
    elif isinstance(part, Norm | LinearMap):
        yield f"{key}.weight", part.weight if isinstance(part, Norm) else part.matrix()
        if part.bias is not None:
            yield f"{key}.bias", part.bias
    elif isinstance(part, Network):
        # Inside a network of the caller's own.
        for name, weight in network_weights(part):
            yield f"{key}.{name}", weight
    elif isinstance(part, tuple):
        for index, layer in enumerate(part):
            yield from held_weights(f"{key}.{index}", layer)
    elif is_dataclass(part):
        for role in fields(part):
            yield from held_weights(f"{key}.{role.name}", getattr(part, role.name))
