"""From keywords and prompts to requests, in which no choice is open; nothing here steps."""

from __future__ import annotations
