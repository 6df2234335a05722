"""Functions of (rows, scores): the reference's processors, the caller's own, and their order."""

from __future__ import annotations
