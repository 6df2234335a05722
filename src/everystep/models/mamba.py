"""Mamba: layers of selective state spaces, which remember a state and no positions.

A layer keeps the inputs that its convolution still reads and the state of its scan. What the
reference rounds to float32 whatever the model's type (the decay, what enters the scan, residuals)
is rounded here too. Source: Gu and Dao 2023; the reference's `MambaConfig`, `MambaForCausalLM`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.models.config import Fields
from everystep.models.decoder import take_head, take_if, take_linear, take_norm, take_table
from everystep.models.families import Family
from everystep.models.names import Filled, Slot, linear, slot
from everystep.models.spec import NormSpec
from everystep.nn.activations import ACTIVATIONS
from everystep.nn.linear import LinearMap, Matrix, Weight, look_up
from everystep.nn.network import Context, Heard, State, StepInputs, Store
from everystep.nn.norm import Norm
from everystep.nn.ragged import Ragged
from everystep.types import InputSpec


@dataclass(frozen=True)
class MambaSpec:
    """`inner`: channels of the scan, each with `state` numbers; `rank`: of the step sizes.

    `kernel`: positions that the convolution reads. `wide`: residuals are added up in float32.
    """

    vocab_size: int
    width: int
    inner: int
    state: int
    kernel: int
    rank: int
    count: int
    activation: str
    norm: NormSpec
    bias: bool
    conv_bias: bool
    wide: bool
    tied: bool


@dataclass(frozen=True, slots=True, eq=False)
class MambaLayer:
    """`inward`: (2 * inner, E), the scan's input and its gate; `conv`: (inner, 1, kernel);
    `select`: step sizes, B and C; `step`: (inner, rank); `decay`: (inner, state) logarithms."""

    norm: Norm
    inward: LinearMap
    conv: Tensor
    conv_bias: Tensor | None
    select: LinearMap
    step: LinearMap
    step_bias: Tensor
    decay: Tensor
    skip: Tensor
    outward: LinearMap


@dataclass(frozen=True, slots=True, eq=False)
class Mamba:
    """The network; `table`: (V, E) token embeddings, float or quantised."""

    spec: MambaSpec
    table: Weight
    layers: tuple[MambaLayer, ...]
    norm: Norm
    head: LinearMap

    @property
    def dtype(self) -> torch.dtype:
        """The type of hidden states, and of weights that are not quantised."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.table.device

    @property
    def encodes(self) -> bool:
        """False: there is no encoder."""
        return False

    @property
    def heads(self) -> int:
        """0: nothing is attended to."""
        return 0

    @property
    def axes(self) -> int:
        """1: positions are places in the row."""
        return 1

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """Nothing: it reads ids or embeddings alone."""
        return ()

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """The last inputs of the convolution, and the state of the scan, of every layer."""
        spec = self.spec
        shapes = ((spec.kernel - 1, spec.inner), (spec.inner, spec.state))
        return ((State(shapes),),) * spec.count

    def embed(self, tokens: Tensor) -> Tensor:
        """(...,) ids -> (..., E)."""
        return look_up(self.table, tokens)

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        """(N, E) hidden states after the last layer, before the last norm."""
        hidden = inputs.hidden
        context.keep(hidden)
        for index, layer in enumerate(self.layers):
            mixed = self._mix(index, layer, layer.norm(hidden.to(self.dtype)), context)
            hidden = (hidden.float() if self.spec.wide else hidden) + mixed
            context.keep(hidden)
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """The last norm, (..., E) -> (..., E)."""
        return self.norm(hidden).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normalised hidden states (..., E) -> (..., V)."""
        return self.head(hidden)

    def encode(self, hidden: Tensor, seen: Tensor | None, heard: Heard | None = None) -> Tensor:
        """Never called: there is no encoder."""
        raise NotImplementedError

    def across(self, encoder: Tensor) -> Tensor:
        """Never called: there is no encoder."""
        raise NotImplementedError

    def _mix(self, index: int, layer: MambaLayer, x: Tensor, context: Context) -> Tensor:
        """(N, E) -> (N, E): convolution, scan, gate."""
        feeds, spec = context.feeds(), self.spec
        last_inputs, state = context.recall(index)
        x, gate = layer.inward(x).chunk(2, dim=-1)
        x, last_inputs = _convolve(layer, x, last_inputs, feeds)
        x = ACTIVATIONS[spec.activation](x)
        sizes, b, c = torch.split(layer.select(x), [spec.rank, spec.state, spec.state], dim=-1)
        sizes = F.softplus(layer.step(sizes) + layer.step_bias.float().to(x.dtype))
        out, state = _scan(layer, x, sizes, b, c, state, feeds)
        context.remember(index, (last_inputs, state))
        out = out + x * layer.skip.float()
        return layer.outward((out * F.silu(gate)).to(self.dtype))


def _convolve(layer: MambaLayer, x: Tensor, before: Tensor, feeds: Ragged) -> tuple[Tensor, Tensor]:
    """(N, I) after the convolution, and the (M, kernel - 1, I) inputs that it will read next."""
    inputs = torch.cat([before.to(x.dtype), feeds.padded(x)], dim=1)
    run = torch.arange(before.shape[1], device=x.device)
    kept = inputs[feeds.rows[:, None], feeds.steps[:, None] + run]
    found = F.conv1d(
        inputs.transpose(1, 2), layer.conv, layer.conv_bias, groups=layer.conv.shape[0]
    )
    return feeds.packed(found.transpose(1, 2)), kept


def _scan(
    layer: MambaLayer,
    x: Tensor,
    sizes: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    feeds: Ragged,
) -> tuple[Tensor, Tensor]:
    """(N, I) outputs, and the (M, I, S) states to keep.

    A step of size 0, as after the end of a feed, leaves the state as it is.
    """
    decay = -torch.exp(layer.decay.float())
    sizes, inputs = feeds.padded(sizes), feeds.padded(x.float())
    writes, reads = feeds.padded(b.float()), feeds.padded(c)
    outs = []
    kept = state.new_empty(len(feeds.rows), *state.shape[1:])
    for t in range(feeds.longest):
        size = sizes[:, t, :, None]
        entering = size * writes[:, t, None, :] * inputs[:, t, :, None]
        state = torch.exp(decay * size) * state + entering
        outs.append((state.to(reads.dtype) @ reads[:, t, :, None])[..., 0])
        if t + 1 in feeds.ends:
            entries, rows = feeds.ends[t + 1]
            kept[entries] = state[rows].to(kept.dtype)
    return feeds.packed(torch.stack(outs, dim=1)), kept


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "residual_in_fp32": True,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def read_spec(config: Mapping[str, Any]) -> MambaSpec:
    """The spec of a configuration, defaults filled in by the caller."""
    read = Fields(config)
    width = read.integer("hidden_size")
    automatic = config.get("time_step_rank") in (None, "auto")
    return MambaSpec(
        vocab_size=read.integer("vocab_size"),
        width=width,
        inner=read.integer("expand") * width,
        state=read.integer("state_size"),
        kernel=read.integer("conv_kernel", least=2),
        rank=math.ceil(width / 16) if automatic else read.integer("time_step_rank"),
        count=read.integer("num_hidden_layers"),
        activation=read.choice("hidden_act", ACTIVATIONS, "silu"),
        norm=NormSpec("rms", read.number("layer_norm_epsilon")),
        bias=read.flag("use_bias", False),
        conv_bias=read.flag("use_conv_bias", True),
        wide=read.flag("residual_in_fp32", True),
        tied=read.flag("tie_word_embeddings", True),
    )


def mamba_slots(spec: MambaSpec) -> list[Slot]:
    """Every tensor of the network, each with its name."""
    slots = [slot("embed", "backbone.embeddings.weight", spec.vocab_size, spec.width)]
    for index in range(spec.count):
        slots += _layer_slots(spec, f"layers.{index}", f"backbone.layers.{index}")
    slots.append(slot("norm.weight", "backbone.norm_f.weight", spec.width))
    if not spec.tied:
        slots.append(slot("head.weight", "lm_head.weight", spec.vocab_size, spec.width))
    return slots


def _layer_slots(spec: MambaSpec, key: str, name: str) -> Iterator[Slot]:
    inner, mixer = spec.inner, f"{name}.mixer"
    selected = spec.rank + 2 * spec.state
    yield slot(f"{key}.norm.weight", f"{name}.norm.weight", spec.width)
    yield from linear(
        f"{key}.inward", ((f"{mixer}.in_proj", 2 * inner),), spec.width, bias=spec.bias
    )
    yield slot(f"{key}.conv", f"{mixer}.conv1d.weight", inner, 1, spec.kernel)
    if spec.conv_bias:
        yield slot(f"{key}.conv_bias", f"{mixer}.conv1d.bias", inner)
    yield slot(f"{key}.select.weight", f"{mixer}.x_proj.weight", selected, inner)
    yield slot(f"{key}.step.weight", f"{mixer}.dt_proj.weight", inner, spec.rank)
    yield slot(f"{key}.step_bias", f"{mixer}.dt_proj.bias", inner)
    yield slot(f"{key}.decay", f"{mixer}.A_log", inner, spec.state)
    yield slot(f"{key}.skip", f"{mixer}.D", inner)
    yield from linear(f"{key}.outward", ((f"{mixer}.out_proj", spec.width),), inner, bias=spec.bias)


def assemble_mamba(spec: MambaSpec, slots: Filled) -> Mamba:
    """The network from its slots, which are taken one by one."""
    table = take_table(slots)
    layers = tuple(_assemble_layer(spec, slots, f"layers.{i}") for i in range(spec.count))
    norm = take_norm(spec.norm, slots, "norm")
    return Mamba(spec, table, layers, norm, take_head(slots, table if spec.tied else None))


def _assemble_layer(spec: MambaSpec, slots: Filled, key: str) -> MambaLayer:
    return MambaLayer(
        norm=take_norm(spec.norm, slots, f"{key}.norm"),
        inward=take_linear(slots, f"{key}.inward"),
        conv=slots.take(f"{key}.conv"),
        conv_bias=take_if(slots, f"{key}.conv_bias"),
        select=take_linear(slots, f"{key}.select"),
        step=take_linear(slots, f"{key}.step"),
        step_bias=slots.take(f"{key}.step_bias"),
        decay=slots.take(f"{key}.decay"),
        skip=slots.take(f"{key}.skip"),
        outward=take_linear(slots, f"{key}.outward"),
    )


def mamba_tensors(network: Mamba) -> Iterator[tuple[str, Matrix]]:
    """Every slot's key and tensor, the inverse of `assemble_mamba`."""
    yield "embed", network.table
    yield "norm.weight", network.norm.weight
    if not network.spec.tied:
        yield "head.weight", network.head.matrix()
    for index, layer in enumerate(network.layers):
        key = f"layers.{index}"
        yield f"{key}.norm.weight", layer.norm.weight
        for role in ("inward", "select", "step", "outward"):
            part = getattr(layer, role)
            yield f"{key}.{role}.weight", part.matrix()
            if part.bias is not None:
                yield f"{key}.{role}.bias", part.bias
        for role in ("conv", "conv_bias", "step_bias", "decay", "skip"):
            held = getattr(layer, role)
            if held is not None:
                yield f"{key}.{role}", held


def leftover(spec: MambaSpec, name: str) -> bool:
    """Whether checkpoints may hold this for nothing: a copy of a tied head."""
    return spec.tied and name == "lm_head.weight"


FAMILY = Family(_DEFAULTS, read_spec, mamba_slots, assemble_mamba, mamba_tensors, leftover)
