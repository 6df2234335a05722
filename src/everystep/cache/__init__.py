"""Where what models remember lies: rows of stores for executors, cache objects for callers."""

from __future__ import annotations
