"""A vision tower: patches of a picture in, features for a decoder out.

One picture at a time, so that its features do not depend on what is encoded beside it. Weights are
floats whatever those of the decoder are. What a family's tower has is said by its spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter, linear, norm, parameter
from everystep.models.spec import NormSpec
from everystep.models.vision.places import patch_places, table_places, window_places
from everystep.models.vision.spec import Grid, VisionSpec
from everystep.nn.activations import ACTIVATIONS, gated
from everystep.nn.linear import LinearMap
from everystep.nn.modes import outside_autocast
from everystep.nn.norm import Norm
from everystep.nn.rotary import inverse_frequencies

_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class VisionBlock:
    """The weights of one block; `up` has gate and up where the spec is gated."""

    attention_norm: Norm
    mlp_norm: Norm
    qkv: LinearMap
    out: LinearMap
    up: LinearMap
    down: LinearMap


@dataclass(frozen=True, slots=True, eq=False)
class Merger:
    """Patches that are merged become one feature. The norm is that of a patch, or of all of them,
    as its size says."""

    norm: Norm
    up: LinearMap
    down: LinearMap

    def __call__(self, hidden: Tensor, size: int) -> Tensor:
        """Merge (n, D) -> (n * D / size, out)."""
        read = self.norm(hidden.view(-1, self.norm.weight.shape[0])).view(-1, size)
        return self.down(F.gelu(self.up(read)))


@dataclass(frozen=True, slots=True, eq=False)
class VisionTower:
    """`patch`: (D, channels, frames, side, side). `table`: (side * side, D) learned positions.

    `mergers`: that after the last block, then one for each tap.
    """

    spec: VisionSpec
    patch: Tensor
    patch_bias: Tensor | None
    table: Tensor | None
    blocks: tuple[VisionBlock, ...]
    mergers: tuple[Merger, ...]

    def encode(self, pixels: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Turn the patches (t * h * w, values) of a picture into its features (n, E).

        The second value is the features of its taps (n, taps, E), if there are any.
        """
        with outside_autocast():
            return self._encoded(pixels, grid)

    def _encoded(self, pixels: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        spec, like = self.spec, self.patch
        places = patch_places(grid, spec.merge)
        hidden = F.linear(pixels.to(like), like.flatten(1), self.patch_bias)
        if self.table is not None and spec.side is not None:
            entries, shares = table_places(places, grid, spec.side)
            near = self.table[entries.to(like.device)] * shares[:, :, None].to(like.device)
            hidden = hidden + near.sum(1).to(like.dtype).repeat(grid[0], 1)
        order, lengths = self._windows(grid)
        hidden, places = (
            self._moved(hidden, order, grid),
            self._moved(places.T, order, (1, *grid[1:])),
        )
        turns = self._turns(places.to(like.device), grid[0])
        found = []
        for index, block in enumerate(self.blocks):
            looked = [grid[1] * grid[2]] if index in spec.whole else lengths
            hidden = self._block(block, hidden, turns, looked, grid[0])
            if index in spec.taps:
                merger = self.mergers[1 + spec.taps.index(index)]
                found.append(self._merged(merger, hidden, order, grid))
        deep = torch.stack(found, dim=1) if found else None
        return self._merged(self.mergers[0], hidden, order, grid), deep

    def _windows(self, grid: Grid) -> tuple[Tensor | None, list[int]]:
        """Return the order of a frame group's features in which windows lie one after another.

        The second value says how many patches each window has.
        """
        if self.spec.window is None:
            return None, [grid[1] * grid[2]]
        return window_places(grid, self.spec.merge, self.spec.window)

    def _moved(self, x: Tensor, order: Tensor | None, grid: Grid) -> Tensor:
        """Return (t * h * w, ...) patches in the order of their features."""
        if order is None:
            return x
        groups = x.view(grid[0], -1, self.spec.merge**2, x.shape[-1])
        return groups[:, order.to(x.device)].flatten(0, 2)

    def _merged(self, merger: Merger, hidden: Tensor, order: Tensor | None, grid: Grid) -> Tensor:
        """Return (n, E) the features of patches (t * h * w, D), as they lie in the picture."""
        found = merger(hidden, self.spec.width * self.spec.merge**2)
        if order is None:
            return found
        groups = found.view(grid[0], -1, found.shape[-1])
        return groups[:, order.argsort().to(found.device)].flatten(0, 1)

    def _turns(self, places: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """Return (t * h * w, 1, head) cos and sin, float32.

        Half of the pairs turn by the row, half by the column.
        """
        size = self.spec.width // self.spec.heads
        frequencies = inverse_frequencies(size // 2, self.spec.theta).to(places.device)
        angles = (places[:, :, None].float() * frequencies).flatten(1)
        angles = torch.cat((angles, angles), dim=-1).repeat(frames, 1)[:, None]
        return angles.cos(), angles.sin()

    def _block(
        self,
        block: VisionBlock,
        hidden: Tensor,
        turns: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        frames: int,
    ) -> Tensor:
        spec, (cos, sin) = self.spec, turns
        qkv = block.qkv(block.attention_norm(hidden)).view(len(hidden), 3, spec.heads, -1)
        q, k = (_turned(x, cos, sin) for x in (qkv[:, 0], qkv[:, 1]))
        # (frames, heads, patches, head) each
        groups = [x.unflatten(0, (frames, -1)).transpose(1, 2) for x in (q, k, qkv[:, 2])]  # type: ignore[no-untyped-call]
        pieces = zip(*(x.split(list(lengths), dim=2) for x in groups), strict=True)
        looked = torch.cat([F.scaled_dot_product_attention(*piece) for piece in pieces], dim=2)
        hidden = block.out.add_to(hidden, looked.transpose(1, 2).reshape(len(hidden), -1))
        inner, activation = block.up(block.mlp_norm(hidden)), ACTIVATIONS[spec.activation]
        inner = gated(inner, activation) if spec.gated else activation(inner)
        return block.down.add_to(hidden, inner)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (n, H, D) in float32, whatever its type, as in transformers."""
    exact = x.float()
    low, high = exact.chunk(2, dim=-1)
    return (exact * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


# --- weights --------------------------------------------------------------------------------------


def vision_parameters(spec: VisionSpec, names: Mapping[str, str]) -> Iterator[Parameter]:
    """Yield every tensor of a tower; `names`: what the checkpoint calls them."""
    side, kind = spec.patch, NormSpec(spec.norm, _EPS, bias=spec.norm == "layer")
    shape = (spec.width, spec.channels, spec.frames, side, side)
    yield parameter("vision.patch", f"{names['patch']}.weight", *shape)
    if spec.patch_bias:
        yield parameter("vision.patch_bias", f"{names['patch']}.bias", spec.width)
    if spec.side is not None:
        yield parameter("vision.table", f"{names['table']}.weight", spec.side**2, spec.width)
    for index in range(spec.depth):
        key, prefix = f"vision.blocks.{index}", f"{names['blocks']}.{index}"
        own = {role: f"{prefix}.{name}" for role, name in names.items()}
        for role in ("attention_norm", "mlp_norm"):
            yield from norm(kind, f"{key}.{role}", own[role], spec.width)
        yield from linear(f"{key}.qkv", {own["qkv"]: 3 * spec.width}, spec.width, bias=True)
        yield from linear(f"{key}.out", {own["out"]: spec.width}, spec.width, bias=True)
        roles = ("gate", "up") if spec.gated else ("up",)
        inner = {own[role]: spec.inner for role in roles}
        yield from linear(f"{key}.up", inner, spec.width, bias=True)
        yield from linear(f"{key}.down", {own["down"]: spec.width}, spec.inner, bias=True)
    merged = spec.width * spec.merge**2
    prefixes = [names["merger"], *(f"{names['taps']}.{i}" for i in range(len(spec.taps)))]
    for index, prefix in enumerate(prefixes):
        key, size = f"vision.mergers.{index}", merged if index else spec.width
        yield from norm(kind, f"{key}.norm", f"{prefix}.{names['merger_norm']}", size)
        up, down = (f"{prefix}.{names[role]}" for role in ("merger_up", "merger_down"))
        yield from linear(f"{key}.up", {up: merged}, merged, bias=True)
        yield from linear(f"{key}.down", {down: spec.out}, merged, bias=True)


def assemble_tower(spec: VisionSpec, loader: WeightLoader) -> VisionTower:
    """Assemble a tower from its parameters, in floats."""
    floats = replace(loader, rounding=None, panels=None)
    kind = NormSpec(spec.norm, _EPS, bias=spec.norm == "layer")
    return VisionTower(
        spec,
        floats.tensor("vision.patch"),
        floats.tensor("vision.patch_bias") if spec.patch_bias else None,
        floats.tensor("vision.table") if spec.side is not None else None,
        floats.layers(VisionBlock, "vision.blocks", spec.depth, kind),
        floats.layers(Merger, "vision.mergers", 1 + len(spec.taps), kind),
    )
