"""What a call takes of memory for certain, compared with what is left before it computes."""

from __future__ import annotations

import math

import torch

from everystep.memory import require_memory
from everystep.nn.network import Full, State, Store, Window
from everystep.requests.inputs import Inputs
from everystep.requests.subject import Subject

# Every row gets room for so many positions of its own at once.
_AHEAD = 16
# A row's ids, numbers and objects, in bytes.
_BOOKS = 2048


def require_rows_fit(
    model: Subject, inputs: Inputs, width: int, *, together: bool, coded: bool
) -> None:
    """CapacityError where the prompts, `width` rows each, cannot be held: all of them `together`,
    or one at a time.

    `coded`: rows keep codes, of half a byte perhaps.
    """
    prompts, length = inputs.batch if together else 1, inputs.width
    size = 0.5 if coded else getattr(torch, model.cache_dtype).itemsize
    shared, own = _of_row(model, length), _of_row(model, _AHEAD)
    needed = math.ceil(prompts * (size * (shared + width * own) + width * _BOOKS))
    rows = prompts * width
    counted = f"{rows} row{'s' * (rows > 1)} after {length} position{'s' * (length > 1)}"
    what = f"a call of {counted}"
    do = "Ask for fewer rows (num_beams, num_return_sequences, the batch) or shorten the prompts"
    require_memory(needed, what, do, model.device)


def row_bytes(model: Subject, length: int) -> int:
    """Bytes of what a row of so many positions keeps in full precision."""
    return int(getattr(torch, model.cache_dtype).itemsize * _of_row(model, length))


def _of_row(model: Subject, length: int) -> int:
    """How many numbers a row of so many positions keeps."""
    return sum(_numbers(one, length) for layer in model.core.network.stores for one in layer)


def _numbers(store: Store, length: int) -> int:
    """How many numbers a store keeps of so many positions."""
    if isinstance(store, State):
        return sum(map(math.prod, store.shapes))
    if isinstance(store, Full | Window):
        seen = min(length, store.size) if isinstance(store, Window) else length
        return store.heads * (store.key_dim + store.value_dim) * seen
    return 0
