"""Tensors as callers pass them, and as their code hands them back, judged before anything is
computed with them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from everystep.errors import RequestError

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def require_tensor(
    given: object,
    name: str,
    wanted: str,
    *,
    dims: tuple[int, ...] = (),
    holds: Literal["integers", "floats", "any"] = "any",
) -> Tensor:
    """Return the tensor itself.

    Raise RequestError for anything else, or another form or content.
    """
    got = flaw_of(given)
    if got is None and isinstance(given, Tensor):
        if dims and given.dim() not in dims:
            got = f"shape {tuple(given.shape)}"
        elif given.is_complex() or not _holds(given, holds):
            got = str(given.dtype)
        else:
            return given
    do = f"Pass {name} as such a tensor"
    raise RequestError(f"{name} does not fit", wanted=wanted, got=got, do=do)


def misfit_of(
    found: object,
    shape: tuple[int, ...],
    *,
    holds: Literal["integers", "floats", "any"] = "floats",
    device: torch.device | None = None,
) -> tuple[str, str] | None:
    """Return what was wanted of a tensor that a caller's code hands back, and what was got; None
    where it is a dense tensor of this shape, content and device."""
    got = flaw_of(found)
    if got is None and isinstance(found, Tensor):
        if tuple(found.shape) != shape:
            got = f"shape {tuple(found.shape)}"
        elif found.is_complex() or not _holds(found, holds):
            got = str(found.dtype)
        elif device is not None and found.device != device:
            got = f"one on {found.device}"
        else:
            return None
    content = "" if holds == "any" else f" of {holds}"
    place = "" if device is None or device.type == "cpu" else f" on {device}"
    return f"a tensor{content} of shape {shape}{place}", str(got)


def flaw_of(given: object) -> str | None:
    """Return why the numbers of what should be a tensor cannot be read; None if they can be."""
    if not isinstance(given, Tensor):
        return type(given).__name__
    if given.device.type == "meta":
        return "a meta tensor, which holds no numbers"
    if given.is_quantized:
        return "a quantised tensor"
    if given.is_nested:
        return "a nested tensor"
    return None if given.layout == torch.strided else f"layout {given.layout}"


def _holds(given: Tensor, what: str) -> bool:
    if what == "any":
        return True
    return given.is_floating_point() if what == "floats" else given.dtype in _WHOLE
