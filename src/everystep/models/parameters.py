"""The two-way map between a network's tensors and the names of a checkpoint.

The decoder fuses projections that read the same input; a checkpoint names them one by one. A
parameter is one tensor of the network, and its parts say which of its rows have which name. Loading
fills parameters from names, exporting cuts them into names again. Values are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from everystep.models.spec import DecoderSpec, NormSpec

NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
"""What most families call their tensors, without `.weight` and `.bias`; those of a layer come after
`layers` and its number. Names of what a spec does not have are not used. `qkv` and `gate_up` name
what checkpoints of some families hold as one."""


@dataclass(frozen=True)
class ParameterPart:
    """Rows [start, stop) of a parameter, under this name in the checkpoint."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """One tensor of the network: its key there, its shape, and the names of its rows."""

    key: str
    shape: tuple[int, ...]
    parts: tuple[ParameterPart, ...]


def parameter(key: str, name: str, *shape: int) -> Parameter:
    """A tensor that has one name."""
    return Parameter(key, shape, (ParameterPart(name, 0, shape[0]),))


def linear(
    key: str, projections: Mapping[str, int], inputs: int, *, bias: bool = False
) -> Iterator[Parameter]:
    """Those of projections, name -> rows, that are fused in this order."""
    stops = list(accumulate(projections.values()))
    places = list(zip(projections, [0, *stops[:-1]], stops, strict=True))
    shapes = {"weight": (stops[-1], inputs), "bias": (stops[-1],)}
    for kind in ("weight", "bias") if bias else ("weight",):
        parts = (ParameterPart(f"{name}.{kind}", start, stop) for name, start, stop in places)
        yield Parameter(f"{key}.{kind}", shapes[kind], tuple(parts))


def norm(spec: NormSpec, key: str, name: str, size: int) -> Iterator[Parameter]:
    """Those of a norm."""
    for kind in ("weight", "bias") if spec.bias else ("weight",):
        yield parameter(f"{key}.{kind}", f"{name}.{kind}", size)


def frame(spec: Any, names: Mapping[str, str]) -> Iterator[Parameter]:
    """Those around the layers: embeddings, the last norm, and a head that is not tied to the
    embeddings."""
    yield parameter("embed", f"{names['embed']}.weight", spec.vocab_size, spec.width)
    yield from norm(spec.norm, "norm", names["norm"], spec.width)
    if not spec.tied:
        yield parameter("head.weight", f"{names['head']}.weight", spec.vocab_size, spec.width)


def decoder_parameters(spec: DecoderSpec, names: Mapping[str, str] = NAMES) -> list[Parameter]:
    """Every tensor of a decoder."""
    found = list(frame(spec, names))
    if spec.head_bias:
        found.append(parameter("head.bias", f"{names['head']}.bias", spec.vocab_size))
    for index in range(len(spec.layers)):
        prefix = f"{names['layers']}.{index}"
        own = {role: f"{prefix}.{name}" for role, name in names.items()}
        found += _attention(spec, f"layers.{index}", own)
        found += _mlp(spec, f"layers.{index}", own)
        for role in _layer_norms(spec):
            found += norm(spec.norm, f"layers.{index}.{role}", own[role], spec.width)
    return found


def _attention(spec: DecoderSpec, key: str, names: Mapping[str, str]) -> Iterator[Parameter]:
    attention = spec.attention
    queries = attention.heads * attention.head_dim
    shared = attention.kv_heads * attention.head_dim
    fused = {names["q"]: queries, names["k"]: shared, names["v"]: shared}
    if "qkv" in names:
        fused = {names["qkv"]: queries + 2 * shared}
    yield from linear(f"{key}.qkv", fused, spec.width, bias=attention.qkv_bias)
    yield from linear(f"{key}.out", {names["out"]: spec.width}, queries, bias=attention.out_bias)
    if attention.qk_norm:
        for role in ("q_norm", "k_norm"):
            yield from norm(spec.norm, f"{key}.{role}", names[role], attention.head_dim)


def _mlp(spec: DecoderSpec, key: str, names: Mapping[str, str]) -> Iterator[Parameter]:
    mlp = spec.mlp
    inner = {names[role]: mlp.size for role in (("gate", "up") if mlp.gated else ("up",))}
    if "gate_up" in names:
        inner = {names["gate_up"]: 2 * mlp.size}
    yield from linear(f"{key}.up", inner, spec.width, bias=mlp.bias)
    yield from linear(f"{key}.down", {names["down"]: spec.width}, mlp.size, bias=mlp.bias)


def _layer_norms(spec: DecoderSpec) -> Iterator[str]:
    yield "attention_norm"
    if not spec.parallel:
        yield "mlp_norm"
    if spec.post_norms:
        yield from ("attention_post_norm", "mlp_post_norm")
