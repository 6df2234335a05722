"""A module of another library as the core of a language model: what the api asks of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from everystep.bridge.executor import ForeignExecutor
from everystep.bridge.findings import Findings
from everystep.bridge.foreign import Foreign
from everystep.bridge.named import Media, declared, placed
from everystep.bridge.own_inputs import prepares
from everystep.bridge.trial import examine
from everystep.errors import RequestError
from everystep.nn.modes import ordinary_mode
from everystep.nn.network import Heard, Store
from everystep.types import InputSpec, Prompt

_NAMING = ("_name_or_path", "name_or_path", "transformers_version", "architectures")
"""What a configuration says that tells nothing of the model."""
_KNOWN: WeakKeyDictionary[nn.Module, Findings] = WeakKeyDictionary()
"""What was found out of modules that still exist; their weights may change, their code not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`width`: the size of its embeddings. `vocab_size`: the width of its logits."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class ForeignNetwork:
    """What the api asks of the network of a model; it declares no inputs of its own."""

    spec: Shape
    stores: tuple[tuple[Store, ...], ...]
    encodes: bool
    foreign: Foreign = field(repr=False)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """What the module takes by name beside ids or embeddings."""
        return declared(self.foreign)

    def embed(self, tokens: Tensor) -> Tensor:
        """(...,) ids -> (..., E)."""
        return self.foreign.embed(tokens)


class ForeignModel:
    """A module of transformers or PEFT, examined: it holds no weights of its own."""

    learns = True

    def __init__(self, module: nn.Module) -> None:
        self.foreign = Foreign(module)
        if module not in _KNOWN:
            _KNOWN[module] = examine(self.foreign)
        self.findings = _KNOWN[module]
        width = self.foreign.table.shape[1]
        shape = Shape(width, self.findings.vocab_size)
        stores = self.findings.stores
        self.network = ForeignNetwork(shape, stores, self.foreign.encodes, self.foreign)

    def __eq__(self, other: object) -> bool:
        """Whether both drive one module, as it lay when they were made."""
        if not isinstance(other, ForeignModel):
            return NotImplemented
        one, two = self.foreign, other.foreign
        return one.module is two.module and (one.dtype, one.device) == (two.dtype, two.device)

    def __hash__(self) -> int:
        return hash(self.foreign.module)

    @property
    def config(self) -> Any:
        """The configuration of the module, of its text part where it has several."""
        config = self.foreign.config
        return config if self.foreign.encodes else config.get_text_config()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.foreign.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.foreign.device

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.findings.vocab_size

    def digest(self) -> str:
        """Equal for modules of one class and configuration, with the same adapters at work, whose
        weights agree in name, type, size and 64 values each."""
        module, digest = self.foreign.module, hashlib.sha256()
        config = {k: v for k, v in self.foreign.config.to_dict().items() if k not in _NAMING}
        active = getattr(module, "active_adapters", ())
        adapters = [] if callable(active) else sorted(active)
        told = [type(module).__qualname__, type(self.foreign.base).__qualname__, adapters, config]
        digest.update(json.dumps(told, sort_keys=True, default=str).encode())
        for name, held in sorted(module.state_dict().items()):
            if isinstance(held, Tensor):
                values, places = held.detach().reshape(-1), torch.linspace(0, held.numel() - 1, 64)
                read = values[places.long()] if len(values) else values
                digest.update(f"{name} {held.dtype} {tuple(held.shape)}".encode())
                digest.update(read.to("cpu", torch.float64).numpy().tobytes())
        return digest.hexdigest()

    def executor(self) -> ForeignExecutor:
        """A fresh executor without rows."""
        own = prepares(self.foreign.base)
        return ForeignExecutor(self.foreign, self.findings, own=own)

    def media(self, given: Mapping[str, Any], ids: Sequence[np.ndarray], length: int) -> Media:
        """What rows of `length` positions, whose ids these are, are given by name."""
        return Media(self.foreign, given, ids, length)

    def placed(self, prompt: Prompt) -> Prompt:
        """The prompt, with the positions that the module finds for what it is given."""
        with ordinary_mode(), self.foreign.at_rest(self.foreign.parts()):
            return placed(self.foreign, prompt)

    def encode(self, prompt: Prompt, heard: Heard | None = None) -> Tensor:
        """Encoder states (S, E) of one prompt without padding; `heard` gets what layers show."""
        if prompt.embeds is None and prompt.ids is None:
            raise RequestError("there is nothing to encode", wanted="ids or embeddings")
        with ordinary_mode(), self.foreign.at_rest(self.foreign.parts()):
            ids = None if prompt.ids is None else torch.from_numpy(prompt.ids)[None]
            embeds = None if prompt.embeds is None else prompt.embeds[None].to(self.dtype)
            shows = {} if heard is None else {"output_hidden_states": True}
            if heard is not None and self.foreign.weighs:
                shows["output_attentions"] = True
            output = self.foreign.encode(ids, embeds, **shows)
        if heard is not None:
            heard.layers.extend(output.hidden_states)
            heard.attentions.extend(output.attentions or ())
        states: Tensor = output[0][0]
        return states
