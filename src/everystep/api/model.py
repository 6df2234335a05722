"""The model as its users see it: weights that can generate, and be called like transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast, final

import torch
from torch import Tensor, nn

from everystep.adapters import (
    AdapterConfig,
    Combination,
    PeftAdapter,
    read_adding,
    read_loading,
)
from everystep.api.capabilities import CallName, Capability, can, capabilities
from everystep.api.forward import forward
from everystep.api.saving import Folder, Merged, Saving
from everystep.api.subjects import Holder, OwnSubject, WrappedSubject
from everystep.bridge.core import ForeignModel
from everystep.cache.formats import CacheDtype, Quantization
from everystep.config import GenerationConfig
from everystep.config.kinds import require as require_choice
from everystep.drivers.custom import Loop
from everystep.drivers.rectangle import generate
from everystep.errors import AbsentAttributeError, ModelClassError, UnsupportedError, shown
from everystep.executors.base import Executor
from everystep.executors.choice import ExecutorName
from everystep.executors.parallel import Crew
from everystep.executors.synced import Sharded
from everystep.models import Model
from everystep.models.load import named_shapes
from everystep.models.loop_methods import LoopMethods
from everystep.outputs import compute_transition_scores
from everystep.requests.arrays import require
from everystep.requests.door import KEYWORDS, lists_options, sort
from everystep.requests.features import PromptInput, require_distinct
from everystep.requests.pictures import picture_names
from everystep.requests.prompts import PromptLike
from everystep.requests.rectangles import with_prompt
from everystep.requests.subject import Subject
from everystep.shown import counted, counted_bytes, cut
from everystep.speech.transcribe import transcribe
from everystep.types import ResolvedAdapter

if TYPE_CHECKING:
    from everystep.requests.keywords import ModelOptions

_FREE = ("media", "speech", "absent")
"""Owners whose keywords may become those of prompt inputs."""


_NAMED = "Name adapters in each call, adapter_names=...: a call without runs the model as it is"
_OTHER_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("set_adapter", "set_adapters", "enable_adapters", "active_adapters"), _NAMED),
    **dict.fromkeys(("disable_adapter", "disable_adapters", "active_adapter"), _NAMED),
    "merge_and_unload": "Call merge_adapter, or save_pretrained(folder, adapters=[...])",
    "unload": "Call delete_adapter",
    "get_adapter_state_dict": "Read adapter.tensors of what load_adapter or add_adapter returned",
    "enable_input_require_grads": "Leave it out: gradients pass through frozen weights anyway",
    "print_trainable_parameters": "Count adapter.parameters(), or model.parameters()",
    "get_nb_trainable_parameters": "Count adapter.parameters(), or model.parameters()",
    "resize_token_embeddings": "Resize the model with transformers, and load what it saves",
}
"""Methods of models of transformers and PEFT that are none here, with what to do."""


@final
class LanguageModel(LoopMethods, Subject):
    """A model with its generation defaults: one of this library, or a wrapped one of another.

    Generating changes nothing in it: calls from several threads do not disturb each other, and an
    interrupted call leaves no row.
    """

    def __init__(
        self,
        core: Model,
        generation_config: GenerationConfig | None = None,
        name: str = "",
        executor: ExecutorName = "auto",
        cache_dtype: CacheDtype | None = None,
        crew: Crew | None = None,
    ) -> None:
        config = generation_config or GenerationConfig()
        self._held: Holder = OwnSubject(core, config, name, executor, cache_dtype, crew)

    @classmethod
    def around(cls, module: nn.Module) -> LanguageModel:
        """Return a model that drives a module of transformers or PEFT, which is examined."""
        made = cls.__new__(cls)
        made._held = WrappedSubject(module)
        return made

    def __init_subclass__(cls) -> NoReturn:
        raise ModelClassError(
            "LanguageModel has no subclasses: the engine would never call what they override",
            got=f"class {cls.__name__}(LanguageModel)",
            do="Pass hooks, processors or a strategy to the call, or wrap a module of your own "
            "with everystep.wrap",
        )

    def __repr__(self) -> str:
        """Return family, parameters, bytes by format, executor, cache and context in a line."""
        weights = [f"{counted_bytes(size)} {name}" for name, size in self.weight_bytes.items()]
        parts = [
            str(getattr(self.config, "model_type", "unknown family")),
            f"{counted(self.num_parameters())} parameters",
            " + ".join(weights),
            f"runs on {cut(self.runs_on)}",
            f"cache {self.cache_dtype}",
            f"context {self.context}" if self.context else "any context",
        ]
        name = f"{cut(self.name_or_path)!r}, " if self.name_or_path else ""
        return f"{type(self).__name__}({name}{', '.join(parts)})"

    if not TYPE_CHECKING:  # which would take every name for one that exists

        def __getattr__(self, name: str) -> object:
            if hasattr(type(self), name):  # a property that failed
                return object.__getattribute__(self, name)
            if hasattr(nn.Module, name) or name in nn.Module().__dict__:
                raise AbsentAttributeError(
                    f"a LanguageModel has no {name}: it is no torch.nn.Module",
                    do="Pass model.as_module() to what takes such a module",
                )
            what = f"a LanguageModel has no attribute {shown(name)}"
            raise AbsentAttributeError(what, do=_OTHER_METHODS.get(name))

    @property
    def core(self) -> Model | ForeignModel:
        return self._held.core

    @property
    def module(self) -> nn.Module | None:
        """The module of another library that is driven, None for a model of this one."""
        return self._held.module

    @property
    def name_or_path(self) -> str:
        """The name or the folder that it was loaded from."""
        return self._held.name_or_path

    @property
    def generation_config(self) -> GenerationConfig:
        """The values that hold for every call that does not say otherwise; of a wrapped model a
        copy of the module's own, to be set there."""
        return self._held.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self._held.configure(config)

    @property
    def prompt_inputs(self) -> tuple[PromptInput, ...]:
        """The inputs that are encoded and read inside a prompt, by keyword; the model's own at
        first. May be set to a list of `PromptInput`; RequestError where names or tokens are
        taken."""
        return self._held.prompt_inputs

    @prompt_inputs.setter
    def prompt_inputs(self, inputs: Iterable[PromptInput]) -> None:
        if self.is_encoder_decoder:
            what = "a prompt that an encoder reads takes no prompt inputs"
            raise UnsupportedError(what, do="Pass its embeddings as inputs_embeds")
        own = [row.name for row in KEYWORDS.values() if row.owner not in _FREE]
        taken = (*own, *self.inputs, *picture_names(self))
        self._held.given_inputs = require_distinct(inputs, taken)

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._held.adapters

    @property
    def cache_dtype(self) -> str:
        return self._held.cache_dtype

    @property
    def executor_name(self) -> str:
        return self._held.executor_name

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of weights by format or type, the most first."""
        return self._held.weight_bytes

    @property
    def runs_on(self) -> str:
        """The executor that plain requests get, and its instruction set, or why it is torch."""
        return self._held.runs_on

    def executor(
        self,
        needs: Set[str] = frozenset(),
        quantization: Quantization | None = None,
        layers: int | None = None,
    ) -> Executor:
        return self._held.executor(needs, quantization, layers)

    def resolved(self, adapters: Iterable[str]) -> Mapping[str, ResolvedAdapter]:
        return self._held.resolved(adapters)

    def digest(self, adapters: Iterable[str] = ()) -> str:
        return self._held.digest(adapters)

    def sharded(self) -> Sharded | None:
        return self._held.sharded()

    def gathered(self, *, to_step: bool = False) -> LanguageModel:
        """Return the model itself; where its weights lie in parts on several processes, a model
        with a copy of them as they are now, whole on each, which all ask for at the same time.
        `to_step`: itself too where each forward gathers what it reads, layer by layer."""
        held = self._held.gathered(to_step=to_step)
        if held is self._held:
            return self
        made = LanguageModel.__new__(LanguageModel)
        made._held, made.chat_defaults = held, self.chat_defaults
        return made

    def close(self) -> None:
        """End the processes that hold parts of the model, where it was loaded with `parallel`; no
        call of it computes anything after that. Nothing for other models."""
        self._held.close()

    @classmethod
    def can_generate(cls) -> bool:
        """Return True, of the class too: a model without a language head is not loaded."""
        return True

    # --- weights ----------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """True in training mode."""
        return self._held.training

    def train(self, mode: bool = True) -> LanguageModel:
        """Return the model itself, in training mode from now on, or out of it.

        In training mode a forward drops parts of what adapters read, where they say so; nothing
        else differs, and `generate` never does so. Networks of this library have no dropout.
        """
        require_choice(isinstance(mode, bool), "mode", "True or False", mode)
        self._held.train(mode)
        return self

    def eval(self) -> LanguageModel:
        """Return the model itself, out of training mode."""
        return self.train(False)

    def gradient_checkpointing_enable(self) -> None:
        """Let forwards keep nothing of a layer for gradients but compute it once more: the same
        gradients in less memory. UnsupportedError for a model that is no decoder."""
        self._held.recompute(True)

    def gradient_checkpointing_disable(self) -> None:
        """Let forwards keep what gradients need."""
        self._held.recompute(False)

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> LanguageModel:
        """Return the model itself, from now on with weights on the device and of the type.

        A call that is running goes on with the weights it began with.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        self._held.to(device, dtype)
        return self

    def adapter(self, name: str) -> PeftAdapter:
        """Return the adapter of this name, as `load_adapter` and `add_adapter` do.

        RequestError where there is none, UnsupportedError for a wrapped model.
        """
        return self._held.adapter(name)

    def load_adapter(
        self,
        folder: Folder | None = None,
        name: str | None = None,
        *,
        is_trainable: bool = False,
        **of_other_libraries: object,
    ) -> PeftAdapter | None:
        """Let requests ask for the adapter in a PEFT folder by this name from now on; return it.

        The order is that of transformers and PEFT, whose `peft_model_id`, `model_id` and
        `adapter_name` are read too; without a name it is "default". `is_trainable`: its tensors
        learn, see `add_adapter`. A call that is running goes on without it. See `read_adapter` for
        what is refused; a wrapped PEFT model loads it by itself.
        """
        asked = read_loading(folder, name, is_trainable, of_other_libraries)
        return self._held.load_adapter(asked.folder, asked.name, learns=asked.learns)

    def add_adapter(
        self,
        name: str | AdapterConfig | None = None,
        config: AdapterConfig | str | None = None,
        **of_other_libraries: object,
    ) -> PeftAdapter:
        """Make an adapter that learns, and let calls ask for it by this name; return it.

        `config`: a `LoraConfig` or `LoHaConfig`. Name and config may come in either order, as in
        PEFT and in transformers, whose `adapter_name`, `adapter_config` and `peft_config` are read
        too; without a name it is "default". The adapter's `parameters()` go to an optimizer, and a
        forward that names it, `model(ids, adapter_names="default")`, is differentiable in them
        while the weights of the model stay as they are, packed or quantised too. Dropout is active
        after `adapter.train()`.
        """
        asked = read_adding(name, config, of_other_libraries)
        return self._held.add_adapter(asked.config, asked.name)

    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = True,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
    ) -> PeftAdapter | None:
        """Make one LoRA of several with weights, as PEFT does, and return it.

        `combination_type`: "cat" is the weighted sum, at the sum of their ranks; "svd" keeps the
        largest of their ranks of it, or `svd_rank`; "linear" combines the factors, which is rough;
        "ties", "dare_linear", "dare_ties" and "magnitude_prune" keep the share `density` of the
        values, of the factors or, with "_svd" behind, of what is added. What would have no effect
        is refused. To mix adapters in a call, exactly and of any kinds, pass `adapters`.
        """
        listed = isinstance(adapters, list | tuple)
        fits = listed and all(isinstance(one, str) for one in adapters)
        require_choice(fits, "adapters", "a list of names", adapters)
        svd = svd_rank, svd_clamp, svd_full_matrices, svd_driver
        how = Combination(combination_type, *svd, density, majority_sign_method)
        return self._held.add_weighted_adapter(adapters, weights, adapter_name, how)

    def merge_adapter(self, adapters: Merged | None = None) -> None:
        """Put adapters into the weights: names, or (name, weight) pairs, the innermost first.

        Calls then run as fast as without adapters and name none, until `unmerge_adapter`. The
        weights before are kept beside the new ones. Projections that are changed are floats, also
        where the model is quantised. A call that is running goes on with the weights it began with.
        """
        self._held.merge_adapter(adapters)

    def unmerge_adapter(self) -> None:
        """Give back the weights from before `merge_adapter`, bit for bit; RequestError where there
        are none."""
        self._held.unmerge_adapter()

    def save_adapter(self, folder: Folder, name: str = "default") -> None:
        """Write an adapter as PEFT does, `adapter_config.json` and `adapter_model.safetensors`.

        Files of an adapter that was there are replaced, others stay; where writing fails, the
        folder is as it was.
        """
        self._held.save_adapter(folder, name)

    def delete_adapter(self, name: str) -> None:
        """Let no new call ask for the adapter."""
        self._held.delete_adapter(name)

    def requires_grad_(self, requires_grad: bool = True) -> LanguageModel:
        """Return the model itself, whose weights require gradients from now on, or no longer do.

        Packed weights become plain parameters for that, one for each name, and stay so. Such a
        model runs on torch operators; a forward of it outside `torch.no_grad()` is differentiable.
        UnsupportedError for quantised weights.
        """
        self._held.requires_grad_(requires_grad)
        return self

    def frozen(self, adapters: Merged | None = None) -> LanguageModel:
        """Return a model with a copy of the weights as they are now, which does not learn.

        It runs on the executor that this one was loaded with, natively where that can be. Further
        changes of this model's weights do not reach it. `adapters`: names, or (name, weight) pairs,
        that are merged into its weights, and it has none then; without a choice it has those of
        this model. UnsupportedError for a wrapped model.
        """
        made = LanguageModel.__new__(LanguageModel)
        made._held = self._held.frozen(adapters)
        made.chat_defaults = self.chat_defaults
        return made

    def as_module(self) -> nn.Module:
        """Return the model as a `torch.nn.Module`, for what takes such a module: optimisers,
        `torch.compile`, `DistributedDataParallel`, `fully_shard` of the whole.

        Its parameters are those of `named_parameters`, with the same names in its `state_dict`,
        whose values lie as in a checkpoint. Its forward is that of the model without a cache. The
        model generates with the values that they have at each call, gathered where they lie in
        parts on several processes that make the call together. Weights that cannot learn yet can
        from now on; UnsupportedError for quantised ones. Of a wrapped model it is `module`.
        """
        return self._held.as_module(self.__call__)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the weights of a model that can learn, by the names that checkpoints give them.

        They are `torch.nn.Parameter`s, each with its rows as this library has them, and a change of
        one changes the model. UnsupportedError before `requires_grad_`.
        """
        return self._held.named_parameters()

    def parameters(self) -> Iterator[Tensor]:
        """Return the same without names, as optimizers take them."""
        return (one for _, one in self.named_parameters())

    def num_parameters(self) -> int:
        """Return how many numbers the weights have, shared ones counted once."""
        core = self.core
        if isinstance(core, Model):
            shapes = (shape for _, shape in named_shapes(core))
        else:
            shapes = (tuple(one.shape) for _, one in self.named_parameters())
        return sum(math.prod(shape) for shape in shapes)

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """Return what turns ids (..., T) into the embeddings (..., T, E) that `inputs_embeds`
        takes; RequestError for ids outside the vocabulary."""
        return self.core.embed

    def state_dict(self) -> dict[str, Tensor]:
        """Return every weight under its checkpoint name. Those that lie row by row are views of the
        model's memory, so change clones of them."""
        return self._held.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> object:
        """Copy values into the weights by their checkpoint names; return names that are missing or
        unexpected, as `torch.nn.Module` does.

        Values have the layout of `as_module().state_dict()`. Weights that cannot learn yet can from
        now on. RuntimeError of torch for other shapes, and where `strict`, for other names;
        UnsupportedError for quantised weights.
        """
        return self.as_module().load_state_dict(state_dict, strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all weights, or set them to zeros; UnsupportedError before
        `requires_grad_`."""
        for one in self.parameters():
            if set_to_none:
                one.grad = None
            elif one.grad is not None:
                one.grad.zero_()

    def save_pretrained(
        self,
        save_directory: Folder,
        *,
        dtype: torch.dtype | None = None,
        adapters: Merged | None = None,
        max_shard_size: int | str = "5GB",
        **of_module: object,
    ) -> None:
        """Write a folder that this library and transformers load, in safetensors.

        Files of a model that was there are replaced, others stay; where writing fails, the folder
        is as it was. `dtype`: the type that is written, None for the weights' own; quantised ones
        need it. `adapters`: names, or (name, weight) pairs, that are merged into what is written;
        RequestError where some are loaded and it is left out. A wrapped model writes what its
        module writes (of PEFT the adapters), and passes on the arguments `of_module`.
        """
        saving = Saving(dtype, adapters, max_shard_size)
        self._held.save_pretrained(save_directory, saving, of_module)

    # --- calls ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return logits of every position, and the cache with these positions after its own.

        The arguments are those of `everystep.api.forward.forward`; a wrapped model returns what its
        module returns.
        """
        if self.module is not None:
            return self.module(*args, **kwargs)
        return forward(cast(OwnSubject, self._held), *args, **kwargs)

    compute_transition_scores = staticmethod(compute_transition_scores)

    @lists_options("rectangle")
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[object] | None = None,
        stopping_criteria: Sequence[object] | None = None,
        prefix_allowed_tokens_fn: object = None,
        synced_gpus: bool | None = None,
        assistant_model: object = None,
        streamer: object = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: object = None,
        *,
        tokenizer: object = None,
        **kwargs: Unpack[ModelOptions],
    ) -> Any:
        """Continue every row of the prompt.

        Names, defaults and outputs are those of `GenerationMixin.generate` in transformers 5.23; an
        unknown name is an error. Returns a (rows, length) int64 tensor, or an output object with
        `return_dict_in_generate=True`. Without `seed` draws come from torch's global generator;
        with it a row's tokens do not depend on its batch. `tokenizer`: what texts are made with.
        `drivers/custom.py` says what a `custom_generate` gets and returns.

        Example:

            >>> batch = tokenizer("Once upon a time", return_tensors="pt")
            >>> ids = model.generate(**batch, max_new_tokens=4)
        """
        spelled = {
            "generation_config": generation_config,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "streamer": streamer,
            "synced_gpus": synced_gpus,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": custom_generate,
            "assistant_model": assistant_model,
            "tokenizer": tokenizer,
        }
        subject, of_loop = self._held, tuple[str, ...]()
        given = {**kwargs, **{name: one for name, one in spelled.items() if one is not None}}
        if custom_generate is not None:
            given["custom_generate"] = loop = Loop.of(custom_generate, self)
            of_loop = loop.names
        arguments = sort("rectangle", subject, given, of_loop)
        if inputs is not None:
            name = subject.core.source or "input_ids"
            prompt = with_prompt(arguments.prompt, inputs, name)
            arguments = replace(arguments, prompt=prompt)
        if synced_gpus is not False and custom_generate is None:
            subject = subject.gathered(to_step=True)
        if arguments.speech is not None:
            return transcribe(subject, arguments)
        return generate(subject, arguments)

    def can(
        self,
        call: CallName,
        *,
        prompt: PromptLike | None = None,
        tokenizer: object = None,
        **keywords: object,
    ) -> Capability:
        """Return whether a call takes these keywords for this model, and if not, why.

        `call`: "model.generate", "es.generate", "es.stream", "es.open" or "AsyncEngine". The answer
        is that of the call itself, up to where it would compute; `prompt` is one of its prompts,
        any short one unless given.

        Example:

            >>> bool(model.can("es.generate", num_beams=4))
            True
            >>> print(model.can("es.stream", use_cache=False))  # doctest: +ELLIPSIS
            use_cache turns off a cache that many prompts are scheduled by...
        """
        return can(self, self._held, call, keywords, prompt, tokenizer)

    def capabilities(self) -> dict[str, dict[str, Capability]]:
        """Return what each call answers to each of the usual features, by name.

        Example:

            >>> bool(model.capabilities()["beam search"]["es.stream"])
            True
        """
        return capabilities(self.can)


def wrap(model: object) -> LanguageModel:
    """Return the model, driven by this library's engine, as `es.generate` and `es.stream` take it.

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
    return LanguageModel.around(model)


def paired(model: object, tokenizer: object) -> LanguageModel:
    """Return the model, wrapped if it is one of another library.

    ModelClassError, RequestError: unless these are a model and a tokenizer, in this order.
    """
    if isinstance(model, nn.Module):
        model = wrap(model)
    if not isinstance(model, LanguageModel):
        swapped = isinstance(tokenizer, LanguageModel | nn.Module)
        raise ModelClassError(
            "model and tokenizer are swapped" if swapped else "this is no model",
            wanted="the model first, then its tokenizer",
            got=f"{type(model).__name__} first",
            do="Call es.load, which returns (model, tokenizer), and pass them in that order",
        )
    require("tokenizer", tokenizer, "encode", "decode")
    return model
