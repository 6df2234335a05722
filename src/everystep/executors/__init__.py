"""What runs a `Work`: storage of keys and values, and the forward, behind one protocol."""

from __future__ import annotations
