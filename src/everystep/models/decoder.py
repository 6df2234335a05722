"""One decoder for every family, driven by its spec.

Positions of all rows come as one packed dimension, (N, E), and every layer but attention treats
them alike; attention is done by the context, which alone knows rows. Projections that read the
same input are one matrix. Cos and sin are made once per step and kind of rope.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from everystep.errors import InvariantError
from everystep.models.loader import WeightLoader
from everystep.models.spec import DecoderSpec
from everystep.nn.activations import ACTIVATIONS, gated
from everystep.nn.attention import Rule
from everystep.nn.experts import Experts
from everystep.nn.linear import LinearMap, look_up
from everystep.nn.network import Context, Full, Network, StepInputs, Store, Window
from everystep.nn.norm import Norm
from everystep.nn.rotary import Rope, RotaryTable, rotary_table, rotate_
from everystep.nn.split import Split
from everystep.types import InputSpec


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one layer; see `DecoderSpec` for which of them exist."""

    qkv: LinearMap
    out: LinearMap
    up: LinearMap | None
    down: LinearMap | None
    experts: Experts | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class Decoder(Network):
    """A decoder-only network.

    `positions`: (rows, E) embeddings of positions, where it learns them. `recomputes`: what a layer
    computes is not kept for gradients, but computed once more. `changes_rows`: what adapters make
    of rows (N, E) of the table that were looked up for ids (N,); `changes_states`: what steering
    makes of hidden states (N, E) after a layer. `around`: of each layer, what is given a call, what
    gives the layer, and the call's other arguments, and makes the call with the weights that the
    layer has then; empty where they are those of `layers`. `split`: the process's part of it, where
    the weights lie in parts on several: those of its heads, of the inside of an MLP and of its rows
    of the vocabulary; `spec` is that of the whole.
    """

    spec: DecoderSpec
    layers: tuple[Layer, ...]
    rules: tuple[Rule, ...]
    positions: Tensor | None = None
    recomputes: bool = False
    changes_rows: Callable[[Tensor, Tensor], Tensor] | None = None
    changes_states: Callable[[int, Tensor], Tensor] | None = None
    around: tuple[Callable[..., Tensor], ...] = ()
    split: Split | None = None

    @property
    def heads(self) -> int:
        """The number of query heads of a layer."""
        return self.spec.attention.heads

    @property
    def axes(self) -> int:
        """The number of position ids that a position has."""
        ropes = [layer.rope for layer in self.spec.layers if layer.rope is not None]
        return 1 + max((axis for rope in ropes for axis in rope.axes), default=0)

    @property
    def most_positions(self) -> int | None:
        """The number of positions that it has embeddings for; None where any number will do."""
        return None if self.spec.positions is None else self.spec.positions.count

    @property
    def placed_rows(self) -> Tensor | None:
        """(positions, E) the embedding of each position, where it has them."""
        if self.positions is None or self.spec.positions is None:
            return None
        return self.positions[self.spec.positions.unused :]

    @property
    def counts_seen(self) -> bool:
        """True if the plain forward numbers the positions that its mask leaves."""
        return self.spec.positions is not None and self.spec.positions.from_mask

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """Keys and values of every layer, of all positions or of a window."""
        return self._stores(self.spec.attention.kv_heads)

    @property
    def own_stores(self) -> tuple[tuple[Store, ...], ...]:
        """Keys and values of the heads that this process has."""
        return self._stores(self._own_heads()[1])

    def _stores(self, kv_heads: int) -> tuple[tuple[Store, ...], ...]:
        size = (kv_heads, self.spec.attention.head_dim, self.spec.attention.head_dim)
        windows = [layer.window for layer in self.spec.layers]
        return tuple((Full(*size) if one is None else Window(*size, one),) for one in windows)

    def _own_heads(self) -> tuple[int, int]:
        """Return how many heads of queries and of keys this process has."""
        count = 1 if self.split is None else self.split.count
        return self.spec.attention.heads // count, self.spec.attention.kv_heads // count

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """Features (layers, E) per position for the first layers, where they take any."""
        shape = (self.spec.deepstack, self.spec.width)
        return (InputSpec("deepstack", "token", shape, self.dtype),) if shape[0] else ()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ids (...,) -> (..., E)."""
        hidden = self._looked_up(tokens)
        if self.changes_rows is not None:
            rows = self.changes_rows(hidden.flatten(0, -2), tokens.flatten())
            hidden = rows.view_as(hidden)
        if self.spec.embed_scale is None:
            return hidden
        # The factor is rounded to the weights' type first, as in transformers.
        return hidden * hidden.new_full((), self.spec.embed_scale, dtype=self.dtype)

    def _looked_up(self, tokens: Tensor) -> Tensor:
        """Look up ids (...,) -> (..., E), each in the process that has its row."""
        if self.split is None:
            return look_up(self.table, tokens)
        first, end = self.split.own(self.spec.vocab_size)
        here = (tokens >= first) & (tokens < end)
        found = look_up(self.table, torch.where(here, tokens - first, 0))
        return self.split.total(found * here[..., None])

    def forward(self, inputs: StepInputs, context: Context) -> Tensor:
        """Return (N, E) hidden states after the last layer, before the last norm."""
        hidden = self._placed(inputs)
        tables, added = self._tables(inputs), inputs.declared.get("deepstack")
        context.keep(hidden)
        for index, layer in enumerate(self.layers):
            rope = self.spec.layers[index].rope
            run = partial(self._layer, index, layer)
            if self.around:
                run = partial(
                    self.around[index], partial(self._layer, index), partial(_same, layer)
                )
            given = hidden, tables.get(rope) if rope else None, context
            again = self.recomputes and torch.is_grad_enabled()
            hidden = checkpoint(run, *given, use_reentrant=False) if again else run(*given)
            if self.changes_states is not None:
                hidden = self.changes_states(index, hidden)
            context.keep(hidden)
            if added is not None and index < self.spec.deepstack:
                hidden = hidden.index_add(0, added.places, added.values[:, index])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn normalised hidden states (..., E) into logits (..., V)."""
        return self._whole(self.own_logits(hidden))

    def early_logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states (..., E) before an earlier layer into logits (..., V)."""
        return self._whole(self.head(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return (..., n), those of the n tokens that this process has of the vocabulary."""
        logits = self.head(hidden)
        cap = self.spec.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _whole(self, logits: Tensor) -> Tensor:
        if self.split is None:
            return logits
        return self.split.joined(logits, logits.dim() - 1, self.spec.vocab_size)

    def _tables(self, inputs: StepInputs) -> dict[Rope, RotaryTable]:
        ropes = {layer.rope for layer in self.spec.layers if layer.rope is not None}
        return {
            rope: rotary_table(rope, inputs.places(rope.axes), inputs.lengths, self.dtype)
            for rope in ropes
        }

    def _placed(self, inputs: StepInputs) -> Tensor:
        """Return (N, E) embeddings, with those of their positions if there are any."""
        rows = self.placed_rows
        return inputs.hidden if rows is None else inputs.hidden + rows[inputs.places(())]

    def _layer(
        self, index: int, layer: Layer, hidden: Tensor, table: RotaryTable | None, context: Context
    ) -> Tensor:
        normed = _normed(layer.attention_norm, hidden)
        mixed = self._attention(index, layer, normed, table, context)
        added = self._added(hidden, layer.out, mixed, layer.attention_post_norm)
        if self.spec.pre_norms == "shared":
            read = normed
        else:
            read = _normed(layer.mlp_norm, hidden if self.spec.parallel else added)
        return self._mlp(index, layer, added, read)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, table: RotaryTable | None, context: Context
    ) -> Tensor:
        spec = self.spec.attention
        heads, kv_heads = self._own_heads()
        turning = heads + kv_heads
        made = layer.qkv(x)
        # (N, H + 2K, D): queries, keys, values; queries and keys are changed in place. Where
        # autocast made them narrower than the model, that is done in the model's type, and rounded
        # once.
        wide = made.to(torch.promote_types(made.dtype, self.dtype))
        qkv = wide.view(-1, turning + kv_heads, spec.head_dim)
        q, kv = qkv[:, :heads], qkv[:, heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            # A norm's gradient needs what the norm has read, so it reads a copy.
            for part, norm in ((q, layer.q_norm), (kv[:, :kv_heads], layer.k_norm)):
                copy = part.to(made.dtype, copy=True)
                read = copy if spec.qk_norm == "heads" else copy.flatten(1)
                part.copy_(norm(read).view_as(part))
        if table is not None:
            rotate_(qkv[:, :turning], table)
        kv = kv.view(-1, 2, kv_heads, spec.head_dim)
        return context.attend(index, q, kv, self.rules[index])

    def _mlp(self, index: int, layer: Layer, hidden: Tensor, x: Tensor) -> Tensor:
        """Return `hidden` (N, E) plus what the MLP or the experts of a layer make of `x` (N, E)."""
        spec, post_norm = self.spec.layers[index].experts, layer.mlp_post_norm
        if spec is not None and layer.experts is not None:
            chosen, normalised = spec.chosen, spec.normalised
            added = layer.experts(x, chosen, self._activate, normalised=normalised)
            return hidden + (added if post_norm is None else post_norm(added))
        if layer.up is None or layer.down is None:
            raise InvariantError(f"layer {index} has neither an MLP nor experts")
        return self._added(hidden, layer.down, self._activate(layer.up(x)), post_norm)

    def _added(
        self, hidden: Tensor, linear: LinearMap, x: Tensor, post_norm: Norm | None
    ) -> Tensor:
        """Return `hidden` plus what a map makes of `x`, of which each process may have a part."""
        if self.split is not None:
            whole = self.split.total(linear(x))
            return hidden + (whole if post_norm is None else post_norm(whole))
        if post_norm is None:
            return linear.add_to(hidden, x)
        return hidden + post_norm(linear(x))

    def _activate(self, inner: Tensor) -> Tensor:
        """Activate (..., F), or (..., 2F) where there is a gate, -> (..., F)."""
        activation = ACTIVATIONS[self.spec.mlp.activation]
        return gated(inner, activation) if self.spec.mlp.gated else activation(inner)


def _same(layer: Layer) -> Layer:
    return layer


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def assemble_decoder(spec: DecoderSpec, loader: WeightLoader) -> Decoder:
    """Assemble a decoder from its parameters."""
    layers = loader.layers(Layer, "layers", len(spec.layers), spec.norm)
    scale, softcap = spec.attention.scale, spec.attention.softcap
    rules = tuple(Rule(scale * one.factor, softcap, one.window) for one in spec.layers)
    positions = loader.tensor_if("positions")
    return Decoder(spec, *loader.frame(spec), layers, rules, positions, split=loader.split)
