"""Which tensors of a source are which parameters of a model.

Checkpoints of one family may have been written under several names; parameters have one. Names and
shapes are compared here, before the first value is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everystep.errors import FormatError, ModelClassError
from everystep.models.families import Family
from everystep.models.loader import TensorSource, load_rows
from everystep.models.parameters import Parameter


@dataclass(frozen=True)
class Renamed:
    """A source whose tensors have other names: `own` says which name each has in the source."""

    source: TensorSource
    own: Mapping[str, str]

    def names(self) -> Iterable[str]:
        return self.own

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self.own[name])

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.source.load(self.own[name], dtype)

    def load_rows(
        self, name: str, first: int, end: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        return load_rows(self.source, self.own[name], first, end, dtype)


def common_names(
    family: Family, spec: Any, parameters: Collection[Parameter], names: Iterable[str]
) -> dict[str, str]:
    """Return, by the names of parameters, the names that a source has.

    The body of a model, saved alone, has no prefix; where the head is tied that is the whole model.
    """
    found = _current(family, list(names))
    prefix = _prefix(parameters)
    if not spec.tied or not prefix or any(name.startswith(prefix) for name in found):
        return _first_names(parameters, found)
    whole = {part.name for one in parameters for part in one.parts}
    whole |= {part.codes_name for one in parameters for part in one.parts}
    whole |= {part.stack.name for one in parameters for part in one.parts if part.stack}
    prefixed = {
        f"{prefix}{name}" if f"{prefix}{name}" in whole else name: own
        for name, own in found.items()
    }
    return _first_names(parameters, prefixed)


def _first_names(parameters: Collection[Parameter], found: dict[str, str]) -> dict[str, str]:
    """Return the same, where tied weights that have another of their names have the first."""
    for part in (part for one in parameters for part in one.parts if part.name not in found):
        other = next((name for name in part.others if name in found), None)
        if other is not None:
            found[part.name] = found.pop(other)
    return found


def _current(family: Family, names: list[str]) -> dict[str, str]:
    """Return each name of a source under what it is called here.

    Names stay as they are where any of them begins as names do here, and not as a longer beginning
    there.
    """
    longer = tuple(there for there, here in family.prefixes if there.startswith(here))
    own = [name for name in names if not name.startswith(longer)]
    same = any(name.startswith(here) for name in own for _, here in family.prefixes)
    others = () if same else family.prefixes
    found = {}
    for name in names:
        there, here = next((pair for pair in others if name.startswith(pair[0])), ("", ""))
        found[here + name.removeprefix(there)] = name
    return found


def check_names(
    family: Family, spec: Any, parameters: Collection[Parameter], source: TensorSource
) -> None:
    """Raise FormatError unless the source has each parameter, in its shape, and nothing else."""
    found = set(source.names())
    wanted = _shapes(parameters, found)
    missing = [name for name in wanted if name not in found]
    unknown = sorted(found - set(wanted))
    unexpected = [name for name in unknown if not family.leaves_over(spec, name)]
    if missing and _is_headless(wanted, found, _named(parameters, "head.weight")):
        raise ModelClassError(
            "this checkpoint has no language head, so it cannot generate",
            wanted="a model saved whole, such as a ...ForCausalLM",
            got=f"the weights of its body alone ({_some(sorted(found), 2)})",
            do="Save the whole model with save_pretrained, and load that",
        )
    for part in family.without:
        if missing and set(missing) == _inside(parameters, part) & set(wanted):
            raise FormatError(
                f"the checkpoint holds nothing of the model's {part} part",
                wanted=f"weights such as {_some(missing, 2)}",
                do=f"Load it with without=({part!r},), or save the model whole",
            )
    if missing:
        near = f"; there are also unknown ones: {_some(unexpected)}" if unexpected else ""
        raise FormatError(f"weights are missing: {_some(missing)}{near}")
    if unexpected:
        raise FormatError(
            f"there are weights that this model has no place for: {_some(unexpected)}",
            do="Check that config.json and weights belong together",
        )
    for name, shape in wanted.items():
        given = tuple(source.shape(name))
        if given != shape:
            what = f"the weight {name!r} does not fit config.json"
            raise FormatError(what, wanted=shape, got=given)


def _shapes(parameters: Collection[Parameter], found: set[str]) -> dict[str, tuple[int, ...]]:
    """Return what a source has to have, and in which shape."""
    wanted = {}
    for one in parameters:
        if one.made is not None and one.parts[0].name not in found:
            continue
        for part, shape in one.shapes():
            if part.transposed and part.codes_name not in found:
                wanted[part.name] = shape[::-1]
            else:
                wanted[part.codes_name] = shape
    return wanted


def _is_headless(wanted: Iterable[str], found: set[str], heads: set[str]) -> bool:
    """Return whether what was found is the body of a model: no head, or names one level in."""
    names = set(wanted)
    inside = {name.partition(".")[2] for name in names} - {"", "weight"}
    return names - found == heads or (bool(found) and found <= inside)


def _named(parameters: Collection[Parameter], key: str) -> set[str]:
    """Return the names of one parameter, none where there is no such."""
    return {part.name for one in parameters if one.key == key for part in one.parts}


def _inside(parameters: Collection[Parameter], part: str) -> set[str]:
    """Return the names of the parameters of a part, whose keys begin with its name."""
    inside = (one for one in parameters if one.key.startswith(f"{part}."))
    return {name for one in inside for part in one.parts for name in (part.name, part.codes_name)}


def _prefix(parameters: Collection[Parameter]) -> str:
    """Return what names of a body begin with in a whole model: "model.", say; "" without that."""
    (embed,) = _named(parameters, "embed")
    return f"{embed.partition('.')[0]}." if embed.count(".") > 1 else ""


def _some(names: list[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
