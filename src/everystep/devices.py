"""Where tensors lie: on the host, which reads them at once, or on a device that works by itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_host(scores: Tensor) -> bool:
    """Return whether numpy may read the scores, which takes no waiting for a device."""
    return scores.device.type == "cpu"


def on_device(
    device: torch.device, numbers: np.ndarray | Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the same numbers there, of this type where one is given.

    The host does not wait for what a CUDA device has still to do.
    """
    given = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers
    # CUDA takes pageable memory of the host away before it returns, so that it may change at once.
    apart = device.type == "cuda" and given.device.type == "cpu"
    return given.to(device, dtype, non_blocking=apart)
