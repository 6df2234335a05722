"""The two kinds of model that a `LanguageModel` can hold: one of this library, one of another.

Each is a `Subject`, which requests see, and does what the model's user asks of its weights.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from everystep.adapters import (
    AdapterConfig,
    Adapters,
    Combination,
    Mix,
    PeftAdapter,
    learning,
    let_follow,
    new_adapter,
    read_adapter,
    require_adapter,
    require_free,
    weighted_adapter,
    with_adapter,
    without_adapter,
    write_adapter,
)
from everystep.api.saving import Folder, Merged, Saving, save_model, with_merged
from everystep.bridge.core import ForeignModel
from everystep.bridge.foreign import Foreign, library
from everystep.cache.formats import CacheDtype, KvFormat, Quantization
from everystep.config import GenerationConfig
from everystep.errors import (
    ModelClassError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
    shown,
)
from everystep.executors.base import Executor
from everystep.executors.choice import (
    ExecutorName,
    chosen,
    open_executor,
    panels_of,
    refuse_cache_dtype,
)
from everystep.executors.parallel import Crew, ParallelExecutor, digest_of_parts
from everystep.executors.synced import ShardedModel, SyncedExecutor
from everystep.models import (
    Model,
    WeightModule,
    convert_model,
    first_layers,
    learning_weights,
    named_weights,
    recomputing,
    weight_bytes,
    weight_digest,
)
from everystep.models.decoder import Decoder
from everystep.models.load import usable_device
from everystep.requests.features import PromptInput, own_inputs
from everystep.requests.subject import Subject
from everystep.types import ResolvedAdapter

# Weights are read once, unless they can change.
_DIGESTS: WeakKeyDictionary[Model, str] = WeakKeyDictionary()


class Holder(Subject, Protocol):
    """A subject that its user can move, teach, save and call; `LanguageModel` says what each does.

    `given_inputs`: the prompt inputs that its user has set, empty for the model's own.
    """

    name_or_path: str
    given_inputs: tuple[PromptInput, ...]

    def close(self) -> None:
        """End what computes for it in other processes."""
        return None

    @property
    @abstractmethod
    def module(self) -> nn.Module | None:
        """The module of another library that it drives, None for a model of this one."""

    @property
    @abstractmethod
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of weights by format or type, the most first."""

    @property
    @abstractmethod
    def runs_on(self) -> str:
        """The executor that plain requests get, or whose forwards are run."""

    @abstractmethod
    def configure(self, config: GenerationConfig) -> None:
        """Let these values hold for every call that does not say otherwise."""

    @property
    @abstractmethod
    def training(self) -> bool:
        """True in training mode."""

    @abstractmethod
    def train(self, mode: bool) -> None:
        """Enter training mode, or leave it."""

    @abstractmethod
    def recompute(self, recomputes: bool) -> None:
        """Keep nothing of a layer for gradients but compute it once more, or keep it."""

    @abstractmethod
    def to(self, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
        """Move the weights to the device and convert them to the type; None: as they are."""

    @abstractmethod
    def adapter(self, name: str) -> PeftAdapter:
        """Return the adapter of this name; RequestError where there is none."""

    @abstractmethod
    def load_adapter(self, folder: Folder, name: str, *, learns: bool) -> PeftAdapter | None:
        """Let requests ask for the adapter in a folder by this name, and return it where it is
        one of this library."""

    @abstractmethod
    def add_adapter(self, config: AdapterConfig, name: str) -> PeftAdapter:
        """Let requests ask for a new adapter, which is to learn, by this name; return it."""

    @abstractmethod
    def add_weighted_adapter(
        self, names: Sequence[str], weights: Sequence[float], name: str, how: Combination
    ) -> PeftAdapter | None:
        """Let requests ask for one adapter of several by this name, and return it where it is one
        of this library."""

    @abstractmethod
    def merge_adapter(self, asked: Merged | None) -> None:
        """Put a mix of adapters into the weights; None for the active ones, where there are
        such."""

    @abstractmethod
    def unmerge_adapter(self) -> None:
        """Give the weights back that were there before."""

    @abstractmethod
    def save_adapter(self, folder: Folder, name: str) -> None:
        """Write the adapter of this name into a folder."""

    @abstractmethod
    def delete_adapter(self, name: str) -> None:
        """Let no new request ask for the adapter."""

    @abstractmethod
    def requires_grad_(self, requires_grad: bool) -> None:
        """Let the weights require gradients, or no longer."""

    @abstractmethod
    def as_module(self, forward: Callable[..., object]) -> nn.Module:
        """Return the module whose parameters are the weights; `forward` is that of the model."""

    def gathered(self, *, to_step: bool = False) -> Holder:
        return self

    @abstractmethod
    def frozen(self, adapters: Merged | None) -> Holder:
        """Return one with a copy of the weights of now, as they are read fastest."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that can learn, with their names."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return every weight by name."""

    @abstractmethod
    def save_pretrained(self, folder: Folder, saving: Saving, passed: Mapping[str, object]) -> None:
        """Write the model into the folder; `passed`: further arguments, for a module."""


@final
class OwnSubject(Holder):
    """A model of this library, with its adapters and the executor that was asked for."""

    module = None

    def __init__(
        self,
        core: Model,
        generation_config: GenerationConfig,
        name: str,
        executor: ExecutorName,
        cache_dtype: CacheDtype | None,
        crew: Crew | None = None,
    ) -> None:
        if not isinstance(core, Model):
            raise ModelClassError(
                "this object is not a model that can generate",
                wanted="a models.Model",
                got=type(core).__name__,
                do="Use everystep.load_model",
            )
        refuse_cache_dtype(core, cache_dtype)
        self._core = core
        self._config = GenerationConfig.of(generation_config)
        self.name_or_path = name
        self._executor_name = executor
        self._cache_dtype = cache_dtype
        self._crew = crew  # the processes that have the other parts of it
        self._adapters: Adapters = {}
        self._training = False
        self._recomputes = False
        self._unmerged: Model | None = None  # the weights without the adapters that are in them
        self._weights: WeightModule | None = None  # they are those of the model, once it was asked
        self._sharded: ShardedModel | None = None  # it lies in parts that gather themselves
        self.given_inputs = ()

    @property
    def core(self) -> Model:
        if self._weights is not None:
            self._core = self._weights.followed(self._core)
        return self._core

    def _whole_core(self) -> Model:
        """Return the model, whose weights can be read; RequestError where they lie in parts."""
        if self._weights is not None:
            self._weights.require_whole()
        return self.core

    def _read_core(self) -> Model:
        """Return the model for a forward, in which each layer is run by its module."""
        if self._weights is None:
            return self.core
        self._weights.require_whole(but_layers=True)
        return self._weights.around_layers(self.core)

    @property
    def generation_config(self) -> GenerationConfig:
        return self._config

    def configure(self, config: GenerationConfig) -> None:
        self._config = GenerationConfig.of(config)

    @property
    def prompt_inputs(self) -> tuple[PromptInput, ...]:
        encoders = self.core.encoders
        return self.given_inputs or (own_inputs(encoders) if encoders else ())

    @property
    def adapters(self) -> tuple[str, ...]:
        return () if self._unmerged is not None else tuple(self._adapters)

    @property
    def cache_dtype(self) -> str:
        return str(KvFormat(self.core.dtype, self._cache_dtype).dtype).removeprefix("torch.")

    @property
    def executor_name(self) -> ExecutorName:
        return self._executor_name

    @property
    def weight_bytes(self) -> dict[str, int]:
        return weight_bytes(self.core)

    @property
    def runs_on(self) -> str:
        if self._crew is not None:
            return f"torch (in parts on {self._crew.count} processes)"
        return chosen(self.core, self._executor_name)

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()

    def executor(
        self,
        needs: Set[str] = frozenset(),
        quantization: Quantization | None = None,
        layers: int | None = None,
    ) -> Executor:
        kept = self._cache_dtype
        sharded = self.sharded()
        if sharded is not None and sharded.synced is not None:
            return SyncedExecutor(sharded, quantization, kept, layers)
        core = self._whole_core()
        if self._crew is not None:
            return ParallelExecutor(self._crew, core, quantization, kept, layers)
        core = core if layers is None else first_layers(core, layers)
        return open_executor(core, self._executor_name, needs, quantization, kept)

    def resolved(self, adapters: Iterable[str]) -> Mapping[str, ResolvedAdapter]:
        return {name: require_adapter(self._adapters, name).now() for name in adapters}

    def digest(self, adapters: Iterable[str] = ()) -> str:
        core = self._whole_core()
        weights = None if core.learns else _DIGESTS.get(core)
        if weights is None:
            read = weight_digest
            if self._crew is not None:
                read = partial(digest_of_parts, self._crew)
            weights = _DIGESTS[core] = read(core)
        parts = [weights, str(core.dtype), self.cache_dtype]
        for name in adapters:
            parts += [name, require_adapter(self._adapters, name).now().digest()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def training(self) -> bool:
        return self._training

    @property
    def anything_learns(self) -> bool:
        """True where a weight of the model or of an adapter requires gradients."""
        if any(one.learns for one in self._adapters.values()):
            return True
        return self.core.learns and any(one.requires_grad for _, one in self.named_parameters())

    def train(self, mode: bool) -> None:
        self._training = mode
        for adapter in self._adapters.values():
            adapter.train(mode and adapter.learns)

    def recompute(self, recomputes: bool) -> None:
        self._core = recomputing(self.core, recomputes)
        self._recomputes = recomputes

    def _convert(self, **how: Any) -> None:
        if self._weights is not None:
            raise RequestError(
                "the weights belong to a torch.nn.Module too, which would keep those of before",
                do="Convert the model before as_module(), or call to() of the module",
            )
        core = convert_model(self.core, **how)
        self._core = recomputing(core, True) if self._recomputes else core

    def to(self, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
        self._require_unmerged()
        place = self.device if device is None else usable_device(device)
        if dtype is not None or place != self.device:
            in_panels = partial(panels_of, self._executor_name)
            self._convert(device=place, dtype=dtype, in_panels=in_panels)
            let_follow(self._adapters, self.core)

    def adapter(self, name: str) -> PeftAdapter:
        return require_adapter(self._adapters, name)

    def load_adapter(self, folder: Folder, name: str, *, learns: bool) -> PeftAdapter:
        self._require_unmerged()
        require_free(self._adapters, name)
        found = read_adapter(folder, self.core)
        self._adapters = with_adapter(self._adapters, name, found.requires_grad_(learns))
        return found

    def add_adapter(self, config: AdapterConfig, name: str) -> PeftAdapter:
        self._require_unmerged()
        require_free(self._adapters, name)
        found = new_adapter(config, self.core, self.name_or_path)
        self._adapters = with_adapter(self._adapters, name, found)
        return found

    def add_weighted_adapter(
        self, names: Sequence[str], weights: Sequence[float], name: str, how: Combination
    ) -> PeftAdapter:
        self._require_unmerged()
        require_free(self._adapters, name)
        given = {one: require_adapter(self._adapters, one) for one in names}
        found = weighted_adapter(given, weights, how, self.core)
        self._adapters = with_adapter(self._adapters, name, found)
        return found

    def merge_adapter(self, asked: Merged | None) -> None:
        self._require_unmerged()
        if asked is None or not self._adapters:
            raise RequestError(
                "merge_adapter does not know which adapters to merge",
                wanted=list(self._adapters),
                got=shown(asked),
                do='Name them: merge_adapter(["formal"]), or [("formal", 0.7)]',
            )
        if self.core.learns:
            raise UnsupportedError(
                "adapters are not merged into weights that learn",
                do="Call requires_grad_(False) and save_pretrained(folder, adapters=[...])",
            )
        if not isinstance(self.core.network, Decoder):
            raise UnsupportedError("only decoders take adapters")
        made = with_merged(self.core, self._adapters, asked)
        in_panels = partial(panels_of, self._executor_name)
        self._unmerged, self._core = self.core, convert_model(made, in_panels=in_panels)

    def unmerge_adapter(self) -> None:
        if self._unmerged is None:
            raise RequestError("no adapter is merged", do="Call merge_adapter first")
        self._core, self._unmerged = self._unmerged, None

    def _require_unmerged(self) -> None:
        if self._unmerged is not None:
            raise RequestError(
                "adapters are merged into the model's weights",
                wanted="the weights as they were",
                got="a merged model",
                do="Call unmerge_adapter first",
            )

    def save_adapter(self, folder: Folder, name: str) -> None:
        write_adapter(folder, require_adapter(self._adapters, name))

    def adapted_core(self, mixes: Sequence[Mix], length: int) -> Model:
        """Return the model for a forward over rows of `length` positions that ask for these mixes.

        It is differentiable in the adapters that learn.
        """
        core, rows = self._read_core(), torch.arange(len(mixes) * length).view(len(mixes), length)
        if not isinstance(core.network, Decoder) or not any(mixes):
            return core
        one_mix = len({*mixes}) == 1
        asked = [
            (
                mix,
                None if one_mix else rows[[one == mix for one in mixes]].flatten().to(self.device),
            )
            for mix in dict.fromkeys(mixes)
            if mix
        ]
        network = learning(core.network, self._adapters, asked, frozen=not core.learns)
        return replace(core, network=network)

    def delete_adapter(self, name: str) -> None:
        self._require_unmerged()
        self._adapters = without_adapter(self._adapters, name)

    def requires_grad_(self, requires_grad: bool) -> None:
        self._require_unmerged()
        if requires_grad and not self.core.learns:
            self._convert(learns=True)
            let_follow(self._adapters, self._core)
        if self.core.learns:
            for _, weight in self.named_parameters():
                weight.requires_grad_(requires_grad)

    def frozen(self, adapters: Merged | None) -> OwnSubject:
        core, kept = self._whole_core(), self._adapters
        if adapters is not None:
            core, kept = with_merged(core, kept, adapters), {}
        return self._copied(core, kept)

    def sharded(self) -> ShardedModel | None:
        weights = self._weights
        if weights is None or not weights.lies_in_parts or not weights.gathers_layers:
            return None
        if self._adapters or self.core.encoders:  # what they read is not gathered
            return None
        if self._sharded is None:
            self._sharded = ShardedModel(weights, self._layers_read, self.depth)
        return self._sharded

    def _layers_read(self, count: int | None) -> Model:
        """Return the model for a forward, or its first so many layers."""
        core = self._read_core()
        return core if count is None else first_layers(core, count)

    def gathered(self, *, to_step: bool = False) -> OwnSubject:
        if self._weights is None or not self._weights.lies_in_parts:
            return self
        if to_step and self.sharded() is not None:
            return self
        return self._copied(self._weights.gathered(self.core), self._adapters)

    def _copied(self, core: Model, kept: Adapters) -> OwnSubject:
        """Return one with a copy of these weights, which does not learn, and these adapters."""
        in_panels = partial(panels_of, self._executor_name)
        made = OwnSubject(
            convert_model(core, in_panels=in_panels, learns=False),
            self._config,
            self.name_or_path,
            self._executor_name,
            self._cache_dtype,
        )
        made.given_inputs, made._adapters = self.given_inputs, kept
        return made

    def as_module(self, forward: Callable[..., object]) -> nn.Module:
        if self._weights is None:
            if not self.core.learns:
                self.requires_grad_(True)
            self._weights = WeightModule(self.core, forward)
        return self._weights

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(learning_weights(self.core))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(named_weights(self._whole_core()))

    def save_pretrained(self, folder: Folder, saving: Saving, passed: Mapping[str, object]) -> None:
        if passed:
            what = f"save_pretrained knows no {next(iter(passed))!r}"
            raise UnknownArgumentError(what, do=f"Arguments are {', '.join(Saving._fields)}")
        known = {} if self._unmerged is not None else self._adapters
        core = with_merged(self._whole_core(), known, saving.adapters)
        save_model(core, self._config, folder, saving)


@final
class WrappedSubject(Holder):
    """A module of another library, driven by this library's engine.

    Weights, gradients, training mode, hooks and adapters are those of `module`, and calls leave
    them as they were. What it can do is found out once, when it is wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._core = ForeignModel(module)
        self.name_or_path = str(getattr(module, "name_or_path", "") or "")
        self.given_inputs: tuple[PromptInput, ...] = ()

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def core(self) -> ForeignModel:
        return self._core

    @property
    def generation_config(self) -> GenerationConfig:
        own = getattr(self._core.foreign.base, "generation_config", None)
        said = () if own is None else own.to_diff_dict().items()
        return GenerationConfig.from_checkpoint({k: v for k, v in said if v is not None}, None)

    def configure(self, config: GenerationConfig) -> None:
        raise RequestError(
            "the generation_config of a wrapped model is a copy of its module's",
            do="Set values in model.module.generation_config, or pass them in the call",
        )

    @property
    def prompt_inputs(self) -> tuple[PromptInput, ...]:
        return self.given_inputs

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._core.foreign.adapters

    @property
    def cache_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def executor_name(self) -> str:
        return "bridge"

    @property
    def weight_bytes(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for weight in self._module.parameters():
            counts[str(weight.dtype).removeprefix("torch.")] += weight.nbytes
        return dict(counts.most_common())

    @property
    def runs_on(self) -> str:
        module = self._core.foreign.module
        return f"{library(module)} ({type(module).__name__})"

    def executor(
        self,
        needs: Set[str] = frozenset(),
        quantization: Quantization | None = None,
        layers: int | None = None,
    ) -> Executor:
        """Return a fresh executor; UnsupportedError for rows that are to be quantised, and for a
        part of the layers."""
        if layers is not None:
            raise UnsupportedError(
                "the layers of a wrapped model run as its own library runs them",
                wanted="all of them",
                got=f"the first {layers}",
                do="Leave assistant_early_exit out, or load the model with everystep.load_model",
            )
        if quantization is not None:
            raise UnsupportedError(
                "rows of a wrapped model lie in cache objects of its own library",
                wanted="a dynamic cache",
                got="a quantised one",
                do="Leave cache_implementation out",
            )
        return self._core.executor()

    def sharded(self) -> Foreign:
        return self._core.foreign

    def resolved(self, adapters: Iterable[str]) -> Mapping[str, ResolvedAdapter]:
        return {}

    def digest(self, adapters: Iterable[str] = ()) -> str:
        """Return the digest of the module, whose adapters are part of it."""
        parts = [self._core.digest(), str(self._core.dtype), self.cache_dtype, *adapters]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def training(self) -> bool:
        return self._module.training

    def train(self, mode: bool) -> None:
        self._module.train(mode)

    def recompute(self, recomputes: bool) -> None:
        module: Any = self._module
        if recomputes:
            module.gradient_checkpointing_enable()
        else:
            module.gradient_checkpointing_disable()

    def to(self, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
        wanted: dict[str, Any] = {"device": device, "dtype": dtype}
        self._module.to(**{name: one for name, one in wanted.items() if one is not None})

    def adapter(self, name: str) -> PeftAdapter:
        raise UnsupportedError(
            "the adapters of a wrapped model belong to its own library",
            do="Read model.module, or load the model with everystep.load_model",
        )

    def load_adapter(self, folder: Folder, name: str, *, learns: bool) -> None:
        self._of_peft().load_adapter(folder, adapter_name=name, is_trainable=learns)

    def add_adapter(self, config: AdapterConfig, name: str) -> PeftAdapter:
        raise UnsupportedError(
            "a new adapter of a wrapped model is made by its own library",
            wanted="a model of this library",
            got=type(self._module).__name__,
            do="Call model.module.add_adapter, or load the model with everystep.load_model",
        )

    def add_weighted_adapter(
        self, names: Sequence[str], weights: Sequence[float], name: str, how: Combination
    ) -> None:
        self._of_peft().add_weighted_adapter([*names], [*weights], name, **asdict(how))

    def merge_adapter(self, asked: Merged | None) -> None:
        names = None if asked is None else [*asked]
        self._of_peft().merge_adapter(adapter_names=names)

    def unmerge_adapter(self) -> None:
        self._of_peft().unmerge_adapter()

    def save_adapter(self, folder: Folder, name: str) -> None:
        self._of_peft().save_pretrained(folder, selected_adapters=[name])

    def delete_adapter(self, name: str) -> None:
        self._of_peft().delete_adapter(name)

    def _of_peft(self) -> Any:
        if library(self._module) != "peft":
            raise UnsupportedError(
                "adapters are loaded into PEFT models",
                wanted="a PeftModel",
                got=type(self._module).__name__,
                do="Wrap peft.PeftModel.from_pretrained(model, folder)",
            )
        return self._module

    def requires_grad_(self, requires_grad: bool) -> None:
        self._module.requires_grad_(requires_grad)

    def as_module(self, forward: Callable[..., object]) -> nn.Module:
        return self._module

    def frozen(self, adapters: Merged | None) -> Holder:
        raise UnsupportedError(
            "the weights of a wrapped model are its own library's",
            do="Save it with save_pretrained, and load the folder",
        )

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._module.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._module.state_dict())

    def save_pretrained(self, folder: Folder, saving: Saving, passed: Mapping[str, object]) -> None:
        given, usual = {**saving._asdict(), **passed}, Saving._field_defaults
        said = {name: one for name, one in given.items() if one != usual.get(name)}
        self._module.save_pretrained(folder, **said)  # type: ignore[operator]
