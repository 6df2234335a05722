"""The parts of a model that adapters change, by the names of their modules.

These are the projections of its layers first of all; then the table of embeddings, the head, the
routers and experts of mixtures, and norms, which adapters hold as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from everystep.adapters.adapter import HEAD, TABLE
from everystep.errors import InvariantError, UnsupportedError, nearest, shown
from everystep.models import Model
from everystep.models.decoder import Decoder
from everystep.models.families import find_family
from everystep.models.load import refuse_part
from everystep.models.parameters import ParameterPart
from everystep.nn.linear import LinearMap, dense
from everystep.nn.norm import Norm

_PROJECTION = re.compile(r"layers\.\d+\.(qkv|out|up|down)\.weight")
_ROUTER = re.compile(r"layers\.\d+\.experts\.router\.weight")
_EXPERT = re.compile(r"layers\.\d+\.experts\.(up|down)\.\d+\.weight")
_NORM = re.compile(r"(layers\.\d+\.(attention|mlp)(_post)?_norm|layers\.\d+\.[qk]_norm|norm)\.\w+")
_KINDS_TOLD = 4
_DO = (
    "Merge the adapter into the whole model with the library that made it and load those weights, "
    "or pass that library's model with the adapter to everystep.wrap"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A map, or some of its rows: its `module` in other libraries, and its `shape` (rows, in).

    `key`: of the network's map, as "layers.0.qkv". `part`: how its rows lie there.
    """

    module: str
    key: str
    part: ParameterPart
    shape: tuple[int, int]

    def matrix(self, model: Model) -> Tensor:
        """Return (rows, in) the values of its own rows, in the network's order."""
        refuse_part(model)
        own = slice(self.part.start, self.part.stop)
        network = cast(Decoder, model.network)
        if self.key == TABLE:
            return dense(network.table)
        base: LinearMap = part_at(network, self.key)
        return dense(base.matrix())[own]

    def bias(self, model: Model) -> Tensor | None:
        """Return (rows,) its bias, in the network's order, None without one."""
        refuse_part(model)
        base = None if self.key == TABLE else part_at(cast(Decoder, model.network), self.key).bias
        return None if base is None else base[self.part.start : self.part.stop]


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The matrices of all experts of a layer, which transformers holds in one tensor.

    `keys`: of each expert's map. `shape`: (rows, in) of each.
    """

    keys: tuple[str, ...]
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class NormTarget:
    """A norm: its `module` in a checkpoint, its key in the network, and its `width`."""

    module: str
    key: str
    width: int

    def norm(self, model: Model) -> Norm:
        """Return the norm itself."""
        found: Norm = part_at(cast(Decoder, model.network), self.key)
        return found


Targets = Mapping[str, Target]
"""Maps by the names of their modules, in the network's order."""


@dataclass(frozen=True)
class AdaptableParts:
    """The parts of a model that adapters change, by the names of modules.

    `stacks`: of experts, by the names of their parameters, which have no module of their own.
    `head`: of the map, also where it is the table. `in_whole`: gives the name of a module in the
    whole model, of a name in its text part alone.
    """

    projections: Targets
    table: Target
    head: Target
    routers: Targets
    stacks: Mapping[str, ExpertStack]
    norms: Mapping[str, NormTarget]
    tied: bool
    in_whole: Callable[[str], str]

    @property
    def maps(self) -> Targets:
        """Everything that one low rank changes: projections, head, table and routers."""
        beside = {one.module: one for one in (self.head, self.table)}
        return {**self.projections, **beside, **self.routers}

    @property
    def modules(self) -> list[str]:
        """The names of all modules that an adapter may hold as a whole."""
        return [*self.maps, *self.norms]


def part_at(decoder: Decoder, key: str) -> Any:
    """Return the map or the norm of a decoder that has this key."""
    found: Any = decoder
    for name in key.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    return found


def targets_of(model: Model) -> Targets:
    """Return every projection of a layer; UnsupportedError for a model that is no decoder."""
    return parts_of(model).projections


def parts_of(model: Model) -> AdaptableParts:
    """Return what adapters change of a model; UnsupportedError for one that is no decoder."""
    if not isinstance(model.network, Decoder):
        got = model.config.model_type
        raise UnsupportedError("only decoders take adapters", got=got)
    family = find_family(model.config.model_type)
    parameters = list(family.parameters(model.spec))
    size = model.spec.vocab_size, model.spec.width
    projections: dict[str, Target] = {}
    routers: dict[str, Target] = {}
    stacks: dict[str, list[tuple[int, str]]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    norms: dict[str, NormTarget] = {}
    table = None
    for one in parameters:
        key = one.key.rpartition(".")[0]
        if _NORM.fullmatch(one.key):
            (part,) = one.parts
            module = family.in_whole(part.name.rpartition(".")[0])
            norms[module] = NormTarget(module, key, one.shape[0])
        elif one.key == TABLE:
            (part,) = one.parts
            name = family.in_whole(part.name.removesuffix(".weight"))
            table = Target(name, TABLE, part, size)
        elif _EXPERT.fullmatch(one.key) and (stack := one.parts[0].stack) is not None:
            name = family.in_whole(stack.name)
            stacks.setdefault(name, []).append((stack.index, key))
            shapes[name] = one.shape[0], one.shape[1]
        elif _ROUTER.fullmatch(one.key):
            (part,) = one.parts
            # transformers has the router under the last of its names.
            name = family.in_whole((part.others or (part.name,))[-1].removesuffix(".weight"))
            routers[name] = Target(name, key, part, (one.shape[0], one.shape[1]))
        elif _PROJECTION.fullmatch(one.key):
            for part in one.parts:
                name = family.in_whole(part.name.removesuffix(".weight"))
                shape = part.stop - part.start, one.shape[1]
                projections[name] = Target(name, key, part, shape)
    if table is None:
        raise InvariantError("a decoder has no table of embeddings")
    head = family.head(model.spec)
    return AdaptableParts(
        projections,
        table,
        Target(family.in_whole(head.name.removesuffix(".weight")), HEAD, head, size),
        routers,
        {
            name: ExpertStack(tuple(key for _, key in sorted(keys)), shapes[name])
            for name, keys in stacks.items()
        },
        norms,
        model.spec.tied,
        family.in_whole,
    )


def require_targets(targets: Targets, modules: Iterable[str], model: Model) -> tuple[Target, ...]:
    """Return the maps of modules; UnsupportedError, which names all of those that are anything
    else."""
    family = find_family(model.config.model_type)
    named = [family.in_whole(one) for one in modules]
    if strangers := [one for one in named if one not in targets]:
        close = nearest(strangers[0], targets) if len(strangers) == 1 else None
        raise UnsupportedError(
            "the adapter changes something other than a projection, a head or embeddings",
            wanted="attention and MLP projections, the head, the table of embeddings",
            got=_told(strangers),
            do=f"The nearest is {close!r}. {_DO}" if close else _DO,
        )
    return tuple(targets[one] for one in named)


def _told(modules: Iterable[str]) -> str:
    """Return the names of modules for an error: of those that differ in numbers alone the first."""
    kinds: dict[str, list[str]] = {}
    for one in modules:
        kinds.setdefault(re.sub(r"\d+", "*", one), []).append(one)
    told = [
        shown(held[0]) + (f" (one of {len(held)})" if len(held) > 1 else "")
        for held in kinds.values()
    ]
    more = len(told) - _KINDS_TOLD
    return ", ".join(told[:_KINDS_TOLD]) + (f" and {more} more kinds" if more > 0 else "")
