"""Which keyword of a call is what: configuration, model input, or a name that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from everystep.config import FIELDS, META
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError, message, nearest

MODEL_INPUTS = (
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "decoder_input_ids",
    "token_type_ids",
)
LATER = {
    "past_key_values": "continuing from a cache",
    "assistant_model": "drafting with a second model",
    "assistant_tokenizer": "drafting with a second model",
    "encoder_outputs": "encoder states made by the caller",
    "decoder_attention_mask": "padded decoder prompts",
    "pixel_values": "images",
    "custom_generate": "decoding loops of the caller",
    "logits_to_keep": "choosing which logits to keep",
}
CONFIG_FIELDS = tuple(name for name in FIELDS if name not in META)


def split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(configuration, model inputs); any other name is an error that proposes the nearest one."""
    config: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in CONFIG_FIELDS:
            config[name] = value
        elif name in MODEL_INPUTS:
            inputs[name] = value
        elif name in LATER:
            _refuse_later(name, value)
        else:
            _refuse_unknown(name)
    return config, inputs


def refuse_unknown(kwargs: Iterable[str], known: Iterable[str]) -> None:
    """Raises for the first name that is not known."""
    names = tuple(known)
    for name in kwargs:
        if name not in names:
            _refuse_unknown(name, names)


def _refuse_later(name: str, value: object) -> None:
    if value is not None:
        raise UnsupportedError(
            message(
                f"{name} asks for {LATER[name]}, which this version does not have",
                got=type(value).__name__,
                do=f"Leave {name} out",
            )
        )


def _refuse_unknown(name: str, known: Iterable[str] = ()) -> None:
    candidates = tuple(known) or (*CONFIG_FIELDS, *MODEL_INPUTS, *EXTRA)
    near = nearest(name, candidates)
    hint = f"Did you mean {near}?" if near else "See help(model.generate) for what there is"
    raise UnknownArgumentError(
        message(f"generate() knows no argument {name!r}", do=hint.rstrip("."))
    )


EXTRA = (
    "seed",
    "tokenizer",
    "logprobs",
    "prompt_logprobs",
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "prefix_allowed_tokens_fn",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)


def require_one(name: str, inputs: object, kwargs: dict[str, Any]) -> None:
    """`inputs` given by position is the same as by name; both at once are an error."""
    if inputs is None:
        return
    if kwargs.get(name) is not None:
        raise RequestError(
            message(
                f"the prompt was given twice: as the first argument and as {name}",
                do=f"Pass it once, as {name}",
            )
        )
    kwargs[name] = inputs
