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
    "decoder_attention_mask",
    "encoder_outputs",
    "past_key_values",
)
_BY_LOOKUP = "Set prompt_lookup_num_tokens, which drafts without a second model"
LATER = {
    "assistant_model": ("drafting with a second model", _BY_LOOKUP),
    "assistant_tokenizer": ("drafting with a second model", _BY_LOOKUP),
    "cache_params": ("a state of recurrent layers", "Pass the whole prompt as input_ids"),
    "pixel_values": ("images", "Pass their embeddings among inputs_embeds"),
    "pixel_values_videos": ("videos", "Pass their embeddings among inputs_embeds"),
    "input_features": ("sounds", "Pass their embeddings as inputs_embeds"),
    "mm_encoder_outputs": ("encoded images", "Pass their embeddings among inputs_embeds"),
    "synced_gpus": (
        "stepping together with other processes",
        "Let every process generate by itself: here none waits for another",
    ),
}
"""Names whose capability is not built yet -> what it is, and what to do instead."""
NEVER = {
    "token_type_ids": (
        "no model of this library reads segments",
        "Leave token_type_ids out, or call the tokenizer with return_token_type_ids=False",
    ),
    "trust_remote_code": (
        "no code of a repository is ever run",
        "Leave it out, and pass a function of your own as custom_generate",
    ),
    "logits_to_keep": (
        "logits are computed where they are needed and nowhere else",
        "Leave it out, or call the model itself for the logits of every position",
    ),
    "use_model_defaults": (
        "values that you do not set come from the checkpoint, then from the defaults",
        "Leave it out, and set what is to be different",
    ),
    "return_legacy_cache": (
        "a cache is returned as an object",
        "Leave it out, and convert the cache of the result",
    ),
}
"""Names that are known and have no place here -> why, and what to do."""
CONFIG_FIELDS = tuple(name for name in FIELDS if name not in META)


def split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(configuration, model inputs); any other name is an error that proposes the nearest one."""
    config: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in kwargs.items():
        if name in CONFIG_FIELDS:
            config[name] = value
        elif name in MODEL_INPUTS:
            inputs[name] = value
        elif name in LATER or name in NEVER:
            refuse_absent(name, value)
        else:
            unknown.append(name)
    if unknown:
        _refuse_unknown(unknown)
    return config, inputs


def refuse_unknown(kwargs: Iterable[str], known: Iterable[str]) -> None:
    """Raises for the names that are not known."""
    names = tuple(known)
    if unknown := [name for name in kwargs if name not in names]:
        _refuse_unknown(unknown, names)


def refuse_absent(name: str, value: object) -> None:
    """Raises if a capability that is not there is asked for by the argument of this name."""
    if value is None or value is False:
        return
    if name in NEVER:
        why, do = NEVER[name]
        what = f"{name} is not read: {why}"
    else:
        capability, do = LATER[name]
        what = f"{name} asks for {capability}, which this version does not have"
    raise UnsupportedError(message(what, got=type(value).__name__, do=do))


def callables(name: str, value: Any) -> tuple[Any, ...]:
    """The functions in a list argument, none without it; RequestError for anything else."""
    if value is None:
        return ()
    listed = isinstance(value, (list, tuple))
    if listed and all(callable(one) for one in value):
        return tuple(value)
    strangers = [one for one in value if not callable(one)] if listed else [value]
    raise RequestError(
        message(
            f"{name} is not a list of functions",
            wanted="a list of callables of (input_ids, scores)",
            got=repr(strangers[0]),
            do=f"Pass {name}=[...] with an object that can be called",
        )
    )


def require(name: str, value: Any, *methods: str) -> Any:
    """The value, which is None or has the methods (`__call__` among them); RequestError if not."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if value is None or not missing:
        return value
    wanted = "a function" if methods == ("__call__",) else f"an object with {', '.join(methods)}"
    raise RequestError(
        message(
            f"{name} is of another kind",
            wanted=wanted,
            got=repr(value),
            do=f"Pass such an object as {name}, or leave it out",
        )
    )


def _refuse_unknown(names: list[str], known: Iterable[str] = ()) -> None:
    candidates = tuple(known) or (*CONFIG_FIELDS, *MODEL_INPUTS, *EXTRA)
    guesses = [(name, nearest(name, candidates)) for name in names]
    hints = [f"{near} instead of {name}" for name, near in guesses if near]
    do = f"Perhaps you meant {', '.join(hints)}" if hints else "See help(model.generate)"
    listed = ", ".join(repr(name) for name in names)
    noun = "argument" if len(names) == 1 else "arguments"
    raise UnknownArgumentError(message(f"generate() knows no {noun} {listed}", do=do))


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
    "custom_generate",
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
