"""A decoder as the library reads it: weights in panels, and a structure that points to them.

Weights that a model holds in panels are read where they lie; others are packed once for all
executors of the model. A head tied to the embedding table shares its panels. What a specification
can say and the library cannot do is found before anything is packed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from ctypes import CDLL, byref, c_void_p
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from everystep.executors.native.library import (
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    LinearMapC,
    Matrix,
    MlpWeights,
    NormWeights,
    check,
    status,
)
from everystep.models import Model, refuse_copies
from everystep.models.decoder import Decoder, Layer
from everystep.models.spec import DecoderSpec, ExpertsSpec
from everystep.nn.experts import Experts
from everystep.nn.linear import JoinedLinear, QuantizedLinear, Weight, rows_of, weights_of
from everystep.nn.linear import LinearMap as TorchLinear
from everystep.nn.norm import Norm
from everystep.nn.panels import Arena, Panels

_ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_new": 1,
    "gelu_fast": 1,
    "gelu_pytorch_tanh": 1,
    "gelu": 2,
    "relu": 3,
}
_NORMS = {"rms": 0, "layer": 1}
_MOST_TURNING = 1024
_OTHER = "there are no kernels for this family of models"


def obstacles(model: Model) -> list[str]:
    """Why the native executor cannot run this model on this machine; empty if it can."""
    network = model.network
    if found := spec_obstacles(model.spec):
        return found
    if model.learns:
        return ["its weights may change, and the kernels read packed copies"]
    return list(_obstacles(network)) if isinstance(network, Decoder) else [_OTHER]


def spec_obstacles(spec: object) -> list[str]:
    """Why no model of this specification can be run on this machine; empty if some can."""
    if reason := status().reason:
        return [reason]
    return list(_kernels_missing(spec)) if isinstance(spec, DecoderSpec) else [_OTHER]


def _kernels_missing(spec: DecoderSpec) -> Iterator[str]:
    if spec.norm.kind not in _NORMS:
        yield f"there is no kernel for the norm {spec.norm.kind}"
    if spec.mlp.activation not in _ACTIVATIONS:
        yield f"there is no kernel for the activation {spec.mlp.activation}"
    if any(layer.rope and layer.rope.dim > _MOST_TURNING for layer in spec.layers):
        yield f"more than {_MOST_TURNING} values of a head turn"


def _obstacles(decoder: Decoder) -> Iterator[str]:
    if decoder.device.type != "cpu":
        yield f"the model is on {decoder.device}"
    if decoder.dtype != torch.float32:
        yield f"the model's type is {decoder.dtype}, and the kernels compute in float32"
    if any(map(_exact, (decoder.head, *(layer.qkv for layer in decoder.layers)))):
        yield "quantised weights are to meet activations that are not rounded"


class Program:
    """A packed decoder; `structure` is what the library reads.

    `arena`: where the panels lie that the decoder does not hold itself.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._alive: list[object] = []
        self.decoder = decoder
        self.ropes = list(dict.fromkeys(one.rope for one in decoder.spec.layers if one.rope))
        self.arena = Arena()
        self.structure = self._decoder(decoder)

    def _decoder(self, decoder: Decoder) -> DecoderWeights:
        spec, head = decoder.spec, decoder.head
        layers = (LayerWeights * len(spec.layers))(
            *(self._layer(index, layer) for index, layer in enumerate(decoder.layers))
        )
        table = self._matrix(decoder.table)
        attention = spec.attention
        return DecoderWeights(
            layers=len(spec.layers),
            width=spec.width,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            inner=spec.mlp.size,
            vocabulary=spec.vocab_size,
            places=decoder.most_positions or 0,
            norm_kind=_NORMS[spec.norm.kind],
            activation=_ACTIVATIONS[spec.mlp.activation],
            parallel=spec.parallel,
            whole_qk=attention.qk_norm == "whole",
            eps=spec.norm.eps,
            scale=attention.scale,
            softcap=attention.softcap or 0.0,
            embed_scale=spec.embed_scale or 0.0,
            final_softcap=spec.final_softcap or 0.0,
            layer=layers,
            norm=self._norm(decoder.norm),
            embedding=table,
            head=self._joined([table], head.bias) if spec.tied else self._linear(head),
            positions=self._floats(decoder.placed_rows),
        )

    def _layer(self, index: int, layer: Layer) -> LayerWeights:
        spec, rope = self.decoder.spec, self.decoder.spec.layers[index].rope
        dense = MlpWeights()
        if layer.up is not None and layer.down is not None:
            dense = self._mlp(layer.up, layer.down, spec.mlp.size)
        return LayerWeights(
            qkv=self._linear(layer.qkv),
            out=self._linear(layer.out),
            dense=dense,
            experts=self._experts(spec.layers[index].experts, layer.experts),
            attention=self._norm(layer.attention_norm),
            mlp=self._norm(layer.mlp_norm),
            attention_post=self._norm(layer.attention_post_norm),
            mlp_post=self._norm(layer.mlp_post_norm),
            q=self._norm(layer.q_norm),
            k=self._norm(layer.k_norm),
            rope=-1 if rope is None else self.ropes.index(rope),
            window=spec.layers[index].window or 0,
            factor=spec.layers[index].factor,
        )

    def _mlp(self, up: TorchLinear, down: TorchLinear, size: int) -> MlpWeights:
        rows, bias = weights_of(up.matrix()), up.bias
        gate: tuple[Weight, ...] = ()
        gate_bias: Tensor | None = None
        if self.decoder.spec.mlp.gated:
            gate, rows = _rows(rows, 0, size), _rows(rows, size, 2 * size)
            if bias is not None:
                gate_bias, bias = bias[:size], bias[size:]
        return MlpWeights(
            gate=self._joined([*map(self._matrix, gate)], gate_bias),
            up=self._joined([*map(self._matrix, rows)], bias),
            down=self._linear(down),
        )

    def _experts(self, spec: ExpertsSpec | None, experts: Experts | None) -> ExpertWeights:
        if spec is None or experts is None:
            return ExpertWeights()
        pairs = zip(experts.up, experts.down, strict=True)
        each = (MlpWeights * spec.count)(*(self._mlp(*pair, spec.size) for pair in pairs))
        self._alive.append(each)
        return ExpertWeights(
            count=spec.count,
            chosen=spec.chosen,
            normalised=spec.normalised,
            router=self._linear(experts.router),
            each=each,
        )

    def _linear(self, linear: TorchLinear) -> LinearMapC:
        return self._joined([*map(self._matrix, weights_of(linear.matrix()))], linear.bias)

    def _joined(self, parts: Sequence[Matrix], bias: Tensor | None) -> LinearMapC:
        return LinearMapC(len(parts), (Matrix * 3)(*parts), self._floats(bias))

    def _matrix(self, weight: Weight) -> Matrix:
        panels = weight if isinstance(weight, Panels) else Panels.of(weight, self.arena)
        self._alive.append(panels)
        return Matrix(
            format=_format(panels),
            rows=panels.rows,
            columns=panels.columns,
            data=panels.data.data_ptr(),
            row_scales=self._floats(panels.row_scales),
        )

    def _norm(self, norm: Norm | None) -> NormWeights:
        if norm is None:
            return NormWeights()
        weight = 1.0 + norm.weight.float() if norm.plus_one else norm.weight
        return NormWeights(self._floats(weight), self._floats(norm.bias))

    def _floats(self, values: Tensor | None) -> int | None:
        if values is None:
            return None
        held = values.float().contiguous()
        self._alive.append(held)
        return held.data_ptr()


_PROGRAMS: WeakKeyDictionary[Model, Program] = WeakKeyDictionary()
_packing = threading.RLock()


def program_of(model: Model) -> Program:
    """The packed form of a model without obstacles, made once, when it is first asked for."""
    with _packing:
        if model not in _PROGRAMS:
            _PROGRAMS[model] = Program(cast(Decoder, model.network))
        return _PROGRAMS[model]


def _forget_packing() -> None:
    """A forked child has no thread that could be packing."""
    global _packing
    _packing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_packing)

_OPEN: dict[int, tuple[CDLL, Program]] = {}


class Runner(int):
    """The address of an open runner of the library, which is closed once nothing can step it any
    more.

    It has no attributes, so the garbage collector does not know it: in a cycle that is collected
    it outlives every finaliser, of which some may still step. What it reads is kept in `_OPEN`.
    """

    __slots__ = ()

    def __del__(self, opened: dict[int, tuple[CDLL, Program]] = _OPEN) -> None:
        library, _program = opened.pop(self)
        library.es_close(self)

    __reduce_ex__ = refuse_copies


def open_runner(library: CDLL, program: Program, kv_type: int) -> Runner:
    """A runner without rows; CapacityError where memory does not suffice."""
    address = c_void_p()
    check(library.es_open(program.structure, kv_type, byref(address)))
    _OPEN[address.value or 0] = library, program
    return Runner(address.value or 0)


def _exact(linear: TorchLinear) -> bool:
    if isinstance(linear, JoinedLinear):
        return any(map(_exact, linear.parts))
    return isinstance(linear, QuantizedLinear) and linear.exact_activations


def _rows(weights: Sequence[Weight], start: int, stop: int) -> tuple[Weight, ...]:
    """The given output rows of matrices that stand one after another."""
    found: list[Weight] = []
    before = 0
    for weight in weights:
        first, last = max(start - before, 0), min(stop - before, weight.shape[0])
        if first < last:
            whole = weight.whole(first, last) if isinstance(weight, Panels) else None
            found.append(whole or rows_of(weight, first, last))
        before += weight.shape[0]
    return tuple(found)


def _format(panels: Panels) -> int:
    """The number that `cpp/model.h` has for it."""
    if panels.format in (None, "int8", "q8_0"):
        return (None, "int8", "q8_0").index(panels.format)
    return 4 if panels.lifted else 3
