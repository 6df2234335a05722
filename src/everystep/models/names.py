"""The two-way map between the decoder's tensors and the names of a checkpoint.

The decoder fuses projections that read the same input; a checkpoint names them one by one. A slot
is one tensor of the decoder, and its parts say which of its rows have which name. Loading fills
slots from names, exporting cuts them into names again. Values are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from everystep.models.spec import DecoderSpec
from everystep.nn.linear import Matrix


@dataclass(frozen=True)
class SlotPart:
    """Rows [start, stop) of a slot, under this name in the checkpoint."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Slot:
    """One tensor of the model: its key there, its shape, and the names of its rows."""

    key: str
    shape: tuple[int, ...]
    parts: tuple[SlotPart, ...]


class Filled(Protocol):
    """Slots that are filled when they are taken, each once, so that none is held twice."""

    def __contains__(self, key: object) -> bool: ...

    @property
    def exact_activations(self) -> bool:
        """Whether quantised matrices are to read activations as they are."""
        ...

    def take(self, key: str) -> Tensor:
        """The values of a slot."""
        ...

    def matrix(self, key: str) -> Matrix:
        """The weight of a slot that is only multiplied by or looked up in: it may be quantised."""
        ...


@dataclass(frozen=True)
class LayerNames:
    """What the tensors of a layer are called after `layers` and the layer's number.

    Names of what a spec does not have are not used.
    """

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = "post_self_attn_layernorm"
    mlp_post_norm: str = "post_mlp_layernorm"


@dataclass(frozen=True)
class Names:
    """What a family calls its tensors, without `.weight` and `.bias`."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: LayerNames = LayerNames()


def decoder_slots(spec: DecoderSpec, names: Names) -> list[Slot]:
    """Every tensor of a decoder, each with its names."""
    slots = [slot("embed", names.embed + ".weight", spec.vocab_size, spec.width)]
    for index in range(len(spec.layers)):
        slots += _layer_slots(spec, names.layer, f"layers.{index}", f"{names.layers}.{index}")
    slots += _norm(spec, "norm", names.norm, spec.width)
    if not spec.tied:
        slots.append(slot("head.weight", names.head + ".weight", spec.vocab_size, spec.width))
    if spec.head_bias:
        slots.append(slot("head.bias", names.head + ".bias", spec.vocab_size))
    return slots


def slot(key: str, name: str, *shape: int) -> Slot:
    """A tensor that has one name."""
    return Slot(key, shape, (SlotPart(name, 0, shape[0]),))


def linear(
    key: str, sizes: tuple[tuple[str, int], ...], inputs: int, *, bias: bool
) -> Iterator[Slot]:
    """The slots of projections, (name, rows) each, that are fused in this order."""
    total = sum(rows for _, rows in sizes)
    yield Slot(f"{key}.weight", (total, inputs), tuple(_parts(sizes, ".weight")))
    if bias:
        yield Slot(f"{key}.bias", (total,), tuple(_parts(sizes, ".bias")))


def _parts(sizes: tuple[tuple[str, int], ...], suffix: str) -> Iterator[SlotPart]:
    start = 0
    for name, rows in sizes:
        yield SlotPart(name + suffix, start, start + rows)
        start += rows


def _layer_slots(spec: DecoderSpec, names: LayerNames, key: str, prefix: str) -> Iterator[Slot]:
    yield from _attention_slots(spec, names, key, prefix)
    yield from _mlp_slots(spec, names, key, prefix)
    norms = {"attention_norm": names.attention_norm}
    if not spec.parallel:
        norms["mlp_norm"] = names.mlp_norm
    if spec.post_norms:
        norms |= {
            "attention_post_norm": names.attention_post_norm,
            "mlp_post_norm": names.mlp_post_norm,
        }
    for role, name in norms.items():
        yield from _norm(spec, f"{key}.{role}", f"{prefix}.{name}", spec.width)


def _attention_slots(spec: DecoderSpec, names: LayerNames, key: str, prefix: str) -> Iterator[Slot]:
    attention = spec.attention
    queries = attention.heads * attention.head_dim
    shared = attention.kv_heads * attention.head_dim
    sizes = ((names.q, queries), (names.k, shared), (names.v, shared))
    fused = tuple((f"{prefix}.{name}", rows) for name, rows in sizes)
    yield from linear(f"{key}.qkv", fused, spec.width, bias=attention.qkv_bias)
    out = ((f"{prefix}.{names.out}", spec.width),)
    yield from linear(f"{key}.out", out, queries, bias=attention.out_bias)
    if attention.qk_norm:
        for role, name in (("q_norm", names.q_norm), ("k_norm", names.k_norm)):
            yield from _norm(spec, f"{key}.{role}", f"{prefix}.{name}", attention.head_dim)


def _mlp_slots(spec: DecoderSpec, names: LayerNames, key: str, prefix: str) -> Iterator[Slot]:
    mlp = spec.mlp
    inner = (names.gate, names.up) if mlp.gated else (names.up,)
    sizes = tuple((f"{prefix}.{name}", mlp.size) for name in inner)
    yield from linear(f"{key}.up", sizes, spec.width, bias=mlp.bias)
    down = ((f"{prefix}.{names.down}", spec.width),)
    yield from linear(f"{key}.down", down, mlp.size, bias=mlp.bias)


def _norm(spec: DecoderSpec, key: str, name: str, size: int) -> Iterator[Slot]:
    yield slot(f"{key}.weight", f"{name}.weight", size)
    if spec.norm.bias:
        yield slot(f"{key}.bias", f"{name}.bias", size)
