"""Heads that a configuration says are tied to the table of embeddings, as checkpoints hold them.

A checkpoint of a tied model holds the matrix under the table's name, under the head's, or under
both; where the two differ, the head counts as one of its own, whatever the configuration says.
Source: transformers' `tie_weights`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from everystep.errors import FormatError
from everystep.models.families import Family
from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter


def with_table(
    family: Family, spec: Any, parameters: Mapping[str, Parameter], names: Collection[str]
) -> dict[str, Parameter]:
    """Return the parameters by their keys.

    The table is under the head's name where a source with these names has that alone.
    """
    found = dict(parameters)
    if spec.tied:
        (table,), head = found["embed"].parts, family.head(spec).name
        if table.name not in names and head in names:
            found["embed"] = replace(found["embed"], parts=(replace(table, name=head),))
    return found


def spec_as_stored(family: Family, spec: Any, loader: WeightLoader) -> Any:
    """Return the specification, not tied where the source holds a head that differs from the table.

    The loader then has the head among its parameters. Raise FormatError for a head of another
    shape.
    """
    if not spec.tied:
        return spec
    (table,), head = loader.parameters["embed"].parts, family.head(spec)
    if head.name == table.name or head.name not in set(loader.source.names()):
        return spec
    wanted, found = loader.parameters["embed"].shape, tuple(loader.source.shape(head.name))
    if found != wanted:
        what = f"the weight {head.name!r} does not fit config.json"
        raise FormatError(what, wanted=wanted, got=found)
    if torch.equal(*(loader.source.load(part.name) for part in (table, head))):
        return spec
    loader.parameters["head.weight"] = Parameter("head.weight", wanted, (head,))
    return replace(spec, tied=False)
