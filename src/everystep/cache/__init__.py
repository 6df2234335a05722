"""Where what models remember lies: rows of stores for executors, cache objects for callers."""

from __future__ import annotations

from everystep.cache.pool import CacheCounts
from everystep.cache.row_cache import RowCache

__all__ = ["CacheCounts", "RowCache"]
