"""Pairs of prompts, and how many positions a row of one can share with the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everystep.types import Prompt
from everystep.types.ends import Injected

VOCABULARY = 29
SHARED = np.arange(1000) * 7 % VOCABULARY


def embeds(seed: int = 0, length: int = 60) -> Tensor:
    return torch.randn(length, 4, generator=torch.Generator().manual_seed(seed))


def changed(values: Tensor, place: int) -> Tensor:
    values = values.clone()
    values[place] += 1
    return values


IDS = SHARED[:60]
BOX = torch.arange(120).view(60, 2)
STEPS = torch.arange(60) * 2
LONG = torch.arange(80) * 2


def featured(values: Tensor, *places: int) -> Prompt:
    """Ids, and features at some of their places."""
    return Prompt(ids=IDS, injected=Injected(np.array(places), values))


CONTENT: dict[str, tuple[Prompt, Prompt, int]] = {
    "embeddings": (Prompt(embeds=embeds()), Prompt(embeds=changed(embeds(), 40)), 40),
    "equal embeddings": (Prompt(embeds=embeds()), Prompt(embeds=embeds()), 59),
    "boxes": (
        Prompt(ids=IDS, inputs={"bbox": BOX}),
        Prompt(ids=IDS, inputs={"bbox": changed(BOX, 31)}),
        31,
    ),
    "boxes or none": (Prompt(ids=IDS, inputs={"bbox": BOX}), Prompt(ids=IDS), 0),
    "one per row": (
        Prompt(ids=IDS, inputs={"style": torch.zeros(1)}),
        Prompt(ids=IDS, inputs={"style": torch.ones(1)}),
        0,
    ),
    "positions": (
        Prompt(ids=IDS, positions=STEPS),
        Prompt(ids=IDS, positions=changed(STEPS, 20)),
        20,
    ),
    "axes": (
        Prompt(ids=IDS, positions=STEPS.expand(3, 60)),
        Prompt(ids=IDS, positions=changed(STEPS.expand(3, 60).T, 25).T),
        25,
    ),
    "features": (
        featured(embeds(0, 2), 10, 40),
        featured(changed(embeds(0, 2), 1), 10, 40),
        40,
    ),
    "equal features": (featured(embeds(0, 2), 10, 40), featured(embeds(0, 2), 10, 40), 59),
    "features elsewhere": (featured(embeds(0, 2), 10, 40), featured(embeds(0, 2), 30, 40), 0),
    "features or none": (featured(embeds(0, 2), 10, 40), Prompt(ids=IDS), 0),
    "embeddings beside ids of other widths": (
        Prompt(embeds=embeds(), ids=IDS[:50]),
        Prompt(embeds=embeds(), ids=IDS[10:55]),
        59,
    ),
    "other embeddings beside the same ids": (
        Prompt(embeds=embeds(), ids=IDS[:50]),
        Prompt(embeds=embeds(1), ids=IDS[:50]),
        0,
    ),
    "positions of what follows": (
        Prompt(ids=IDS, positions=LONG),
        Prompt(ids=IDS, positions=changed(LONG, 70)),
        59,
    ),
    "positions, some of which follow": (
        Prompt(ids=IDS, positions=LONG),
        Prompt(ids=IDS, positions=changed(LONG, 20)),
        20,
    ),
    "ids": (Prompt(ids=IDS), Prompt(ids=np.r_[IDS[:33], IDS[:20]]), 33),
}
