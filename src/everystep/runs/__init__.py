"""A generation in a caller's hands, step by step."""

from __future__ import annotations
