"""Cache rows as chains of shared segments with tails of their own."""

from __future__ import annotations

from everystep.cache.pool import Counts
from everystep.cache.row_cache import RowCache

__all__ = ["Counts", "RowCache"]
