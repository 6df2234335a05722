"""Mamba: layers of selective state spaces, which remember a state and no positions.

A layer keeps the inputs that its convolution still reads and the state of its scan. What
transformers rounds to float32 whatever the model's type (the decay, what enters the scan,
residuals) is rounded here too.

Source: Gu and Dao 2023; transformers' `MambaConfig`, `MambaForCausalLM`.
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
from everystep.models.families import Family
from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter, frame, linear, norm, parameter
from everystep.models.spec import NormSpec
from everystep.nn.activations import ACTIVATIONS
from everystep.nn.linear import LinearMap
from everystep.nn.network import Context, Network, State, StepInputs, Store
from everystep.nn.norm import Norm
from everystep.nn.ragged import Ragged


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
class Mamba(Network):
    """The network; nothing is attended to."""

    spec: MambaSpec
    layers: tuple[MambaLayer, ...]

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """The last inputs of the convolution, and the state of the scan, of every layer."""
        spec = self.spec
        shapes = ((spec.kernel - 1, spec.inner), (spec.inner, spec.state))
        return ((State(shapes),),) * spec.count

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        """Return (N, E) hidden states after the last layer, before the last norm."""
        hidden = inputs.hidden
        context.keep(hidden)
        for index, layer in enumerate(self.layers):
            mixed = self._mix(index, layer, layer.norm(hidden.to(self.dtype)), context)
            hidden = (hidden.float() if self.spec.wide else hidden) + mixed
            context.keep(hidden)
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """Apply the last norm, (..., E) -> (..., E)."""
        return self.norm(hidden).to(self.dtype)

    def _mix(self, index: int, layer: MambaLayer, x: Tensor, context: Context) -> Tensor:
        """Mix (N, E) -> (N, E): convolution, scan, gate."""
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
    """Return (N, I) after the convolution, and the (M, kernel - 1, I) inputs that it reads next."""
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
    """Return (N, I) outputs, and the (M, I, S) states to keep.

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
    """Read the spec of a configuration, defaults filled in by the caller."""
    read = Fields(config)
    width = read.integer("hidden_size")
    automatic = config.get("time_step_rank") in (None, "auto")
    return MambaSpec(
        vocab_size=read.integer("vocab_size"),
        width=width,
        inner=read.integer("intermediate_size", read.integer("expand") * width),
        state=read.integer("state_size"),
        kernel=read.integer("conv_kernel", least=2),
        rank=math.ceil(width / 16) if automatic else read.integer("time_step_rank"),
        count=read.count("num_hidden_layers"),
        activation=read.choice("hidden_act", ACTIVATIONS),
        norm=NormSpec("rms", read.number("layer_norm_epsilon")),
        bias=read.flag("use_bias"),
        conv_bias=read.flag("use_conv_bias"),
        wide=read.flag("residual_in_fp32"),
        tied=read.flag("tie_word_embeddings"),
    )


_NAMES = {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}


def mamba_parameters(spec: MambaSpec) -> Iterator[Parameter]:
    """Yield every tensor of the network, each with its name."""
    yield from frame(spec, _NAMES)
    inner, selected = spec.inner, spec.rank + 2 * spec.state
    for index in range(spec.count):
        key, name = f"layers.{index}", f"backbone.layers.{index}"
        mixer = f"{name}.mixer"
        yield from norm(spec.norm, f"{key}.norm", f"{name}.norm", spec.width)
        inward, outward = {f"{mixer}.in_proj": 2 * inner}, {f"{mixer}.out_proj": spec.width}
        yield from linear(f"{key}.inward", inward, spec.width, bias=spec.bias)
        yield parameter(f"{key}.conv", f"{mixer}.conv1d.weight", inner, 1, spec.kernel)
        if spec.conv_bias:
            yield parameter(f"{key}.conv_bias", f"{mixer}.conv1d.bias", inner)
        yield parameter(f"{key}.select.weight", f"{mixer}.x_proj.weight", selected, inner)
        yield parameter(f"{key}.step.weight", f"{mixer}.dt_proj.weight", inner, spec.rank)
        yield parameter(f"{key}.step_bias", f"{mixer}.dt_proj.bias", inner)
        yield parameter(f"{key}.decay", f"{mixer}.A_log", inner, spec.state)
        yield parameter(f"{key}.skip", f"{mixer}.D", inner)
        yield from linear(f"{key}.outward", outward, inner, bias=spec.bias)


def assemble_mamba(spec: MambaSpec, loader: WeightLoader) -> Mamba:
    """Assemble the network from its parameters."""
    layers = loader.layers(MambaLayer, "layers", spec.count, spec.norm)
    return Mamba(spec, *loader.frame(spec), layers)


FAMILIES = {"mamba": Family(_DEFAULTS, read_spec, mamba_parameters, assemble_mamba)}
