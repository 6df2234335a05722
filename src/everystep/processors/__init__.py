"""Functions of (rows, scores): transformers' processors, the caller's own, and their order."""

from __future__ import annotations
