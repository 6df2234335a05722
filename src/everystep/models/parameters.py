"""The two-way map between a network's tensors and the names of a checkpoint.

The decoder fuses projections that read the same input; a checkpoint names them one by one. A
parameter is one tensor of the network, and its parts say which of its rows have which name, and how
they lie there. Loading fills parameters from names, exporting cuts them into names again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from everystep.models.spec import DecoderSpec, ExpertsSpec, NormSpec
from everystep.nn.quantized import QuantizedWeight

RowsT = TypeVar("RowsT", Tensor, QuantizedWeight)

NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "positions": "model.embed_positions",
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
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
    "experts_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
"""The names of tensors in most families, without `.weight` and `.bias`; those of a layer come after
`layers` and its number. Names of what a spec does not have are not used. `qkv` and `gate_up` name
what checkpoints of some families hold as one. A pair of braces stands for an expert's number;
`experts_up` and `experts_down` are the stacks of all experts that transformers' modules hold, and
`router_there` what those call the router where files have another name."""


@dataclass(frozen=True)
class Interleaved:
    """Rows of several kinds that take turns in a checkpoint.

    There are `sizes[0]` rows of the first kind, `sizes[1]` of the second and so on, and all that
    `groups` times. The network has the rows of each kind together.
    """

    groups: int
    sizes: tuple[int, ...]

    def order(self) -> Tensor:
        """Return (rows,): which row there each row of the network is."""
        there = torch.arange(self.groups * sum(self.sizes)).view(self.groups, -1)
        return torch.cat([kind.flatten() for kind in torch.split(there, list(self.sizes), dim=1)])


@dataclass(frozen=True)
class Stack:
    """A place where a checkpoint may hold a part instead.

    It is rows [start, stop) of the `index`-th matrix of the `count` under this name, (count, rows,
    columns) or, turned, (count, columns, rows). `written`: files of the family hold the stack,
    turned, and not the part.
    """

    name: str
    start: int
    stop: int
    rows: int
    count: int
    index: int
    written: bool


@dataclass(frozen=True)
class ParameterPart:
    """Rows [start, stop) of a parameter, under this name in the checkpoint, or under the first of
    the `others` that it has, as tied weights may be.

    `transposed`: they are columns there. `interleaved`: they are in another order there.
    `stack`: where it may be instead.
    """

    name: str
    start: int
    stop: int
    transposed: bool = False
    interleaved: Interleaved | None = None
    stack: Stack | None = None
    others: tuple[str, ...] = ()

    @property
    def codes_name(self) -> str:
        """Its name where it lies as codes, which are never transposed."""
        return f"{self.name}.T" if self.transposed else self.name

    def loaded(self, rows: RowsT) -> RowsT:
        """Bring rows in the order of the checkpoint into that of the network."""
        return rows if self.interleaved is None else _gathered(rows, self.interleaved.order())

    def stored(self, rows: RowsT) -> RowsT:
        """Bring rows in the order of the network into that of the checkpoint."""
        if self.interleaved is None:
            return rows
        return _gathered(rows, self.interleaved.order().argsort())

    def stored_values(self, rows: Tensor) -> Tensor:
        """Return rows of the network as values lie in the checkpoint."""
        return self.stored(rows).T if self.transposed else self.stored(rows)


def _gathered(rows: RowsT, order: Tensor) -> RowsT:
    if isinstance(rows, Tensor):
        return rows[order.to(rows.device)]
    return rows.gather(order.to(rows.device))


@dataclass(frozen=True)
class Parameter:
    """One tensor of the network: its key there, its shape, and the names of its rows.

    Rows without a name are 0. `made`: its values where a checkpoint leaves it out, None where that
    is an error.
    """

    key: str
    shape: tuple[int, ...]
    parts: tuple[ParameterPart, ...]
    made: Callable[[], Tensor] | None = None

    @property
    def named_rows(self) -> int:
        """The number of rows that have a name."""
        return sum(part.stop - part.start for part in self.parts)

    def alone(self, part: ParameterPart) -> Parameter:
        """Return one part as a parameter of its own."""
        size = part.stop - part.start
        return Parameter(self.key, (size, *self.shape[1:]), (replace(part, start=0, stop=size),))

    def shapes(self) -> Iterator[tuple[ParameterPart, tuple[int, ...]]]:
        """Yield every part with its shape where rows are rows."""
        for part in self.parts:
            yield part, (part.stop - part.start, *self.shape[1:])


def parameter(key: str, name: str, *shape: int) -> Parameter:
    """Return a tensor that has one name."""
    return Parameter(key, shape, (ParameterPart(name, 0, shape[0]),))


def linear(
    key: str,
    projections: Mapping[str, int],
    inputs: int,
    *,
    bias: bool = False,
    transposed: bool = False,
    interleaved: Interleaved | None = None,
    unbiased: Collection[str] = (),
) -> Iterator[Parameter]:
    """Yield the parameters of projections, name -> rows, that are fused in this order.

    The `unbiased` among them have no bias where the others have one.
    """
    stops = list(accumulate(projections.values()))
    places = list(zip(projections, [0, *stops[:-1]], stops, strict=True))
    shapes = {"weight": (stops[-1], inputs), "bias": (stops[-1],)}
    for kind in ("weight", "bias") if bias else ("weight",):
        turned = transposed and kind == "weight"
        absent = unbiased if kind == "bias" else ()
        parts = (
            ParameterPart(f"{name}.{kind}", start, stop, turned, interleaved)
            for name, start, stop in places
            if name not in absent
        )
        yield Parameter(f"{key}.{kind}", shapes[kind], tuple(parts))


def norm(spec: NormSpec, key: str, name: str, size: int) -> Iterator[Parameter]:
    """Yield the parameters of a norm."""
    for kind in ("weight", "bias") if spec.bias else ("weight",):
        yield parameter(f"{key}.{kind}", f"{name}.{kind}", size)


def frame(spec: Any, names: Mapping[str, str]) -> Iterator[Parameter]:
    """Yield the parameters around the layers.

    These are embeddings, the last norm, and a head that is not tied to the embeddings.
    """
    yield parameter("embed", f"{names['embed']}.weight", spec.vocab_size, spec.width)
    yield from norm(spec.norm, "norm", names["norm"], spec.width)
    if not spec.tied:
        yield parameter("head.weight", f"{names['head']}.weight", spec.vocab_size, spec.width)


@dataclass(frozen=True)
class CheckpointLayout:
    """The layout of a decoder in checkpoints: `names` as in NAMES.

    `transposed`: projections lie as (inputs, outputs). `interleaved`: queries, keys and values take
    turns in `qkv`, those that belong to one key head after those of another. `stacked`: files hold
    the experts of a layer as stacks, turned.
    """

    names: Mapping[str, str]
    transposed: bool = False
    interleaved: bool = False
    stacked: bool = False


_USUAL = CheckpointLayout(NAMES)


def decoder_parameters(spec: DecoderSpec, layout: CheckpointLayout = _USUAL) -> list[Parameter]:
    """Return every tensor of a decoder."""
    names = layout.names
    found = list(frame(spec, names))
    if spec.head_bias:
        found.append(parameter("head.bias", f"{names['head']}.bias", spec.vocab_size))
    if (learned := spec.positions) is not None:
        rows, name = learned.unused + learned.count, f"{names['positions']}.weight"
        found.append(parameter("positions", name, rows, spec.width))
    for index in range(len(spec.layers)):
        prefix = f"{names['layers']}.{index}"
        own = replace(layout, names={role: f"{prefix}.{name}" for role, name in names.items()})
        found += _attention(spec, f"layers.{index}", own)
        if (experts := spec.layers[index].experts) is None:
            found += _mlp(spec, f"layers.{index}", own)
        else:
            found += _experts(spec, experts, f"layers.{index}.experts", own)
        for role in _layer_norms(spec):
            found += norm(spec.norm, f"layers.{index}.{role}", own.names[role], spec.width)
    return found


def _attention(spec: DecoderSpec, key: str, layout: CheckpointLayout) -> Iterator[Parameter]:
    attention, names, turned = spec.attention, layout.names, layout.transposed
    queries = attention.heads * attention.head_dim
    shared = attention.kv_heads * attention.head_dim
    fused = {names["q"]: queries, names["k"]: shared, names["v"]: shared}
    if "qkv" in names:
        fused = {names["qkv"]: queries + 2 * shared}
    turns, bias = _turns(spec) if layout.interleaved else None, attention.qkv_bias
    yield from linear(
        f"{key}.qkv", fused, spec.width, bias=bias, transposed=turned, interleaved=turns
    )
    out, bias = {names["out"]: spec.width}, attention.out_bias
    yield from linear(f"{key}.out", out, queries, bias=bias, transposed=turned)
    if attention.qk_norm is not None:
        sizes = {"heads": (attention.head_dim,) * 2, "whole": (queries, shared)}
        for role, size in zip(("q_norm", "k_norm"), sizes[attention.qk_norm], strict=True):
            yield from norm(spec.norm, f"{key}.{role}", names[role], size)


def _turns(spec: DecoderSpec) -> Interleaved:
    """Return the turns: the queries that read a key, then the key, the value, and so on."""
    attention, size = spec.attention, spec.attention.head_dim
    readers = attention.heads // attention.kv_heads
    return Interleaved(attention.kv_heads, (readers * size, size, size))


def _mlp(spec: DecoderSpec, key: str, layout: CheckpointLayout) -> Iterator[Parameter]:
    mlp, names, turned = spec.mlp, layout.names, layout.transposed
    inner = {names[role]: mlp.size for role in (("gate", "up") if mlp.gated else ("up",))}
    if "gate_up" in names:
        inner = {names["gate_up"]: 2 * mlp.size}
    yield from linear(f"{key}.up", inner, spec.width, bias=mlp.bias, transposed=turned)
    down = {names["down"]: spec.width}
    yield from linear(f"{key}.down", down, mlp.size, bias=mlp.bias, transposed=turned)


def _experts(
    spec: DecoderSpec, experts: ExpertsSpec, key: str, layout: CheckpointLayout
) -> Iterator[Parameter]:
    count, size, names = experts.count, experts.size, layout.names
    others = (f"{names['router_there']}.weight",) if "router_there" in names else ()
    router = ParameterPart(f"{names['router']}.weight", 0, count, others=others)
    yield Parameter(f"{key}.router.weight", (count, spec.width), (router,))
    roles = ("expert_gate", "expert_up") if spec.mlp.gated else ("expert_up",)
    inner = [(names[role], size) for role in roles]
    for expert in range(count):
        up = _in_stack(inner, names["experts_up"], count, expert, layout.stacked)
        yield Parameter(f"{key}.up.{expert}.weight", (up[-1].stop, spec.width), up)
    for expert in range(count):
        outer = [(names["expert_down"], spec.width)]
        down = _in_stack(outer, names["experts_down"], count, expert, layout.stacked)
        yield Parameter(f"{key}.down.{expert}.weight", (spec.width, size), down)


def _in_stack(
    parts: Sequence[tuple[str, int]], stack: str, count: int, expert: int, written: bool
) -> tuple[ParameterPart, ...]:
    """Return the parts of an expert's matrix, (name, rows) each, in the order of their stack."""
    stops = list(accumulate(rows for _, rows in parts))
    return tuple(
        ParameterPart(
            f"{name.format(expert)}.weight",
            stop - rows,
            stop,
            stack=Stack(stack, stop - rows, stop, stops[-1], count, expert, written),
        )
        for (name, rows), stop in zip(parts, stops, strict=True)
    )


def _layer_norms(spec: DecoderSpec) -> Iterator[str]:
    if spec.pre_norms != "none":
        yield "attention_norm"
    if spec.pre_norms == "each":
        yield "mlp_norm"
    if spec.post_norms:
        yield from ("attention_post_norm", "mlp_post_norm")
