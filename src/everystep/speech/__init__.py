"""Sounds longer than a window, written down window by window."""

from __future__ import annotations
