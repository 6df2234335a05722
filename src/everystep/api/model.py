"""The model as its users see it: weights that can generate, and be called like the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everystep.api.arguments import refuse_absent
from everystep.api.custom import require_loop
from everystep.api.forward import CausalLMOutput, cache_of_forward, kept_positions
from everystep.api.generate import generate
from everystep.api.transitions import compute_transition_scores
from everystep.cache.formats import CacheDtype, KvFormat, Quantization
from everystep.config import GenerationConfig
from everystep.errors import ModelClassError, message
from everystep.executors.base import Executor
from everystep.executors.choice import (
    ExecutorName,
    chosen,
    holds_panels,
    open_executor,
    refuse_cache_dtype,
)
from everystep.models import Model, convert_model, named_weights, weight_bytes
from everystep.models.device import usable_device
from everystep.nn.network import Heard, Store, Window
from everystep.types import Prompt


class LanguageModel:
    """A model with its generation defaults.

    Generating changes nothing in it: every call has its own engine and its own cache rows, so
    calls from several threads do not disturb each other, and an interrupted call leaves no row.
    """

    def __init__(
        self,
        core: Model,
        generation_config: GenerationConfig | None = None,
        name: str = "",
        executor: ExecutorName = "auto",
        cache_dtype: CacheDtype | None = None,
    ) -> None:
        if not isinstance(core, Model):
            raise ModelClassError(
                message(
                    "this object is not a model that can generate",
                    wanted="a models.Model",
                    got=type(core).__name__,
                    do="Use everystep.load_model",
                )
            )
        refuse_cache_dtype(core, cache_dtype)
        self._core = core
        self.generation_config = generation_config or GenerationConfig()
        self.name_or_path = name
        self._executor = executor
        self._cache_dtype = cache_dtype

    @property
    def core(self) -> Model:
        """The weights, and what they were built from."""
        return self._core

    @property
    def config(self) -> Any:
        """The values of config.json, as attributes."""
        return self._core.config

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._core.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self._core.dtype

    @property
    def cache_dtype(self) -> str:
        """The name of the type in which rows keep keys and values."""
        return str(KvFormat(self.dtype, self._cache_dtype).dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self._core.vocab_size

    @property
    def hidden_size(self) -> int:
        """The width of the embeddings."""
        return self._core.network.spec.width

    @property
    def context(self) -> int | None:
        """The longest sequence the model was made for."""
        return getattr(self._core.config, "max_position_embeddings", None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, how many positions it looks back; None for all."""
        sizes = [
            [one.size for one in layer if isinstance(one, Window)]
            for layer in self._core.network.stores
        ]
        return tuple(size[0] if size else None for size in sizes)

    @property
    def stores(self) -> tuple[tuple[Store, ...], ...]:
        """What each layer keeps of a row."""
        return self._core.network.stores

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt."""
        return bool(getattr(self._core.config, "is_encoder_decoder", False))

    def can_generate(self) -> bool:
        """True: a model without a language head is refused when it is loaded."""
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
            in_panels = partial(holds_panels, self._executor)
            self._core = convert_model(self._core, device=place, dtype=dtype, in_panels=in_panels)
        return self

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """What turns ids (..., T) into the embeddings (..., T, E) that `inputs_embeds` takes."""
        return self._core.network.embed

    def state_dict(self) -> dict[str, Tensor]:
        """Every weight under its checkpoint name.

        Those that lie row by row are views of the model's memory, so change clones of them.
        """
        return dict(named_weights(self._core))

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of weights by format or type, the most first."""
        return weight_bytes(self._core)

    @property
    def runs_on(self) -> str:
        """Which executor plain requests get, and its instruction set, or why it is torch."""
        return chosen(self._core, self._executor)

    def executor(
        self, needs: Set[str] = frozenset(), quantization: Quantization | None = None
    ) -> Executor:
        """A fresh executor with no rows that has the abilities in `needs`.

        `quantization`: how its rows will keep what they hold, None for full precision.
        """
        return open_executor(self._core, self._executor, needs, quantization, self._cache_dtype)

    def encode(self, prompt: Prompt, heard: Heard | None = None) -> Tensor:
        """(S, E) encoder states of one prompt; `heard` gets what the encoder's layers show."""
        return self._core.encode(prompt, heard)

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
    ) -> Any:
        """Logits of every position, (B, T, V), and the cache with these positions behind its own.

        `input_ids` (B, T) or `inputs_embeds` (B, T, E) stand behind the S positions of
        `past_key_values`, a cache object that is filled in place. `attention_mask` (B, S + T).
        `position_ids` are S..S+T-1 unless given. `use_cache`: whether to begin a new cache where
        none was passed; None: as the model's configuration says. `logits_to_keep`: of how many of
        the last positions logits are given, 0 for all, or (n,) of which. Returns a
        `CausalLMOutput`, or with `return_dict=False` a tuple.
        """
        inputs = inputs_embeds if input_ids is None else input_ids
        given = inputs if decoder_input_ids is None else decoder_input_ids
        kept = kept_positions(logits_to_keep, given)
        cache = cache_of_forward(self, inputs, past_key_values, use_cache)
        # What callers get they may change in place, so it must not be made in inference mode.
        with torch.no_grad():
            logits = self._core.forward(
                input_ids,
                attention_mask,
                position_ids,
                inputs_embeds,
                decoder_input_ids=decoder_input_ids,
                cache=cache,
                kept=kept,
            )
        result = CausalLMOutput(logits, cache)
        return result.to_tuple() if return_dict is False else result

    compute_transition_scores = staticmethod(compute_transition_scores)

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
        seed: int | Sequence[int] | None = None,
        tokenizer: Any = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Continues every row of the prompt.

        Names, defaults and outputs are the reference's (`GenerationMixin.generate`, 5.23): any
        `GenerationConfig` field and model input may be given by name; a name nobody knows is an
        error. Returns a (rows, length) int64 tensor, or with `return_dict_in_generate=True` an
        output object. Without `seed` draws come from torch's global generator, as there; with
        it a row's tokens do not depend on its batch. `seed`: one integer, or one per row.
        `logprobs=k`, `prompt_logprobs=k`: how likely every chosen, every prompt token was, and the
        k best there, before any processor; part of the output object (`TokenLogprobs`).
        `custom_generate`: a decoding loop of the caller's, see `api/custom.py`.
        """
        refuse_absent("synced_gpus", synced_gpus)
        refuse_absent("assistant_model", assistant_model)
        user = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "streamer": streamer,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": require_loop(custom_generate),
            "seed": seed,
            "tokenizer": tokenizer,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }
        return generate(self, inputs, generation_config, user, dict(kwargs))
