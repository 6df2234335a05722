"""Float weights rounded to 8 or 4 bits.

Every code is the nearest one for the scale that is stored, after the scale itself was rounded to
its type. Which weights of a model are rounded is not known here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from everystep.errors import UnsupportedError
from everystep.nn.quantized import BLOCK, QuantizedWeight

Rounding = Literal["int8", "int4"]

_STRETCH_VALUES = 1 << 20


def quantize(values: Tensor, format: Rounding) -> QuantizedWeight:
    """Round a (rows, columns) float matrix to 8 bits per output channel or 4 per group of 32.

    `int8`: scale = largest magnitude of the row / 127. `int4`: of the forms with and without a
    minimum the one with the smaller squared error over the matrix. Raise UnsupportedError for
    `int4` where the columns are not whole groups.
    """
    if format == "int8":
        return _int8(values)
    if values.shape[1] % BLOCK:
        raise UnsupportedError(
            "int4 needs inputs in whole groups",
            wanted=f"a multiple of {BLOCK}",
            got=values.shape[1],
            do="Use int8",
        )
    step = max(1, _STRETCH_VALUES // values.shape[1])
    stretches = torch.split(values.float(), step)
    symmetric, lifted = ([form(one) for one in stretches] for form in (_symmetric, _lifted))
    better = min((symmetric, lifted), key=lambda found: _squared_error(stretches, found))
    return QuantizedWeight.cat(better)


def eight_bits(values: Tensor, scales: Tensor | None = None) -> QuantizedWeight:
    """Round a (rows, columns) float matrix as `q8_0`: 8 bits, with a scale per block of 32.

    `scales`: (rows, blocks) float16, where they are known; otherwise largest magnitude of the block
    / 127. Raise UnsupportedError as for `storable`.
    """
    blocks = values.unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    stored = storable(blocks.abs().amax(2) / 127 if scales is None else scales)
    codes = nearest(blocks, stored.float()[..., None], -127, 127).to(torch.int8)
    return QuantizedWeight("q8_0", codes.flatten(1), stored)


def storable(values: Tensor) -> Tensor:
    """Return scales or minimums as float16.

    Raise UnsupportedError for what is too large for it or no number: no code could make up for
    that.
    """
    stored = values.half()
    if not bool(stored.isfinite().all()):
        raise UnsupportedError(
            "a weight is too large for a float16 scale, or no number",
            wanted=f"scales and minimums up to {torch.finfo(torch.float16).max:.0f}",
            got=float(values.abs().amax()),
            do="Load the model with a dtype, or round its floats with quantize='int8'",
        )
    return stored


def require_numbers(values: Tensor, name: str) -> Tensor:
    """Return the values themselves; UnsupportedError where one is no number, which activations in
    codes would hide."""
    if not bool(values.isfinite().all()):
        raise UnsupportedError(
            f"{name} holds nan or infinite values, which codes cannot stand for",
            wanted="finite numbers",
            got=f"{int((~values.isfinite()).sum())} of {values.numel()} that are not",
            do="Correct the checkpoint, or fetch it again",
        )
    return values


def _int8(values: Tensor) -> QuantizedWeight:
    scales = require_numbers(values.float().abs().amax(1) / 127, "a weight")
    codes = nearest(values.float(), scales[:, None], -127, 127).to(torch.int8)
    return QuantizedWeight("int8", codes, scales)


def _symmetric(values: Tensor) -> QuantizedWeight:
    """Round as value = (code - 8) * scale.

    The value farthest from zero becomes -8, the code without a twin, so the scale takes the
    opposite sign, as in ggml's Q4_0.
    """
    blocks = values.unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    far = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = storable(far / -8)
    codes = nearest(blocks, scales.float(), -8, 7) + 8
    return QuantizedWeight("int4", _packed(codes), scales.squeeze(2))


def _lifted(values: Tensor) -> QuantizedWeight:
    """Round as value = code * scale + min; codes 0 and 15 are the least and the largest value."""
    blocks = values.unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    mins = storable(blocks.amin(2, keepdim=True))
    scales = storable((blocks.amax(2, keepdim=True) - mins) / 15)
    codes = nearest(blocks - mins.float(), scales.float(), 0, 15)
    return QuantizedWeight("int4", _packed(codes), scales.squeeze(2), mins.squeeze(2))


def nearest(values: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """Return the codes whose multiples of the scales are nearest; 0 where the scale is."""
    return (values / torch.where(scales == 0, 1, scales)).round_().clamp_(least, most)


def _packed(codes: Tensor) -> Tensor:
    """Pack (rows, blocks, 32) codes 0..15 -> (rows, blocks * 16) bytes."""
    low, high = torch.split(codes.to(torch.uint8), BLOCK // 2, dim=2)
    return (low | high << 4).flatten(1)


def _squared_error(values: tuple[Tensor, ...], found: list[QuantizedWeight]) -> float:
    pairs = zip(values, found, strict=True)
    return sum(float((one - weight.dequantize()).square().sum()) for one, weight in pairs)
