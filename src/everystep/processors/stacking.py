"""Parameters that are one number, or one per row, and instances of a class run as one.

A processor names the fields that may be given per row in `per_row`.

A parameter per row is a tuple, so that processors stay comparable; where it is used it becomes a
(R, 1) tensor of the scores' type, in which a number would be rounded in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from everystep.config.kinds import Kind, is_integer, plain
from everystep.errors import RequestError, message

Numbers = float | tuple[float, ...]
Counts = int | tuple[int, ...]


P = TypeVar("P")


def admit(processor: Any, name: str, kind: Kind, label: str = "", do: str | None = None) -> None:
    """The field holds a number of that kind, or, given a list or tensor, a tuple of them.

    RequestError for anything else; `label` is what the error calls the field.
    """
    given = getattr(processor, name)
    value = plain(given)
    several = isinstance(value, list | tuple) and name in processor.per_row
    if several and value and all(map(kind.accepts, value)):
        value = tuple(value)
    elif several or not kind.accepts(value):
        label = label or name
        text = message(
            f"{label} is not valid",
            wanted=kind.wanted + (", or one per row" if name in processor.per_row else ""),
            got=repr(given),
            do=do or f"Give {label} such a value",
        )
        raise RequestError(text)
    object.__setattr__(processor, name, value if several else kind.stored(value))


def admit_ids(processor: Any, name: str, label: str = "") -> None:
    """The field holds a tuple of token ids, given as one id, a list or a tensor of them."""
    given = getattr(processor, name)
    value = plain(given)
    ids = tuple(value) if isinstance(value, list | tuple | range | set) else (value,)
    if not all(is_integer(token) and token >= 0 for token in ids):
        label = label or name
        text = message(
            f"{label} is not valid",
            wanted="a token id or a list of token ids, from 0 on",
            got=repr(given),
            do=f"Give {label} such a value",
        )
        raise RequestError(text)
    object.__setattr__(processor, name, ids)


def stack_key(processor: Any) -> Hashable:
    """Equal for processors that differ only in what they may have per row; None if nothing may."""
    names = _names(processor)
    if not names:
        return None
    fixed = [one.name for one in fields(processor) if one.name not in names]
    absent = tuple(getattr(processor, name) is None for name in names)
    return (type(processor), absent, *(getattr(processor, name) for name in fixed))


def _names(processor: Any) -> tuple[str, ...]:
    """What it may have per row; nothing for what is not ours."""
    return getattr(processor, "per_row", ())


def stacked(instances: Sequence[P]) -> P:
    """One instance for R rows, from the instance of each; all of one `stack_key`."""
    per_row = {}
    for name in _names(instances[0]):
        values = [getattr(one, name) for one in instances]
        same = all(value == values[0] for value in values)
        per_row[name] = values[0] if same else tuple(values)
    return _changed(instances[0], per_row)


def varies(processor: object) -> bool:
    """Whether it has a parameter per row."""
    return any(isinstance(getattr(processor, name), tuple) for name in _names(processor))


def at_row(processor: P, row: int, rows: int) -> P:
    """The processor as it is for one of a call's rows; RequestError if it has other rows."""
    require_rows(processor, rows)
    values = {name: getattr(processor, name) for name in _names(processor)}
    own = {name: value[row] for name, value in values.items() if isinstance(value, tuple)}
    return _changed(processor, own) if own else processor


def require_rows(processor: object, rows: int) -> None:
    """RequestError unless every parameter is one number, or one for each of the rows."""
    for name in _names(processor):
        value = getattr(processor, name)
        if isinstance(value, tuple) and len(value) != rows:
            text = message(
                f"{name} of {type(processor).__name__} does not fit the rows",
                wanted=f"one number, or {rows} of them",
                got=len(value),
                do="Give one number per row of input_ids",
            )
            raise RequestError(text)


def _changed(processor: P, values: dict[str, Any]) -> P:
    result = object.__new__(type(processor))  # the values were checked one by one
    result.__dict__.update(processor.__dict__, **values)
    return result


def column(value: Numbers, scores: Tensor) -> Any:
    """A number as it is; a parameter per row as (R, 1) in the scores' type, where they are."""
    if isinstance(value, tuple):
        return torch.tensor(value, dtype=torch.float64)[:, None].to(scores)
    return value


def counts(value: Numbers, scores: Tensor) -> Any:
    """As `column`, in a type of its own."""
    if isinstance(value, tuple):
        return torch.tensor(value, device=scores.device)[:, None]
    return value


def greatest(value: Counts) -> int:
    """The number, or the greatest of all rows."""
    return max(value) if isinstance(value, tuple) else value


def larger(first: Counts, second: Counts) -> Counts:
    """The larger of two, row by row."""
    if not isinstance(first, tuple) and not isinstance(second, tuple):
        return max(first, second)
    length = len(first) if isinstance(first, tuple) else len(second)  # type: ignore[arg-type]
    pair = [one if isinstance(one, tuple) else (one,) * length for one in (first, second)]
    return tuple(map(max, *pair))


def require(holds: bool, name: str, wanted: str, got: object, do: str | None = None) -> None:
    """RequestError unless it holds."""
    if not holds:
        text = message(
            f"{name} is not valid",
            wanted=wanted,
            got=repr(got),
            do=do or f"Give {name} such a value",
        )
        raise RequestError(text)
