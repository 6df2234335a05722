"""Methods that decoding loops written for transformers call on the model they are given.

Names and meanings are those of `GenerationMixin` in transformers 5.23, also where they begin with
an underscore. The engine calls none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_PER_POSITION = ("position_ids", "token_type_ids")


class LoopMethods:
    """Methods of a model for a loop that is passed as `custom_generate`."""

    module: Any
    core: Any
    is_encoder_decoder: bool

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of the next forward: of (R, T) ids the last ones, and what goes with
        them.

        Without `next_sequence_length` they are those that the cache does not hold. A wrapped model
        is asked itself.
        """
        if self.module is not None:
            found: dict[str, Any] = self.module.prepare_inputs_for_generation(
                input_ids,
                next_sequence_length=next_sequence_length,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                is_first_iteration=is_first_iteration,
                **kwargs,
            )
            return found
        count, encodes = next_sequence_length, self.is_encoder_decoder
        if count is None and past_key_values is not None:
            whole = input_ids if encodes else attention_mask
            count = None if whole is None else whole.shape[1] - past_key_values.get_seq_length()
        embedded = inputs_embeds is not None and is_first_iteration and not encodes
        read = inputs_embeds if embedded and inputs_embeds is not None else input_ids
        read = read if count is None else read[:, -count:]
        name = "decoder_input_ids" if encodes else "inputs_embeds" if embedded else "input_ids"
        found = {name: read.clone()}
        if attention_mask is not None:
            found["attention_mask"] = attention_mask
            counts = self.core.has_positions and kwargs.get("position_ids") is None
            if counts and not attention_mask.all():
                kwargs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        for name in _PER_POSITION:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., -read.shape[1] :]
        if past_key_values is not None:
            found["past_key_values"] = past_key_values
        dropped = ("labels", "next_sequence_length")
        return found | {name: value for name, value in kwargs.items() if name not in dropped}

    def _update_model_kwargs_for_generation(
        self,
        outputs: Any,
        model_kwargs: dict[str, Any],
        is_encoder_decoder: bool = False,
        num_new_tokens: int = 1,
    ) -> dict[str, Any]:
        """Return the keywords of a loop after a forward, as long as the ids with the new tokens."""
        if self.module is not None:
            found: dict[str, Any] = self.module._update_model_kwargs_for_generation(
                outputs, model_kwargs, is_encoder_decoder, num_new_tokens
            )
            return found
        if (cache := getattr(outputs, "past_key_values", None)) is not None:
            model_kwargs["past_key_values"] = cache
        name = "decoder_attention_mask" if is_encoder_decoder else "attention_mask"
        if (mask := model_kwargs.get(name)) is not None:
            more = mask.new_ones(len(mask), num_new_tokens)
            model_kwargs[name] = torch.cat([mask, more], dim=-1)
        if (types := model_kwargs.get("token_type_ids")) is not None:
            model_kwargs["token_type_ids"] = torch.cat([types, types[:, -num_new_tokens:]], dim=-1)
        if (places := model_kwargs.get("position_ids")) is not None:
            steps = torch.arange(1, num_new_tokens + 1, device=places.device)
            model_kwargs["position_ids"] = torch.cat([places, places[..., -1:] + steps], dim=-1)
        return model_kwargs

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> Any:
        """Return what the forward of the prompt says, without what the cache holds already."""
        given = self.prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **model_kwargs
        )
        return self(**given, return_dict=True)  # type: ignore[operator]

    def _has_unfinished_sequences(
        self, this_peer_finished: bool, synced_gpus: bool, device: torch.device
    ) -> bool:
        """Return True until all rows are finished: no other process is waited for."""
        return not this_peer_finished

    def _valid_auto_compile_criteria(self, model_kwargs: Any, generation_config: Any) -> bool:
        """Return False: forwards are not compiled."""
        return False

    @contextmanager
    def _optimize_model_for_decode(self) -> Iterator[None]:
        """Change nothing: one executor serves prompts and steps."""
        yield
