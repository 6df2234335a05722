"""What a run trains: weights of a model, an adapter beside them, or a module of another library.

Each knows its tensors by name, how a forward is run with them, how they are kept in a folder that
other libraries read, and which model generates with them as they are now.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from everystep.adapters import AdapterConfig, PeftAdapter
from everystep.api.load import load_model
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.models import Model
from everystep.models.decoder import Decoder
from everystep.train.checkpoints import copy_into

TRAINED = "trained.safetensors"
"""What a checkpoint keeps of a module of another library, beside what the module writes."""
_NO_CACHE = {"use_cache": False}


class TrainedWeights(ABC):
    """Tensors that a run trains, with the model that they belong to."""

    model: LanguageModel
    is_beside: ClassVar[bool] = False
    """Whether they are no part of the model's own weights."""

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that make the model what was trained."""
        return ()

    @property
    def may_be_unused(self) -> bool:
        """True if there are weights that some batches do not reach, as those of experts."""
        core = self.model.core
        if not isinstance(core, Model) or not isinstance(core.network, Decoder):
            return True
        layers = core.network.spec.layers
        return bool(core.encoders or core.tower) or any(one.experts for one in layers)

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """Return the tensors that are trained, by name."""

    @abstractmethod
    def arguments(self, *, wants_logits: bool) -> dict[str, Any]:
        """Return what a forward is told beside its inputs."""

    @abstractmethod
    def train(self, mode: bool) -> None:
        """Enter training mode, or leave it."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write them into an empty folder."""

    @abstractmethod
    def restore(self, folder: Path) -> None:
        """Take the values that `save` wrote; FormatError where those are of other tensors."""

    @abstractmethod
    def generating(self) -> tuple[LanguageModel, dict[str, Any]]:
        """Return a model that generates with their values of now, and options of each call."""

    def held(self) -> list[Tensor]:
        """Return the tensors in which processes that train together have to agree: those that are
        trained, and what a model has beside them that could be."""
        return list(self.named().values())

    def count(self) -> int:
        """Return how many numbers are trained."""
        return sum(one.numel() for one in self.named().values())


@final
class OwnWeights(TrainedWeights):
    """The weights of a model of this library, or those whose names a pattern matches somewhere."""

    def __init__(self, model: LanguageModel, patterns: Sequence[str] | None) -> None:
        self.model = model.requires_grad_()
        chosen = chosen_names([name for name, _ in model.named_parameters()], patterns)
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in chosen)

    def named(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def held(self) -> list[Tensor]:
        return [one for _, one in self.model.named_parameters()]

    def arguments(self, *, wants_logits: bool) -> dict[str, Any]:
        return {**_NO_CACHE, "output_logits": wants_logits}

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder, adapters=() if self.model.adapters else None)

    def restore(self, folder: Path) -> None:
        held = load_model(folder).requires_grad_()
        values = {name: one.detach() for name, one in held.named_parameters()}
        copy_into(self.named(), values, folder)

    def generating(self) -> tuple[LanguageModel, dict[str, Any]]:
        return self.model.frozen(), {}


@final
class AdapterWeights(TrainedWeights):
    """An adapter of a model of this library, whose own weights stay as they are stored."""

    is_beside = True

    def __init__(self, model: LanguageModel, adapter: PeftAdapter, name: str) -> None:
        self.model, self.name = model, name
        self.adapter = adapter.requires_grad_()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return (self.name,)

    def named(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.adapter.named_parameters() if one.requires_grad}

    def arguments(self, *, wants_logits: bool) -> dict[str, Any]:
        return {**_NO_CACHE, "output_logits": wants_logits, "adapter_names": self.name}

    def train(self, mode: bool) -> None:
        self.model.train(mode)
        self.adapter.train(mode)

    def save(self, folder: Path) -> None:
        self.model.save_adapter(folder, self.name)

    def restore(self, folder: Path) -> None:
        values = load_file(folder / "adapter_model.safetensors")
        copy_into(self.named(), values, folder)

    def generating(self) -> tuple[LanguageModel, dict[str, Any]]:
        return self.model, {"adapter_names": self.name}


@final
class ModuleWeights(TrainedWeights):
    """The weights of a module of another library that require gradients, or those among all whose
    names a pattern matches somewhere."""

    def __init__(self, model: LanguageModel, patterns: Sequence[str] | None) -> None:
        self.model = model
        if patterns is not None:
            names = [name for name, _ in model.named_parameters()]
            chosen = chosen_names(names, patterns)
            for name, weight in model.named_parameters():
                weight.requires_grad_(name in chosen)
        if not self.named():
            do = "Call requires_grad_() of the weights that are to be trained"
            raise RequestError("no weight of the module requires gradients", do=do)

    def named(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def held(self) -> list[Tensor]:
        return [one for _, one in self.model.named_parameters()]

    def arguments(self, *, wants_logits: bool) -> dict[str, Any]:
        return dict(_NO_CACHE)

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        values = {name: one.detach().contiguous() for name, one in self.named().items()}
        save_file(values, folder / TRAINED)

    def restore(self, folder: Path) -> None:
        copy_into(self.named(), load_file(folder / TRAINED), folder)

    def generating(self) -> tuple[LanguageModel, dict[str, Any]]:
        return self.model, {}


def chosen_names(names: Sequence[str], patterns: Sequence[str] | None) -> frozenset[str]:
    """Return the names that a pattern matches somewhere, all without patterns; RequestError for a
    pattern that is none, or that matches nothing."""
    if patterns is None:
        return frozenset(names)
    found: set[str] = set()
    for pattern in patterns:
        try:
            own = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            what = "trainable has a text that is no regular expression"
            raise RequestError(what, got=f"{shown(pattern)}: {error}") from error
        if not own:
            raise RequestError(
                "a pattern of trainable matches no weight",
                wanted=f"a part of a name such as {names[-1]}",
                got=shown(pattern),
                do="Look at the names: dict(model.named_parameters())",
            )
        found |= own
    return frozenset(found)


def trained_weights(
    model: LanguageModel,
    peft_config: AdapterConfig | None,
    patterns: Sequence[str] | None,
    name: str | None = None,
) -> TrainedWeights:
    """Return what a run trains: a new adapter where there is a configuration of one, one that the
    model has where there is its name alone."""
    if peft_config is None and name is None:
        if patterns is None:
            _require_no_learner(model)
        return (OwnWeights if model.module is None else ModuleWeights)(model, patterns)
    if model.module is not None:
        raise UnsupportedError(
            "an adapter of a wrapped model is made, and chosen, by its own library",
            do="Pass a PEFT model, wrapped, or load the model with everystep.load_model",
        )
    if patterns is not None:
        do = "Leave trainable out: target_modules of the adapter say what is trained"
        raise RequestError("an adapter is trained, and weights stay as they are", do=do)
    if name is None:
        name = "default"
    own = model.adapter(name) if peft_config is None else model.add_adapter(name, peft_config)
    return AdapterWeights(model, own, name)


def _require_no_learner(model: LanguageModel) -> None:
    """Refuse a model with an adapter that learns, of which nobody says whether it is trained."""
    held = () if model.module is not None else model.adapters
    learner = next((one for one in held if model.adapter(one).learns), None)
    if learner is not None:
        raise RequestError(
            "the model has an adapter that learns, and nothing says whether that is trained",
            wanted=f"adapter_name={learner!r}, or trainable for weights of the model",
            got="neither",
            do=f"Pass adapter_name={learner!r}; or trainable=['.'] for every weight",
        )


def name_without_numbers(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose gradient, of this process's part, is not all numbers, None where
    all are."""
    for name, one in tensors.items():
        grad: Any = one.grad
        if grad is not None:
            own = grad.to_local() if hasattr(grad, "to_local") else grad
            if not bool(torch.isfinite(own).all()):
                return name
    return None
