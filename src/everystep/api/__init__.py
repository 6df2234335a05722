"""What users import."""

from __future__ import annotations
