"""Requests of every kind for a decoder with a vocabulary of 40 and a width of 32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from everystep.draws import SeededDraws
from everystep.engine import Guidance, PromptLookup
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Beam, Contrastive, Greedy, Sample
from everystep.types import Prompt, Request

MAX_NEW = 10
ENDS = (2, 17)


def ids(seed: int, count: int) -> np.ndarray:
    """(count,) ids."""
    return np.random.default_rng(seed).integers(0, 40, count)


def request(name: str, strategy: Any, prompt: Prompt, **rest: Any) -> Request:
    """A request that ends at an end token or after MAX_NEW tokens."""
    length = 0 if prompt.ids is None else prompt.length
    return Request(
        name,
        prompt,
        strategy,
        SeededDraws(sum(map(ord, name))),
        stops=(EosToken(ENDS), MaxLength(length + MAX_NEW)),
        max_length=prompt.length + MAX_NEW,
        **rest,
    )


def _embedded(count: int) -> Prompt:
    generator = torch.Generator().manual_seed(5)
    return Prompt(embeds=torch.randn(count, 32, generator=generator, dtype=torch.float64))


REQUESTS: tuple[Request, ...] = (
    request("greedy", Greedy(), Prompt(ids(1, 7))),
    request("embedded", Greedy(), _embedded(6)),
    request("placed", Greedy(), Prompt(ids(3, 5), positions=torch.tensor([0, 4, 4, 9, 30]))),
    request("sampled", Sample(3), Prompt(ids(4, 9))),
    request("beams", Beam(3, returns=2, eos_count=len(ENDS), max_new=MAX_NEW), Prompt(ids(5, 6))),
    request("drawn beams", Beam(2, eos_count=len(ENDS), sampled=True), Prompt(ids(6, 3))),
    request("drafted", Greedy(), Prompt(np.tile(ids(7, 3), 4)), drafter=PromptLookup(4, 2)),
    request("contrastive", Contrastive(3, 0.6), Prompt(ids(8, 5))),
    request(
        "guided",
        Greedy(),
        Prompt(ids(9, 6)),
        companions=(Prompt(ids(10, 2)),),
        readout=Guidance(1.5),
    ),
)
