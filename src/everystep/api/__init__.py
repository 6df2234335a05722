"""From a call to requests: a config resolved, an engine driven, outputs collected."""

from __future__ import annotations
