"""`es.wrap`: a model of transformers or PEFT as a language model of this library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from everystep.api.model import LanguageModel
from everystep.bridge.core import ForeignModel
from everystep.bridge.foreign import library
from everystep.cache.formats import Quantization
from everystep.config import GenerationConfig
from everystep.errors import ModelClassError, UnsupportedError
from everystep.executors.base import Executor


class WrappedModel(LanguageModel):
    """A model of another library, driven by this library's engine.

    Weights, gradients, training mode, hooks and adapters are those of `module`, and calls leave
    them as they were. What it can do is found out once, when it is wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._foreign = ForeignModel(module)
        self.name_or_path = str(getattr(module, "name_or_path", "") or "")
        self._prompt_inputs = ()

    @property
    def core(self) -> ForeignModel:
        """The module, and what was found out of it."""
        return self._foreign

    @property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]
        """A copy of the module's own, as it is now: set values there, or pass them in the call."""
        own = getattr(self._foreign.foreign.base, "generation_config", None)
        said = {} if own is None else own.to_diff_dict()
        return GenerationConfig.from_checkpoint({k: v for k, v in said.items() if v is not None})

    @property
    def cache_dtype(self) -> str:
        """The name of the type in which rows keep keys and values: that of the weights."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that rows may ask for."""
        return self._foreign.foreign.adapters

    @property
    def runs_on(self) -> str:
        """Whose forwards are run."""
        module = self._foreign.foreign.module
        return f"{library(module)} ({type(module).__name__})"

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of weights by type, the most first."""
        counts: Counter[str] = Counter()
        for weight in self.module.parameters():
            counts[str(weight.dtype).removeprefix("torch.")] += weight.nbytes
        return dict(counts.most_common())

    def executor(
        self,
        needs: Set[str] = frozenset(),
        quantization: Quantization | None = None,
        layers: int | None = None,
    ) -> Executor:
        """A fresh executor with no rows; UnsupportedError for rows that are to be quantised, and
        for a part of the layers."""
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
        return self._foreign.executor()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module itself returns."""
        return self.module(*args, **kwargs)

    def eval(self) -> WrappedModel:
        """The model itself, whose module is in evaluation mode from now on."""
        self.module.eval()
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> WrappedModel:
        """The model itself, whose module was moved or converted."""
        wanted = {"device": device, "dtype": dtype}
        if isinstance(device, torch.dtype):
            wanted = {"dtype": device}
        self.module.to(**{name: one for name, one in wanted.items() if one is not None})
        self._foreign = ForeignModel(self.module)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> WrappedModel:
        """The model itself, whose module's weights require gradients, or no longer do."""
        self.module.requires_grad_(requires_grad)
        return self

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The module's parameters, by name."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """The module's."""
        return dict(self.module.state_dict())

    def save_pretrained(self, save_directory: str | PathLike[str], **choices: Any) -> None:
        """What the module's own method writes, with its arguments: of a PEFT model its adapters."""
        self.module.save_pretrained(save_directory, **choices)  # type: ignore[operator]

    def load_adapter(self, name: str, folder: str | PathLike[str]) -> None:
        """The module, a PEFT model, has the adapter in the folder under this name from now on."""
        self._of_peft().load_adapter(folder, adapter_name=name)

    def delete_adapter(self, name: str) -> None:
        """The module no longer has the adapter."""
        self._of_peft().delete_adapter(name)

    def _of_peft(self) -> Any:
        if library(self.module) != "peft":
            raise UnsupportedError(
                "adapters are loaded into PEFT models",
                wanted="a PeftModel",
                got=type(self.module).__name__,
                do="Wrap peft.PeftModel.from_pretrained(model, folder)",
            )
        return self.module


def wrap(model: Any) -> LanguageModel:
    """The model, driven by this library's engine: `generate`, `es.generate`, `es.stream` take it.

    A model of transformers or any PEFT wrapper of one is examined with a few short forwards and
    left as it was; a model of this library is returned as it is. ModelClassError for anything else.

    Example:

        >>> es.wrap(model) is model
        True
    """
    if isinstance(model, LanguageModel):
        return model
    if not isinstance(model, nn.Module):
        raise ModelClassError(
            "this object is not a model that can generate",
            wanted="a model of this library, of transformers or of PEFT",
            got=type(model).__name__,
            do="Use everystep.load_model",
        )
    return WrappedModel(model)
