"""Tensors as callers pass them, judged before anything is computed with them."""

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
    if not isinstance(given, Tensor):
        got: object = type(given).__name__
    elif given.device.type == "meta":
        got = "a meta tensor, which holds no numbers"
    elif given.is_quantized or given.layout != torch.strided:
        got = "a quantised tensor" if given.is_quantized else f"layout {given.layout}"
    elif dims and given.dim() not in dims:
        got = f"shape {tuple(given.shape)}"
    elif given.is_complex() or not _holds(given, holds):
        got = given.dtype
    else:
        return given
    do = f"Pass {name} as such a tensor"
    raise RequestError(f"{name} does not fit", wanted=wanted, got=got, do=do)


def _holds(given: Tensor, what: str) -> bool:
    if what == "any":
        return True
    return given.is_floating_point() if what == "floats" else given.dtype in _WHOLE
