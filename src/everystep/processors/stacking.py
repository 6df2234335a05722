"""Arguments that are one number, or one per row, and instances of a class run as one.

A processor names the fields that are checked, and those that may be given per row in `per_row`. An
argument per row is a tuple, so that processors stay comparable; where it is used it becomes a
(R, 1) tensor of the scores' type, in which a number would be rounded in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import SIZE, Kind, plain, require
from everystep.devices import on_device
from everystep.errors import RequestError

Numbers = float | tuple[float, ...]
Counts = int | tuple[int, ...]

P = TypeVar("P")


class Argument(NamedTuple):
    """A field of a processor that is checked; errors call it `label`, or by its name, and end with
    `do`."""

    name: str
    kind: Kind
    label: str = ""
    do: str | None = None
    optional: bool = False


LEAST_KEPT = Argument("min_tokens_to_keep", SIZE)


def admit(processor: Any) -> None:
    """Let every argument hold a value of its kind or, if given one per row, a tuple of them.

    Raise RequestError for anything else.
    """
    for several, arguments in ((True, processor.per_row), (False, processor.checked)):
        for one in arguments:
            given = getattr(processor, one.name)
            if given is not None or not one.optional:
                object.__setattr__(processor, one.name, _admitted(given, one, several))


def _admitted(given: Any, argument: Argument, several: bool) -> Any:
    value, kind = plain(given), argument.kind
    listed = several and isinstance(value, list | tuple)
    fits = bool(value) and all(map(kind.accepts, value)) if listed else kind.accepts(value)
    wanted = kind.wanted + (", or one per row" if several else "")
    require(fits, argument.label or argument.name, wanted, given, argument.do)
    return tuple(value) if listed else kind.stored(value)


def stack_key(processor: Any) -> Hashable:
    """Return a key that is equal for processors that differ only in what they may have per row.

    None if nothing may.
    """
    names = _names(processor)
    if not names:
        return None
    fixed = [one.name for one in fields(processor) if one.name not in names]
    absent = tuple(getattr(processor, name) is None for name in names)
    return (type(processor), absent, *(getattr(processor, name) for name in fixed))


def _names(processor: Any) -> list[str]:
    """Return what it may have per row; nothing for what is not ours."""
    return [argument.name for argument in getattr(processor, "per_row", ())]


def _several(processor: Any) -> dict[str, tuple[Any, ...]]:
    """Return its arguments that are given per row."""
    values = {name: getattr(processor, name) for name in _names(processor)}
    return {name: value for name, value in values.items() if isinstance(value, tuple)}


def stacked(instances: Sequence[P]) -> P:
    """Return one instance for R rows, from the instance of each; all of one `stack_key`."""
    per_row = {}
    for name in _names(instances[0]):
        values = [getattr(one, name) for one in instances]
        same = all(value == values[0] for value in values)
        per_row[name] = values[0] if same else tuple(values)
    return _changed(instances[0], per_row)


def varies(processor: object) -> bool:
    """Return True for a processor that has an argument per row."""
    may = getattr(processor, "per_row", ())
    return any(isinstance(getattr(processor, one.name), tuple) for one in may)


def at_row(processor: P, row: int, rows: int) -> P:
    """Return the processor for one of a call's rows; raise RequestError if it has other rows."""
    require_rows(processor, rows)
    own = {name: value[row] for name, value in _several(processor).items()}
    return _changed(processor, own) if own else processor


def require_rows(processor: object, rows: int) -> None:
    """RequestError unless every argument is one number, or one for each of the rows."""
    for name, value in _several(processor).items():
        if len(value) != rows:
            raise RequestError(
                f"{name} of {type(processor).__name__} does not fit the rows",
                wanted=f"one number, or {rows} of them",
                got=len(value),
                do="Give one number per row of input_ids",
            )


def _changed(processor: P, values: dict[str, Any]) -> P:
    result = object.__new__(type(processor))  # the values were checked one by one
    result.__dict__.update(processor.__dict__, **values)
    return result


def column(value: Numbers, scores: Tensor) -> Any:
    """Return a number as it is; an argument per row as (R, 1) in the scores' type and place."""
    if isinstance(value, tuple):
        return on_device(scores.device, np.array(value, dtype=np.float64)[:, None], scores.dtype)
    return value


def counts(value: Numbers, scores: Tensor) -> Any:
    """Do as `column`, in a type of its own."""
    if isinstance(value, tuple):
        return on_device(scores.device, torch.tensor(value))[:, None]
    return value


def greatest(value: Counts) -> int:
    """Return the number, or the greatest of all rows."""
    return max(value) if isinstance(value, tuple) else value


def larger(first: Counts, second: Counts) -> Counts:
    """Return the larger of two, row by row."""
    if isinstance(first, tuple) or isinstance(second, tuple):
        return tuple(np.maximum(first, second).tolist())
    return max(first, second)
