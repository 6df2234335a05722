"""All that steps: the engine as calls, streams and threads share it."""

from __future__ import annotations
