"""Reasons to end: frozen values that say which of many candidate sequences end now."""

from __future__ import annotations
