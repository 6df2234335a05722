"""`Subject`: a model, as far as a request has to know it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Set
from typing import Any, Protocol

import torch

from everystep.bridge.core import ForeignModel
from everystep.cache.formats import Quantization
from everystep.config import ChatDefaults, GenerationConfig
from everystep.executors.base import Executor
from everystep.executors.synced import Sharded
from everystep.models import Model, learning_weights
from everystep.nn.network import Window
from everystep.requests.features import PromptInput
from everystep.types import InputSpec, ResolvedAdapter


class Subject(Protocol):
    """A model as requests, drivers and runs see it: facts, and a way to executors.

    `api/subjects.py` has one for models of this library and one for those of transformers and PEFT.
    Nothing below the faces asks which of the two it has. `chat_defaults`: what holds for
    conversations where neither caller nor model says.
    """

    chat_defaults: ChatDefaults = ChatDefaults()

    @property
    @abstractmethod
    def core(self) -> Model | ForeignModel:
        """The weights, or the module that holds them, and what they were built from."""

    @property
    @abstractmethod
    def generation_config(self) -> GenerationConfig:
        """The values that hold for every call that does not say otherwise."""

    @property
    @abstractmethod
    def prompt_inputs(self) -> tuple[PromptInput, ...]:
        """The inputs that are encoded and read inside a prompt, by keyword."""

    @property
    @abstractmethod
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may ask for."""

    @property
    @abstractmethod
    def cache_dtype(self) -> str:
        """The name of the type in which rows keep keys and values."""

    @property
    @abstractmethod
    def executor_name(self) -> str:
        """The executor that was asked for: "auto", "native", "torch" or, of a wrapped model,
        "bridge"."""

    @abstractmethod
    def executor(
        self,
        needs: Set[str] = frozenset(),
        quantization: Quantization | None = None,
        layers: int | None = None,
    ) -> Executor:
        """Return a fresh executor with no rows that has the abilities in `needs`.

        `quantization`: how its rows will keep what they hold, None for full precision. `layers`: it
        runs the first so many layers alone, None for all.
        """

    @abstractmethod
    def resolved(self, adapters: Iterable[str]) -> Mapping[str, ResolvedAdapter]:
        """Return what each of these names stands for at this moment; nothing where an executor
        knows the names itself."""

    @abstractmethod
    def digest(self, adapters: Iterable[str] = ()) -> str:
        """Return a text that is equal for models that compute the same, bit for bit, also with
        these adapters; RequestError where there is none of such a name."""

    def sharded(self) -> Sharded | None:
        """Return that of which processes may have to make forwards together; None where each has
        the weights."""
        return None

    def gathered(self, *, to_step: bool = False) -> Subject:
        """Return a subject with a copy of the weights of now, where they lie in parts on several
        processes, which all ask for it at the same time; itself where they are whole, and `to_step`
        where each forward gathers what it reads."""
        return self

    # --- what follows from the core ---------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The values of config.json, as attributes."""
        return self.core.config

    @property
    def device(self) -> torch.device:
        """The place where the weights lie."""
        return self.core.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights; the kernels compute in float32 with those of 16 bits too."""
        return self.core.float_type

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.core.vocab_size

    @property
    def width(self) -> int:
        """The size of its hidden states, and of the embeddings that it reads."""
        return int(self.core.network.spec.width)

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        """The inputs that the network declares beside ids or embeddings: keywords of every call."""
        return {one.name: one for one in self.core.inputs}

    @property
    def context(self) -> int | None:
        """The longest sequence the model was made for."""
        most: int | None = self.core.network.most_positions
        return getattr(self.core.config, "max_position_embeddings", most)

    @property
    def reach(self) -> int | None:
        """The longest sequence that prompts may fill: the context, or what a rope that grows with
        the length (dynamic NTK) leads to, while of other kinds files count what they lead to."""
        config, most = self.core.config, self.context
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        if most is None or not isinstance(rope, Mapping):
            return most
        grows = "dynamic" in (rope.get("rope_type"), rope.get("type"))
        return int(most * rope.get("factor", 1.0)) if grows else most

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The number of positions that each layer looks back; None for all."""
        layers = self.core.network.stores
        sizes = ([one.size for one in layer if isinstance(one, Window)] for layer in layers)
        return tuple(size[0] if size else None for size in sizes)

    @property
    def depth(self) -> int:
        """The number of layers between ids and logits, the decoder's beside an encoder."""
        if self.is_encoder_decoder:
            return len(self.core.network.stores)
        return int(getattr(self.core.config, "num_hidden_layers", len(self.core.network.stores)))

    @property
    def has_tied_head(self) -> bool:
        """True where logits are read out with the table of embeddings."""
        return bool(getattr(self.core.network.spec, "tied", False))

    @property
    def listens(self) -> bool:
        """True where its own encoder reads sounds, so that `generate` transcribes."""
        return isinstance(self.core, Model) and self.core.source is not None

    @property
    def is_encoder_decoder(self) -> bool:
        """True where an encoder reads the prompt."""
        return bool(getattr(self.core.config, "is_encoder_decoder", False))


def weight_changes(core: Model | ForeignModel) -> int:
    """Count how often weights were changed in place, as far as torch counts it.

    An optimizer's step counts, a write through `weight.data` does not. 0 where weights are packed,
    which nothing changes.
    """
    weights: Iterable[torch.Tensor] = ()
    if isinstance(core, ForeignModel):
        weights = core.foreign.module.parameters()
    elif core.learns:
        weights = (one for _, one in learning_weights(core))
    return sum(one._version for one in weights if not one.is_inference())
