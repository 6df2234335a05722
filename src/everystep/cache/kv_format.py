"""In which type rows keep keys and values, and how these are written and read back.

A narrower type costs what rounding costs and nothing else: whoever looks at a position, in the step
that fed it too, sees what its row keeps. A position depends on itself alone, so neither chunks nor
the batch change it. Codes of 8 bits have one scale per position and head, which lies behind them in
memory, so that rows are copied, shared and cut without knowing what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from everystep.nn.network import KvShape

CacheDtype = Literal["float32", "float16", "int8"]

_SCALE_BYTES = 4


@dataclass(frozen=True)
class KvFormat:
    """How (..., D) keys or values of the type `computed` are kept; `name` None: as they are."""

    computed: torch.dtype
    name: CacheDtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is kept."""
        return self.computed if self.name is None else getattr(torch, self.name)

    def shape(self, shape: KvShape) -> KvShape:
        """The shape of what is kept of such keys and values."""
        more = _SCALE_BYTES if self.name == "int8" else 0
        return replace(shape, head_dim=shape.head_dim + more)

    def packed(self, kv: Tensor) -> Tensor:
        """What is kept of (..., D)."""
        return _codes(kv.float()) if self.name == "int8" else kv.to(self.dtype)

    def unpacked(self, kept: Tensor) -> Tensor:
        """The (..., D) that what is kept stands for."""
        return (_values(kept) if self.name == "int8" else kept).to(self.computed)


def _codes(values: Tensor) -> Tensor:
    """(..., D) float32 -> (..., D + 4) int8: codes, then the bytes of their scale."""
    # What is not finite makes the scale NaN, and with it all that the codes stand for.
    scale = values.abs().amax(-1, keepdim=True) / 127 + (values * 0).sum(-1, keepdim=True)
    codes = (values / torch.where(scale == 0, 1.0, scale)).round().nan_to_num().to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def _values(kept: Tensor) -> Tensor:
    """The inverse of `_codes`, up to rounding."""
    scale = kept[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return kept[..., :-_SCALE_BYTES] * scale
