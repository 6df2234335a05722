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

from everystep.bridge.cache_objects import foreign_cache, is_foreign, own_cache
from everystep.bridge.executor import ForeignExecutor
from everystep.bridge.findings import Findings
from everystep.bridge.foreign import Foreign
from everystep.bridge.foreign_errors import attributed
from everystep.bridge.named_inputs import Media, batched, declared, placed
from everystep.bridge.own_inputs import has_own, prepares
from everystep.bridge.trial import examine
from everystep.cache.containers import Cache, DynamicCache, own_half
from everystep.errors import RequestError
from everystep.models.encoders import PromptEncoder
from everystep.nn.digests import add_tensor
from everystep.nn.modes import ordinary_mode
from everystep.nn.network import Heard, Store
from everystep.types import InputSpec, Prompt

_NAMING = ("_name_or_path", "name_or_path", "transformers_version", "architectures")
"""The parts of a configuration that tell nothing of the model."""
_KNOWN: WeakKeyDictionary[nn.Module, Findings] = WeakKeyDictionary()
"""The findings on modules that still exist; their weights may change, their code not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`width`: the size of its embeddings. `vocab_size`: the width of its logits. `tied`: whether
    the head is the table of embeddings."""

    width: int
    vocab_size: int
    tied: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ForeignNetwork:
    """The network of a wrapped model, as the api asks for it; it declares no inputs of its own."""

    spec: Shape
    stores: tuple[tuple[Store, ...], ...]
    encodes: bool
    foreign: Foreign = field(repr=False)

    @property
    def most_positions(self) -> int | None:
        """None: the module says itself what it cannot read."""
        return None

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that the module takes by name beside ids or embeddings."""
        return declared(self.foreign)

    @property
    def most_source_positions(self) -> int | None:
        """None, likewise."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ids (...,) -> (..., E)."""
        return self.foreign.embed(tokens)

    def embed_source(self, tokens: Tensor) -> Tensor:
        """Embed ids (...,) that an encoder reads -> (..., E)."""
        return self.foreign.embed(tokens)


class ForeignModel:
    """A module of transformers or PEFT, examined: it holds no weights of its own."""

    learns = True
    encoders: tuple[PromptEncoder, ...] = ()

    def __init__(self, module: nn.Module) -> None:
        self.foreign = Foreign(module)
        if module not in _KNOWN:
            _KNOWN[module] = examine(self.foreign)
        self.findings = _KNOWN[module]
        width = self.foreign.table.shape[1]
        shape = Shape(width, self.findings.vocab_size, self.foreign.tied)
        stores = self.findings.stores
        self.network = ForeignNetwork(shape, stores, self.foreign.encodes, self.foreign)

    def __eq__(self, other: object) -> bool:
        """Return whether both drive one module, as it lay when they were made."""
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
    def inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that prompts may bring beside ids or embeddings."""
        return self.network.inputs

    @property
    def dtype(self) -> torch.dtype:
        """The type that it computes in."""
        return self.foreign.dtype

    @property
    def float_type(self) -> torch.dtype:
        """The type of its weights."""
        return self.foreign.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.foreign.device

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.findings.vocab_size

    @property
    def known_ids(self) -> int | None:
        """The number of ids that it reads; None where a forward of its own may know ids beyond."""
        return None if has_own(self.foreign.base, "forward") else self.vocab_size

    def embed(self, ids: Tensor) -> Tensor:
        """Return (..., E) embeddings of ids (...,)."""
        return self.foreign.embed(ids)

    def digest(self) -> str:
        """Return a text that is equal for modules of one class and configuration, with the same
        adapters at work, whose weights agree in every bit."""
        module, digest = self.foreign.module, hashlib.sha256()
        config = {k: v for k, v in self.foreign.config.to_dict().items() if k not in _NAMING}
        active = getattr(module, "active_adapters", ())
        adapters = [] if callable(active) else sorted(active)
        told = [type(module).__qualname__, type(self.foreign.base).__qualname__, adapters, config]
        digest.update(json.dumps(told, sort_keys=True, default=str).encode())
        for name, held in sorted(module.state_dict().items()):
            if isinstance(held, Tensor):
                add_tensor(digest, name, held)
        return digest.hexdigest()

    def sharded(self) -> Foreign:
        """Return the module, whose forwards processes may have to make together."""
        return self.foreign

    def executor(self) -> ForeignExecutor:
        """Open an executor without rows."""
        own = prepares(self.foreign.base)
        return ForeignExecutor(self.foreign, self.findings, own=own)

    def media(self, given: Mapping[str, Any], ids: Sequence[np.ndarray], length: int) -> Media:
        """Return what rows of `length` positions, whose ids these are, are given by name."""
        return Media(self.foreign, given, ids, length)

    def placed(self, prompt: Prompt) -> Prompt:
        """Return the prompt, with the positions that the module finds for what it is given."""
        with ordinary_mode(), self.foreign.at_rest(self.foreign.parts()):
            return placed(self.foreign, prompt)

    def own_cache(self, passed: Any) -> Any:
        """Return the passed `past_key_values`, as a cache of this library where it can be one."""
        if not is_foreign(passed) or not self.findings.exports:
            return passed
        return own_cache(passed, self.findings.stores)

    def returned_cache(self, cache: Cache, passed: Any) -> Any:
        """Return what a caller gets who passed the other.

        That is the same object, filled, if it is foreign; a new one of the module's kind for
        nothing; else the cache itself.
        """
        growing = isinstance(own_half(cache), DynamicCache)
        if is_foreign(passed) or (passed is None and growing):
            return foreign_cache(cache, self.findings.cache, passed)
        return cache

    @property
    def has_positions(self) -> bool:
        """True if its forward takes position ids."""
        return self.foreign.positions is not None

    @property
    def source(self) -> str | None:
        """The name of what its encoder reads, if that is neither ids nor embeddings."""
        return self.foreign.source

    def sources(self, given: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return (B,) what the encoder reads of each row, of what is given by name for all."""
        name = str(self.source)
        if "attention_mask" in given and "attention_mask" not in self.foreign.heard:
            do = "Leave attention_mask out"
            raise RequestError(f"attention_mask has no meaning beside {name}", do=do)
        if not hasattr(given[name], "__len__"):
            got = type(given[name]).__name__
            raise RequestError(f"{name} is not a tensor", wanted="one entry per row", got=got)
        rows = [np.empty(0, dtype=np.int64)] * len(given[name])
        return self.media(given, rows, -1).wholes

    def real_states(self, mask: Tensor, length: int) -> Tensor:
        """Return (B, S) int64: which of S encoder states are real; `mask` is of the source."""
        return self.foreign.real_states(mask, length).long()

    def encode(self, prompt: Prompt, heard: Heard | None = None) -> Tensor:
        """Return encoder states (S, E) of one prompt, without padding; `heard` gets what layers
        show.

        Raise RequestError where the encoder refuses what it is given by name.
        """
        read = self._read(prompt)
        with ordinary_mode(), self.foreign.at_rest(self.foreign.parts()):
            shows = {} if heard is None else {"output_hidden_states": True}
            if heard is not None and self.foreign.weighs:
                shows["output_attentions"] = True
            given = {**prompt.inputs, **prompt.whole}
            with attributed(self.foreign.base, lambda: f"{', '.join(read)} to encode", given):
                output = self.foreign.encode(read, **shows)
            states: Tensor = output[0][0]
            mask = read.get("attention_mask")
            if mask is not None and self.source is not None:
                mask = self.foreign.real_states(mask, len(states))
            states = states if mask is None else states[mask[0].to(states.device).bool()]
        if heard is not None:
            heard.layers.extend(output.hidden_states)
            heard.attentions.extend(output.attentions or ())
        return states

    def _read(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return what the encoder is given for the prompt, by name, in a batch of one."""
        read = {name: batched(name, one) for name, one in prompt.whole.items()}
        if self.source is not None:
            return read
        read |= {name: one[None] for name, one in prompt.inputs.items()}
        if prompt.embeds is not None:
            read["inputs_embeds"] = prompt.embeds[None].to(self.dtype)
        elif prompt.ids is not None:
            read["input_ids"] = torch.tensor(prompt.ids)[None]
        else:
            raise RequestError("there is nothing to encode", wanted="ids or embeddings")
        read["attention_mask"] = torch.ones(1, prompt.length, dtype=torch.int64)
        if prompt.mask is not None:
            read["attention_mask"] = prompt.mask[..., -1, :].reshape(1, -1).long()
        return read
