"""A tiny document-layout Llama: text, patches of an image, and a box after each line of text.

As in DocLayLLM, patches and boxes stand in the prompt as ids beyond the vocabulary, and what stands
there is embedded by two small encoders. Those here count their calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import everystep as es
from everystep.api.model import LanguageModel
from tests.models.tiny import ours as built
from tests.models.tiny import reference_decoder

BOX, PATCH = 150000, 150001
PATCHES = 4


class Patches(nn.Module):
    """(b, 3, 32, 32) -> (b, 4, E): four patches and a projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 16, 16)
        self.project = nn.Linear(32, width)
        self.calls = 0

    def forward(self, pixels: Tensor) -> Tensor:
        self.calls += 1
        return self.project(self.patch(pixels).flatten(2).transpose(1, 2))


class Boxes(nn.Module):
    """(b, n, 4) -> b tensors (m, E); boxes of -100 are padding and have no feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.x, self.y, self.h, self.w = (nn.Embedding(64, n) for n in (5, 5, 6, 6))
        self.project = nn.Linear(32, width)
        self.calls = 0

    def forward(self, boxes: Tensor) -> list[Tensor]:
        self.calls += 1
        return [self._embedded(row[row[:, 0] >= 0]) for row in boxes]

    def _embedded(self, box: Tensor) -> Tensor:
        left, top, right, bottom = box.unbind(-1)
        sides = (self.x(left), self.y(top), self.x(right), self.y(bottom))
        sizes = (self.h((bottom - top).clamp(0, 63)), self.w((right - left).clamp(0, 63)))
        return self.project(torch.cat([*sides, *sizes], dim=-1))


class Document:
    """A reference model, ours with its weights, and both encoders."""

    def __init__(self, **changes: Any) -> None:
        torch.manual_seed(1)
        self.reference = reference_decoder("llama", torch.float64, **changes)
        width = self.reference.config.hidden_size
        self.patches, self.boxes = (one(width).double().eval() for one in (Patches, Boxes))
        config = es.GenerationConfig.from_model_config(self.reference.config)
        self.model = LanguageModel(built(self.reference), config)
        self.model.prompt_inputs = [
            es.PromptInput("pixel_values", self.patches, shape=(3, 32, 32), token=PATCH),
            es.PromptInput("bbox", self.boxes, shape=(None, 4), token=BOX),
        ]

    def ids(self, lines: int, seed: int) -> list[int]:
        """A prompt with an image and `lines` lines of text, each with its box."""
        words = torch.randint(3, 90, (4 + 2 * lines,), generator=_seeded(seed)).tolist()
        texts = [[*words[4 + 2 * i : 6 + 2 * i], BOX] for i in range(lines)]
        return [*words[:2], *[PATCH] * PATCHES, *chain(*texts), *words[2:4]]

    def embeds(self, ids: Tensor, pixels: Tensor, boxes: Tensor) -> Tensor:
        """(1, T, E) what the model is to read of one row (T,)."""
        table = self.reference.get_input_embeddings()
        with torch.no_grad():
            found = table(ids.masked_fill(ids >= BOX, 0))
            found[ids == PATCH] = self.patches(pixels[None])[0]
            found[ids == BOX] = self.boxes(boxes[None])[0]
        self.patches.calls = self.boxes.calls = 0
        return found[None]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int) -> Tensor:
    return torch.rand(count, 3, 32, 32, dtype=torch.float64, generator=_seeded(5))


def boxes(counts: Sequence[int]) -> Tensor:
    """(b, most, 4) boxes of each row, then -100."""
    made = []
    for row, count in enumerate(counts):
        corner = torch.randint(0, 30, (count, 2), generator=_seeded(row))
        size = torch.randint(0, 30, (count, 2), generator=_seeded(row + 9))
        own = torch.cat([corner, corner + size], dim=-1)
        made.append(F.pad(own, (0, 0, 0, max(counts) - count), value=-100))
    return torch.stack(made)


def padded(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Ids and mask of a batch, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}
