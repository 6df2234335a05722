"""The counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Numbers of all that the engine has done so far; deterministic, so that tests can check them.

    `forked`: positions that were not fed because another row held them. `alternatives`: how often a
    sequence went on with another draft than its first.
    """

    steps: int = 0
    forwards: int = 0
    fed: int = 0
    forked: int = 0
    chunks: int = 0
    syncs: int = 0
    preemptions: int = 0
    preemptions_in_decode: int = 0
    long_children: int = 0
    drafted: int = 0
    accepted: int = 0
    alternatives: int = 0
