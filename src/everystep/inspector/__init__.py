"""The inspector: what a record of a generation says, for a terminal and as a page of its own."""

from __future__ import annotations
