"""What kind of cache a configuration asks for, read and checked.

Windows come from the model's configuration, settings from the names that a `cache_config` has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from everystep.cache.formats import Quantization
from everystep.config.kinds import is_integer
from everystep.errors import RequestError, UnsupportedError, shown


def layer_windows(config: Any) -> list[int | None]:
    """Return how far each layer of a configuration or list looks back; None for all the way."""
    if isinstance(config, list):
        wrong = [one for one in config if one is not None and not is_integer(one)]
        if wrong:
            wanted = "an integer per layer, or None"
            raise RequestError("a window is impossible", wanted=wanted, got=shown(wrong[0]))
        return config
    text = getattr(config, "get_text_config", None)
    if callable(text):
        config = text(decoder=True)
    names = "num_decoder_layers", "num_hidden_layers"
    count = next(filter(is_integer, (getattr(config, name, None) for name in names)), None)
    if count is None:
        raise RequestError(
            "a cache cannot tell how many layers there are",
            wanted="the configuration of a model, or a list with a window per layer",
            got=shown(config),
            do="Pass config=model.config",
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    others = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if others or (kinds is None and getattr(config, "attention_chunk_size", None) is not None):
        raise UnsupportedError(
            "a cache is for layers that see everything, or a window",
            wanted="full_attention and sliding_attention",
            got=", ".join(sorted(others)) or "attention_chunk_size",
            do="Call generate without a cache object of your own",
        )
    if getattr(config, "use_sliding_window", True) is False:
        return [None] * count
    if kinds is not None:
        return [window if "sliding" in kind else None for kind in kinds]
    first = getattr(config, "max_window_layers", 0) if hasattr(config, "use_sliding_window") else 0
    return [window if index >= first else None for index in range(count)]


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read how to quantise from the names of a `cache_config`; None stands for the default."""
    names = {"nbits": "bits", "q_group_size": "group", "residual_length": "residual"}
    axes = "keys per channel, values per position"
    fixed = {"backend": "'everystep', the library's own", "axis_key": axes, "axis_value": axes}
    given = {name: value for name, value in config.items() if value is not None}
    if isinstance(given.get("backend"), str) and given["backend"] == "everystep":
        del given["backend"]
    for name, value in given.items():
        if name not in names:
            raise RequestError(
                f"a quantised cache cannot have {name}",
                wanted=fixed.get(name, ", ".join(names)),
                got=shown(value),
                do=f"Leave {name} out",
            )
    return Quantization(**{names[name]: value for name, value in given.items()})


def refuse_quantized_windows(windows: Sequence[int | None]) -> None:
    """Refuse layers that have a window: what it drops need not be quantised."""
    if any(window is not None for window in windows):
        raise UnsupportedError(
            "a quantised cache is for models without sliding windows",
            got=f"windows {sorted({w for w in windows if w is not None})}",
            do="Use a DynamicCache",
        )


def layers_of(given: Any) -> list[tuple[Any, ...]]:
    """Return tuples of tensors, one per layer; raise RequestError for anything else."""
    if given is None:
        return []
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Tensor | Mapping)
    found = list(given) if listed else [given]
    if not all(isinstance(one, list | tuple) and len(one) >= 2 for one in found):
        raise RequestError(
            "a cache is made of other data",
            wanted="(keys, values) of every layer, in a list",
            got=shown(given),
            do="Leave it out for an empty cache",
        )
    return [tuple(one) for one in found]
