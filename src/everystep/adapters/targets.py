"""The projections of a model that adapters change, by the names of their modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from everystep.errors import UnsupportedError, nearest, shown
from everystep.models import Model
from everystep.models.decoder import Decoder
from everystep.models.families import find_family
from everystep.models.parameters import ParameterPart
from everystep.nn.linear import LinearMap, dense

_ADAPTABLE = re.compile(r"layers\.\d+\.(qkv|out|up|down)\.weight")


@dataclass(frozen=True, slots=True)
class Target:
    """A projection: its `module` in other libraries, the network's map that it is part of, and its
    `shape` (rows, in).

    `key`: of the map, as "layers.0.qkv". `part`: how its rows lie there.
    """

    module: str
    key: str
    part: ParameterPart
    shape: tuple[int, int]

    def matrix(self, model: Model) -> Tensor:
        """Return (rows, in) the values of its own rows, in the network's order."""
        _, layer, role = self.key.split(".")
        layers = cast(Decoder, model.network).layers
        base: LinearMap = getattr(layers[int(layer)], role)
        return dense(base.matrix())[self.part.start : self.part.stop]


Targets = Mapping[str, Target]
"""Projections by the names of their modules, in the network's order."""


def targets_of(model: Model) -> Targets:
    """Return every projection that can be adapted; UnsupportedError for a model that is no
    decoder."""
    if not isinstance(model.network, Decoder):
        got = model.config.model_type
        raise UnsupportedError("only decoders take adapters", got=got)
    family = find_family(model.config.model_type)
    found = (
        Target(
            family.in_whole(part.name.removesuffix(".weight")),
            one.key.removesuffix(".weight"),
            part,
            (part.stop - part.start, one.shape[1]),
        )
        for one in family.parameters(model.spec)
        if _ADAPTABLE.fullmatch(one.key)
        for part in one.parts
    )
    return {one.module: one for one in found}


def require_target(targets: Targets, module: str, model: Model) -> Target:
    """Return the projection of a module; UnsupportedError where it is anything else."""
    module = find_family(model.config.model_type).in_whole(module)
    if module not in targets:
        close = nearest(module, targets)
        raise UnsupportedError(
            "the adapter changes something other than a projection of a layer of this model",
            wanted="attention and MLP projections",
            got=shown(module),
            do=f"The nearest is {close!r}" if close else None,
        )
    return targets[module]
