"""Torch's modes for a block of code, restored whatever happens.

The public `torch.inference_mode` is written in Python: it takes three times as long, and where an
interrupt comes inside it, the thread stays in the mode of the block for as long as anybody holds
the error. These are the object of torch's C++ core that it wraps: the modes before come back when
it is left, or at the latest when it ceases to exist. They hold for the calling thread alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch


def inference_mode() -> AbstractContextManager[None]:
    """Make tensors within that never take part in autograd."""
    return _modes(True)


def ordinary_mode() -> AbstractContextManager[None]:
    """Make ordinary tensors within, with gradients on; this ends a `no_grad` within too."""
    return _modes(False)


@contextmanager
def without_gradients() -> Iterator[None]:
    """Make ordinary tensors within, none of which remembers what it was made of."""
    with ordinary_mode(), torch.no_grad():
        yield


def modes_kept() -> AbstractContextManager[None]:
    """Keep inference mode as it is; what is changed within, by `no_grad`, ends with it."""
    return _modes(torch.is_inference_mode_enabled())


def outside_autocast() -> AbstractContextManager[None]:
    """Within, operators compute with the types of what they are given, whatever `torch.autocast`
    says around it; a block of `torch.autocast` within says nothing either."""
    return cast(AbstractContextManager[None], torch._C._DisableAutocast())


def _modes(inference: bool) -> AbstractContextManager[None]:
    return cast(AbstractContextManager[None], torch._C._InferenceMode(inference))
