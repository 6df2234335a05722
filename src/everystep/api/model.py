"""The model as its users see it: weights that can generate, and be called like transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from os import PathLike
from typing import Any, Unpack

import torch
from torch import Tensor

from everystep.adapters import Adapters, moved_adapters, with_adapter, without_adapter
from everystep.api.absent import refuse_argument
from everystep.api.chat_defaults import ChatDefaults
from everystep.api.custom import require_loop
from everystep.api.described import lists_options
from everystep.api.features import PromptInput, own_inputs, require_distinct
from everystep.api.forward import (
    cache_of_forward,
    kept_positions,
    listener,
    output_of,
    require_inputs,
    see_pictures,
    states_in_place,
)
from everystep.api.keywords import ModelOptions, RectangleOptions
from everystep.api.objects import require_core
from everystep.api.options import KEYWORDS
from everystep.api.passed import with_prompt
from everystep.api.pictures import picture_names
from everystep.api.rectangle import generate
from everystep.api.saving import Merged, save_model, with_merged
from everystep.api.speech import is_speech, transcribe
from everystep.api.tables import model_line
from everystep.bridge.core import ForeignModel
from everystep.cache.formats import CacheDtype, KvFormat, Quantization
from everystep.config import GenerationConfig
from everystep.errors import UnsupportedError
from everystep.executors.base import Executor
from everystep.executors.choice import (
    ExecutorName,
    chosen,
    holds_panels,
    open_executor,
    refuse_cache_dtype,
)
from everystep.models import (
    Model,
    convert_model,
    first_layers,
    learning_weights,
    named_weights,
    weight_bytes,
)
from everystep.models.load import usable_device
from everystep.nn.network import Window
from everystep.outputs import compute_transition_scores, loss_of
from everystep.types import InputSpec


class LanguageModel:
    """A model with its generation defaults.

    Generating changes nothing in it: every call has its own engine and its own cache rows, so
    calls from several threads do not disturb each other, and an interrupted call leaves no row.
    """

    chat_defaults = ChatDefaults()

    def __init__(
        self,
        core: Model,
        generation_config: GenerationConfig | None = None,
        name: str = "",
        executor: ExecutorName = "auto",
        cache_dtype: CacheDtype | None = None,
    ) -> None:
        require_core(core)
        refuse_cache_dtype(core, cache_dtype)
        self._core = core
        self.generation_config = generation_config or GenerationConfig()
        self.name_or_path = name
        self.executor_name = executor
        self._cache_dtype = cache_dtype
        self._adapters: Adapters = {}
        self._prompt_inputs: tuple[PromptInput, ...] = ()

    __repr__ = model_line

    @property
    def core(self) -> Model | ForeignModel:
        """The weights, or the module that holds them, and what they were built from."""
        return self._core

    @property
    def config(self) -> Any:
        """The values of config.json, as attributes."""
        return self.core.config

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.core.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights; the kernels compute in float32 with those of 16 bits too."""
        return self.core.float_type

    @property
    def cache_dtype(self) -> str:
        """The name of the type in which rows keep keys and values."""
        return str(KvFormat(self.core.dtype, self._cache_dtype).dtype).removeprefix("torch.")

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
        """What the network declares beside ids or embeddings: keywords of every call."""
        return {one.name: one for one in self.core.inputs}

    @property
    def prompt_inputs(self) -> tuple[PromptInput, ...]:
        """What is encoded and read inside a prompt, by keyword; the model's own at first. May be
        set to a list of `PromptInput`; RequestError where names or tokens are taken."""
        return self._prompt_inputs or own_inputs(self.core.encoders)

    @prompt_inputs.setter
    def prompt_inputs(self, inputs: Iterable[PromptInput]) -> None:
        if self.is_encoder_decoder:
            what = "a prompt that an encoder reads takes no prompt inputs"
            raise UnsupportedError(what, do="Pass its embeddings as inputs_embeds")
        taken = (*KEYWORDS, *self.inputs, *picture_names(self))
        self._prompt_inputs = require_distinct(inputs, taken)

    @property
    def context(self) -> int | None:
        """The longest sequence the model was made for."""
        most: int | None = self.core.network.most_positions
        return getattr(self.core.config, "max_position_embeddings", most)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, how many positions it looks back; None for all."""
        layers = self.core.network.stores
        sizes = ([one.size for one in layer if isinstance(one, Window)] for layer in layers)
        return tuple(size[0] if size else None for size in sizes)

    @property
    def depth(self) -> int:
        """How many layers lie between ids and logits."""
        return int(getattr(self.core.config, "num_hidden_layers", len(self.core.network.stores)))

    @property
    def has_tied_head(self) -> bool:
        """Whether logits are read out with the table of embeddings."""
        return bool(getattr(self.core.network.spec, "tied", False))

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt."""
        return bool(getattr(self.core.config, "is_encoder_decoder", False))

    @classmethod
    def can_generate(cls) -> bool:
        """True, of the class too: a model without a language head is refused when it is loaded."""
        return True

    def eval(self) -> LanguageModel:
        """The model itself; there is no training mode."""
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> LanguageModel:
        """The model itself, from now on with weights on the given device and of the given type.

        A call that is running goes on with the weights it began with.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        place = self.device if device is None else usable_device(device)
        if dtype is not None or place != self.device:
            in_panels = partial(holds_panels, self.executor_name)
            self._core = convert_model(self._core, device=place, dtype=dtype, in_panels=in_panels)
            self._adapters = moved_adapters(self._adapters, self._core.device, self._core.dtype)
        return self

    def load_adapter(self, name: str, folder: str | PathLike[str]) -> None:
        """Requests may ask for the LoRA in a PEFT folder by this name from now on.

        A call that is running goes on without it. See `read_lora` for what is refused.
        """
        self._adapters = with_adapter(self._adapters, name, folder, self._core)

    def delete_adapter(self, name: str) -> None:
        """No new call can ask for the adapter."""
        self._adapters = without_adapter(self._adapters, name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may ask for."""
        return tuple(self._adapters)

    def requires_grad_(self, requires_grad: bool = True) -> LanguageModel:
        """The model itself, whose weights require gradients from now on, or no longer do.

        Packed weights become plain float tensors for that, and stay so. Such a model runs on torch
        operators; a forward of it outside `torch.no_grad()` is differentiable. UnsupportedError for
        quantised weights.
        """
        if requires_grad and not self._core.learns:
            self._core = convert_model(self._core, learns=True)
        if self._core.learns:
            for weight in self.parameters():
                weight.requires_grad_(requires_grad)
        return self

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of a model that can learn, by name, joined projections as one tensor.

        A change of one changes the model. UnsupportedError before `requires_grad_`.
        """
        return iter(learning_weights(self._core))

    def parameters(self) -> Iterator[Tensor]:
        """The same without names, as optimizers take them."""
        return (one for _, one in self.named_parameters())

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """What turns ids (..., T) into the embeddings (..., T, E) that `inputs_embeds` takes;
        RequestError for ids outside the vocabulary."""
        return self.core.embed

    def state_dict(self) -> dict[str, Tensor]:
        """Every weight under its checkpoint name. Those that lie row by row are views of the
        model's memory, so change clones of them."""
        return dict(named_weights(self._core))

    def save_pretrained(
        self,
        save_directory: str | PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        adapters: Merged | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """The folder holds the model as this library and transformers load it, in safetensors.

        Files of a model that was there are replaced, others stay; where writing fails, the folder
        is as it was. `dtype`: the type that is written, None for the weights' own; quantised ones
        need it. `adapters`: names, or (name, weight) pairs, that are merged into what is written;
        RequestError where some are loaded and it is left out.
        """
        core = with_merged(self._core, self._adapters, adapters)
        save_model(core, self.generation_config, save_directory, dtype, max_shard_size)

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of weights by format or type, the most first."""
        return weight_bytes(self._core)

    @property
    def runs_on(self) -> str:
        """Which executor plain requests get, and its instruction set, or why it is torch."""
        return chosen(self._core, self.executor_name)

    def executor(
        self,
        needs: Set[str] = frozenset(),
        quantization: Quantization | None = None,
        layers: int | None = None,
    ) -> Executor:
        """A fresh executor with no rows that has the abilities in `needs`.

        `quantization`: how its rows will keep what they hold, None for full precision. `layers`: it
        runs the first so many layers alone, None for all.
        """
        core = self._core if layers is None else first_layers(self._core, layers)
        return open_executor(
            core, self.executor_name, needs, quantization, self._cache_dtype, self._adapters
        )

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        decoder_input_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        input_features: Tensor | None = None,
        **pictures: Any,
    ) -> Any:
        """Logits of every position, (B, T, V), and the cache with these positions after its own.

        `input_ids` (B, T) or `inputs_embeds` (B, T, E) come after the S positions of
        `past_key_values`, a cache object that is filled in place. `attention_mask` (B, S + T).
        `position_ids` are S..S+T-1 unless given. `use_cache`: whether to begin a new cache where
        none was passed; None: as the model's configuration says. `logits_to_keep`: of how many of
        the last positions logits are given, 0 for all, or (n,) of which. `labels` (B, T): ids whose
        loss is given, each predicted from what stands before it, -100 for none. `input_features`
        (B, channels, frames): what an encoder of sounds reads; `encoder_outputs` stand in the place
        of an encoder's prompt. With one it is `decoder_input_ids` (B, T) that come after what is
        cached; keys and values of the encoder's states are cached beside them. `pictures`: pixels
        and grids, as for `generate`. Differentiable after `requires_grad_`. Returns a
        `CausalLMOutput`, or with `return_dict=False` a tuple.
        """
        own = input_ids, attention_mask, position_ids, inputs_embeds, labels
        require_inputs(self, *own, decoder_input_ids, decoder_attention_mask)
        states = states_in_place(encoder_outputs, input_ids, inputs_embeds, input_features)
        inputs = inputs_embeds if input_ids is None else input_ids
        given = inputs if decoder_input_ids is None else decoder_input_ids
        kept = kept_positions(logits_to_keep, given)
        cache = cache_of_forward(self, given, past_key_values, use_cache)
        heard = listener(output_hidden_states, output_attentions)
        read = input_ids, position_ids, inputs_embeds
        seen = see_pictures(self, *read, attention_mask, cache, pictures)
        logits = self._core.forward(
            seen.ids,
            attention_mask,
            seen.positions,
            seen.embeds,
            decoder_input_ids=decoder_input_ids,
            cache=cache,
            kept=kept,
            decoder_attention_mask=decoder_attention_mask,
            encoder_states=states,
            heard=heard,
            sounds=input_features,
            declared=seen.declared,
        )
        loss = loss_of(logits, labels, self.is_encoder_decoder)
        result = output_of(logits, loss, cache, heard, output_hidden_states, output_attentions)
        return result.to_tuple() if return_dict is False else result

    compute_transition_scores = staticmethod(compute_transition_scores)

    @lists_options(RectangleOptions)
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: Any = None,
        *,
        tokenizer: Any = None,
        **kwargs: Unpack[ModelOptions],
    ) -> Any:
        """Continues every row of the prompt.

        Names, defaults and outputs are those of `GenerationMixin.generate` in transformers 5.23; an
        unknown name is an error. Returns a (rows, length) int64 tensor, or an output object with
        `return_dict_in_generate=True`. Without `seed` draws come from torch's global generator;
        with it a row's tokens do not depend on its batch. `tokenizer`: what texts are made with.
        `api/custom.py` says what a `custom_generate` gets and returns.

        Example:

            >>> batch = tokenizer("Once upon a time", return_tensors="pt")
            >>> ids = model.generate(**batch, max_new_tokens=4)
        """
        refuse_argument("synced_gpus", synced_gpus)
        given = {
            **with_prompt(kwargs, inputs, self.core.source or "input_ids"),
            "generation_config": generation_config,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "streamer": streamer,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": require_loop(custom_generate),
            "assistant_model": assistant_model,
            "tokenizer": tokenizer,
        }
        return transcribe(self, given) if is_speech(self) else generate(self, given)
