"""Instances of one class as one instance with a parameter per row, and parameters of either form.

A parameter is a number, or, after `stacked`, a (R, 1) tensor in float64 or int64 that is brought to
the scores' type and device where it is used: there a number would be rounded in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from everystep.errors import RequestError, message

P = TypeVar("P")


def stacked(cls: type[P], instances: Sequence[P]) -> P:
    """One instance for R rows, from the instance of each; all their parameters are numbers."""
    result = object.__new__(cls)  # the parameters were checked one by one
    for one in fields(cls):  # type: ignore[arg-type]
        values = [[getattr(instance, one.name)] for instance in instances]
        floats = any(isinstance(value, float) for (value,) in values)
        wide = torch.float64 if floats else torch.int64
        object.__setattr__(result, one.name, torch.tensor(values, dtype=wide))
    return result


def column(value: float | Tensor, scores: Tensor) -> Any:
    """A number as it is; a stacked parameter in the scores' type, where they are."""
    return value.to(scores) if isinstance(value, Tensor) else value


def counts(value: int | Tensor, scores: Tensor) -> Any:
    """As `column`, for whole numbers."""
    return value.to(scores.device) if isinstance(value, Tensor) else value


def require(
    holds: bool | Tensor, name: str, wanted: str, got: object, do: str | None = None
) -> None:
    """RequestError unless it holds."""
    if not holds:
        text = message(
            f"{name} is not valid",
            wanted=wanted,
            got=repr(got),
            do=do or f"Give {name} such a value",
        )
        raise RequestError(text)
