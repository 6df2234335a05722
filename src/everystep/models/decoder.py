"""One decoder for every family, driven by its spec.

Positions of all rows come as one packed dimension, (N, E), and every layer but attention treats
them alike; attention is done by the context, which alone knows rows. Projections that read the
same input are one matrix. Cos and sin are made once per step and kind of rope.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from everystep.models.names import Filled
from everystep.models.spec import DecoderSpec, NormSpec
from everystep.nn.activations import ACTIVATIONS, gated
from everystep.nn.attention import Rule
from everystep.nn.linear import (
    LinearMap,
    Matrix,
    Weight,
    look_up,
    packed_linear,
    shared_linear,
    weights_of,
)
from everystep.nn.network import Context, Full, Heard, StepInputs, Store, Window
from everystep.nn.norm import Norm
from everystep.nn.rotary import Rope, RotaryTable, rotary_table, rotate_
from everystep.types import InputSpec


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one layer; see `DecoderSpec` for which of them exist."""

    qkv: LinearMap
    out: LinearMap
    up: LinearMap
    down: LinearMap
    attention_norm: Norm
    mlp_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A decoder-only network; `table`: (V, E) token embeddings, float or quantised."""

    spec: DecoderSpec
    table: Weight
    layers: tuple[Layer, ...]
    norm: Norm
    head: LinearMap
    rules: tuple[Rule, ...]

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
        """How many query heads a layer has."""
        return self.spec.attention.heads

    @property
    def axes(self) -> int:
        """How many position ids a position has."""
        ropes = [layer.rope for layer in self.spec.layers if layer.rope is not None]
        return 1 + max((axis for rope in ropes for axis in rope.axes), default=0)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """Nothing: it reads ids or embeddings alone."""
        return ()

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """Keys and values of every layer, of all positions or of a window."""
        attention = self.spec.attention
        size = (attention.kv_heads, attention.head_dim, attention.head_dim)
        windows = [layer.window for layer in self.spec.layers]
        return tuple((Full(*size) if one is None else Window(*size, one),) for one in windows)

    def embed(self, tokens: Tensor) -> Tensor:
        """(...,) ids -> (..., E)."""
        hidden = look_up(self.table, tokens)
        if self.spec.embed_scale is None:
            return hidden
        # The factor is rounded to the weights' type first, as in the reference.
        return hidden * torch.tensor(self.spec.embed_scale, dtype=self.dtype, device=self.device)

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        """(N, E) hidden states after the last layer, before the last norm."""
        hidden = inputs.hidden
        tables = self._tables(inputs)
        context.keep(hidden)
        for index, layer in enumerate(self.layers):
            rope = self.spec.layers[index].rope
            hidden = self._layer(index, layer, hidden, tables.get(rope) if rope else None, context)
            context.keep(hidden)
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """The last norm, (..., E) -> (..., E)."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normalised hidden states (..., E) -> (..., V)."""
        logits = self.head(hidden)
        cap = self.spec.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def encode(self, hidden: Tensor, seen: Tensor | None, heard: Heard | None = None) -> Tensor:
        """Never called: there is no encoder."""
        raise NotImplementedError

    def across(self, encoder: Tensor) -> Tensor:
        """Never called: there is no encoder."""
        raise NotImplementedError

    def _tables(self, inputs: StepInputs) -> dict[Rope, RotaryTable]:
        ropes = {layer.rope for layer in self.spec.layers if layer.rope is not None}
        return {
            rope: rotary_table(rope, inputs.places(rope.axes), inputs.lengths, self.dtype)
            for rope in ropes
        }

    def _layer(
        self, index: int, layer: Layer, hidden: Tensor, table: RotaryTable | None, context: Context
    ) -> Tensor:
        normed = layer.attention_norm(hidden)
        mixed = self._attention(index, layer, normed, table, context)
        hidden = _add(hidden, layer.out, mixed, layer.attention_post_norm)
        read = normed if layer.mlp_norm is None else layer.mlp_norm(hidden)
        return _add(hidden, layer.down, self._mlp(layer, read), layer.mlp_post_norm)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, table: RotaryTable | None, context: Context
    ) -> Tensor:
        spec = self.spec.attention
        turning = spec.heads + spec.kv_heads
        # (N, H + 2K, D): queries, keys, values; queries and keys are changed in place.
        qkv = layer.qkv(x).view(-1, turning + spec.kv_heads, spec.head_dim)
        q, kv = qkv[:, : spec.heads], qkv[:, spec.heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            keys = kv[:, : spec.kv_heads]
            # A norm's gradient needs what the norm has read, so it reads a copy.
            q.copy_(layer.q_norm(q.clone()))
            keys.copy_(layer.k_norm(keys.clone()))
        if table is not None:
            rotate_(qkv[:, :turning], table)
        kv = kv.view(-1, 2, spec.kv_heads, spec.head_dim)
        return context.attend(index, q, kv, self.rules[index])

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.spec.mlp.activation]
        inner = layer.up(x)
        return gated(inner, activation) if self.spec.mlp.gated else activation(inner)


def _add(hidden: Tensor, linear: LinearMap, x: Tensor, post_norm: Norm | None) -> Tensor:
    if post_norm is None:
        return linear.add_to(hidden, x)
    return hidden + post_norm(linear(x))


def assemble_decoder(spec: DecoderSpec, slots: Filled) -> Decoder:
    """A decoder from its slots, which are taken one by one."""
    table = take_table(slots)
    layers = tuple(_assemble_layer(spec, slots, index) for index in range(len(spec.layers)))
    head = take_head(slots, table if spec.tied else None)
    return Decoder(spec, table, layers, take_norm(spec.norm, slots, "norm"), head, _rules(spec))


def take_table(slots: Filled) -> Weight:
    """The table of token embeddings."""
    (table,) = weights_of(slots.matrix("embed"))
    return table


def take_head(slots: Filled, table: Weight | None) -> LinearMap:
    """The head: tied to a table of embeddings, or with a weight of its own."""
    if table is None:
        return take_linear(slots, "head")
    bias = take_if(slots, "head.bias")
    return shared_linear(table, bias, exact_activations=slots.exact_activations)


def take_if(slots: Filled, key: str) -> Tensor | None:
    """A slot's tensor, None where there is no such slot."""
    return slots.take(key) if key in slots else None


def take_linear(slots: Filled, key: str) -> LinearMap:
    """A linear map in the layout that this machine prefers."""
    weight, bias = slots.matrix(f"{key}.weight"), take_if(slots, f"{key}.bias")
    return packed_linear(weight, bias, exact_activations=slots.exact_activations)


def take_norm(spec: NormSpec, slots: Filled, key: str) -> Norm:
    """A norm."""
    weight, bias = slots.take(f"{key}.weight"), take_if(slots, f"{key}.bias")
    return Norm(spec.kind, spec.eps, weight, bias, spec.plus_one)


def _rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention = spec.attention
    return tuple(Rule(attention.scale, attention.softcap, layer.window) for layer in spec.layers)


def _assemble_layer(spec: DecoderSpec, slots: Filled, index: int) -> Layer:
    key = f"layers.{index}"

    def norm(role: str) -> Norm | None:
        found = f"{key}.{role}.weight" in slots
        return take_norm(spec.norm, slots, f"{key}.{role}") if found else None

    return Layer(
        qkv=take_linear(slots, f"{key}.qkv"),
        out=take_linear(slots, f"{key}.out"),
        up=take_linear(slots, f"{key}.up"),
        down=take_linear(slots, f"{key}.down"),
        attention_norm=take_norm(spec.norm, slots, f"{key}.attention_norm"),
        mlp_norm=norm("mlp_norm"),
        attention_post_norm=norm("attention_post_norm"),
        mlp_post_norm=norm("mlp_post_norm"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
    )


def decoder_tensors(decoder: Decoder) -> Iterator[tuple[str, Matrix]]:
    """Every slot's key and tensor, the inverse of `assemble_decoder`, unpacked one at a time."""
    yield "embed", decoder.table
    yield from _held("norm", decoder.norm)
    if not decoder.spec.tied:
        yield "head.weight", decoder.head.matrix()
    if decoder.head.bias is not None:
        yield "head.bias", decoder.head.bias
    for index, layer in enumerate(decoder.layers):
        for role in fields(layer):
            yield from _held(f"layers.{index}.{role.name}", getattr(layer, role.name))


def _held(key: str, part: LinearMap | Norm | None) -> Iterator[tuple[str, Matrix]]:
    if part is None:
        return
    yield f"{key}.weight", part.weight if isinstance(part, Norm) else part.matrix()
    if part.bias is not None:
        yield f"{key}.bias", part.bias
