"""Tiny models that read more than ids: a layout decoder, and one that turns by three axes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from everystep.models import Model
from everystep.models.config import ModelConfig
from everystep.models.decoder import Decoder
from everystep.nn.attention import RelativeBias, Rule
from everystep.nn.network import Context, Network, StepInputs, Store
from everystep.nn.rotary import UNSCALED, Rope, section_axes
from everystep.types import InputSpec
from tests.executors.models import PLAIN, random_model, with_layers

SIDES = 30
BBOX = InputSpec("bbox", "token", (4,), torch.int64)


@dataclass(frozen=True, eq=False)
class LayoutDecoder(Network):
    """A decoder that adds to the embedding of a token that of each side of its box.

    `sides`: (4, SIDES, E).
    """

    decoder: Decoder
    sides: Tensor
    inputs: tuple[InputSpec, ...] = (BBOX,)

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        return self.decoder.stores

    @property
    def heads(self) -> int:
        return self.decoder.heads

    def boxes(self, bbox: Tensor) -> Tensor:
        """(n, 4) -> (n, E)."""
        return self.sides[torch.arange(4), bbox].sum(dim=1)

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        given = inputs.declared["bbox"]
        hidden = inputs.hidden.index_add(0, given.places, self.boxes(given.values))
        return self.decoder.forward(replace(inputs, hidden=hidden), context)


@cache
def layout_model() -> Model:
    """A layout decoder around the plain one."""
    decoder = random_model(PLAIN).network
    generator = torch.Generator().manual_seed(3)
    sides = torch.randn(4, SIDES, PLAIN.width, generator=generator, dtype=torch.float64)
    frame = (PLAIN, decoder.table, decoder.norm, decoder.head)
    return Model(ModelConfig({"model_type": "llama"}), PLAIN, LayoutDecoder(*frame, decoder, sides))


@cache
def axes_model(interleaved: bool, dtype: torch.dtype = torch.float64) -> Model:
    """A decoder whose four pairs turn by three axes."""
    axes = section_axes((2, 1, 1), interleaved=interleaved)
    spec = with_layers(*[replace(PLAIN.layers[0], rope=Rope(8, 100.0, UNSCALED, axes))] * 2)
    return random_model(spec, dtype=dtype)


def masked_logits(model: Model, inputs: Tensor, seen: Tensor) -> Tensor:
    """(T, V) of (T, E) embeddings, where position i sees j iff `seen` (1 or H, T, T) says so."""
    places = torch.arange(len(inputs))
    given = StepInputs(inputs, places, torch.full_like(places, len(places)))
    with torch.inference_mode():
        hidden = model.network.forward(given, _Masked(seen))
        return model.network.logits(model.network.finish(hidden))


@dataclass(frozen=True, eq=False)
class _Masked:
    """A row whose positions see what `seen` (1 or H, T, T) says."""

    seen: Tensor

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        shared = q.shape[1] // kv.shape[2]
        keys, values = (kv[:, side].repeat_interleave(shared, dim=1) for side in (0, 1))
        scores = torch.einsum("thd,shd->hts", q, keys) * rule.scale
        weights = scores.masked_fill(~self.seen, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values).flatten(1)

    def keep(self, hidden: Tensor) -> None:
        pass
