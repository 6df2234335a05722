"""A module of another library: what it is called with, and how it is left as it was found."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from everystep.errors import ModelClassError, UnsupportedError
from everystep.executors.synced import DECODES, READS, SyncedForwards, is_in_parts
from everystep.nn.modes import ordinary_mode

NOBODY = "__base__"
"""The adapter of a row that none is to change, in the words of PEFT."""
_ADAPTERS = "peft"
_LINEAR_CACHE = "cache_params"


class Foreign:
    """A module that turns ids into logits and keeps a cache object.

    `module`: what is called, so that its hooks and adapters take part. `base`: the module inside
    any PEFT wrapper, whose signature says what a forward takes. `heard`: what its encoder takes by
    name, where it has one. `source`: the name of what the encoder reads if that is not ids, such as
    images. `watched`: modules whose attributes change while it runs; they are put back after every
    step, so that no row sees another's. `synced`: what its forwards wait for, while a call makes
    them together with other processes.
    """

    synced: SyncedForwards | None = None
    turns = 2

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.base = unwrapped(module)
        self.names = frozenset(_names_of_forward(type(self.base)))
        self.config: Any = self.base.config
        self.encodes = bool(getattr(self.config, "is_encoder_decoder", False))
        self.heard: frozenset[str] = frozenset()
        self.source: str | None = None
        if self.encodes:
            self.heard = frozenset(_names_of_forward(type(self.encoder)))
            self.source = None if "input_ids" in self.heard else self.encoder.main_input_name
        linear = _LINEAR_CACHE in self.names and "past_key_values" not in self.names
        self.cache_name = _LINEAR_CACHE if linear else "past_key_values"
        self.watched: tuple[nn.Module, ...] = tuple(_with_own_buffers(self.base))
        first = next(iter(self.base.parameters()), torch.empty(0))
        self.device, self.dtype = first.device, first.dtype

    @property
    def in_parts(self) -> bool:
        """True where the weights of the module lie in parts on several processes."""
        return is_in_parts(self.module)

    @property
    def positions(self) -> str | None:
        """The name of position ids in a forward, if it takes them for every position."""
        return "position_ids" if "position_ids" in self.names and not self.encodes else None

    @property
    def weighs(self) -> bool:
        """True if its attention is of the kind that can show its weights."""
        return getattr(self.config, "_attn_implementation", "") == "eager"

    @property
    def encoder(self) -> Any:
        """The part that reads the prompt of a module that encodes."""
        return self.base.get_encoder()  # type: ignore[operator]

    @property
    def embedding(self) -> nn.Module:
        """The part that turns ids into embeddings."""
        return self.base.get_input_embeddings()  # type: ignore[operator]

    @property
    def table(self) -> Tensor:
        """(V, E) its embeddings."""
        weight: Any = self.embedding.weight
        return cast(Tensor, weight)

    @property
    def head(self) -> Callable[[Tensor], Tensor] | None:
        """The part that makes logits of hidden states, where the module names it."""
        found: Any = getattr(self.base, "get_output_embeddings", lambda: None)()
        return cast("Callable[[Tensor], Tensor] | None", found)

    @property
    def tied(self) -> bool:
        """True if that reads the table of embeddings."""
        return getattr(self.head, "weight", None) is self.table

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that a row can ask for by name."""
        takes = getattr(self.module, "special_peft_forward_args", ())
        tuner: Any = self.module._modules.get("base_model")
        mixes = "_enable_peft_forward_hooks" in vars(type(tuner))  # those of LoRA alone
        return (NOBODY, *tuner.peft_config) if mixes and "adapter_names" in takes else ()

    @property
    def fixed_adapters(self) -> tuple[str, ...]:
        """The adapters of a module whose rows cannot choose: those that are active change each."""
        held: Any = getattr(self.module, "peft_config", None)
        return tuple(held) if isinstance(held, Mapping) and not self.adapters else ()

    def call(self, given: Mapping[str, Any]) -> Any:
        """Return what the module returns for these arguments; with `at_rest` around it."""
        return self.forward({**given, "use_cache": True})

    def forward(self, given: Mapping[str, Any]) -> Any:
        """Return the same for arguments that say by themselves whether a cache is kept."""
        with self._turn(DECODES):
            return self.module(**given, return_dict=True)

    def _turn(
        self, part: int, read: Mapping[str, Tensor] | None = None
    ) -> AbstractContextManager[None]:
        return nullcontext() if self.synced is None else self.synced.turn(self, part, read)

    def stand_in(self, part: int, read: Mapping[str, Tensor] | None) -> None:
        """Run a forward of one position, or of the encoder on `read`, for nothing: another process
        needs the weights that lie here."""
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with ordinary_mode(), self.at_rest(self.parts()):
            if part == READS:
                self.encoder(**(read or {"input_ids": one}), return_dict=True)
            elif self.encodes:
                states = torch.zeros(1, 1, self.table.shape[1], dtype=self.dtype)
                known = (states.to(self.device),)
                self.module(encoder_outputs=known, decoder_input_ids=one, use_cache=False)
            else:
                self.module(input_ids=one, use_cache=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids (...,) -> (..., E)."""
        return self.embedding(ids)

    def encode(self, read: Mapping[str, Tensor], **shows: bool) -> Any:
        """Return what the encoder returns for what it is given by name, its states (B, S, E) first.

        `shows`: `output_hidden_states`, `output_attentions`.
        """
        given = {name: one.to(self.device) for name, one in read.items()}
        with self._turn(READS, given):
            return self.encoder(**given, return_dict=True, **shows)

    def real_states(self, mask: Tensor, length: int) -> Tensor:
        """Return (B, S) bool: which of S encoder states are real; `mask` is of the source.

        This is for sources that the encoder makes shorter.
        """
        for one in (self.base, *self.base.modules()):
            if (shorten := getattr(one, "_get_feature_vector_attention_mask", None)) is not None:
                real: Tensor = shorten(length, mask.to(self.device)).bool()
                return real
        return torch.ones(len(mask), length, dtype=torch.bool, device=self.device)

    def parts(self) -> tuple[nn.Module, ...]:
        """Return the module and all modules inside it."""
        return tuple(self.module.modules())

    @contextmanager
    def at_rest(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Put these modules into evaluation mode within, and keep no gradient.

        Afterwards their modes and the attributes of the watched ones are what they were.
        """
        trained = [one for one in parts if one.training]
        before = [(one, dict(vars(one)), dict(one._buffers)) for one in self.watched]
        try:
            for one in trained:
                one.training = False
            with torch.no_grad():
                yield
        finally:
            for one, attributes, buffers in before:
                _put_back(vars(one), attributes)
                _put_back(one._buffers, buffers)
            for one in trained:
                one.training = True

    def watch(self, act: Callable[[], None]) -> None:
        """Watch also the modules whose attributes `act` changes, and put those back now."""
        before = [(one, dict(vars(one))) for one in self.parts()]
        act()
        changed = [(one, old) for one, old in before if _differs(vars(one), old)]
        for one, old in changed:
            _put_back(vars(one), old)
        self.watched = (*self.watched, *(one for one, _ in changed if one not in self.watched))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside PEFT's wrappers.

    Raise ModelClassError if it is none that has a configuration, UnsupportedError for adapters that
    are virtual tokens.
    """
    while library(module) == _ADAPTERS:
        active = getattr(module, "active_peft_config", None)
        if getattr(active, "is_prompt_learning", False):
            raise UnsupportedError(
                "adapters that put virtual tokens before a prompt are not driven by the engine",
                wanted="adapters that change layers, such as LoRA",
                got=type(active).__name__,
                do="Call the model's own generate",
            )
        # A wrapper's own part, not what it looks up further inside.
        own = module._modules
        inner = own.get("base_model") or own.get("model")
        if inner is None:
            break
        module = inner
    if not hasattr(module, "config") or not hasattr(module, "get_input_embeddings"):
        raise ModelClassError(
            "this object is not a model that can generate",
            wanted="a model of transformers with a language head, or a PEFT model of one",
            got=type(module).__name__,
            do="Load it with an AutoModel class that has a head",
        )
    return module


def library(module: object) -> str:
    """Return the name of the library that the class of an object comes from."""
    return type(module).__module__.partition(".")[0]


def _names_of_forward(kind: type) -> Iterator[str]:
    """Yield what a forward takes by name, also what it hands on to that of a class above."""
    for one in kind.__mro__:
        if "forward" not in vars(one):
            continue
        parameters = inspect.signature(one.forward).parameters  # type: ignore[attr-defined]
        named = [
            n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        yield from named[1:]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break


def _with_own_buffers(module: nn.Module) -> Iterator[nn.Module]:
    """Return modules with buffers that no checkpoint has: tables that models make as they go."""
    return (one for one in module.modules() if one._non_persistent_buffers_set)


def _differs(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    same = len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))
    return not same


def _put_back(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    if _differs(now, before):
        for name in now.keys() - before.keys():
            del now[name]
        now.update(before)
