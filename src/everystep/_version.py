"""The version of the package: this line is the only place that states it."""

from __future__ import annotations

__version__ = "0.1.0"
