"""A network as the library reads it: weights in panels, and a structure that points to them.

Networks are packed once for all executors of their model. What a specification can say and the
library cannot do is found before anything is packed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from ctypes import CDLL, byref, c_void_p
from typing import cast
from weakref import WeakKeyDictionary

import torch

from everystep.executors.native.changes import PackedAdapters
from everystep.executors.native.decoders import decoder_weights, ropes_of
from everystep.executors.native.encoder_and_decoder import crossing_weights, encoder_weights
from everystep.executors.native.library import StackWeights, check, status
from everystep.executors.native.packing import ACTIVATIONS, NORMS, Packing
from everystep.executors.native.recurrent import recurrent_weights
from everystep.models import Model, refuse_copies
from everystep.models.decoder import Decoder
from everystep.models.encoder_decoders.network import EncoderDecoder
from everystep.models.encoder_decoders.spec import EncoderDecoderSpec
from everystep.models.mamba import Mamba, MambaSpec
from everystep.models.spec import DecoderSpec
from everystep.nn.linear import JoinedLinear, LinearMap, QuantizedLinear
from everystep.nn.network import Network
from everystep.nn.panels import Arena
from everystep.nn.rotary import Rope

_MOST_TURNING = 1024
_OTHER = "there are no kernels for this family of models"


def obstacles(model: Model) -> list[str]:
    """Return why the native executor cannot run this model on this machine; nothing if it can."""
    network = model.network
    if found := spec_obstacles(model.spec):
        return found
    if model.learns:
        return ["its weights may change, and the kernels read packed copies"]
    known = isinstance(network, Decoder | EncoderDecoder | Mamba)
    return list(_obstacles(network)) if known else [_OTHER]


def spec_obstacles(spec: object) -> list[str]:
    """Return why no model of this specification can be run on this machine; nothing if some can."""
    if reason := status().reason:
        return [reason]
    if isinstance(spec, DecoderSpec):
        return [*_kernels_missing(spec.norm.kind, spec.mlp.activation), *_too_wide(spec)]
    if isinstance(spec, EncoderDecoderSpec):
        stacks = (spec.encoder, spec.decoder)
        return [one for s in stacks for one in _kernels_missing(spec.norm.kind, s.mlp.activation)]
    if isinstance(spec, MambaSpec):
        return [*_kernels_missing(spec.norm.kind, spec.activation)]
    return [_OTHER]


def _kernels_missing(norm: str, activation: str) -> Iterator[str]:
    if norm not in NORMS:
        yield f"there is no kernel for the norm {norm}"
    if activation not in ACTIVATIONS:
        yield f"there is no kernel for the activation {activation}"


def _too_wide(spec: DecoderSpec) -> Iterator[str]:
    if any(layer.rope and layer.rope.dim > _MOST_TURNING for layer in spec.layers):
        yield f"more than {_MOST_TURNING} values of a head turn"


def _obstacles(network: Network) -> Iterator[str]:
    if network.device.type != "cpu":
        yield f"the model is on {network.device}"
    if network.dtype != torch.float32:
        yield f"the model's type is {network.dtype}, and the kernels compute in float32"
    if any(map(_exact, _maps(network))):
        yield "quantised weights are to meet activations that are not rounded"


def _maps(network: Network) -> Iterator[LinearMap]:
    """Yield some maps, of which all are held alike."""
    yield network.head
    if isinstance(network, EncoderDecoder):
        yield from (layer.qkv for layer in (*network.encoder, *network.decoder))
    elif isinstance(network, Decoder):
        yield from (layer.qkv for layer in network.layers)
    elif isinstance(network, Mamba):
        yield from (layer.inward for layer in network.layers)


class Program:
    """A packed stack of layers; `structure` is what the library reads, `adapters` what feeds may
    ask for beside it.

    `arena`: where the panels lie that the network does not hold itself.
    """

    def __init__(self, network: Network, *, encoder: bool = False) -> None:
        self.network = network
        self._packing = Packing()
        self.ropes: list[Rope] = []
        self.structure = self._packed(network, encoder)
        self.adapters = PackedAdapters(network, self.structure)

    @property
    def arena(self) -> Arena:
        """The memory of panels that the network does not hold itself."""
        return self._packing.arena

    def _packed(self, network: Network, encoder: bool) -> StackWeights:
        if isinstance(network, EncoderDecoder):
            weights = encoder_weights if encoder else crossing_weights
            return weights(self._packing, network)
        if isinstance(network, Mamba):
            return recurrent_weights(self._packing, network)
        self.ropes = ropes_of(network.spec)
        return decoder_weights(self._packing, cast(Decoder, network))


_PROGRAMS: WeakKeyDictionary[Model, Program] = WeakKeyDictionary()
_ENCODERS: WeakKeyDictionary[Model, Program] = WeakKeyDictionary()
_packing = threading.RLock()


def program_of(model: Model, *, encoder: bool = False) -> Program:
    """Return the packed form of a model without obstacles, or of its `encoder`, made only once."""
    programs = _ENCODERS if encoder else _PROGRAMS
    with _packing:
        if model not in programs:
            programs[model] = Program(model.network, encoder=encoder)
        return programs[model]


def _forget_packing() -> None:
    """Renew the lock: a forked child has no thread that could be packing."""
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
    """Open a runner without rows; raise CapacityError where memory does not suffice."""
    address = c_void_p()
    check(library.es_open(program.structure, kv_type, byref(address)))
    _OPEN[address.value or 0] = library, program
    return Runner(address.value or 0)


def _exact(linear: LinearMap) -> bool:
    if isinstance(linear, JoinedLinear):
        return any(map(_exact, linear.parts))
    return isinstance(linear, QuantizedLinear) and linear.exact_activations
