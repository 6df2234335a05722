"""Requests whose steps a benchmark measures, one token at a time until their length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from everystep.draws import SeededDraws
from everystep.processors.warpers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from everystep.stops.ends import EosToken, MaxLength
from everystep.types import Prompt, Request

WARPERS = (TemperatureLogitsWarper(0.8), TopKLogitsWarper(50), TopPLogitsWarper(0.9))


@dataclass(frozen=True)
class Kind:
    """A way to choose, with its processors and draws; `listed`: the executor may report the best of
    rows instead of whole rows."""

    name: str
    strategy: Any
    processors: tuple[Any, ...] = ()
    draws: Callable[[int], Any] = SeededDraws
    listed: bool = True

    def request(self, index: int, ids: np.ndarray, steps: int, end: int) -> Request:
        """A request for so many tokens; `end` would end it before."""
        length = len(ids) + steps
        return Request(
            request_id=str(index),
            prompt=Prompt(ids=ids),
            strategy=self.strategy,
            draws=self.draws(index),
            processors=self.processors,
            stops=(EosToken((end,)), MaxLength(length)),
            max_length=length,
        )
