"""The model as a function, for decoding loops that callers write: ids in, logits and a cache out.

The cache is the object that was passed, which has grown when the call is over, or a new one. All
that does not fit is refused before any compute. Generation does not come through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everystep.api.call import Host
from everystep.api.past import is_recurrent, require_cache, require_room
from everystep.cache.containers import Cache, DynamicCache
from everystep.config.kinds import is_integer
from everystep.errors import RequestError, UnsupportedError, message


@dataclass(frozen=True, eq=False)
class CausalLMOutput:
    """`logits`: (B, T, V). `past_key_values`: the cache with these positions, or None.

    Fields are attributes, and keys and indices too, without those that are None.
    """

    logits: Tensor
    past_key_values: Cache | None = None

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return dict(self._held())[key]
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._held()))

    def __len__(self) -> int:
        return len(self._held())

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None, in order."""
        return tuple(value for _, value in self._held())

    def _held(self) -> list[tuple[str, Any]]:
        held = [("logits", self.logits), ("past_key_values", self.past_key_values)]
        return [(name, value) for name, value in held if value is not None]


def kept_positions(wanted: object, inputs: Tensor | None) -> slice | Tensor:
    """Of which positions of the inputs (B, T, ...) logits are given: the last `wanted` of them, all
    for 0, or those that a tensor (n,) names; RequestError for anything else."""
    length = inputs.shape[1] if inputs is not None and inputs.dim() > 1 else 0
    if is_integer(wanted) and wanted >= 0:  # type: ignore[operator]
        return slice(-wanted, None)  # type: ignore[operator]
    if isinstance(wanted, Tensor) and _are_places(wanted, length):
        return wanted
    raise RequestError(
        message(
            "logits_to_keep names no positions of the inputs",
            wanted=f"an integer of at least 0, or a 1-D tensor of integers below {length}",
            got=repr(wanted),
            do="Leave it out for the logits of every position",
        )
    )


def _are_places(wanted: Tensor, length: int) -> bool:
    inside = (wanted >= -length) & (wanted < length)
    return wanted.dim() == 1 and wanted.dtype in (torch.int64, torch.int32) and bool(inside.all())


def cache_of_forward(
    model: Host, inputs: Tensor | None, passed: object, use_cache: bool | None
) -> Cache | None:
    """The cache that a forward of `inputs` (B, T, ...) adds to; None if it keeps nothing.

    As in the reference a passed one is filled whatever `use_cache` says, and without it the
    model's configuration decides.
    """
    recurrent = is_recurrent(model)
    if passed is None and use_cache is None:
        holds = not (model.is_encoder_decoder or recurrent)
        use_cache = bool(getattr(model.config, "use_cache", True)) and holds
    if passed is None and not use_cache:
        return None
    if model.is_encoder_decoder:
        raise UnsupportedError(
            message(
                "a model with an encoder keeps no cache when it is called",
                got="use_cache=True" if passed is None else "past_key_values",
                do="Leave it out and pass all decoder_input_ids, or call generate",
            )
        )
    if passed is None and recurrent:
        raise UnsupportedError(
            message(
                "a model with recurrent layers keeps no cache object",
                got="use_cache=True",
                do="Leave it out and pass all input_ids each time, or call generate",
            )
        )
    if passed is None:
        return DynamicCache(config=list(model.windows))
    cache = require_cache(passed, model)
    if inputs is not None and inputs.dim() > 1:
        _require_fit(cache, *inputs.shape[:2])
    return cache


def _require_fit(cache: Cache, batch: int, length: int) -> None:
    if cache.batch_size not in (-1, batch):
        raise RequestError(
            message(
                "past_key_values differs from the inputs in rows",
                wanted=batch,
                got=cache.batch_size,
                do="Choose rows with batch_select_indices",
            )
        )
    if "grow" not in cache.abilities:
        require_room(cache, int(cache.get_seq_length()) + length)
