"""How many threads an executor gets that is opened here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def members(count: int) -> Iterator[None]:
    """torch is set to so many threads, and afterwards to as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
