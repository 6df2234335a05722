"""A tiny document-layout Llama: text, patches of an image, and a box after each line of text.

As in DocLayLLM, patches and boxes stand in the prompt as ids beyond the vocabulary, and what stands
there is embedded by LayoutLMv3's embedders and two projections. There is no such model in
transformers, but there are its parts: its LayoutLMv3 and its Llama, with embeddings merged by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LayoutLMv3Config, LayoutLMv3Model

import everystep as es
from everystep.api.model import LanguageModel
from everystep.models.layout.embedders import BoxEncoder, PatchEncoder
from tests.models.tiny import ours as built
from tests.models.tiny import reference_decoder

BOX, PATCH = 150000, 150001
PATCHES = 4
LAYOUT = {"hidden_size": 32, "input_size": 32, "coordinate_size": 5, "shape_size": 6}


def reference_layout(**config: Any) -> LayoutLMv3Model:
    """LayoutLMv3 with embedders that hide no error behind zeros."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = LayoutLMv3Model(LayoutLMv3Config(**{**LAYOUT, **small, **config})).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


class Patches(nn.Module):
    """(b, 3, 32, 32) -> (b, 4, E): the embedded picture without its class token, projected."""

    def __init__(self, layout: LayoutLMv3Model, width: int) -> None:
        super().__init__()
        self.layout = layout
        self.project = nn.Linear(layout.config.hidden_size, width)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.project(self.layout.forward_image(pixels)[:, 1:])


class Boxes(nn.Module):
    """(b, n, 4) -> b tensors (m, E); boxes of -100 are padding and have no feature."""

    def __init__(self, layout: LayoutLMv3Model, width: int) -> None:
        super().__init__()
        self.layout = layout
        self.project = nn.Linear(layout.config.hidden_size, width)

    def forward(self, boxes: Tensor) -> list[Tensor]:
        embed = self.layout.embeddings.calculate_spatial_position_embeddings
        return [self.project(embed(row[row[:, 0] >= 0][None])[0]) for row in boxes]


class Counted:
    """An encoder that notes how many rows each of its calls had."""

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder
        self.sizes: list[int] = []

    @property
    def calls(self) -> int:
        return len(self.sizes)

    def __call__(self, *given: Any) -> Any:
        self.sizes.append(len(given[-1]))
        return self.encoder(*given)


class Document:
    """transformers' modules, and our model with their weights.

    `folder`: where a model folder is written that the model is loaded from; without one it is a
    Llama for which the modules are declared as encoders.
    """

    def __init__(
        self, folder: Path | None = None, dtype: torch.dtype = torch.float64, **changes: Any
    ) -> None:
        torch.manual_seed(1)
        self.reference = reference_decoder("llama", dtype, **changes)
        width, layout = self.reference.config.hidden_size, reference_layout()
        modules = Patches(layout, width), Boxes(layout, width)
        self.reference_patches, self.reference_boxes = (one.to(dtype).eval() for one in modules)
        if folder is None:
            config = es.GenerationConfig.from_model_config(self.reference.config)
            self.model = LanguageModel(built(self.reference), config)
            self.patches, self.boxes = map(Counted, modules)
            declared = [("pixel_values", (3, 32, 32), PATCH), ("bbox", (None, 4), BOX)]
            self.model.prompt_inputs = [
                es.PromptInput(name, one, shape=shape, token=token)
                for one, (name, shape, token) in zip(self.encoders, declared, strict=True)
            ]
        else:
            self.write(folder)
            self.model = es.load_model(folder, dtype=dtype)
            self.patches, self.boxes = Counted(PatchEncoder.__call__), Counted(BoxEncoder.__call__)

    @property
    def encoders(self) -> tuple[Counted, Counted]:
        return self.patches, self.boxes

    def write(self, folder: Path, **changes: Any) -> None:
        """The folder holds a document model with these weights."""
        folder.mkdir(exist_ok=True)
        text = self.reference.config.to_dict()
        config = {**text, "model_type": "doclayllm", "layout_config": LAYOUT, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.weights(), folder / "model.safetensors")

    def weights(self) -> dict[str, Tensor]:
        """All of them under the names of a checkpoint."""
        layout = self.reference_patches.layout
        found = dict(self.reference.state_dict())
        for name, value in layout.state_dict().items():
            if name.startswith(("patch_embed", "pos_embed", "cls_token", "norm.")):
                found[f"visual_embedder.{name}"] = value
            if name.endswith(tuple(f"{axis}_position_embeddings.weight" for axis in "xyhw")):
                found[name.replace("embeddings", "layout_embedder", 1)] = value
        for name, module in (("visual", self.reference_patches), ("layout", self.reference_boxes)):
            for key, value in module.project.state_dict().items():
                found[f"{name}_projector.{key}"] = value
        return {name: value.contiguous() for name, value in found.items()}

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
            pixels = pixels.to(found.dtype)
            found[ids == PATCH] = self.reference_patches(pixels[None])[0]
            found[ids == BOX] = self.reference_boxes(boxes[None])[0]
        return found[None]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int) -> Tensor:
    return torch.rand(count, 3, 32, 32, dtype=torch.float64, generator=_seeded(5))


def boxes(counts: Sequence[int]) -> Tensor:
    """(b, most, 4) boxes of each row, then -100."""
    made = []
    for row, count in enumerate(counts):
        corner = torch.randint(0, 500, (count, 2), generator=_seeded(row))
        size = torch.randint(0, 501, (count, 2), generator=_seeded(row + 9))
        own = torch.cat([corner, corner + size], dim=-1)
        made.append(F.pad(own, (0, 0, 0, max(counts) - count), value=-100))
    return torch.stack(made)


def padded(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Ids and mask of a batch, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}
