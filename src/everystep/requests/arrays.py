"""Ids, embeddings, masks, positions and named inputs as callers pass them, each checked by itself.

What comes out is of one kind: int64 arrays on the host, tensors with numbers in them, and masks in
which True is what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.adapters import Mix
from everystep.bridge.foreign import NOBODY
from everystep.config.installed import HOOKS, PROCESSORS
from everystep.config.kinds import is_number
from everystep.errors import RequestError, shown
from everystep.executors.positions import require_positions
from everystep.types import InputSpec
from everystep.types.hooks import Hook

_HIDES = -1e4  # an additive mask hides from here downwards, as half precision allows
_PIECE = 1 << 14  # numbers of a list that are read at once
_ROWS = "Pass a tensor, with rows padded to one length"


def as_numbers(name: str, given: object, wanted: str, do: str = _ROWS) -> Tensor:
    """Return the tensor, array or nested list as a tensor; RequestError where it holds no numbers,
    or not one beside the other."""
    try:
        found = _in_pieces(given) if isinstance(given, list) and len(given) > _PIECE else None
        found = torch.as_tensor(given) if found is None else found
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        got = type(given).__name__
        raise RequestError(f"{name} is not a tensor", wanted=wanted, got=got, do=do) from error
    if found.device.type == "meta":
        do = f"Pass {name} with its values, on the CPU or on the model's device"
        raise RequestError(f"{name} holds no numbers", wanted=wanted, got="a meta tensor", do=do)
    if found.layout != torch.strided or found.is_quantized:
        got = "a quantised tensor" if found.is_quantized else str(found.layout)
        do = f"Pass {name}.dequantize()" if found.is_quantized else f"Pass {name}.to_dense()"
        raise RequestError(f"{name} is not a plain tensor", wanted=wanted, got=got, do=do)
    return found.detach()


def _in_pieces(given: list[object]) -> Tensor | None:
    """Return a long list of whole numbers as a tensor; None where it holds something else.

    One piece at a time is read, for other threads cannot run meanwhile.
    """
    found = torch.empty(len(given), dtype=torch.int64)
    for start in range(0, len(given), _PIECE):
        piece = torch.as_tensor(given[start : start + _PIECE])
        if piece.dtype != torch.int64 or piece.dim() != 1:
            return None
        found[start : start + _PIECE] = piece
    return found


# --- ids and embeddings ---------------------------------------------------------------------------


def read_ids(given: object, name: str, *, empty: bool = False) -> np.ndarray:
    """Return (B, T) ids; `empty`: whether T may be 0."""
    do = "Pad the rows to one length, with an attention_mask, or use es.generate"
    ids = as_numbers(name, given, "a (batch, length) rectangle of ids", do)
    shape = tuple(ids.shape)
    if ids.dim() != 2 or 0 in shape[: 1 if empty else 2]:
        what, wanted = f"{name} has the wrong shape", "(batch, length), neither of them 0"
        do = "Add the missing dimension, for example with [None]"
        raise RequestError(what, wanted=wanted, got=shape, do=do)
    if not shape[1]:
        return np.empty(shape, dtype=np.int64)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        what = f"{name} has the wrong type"
        raise RequestError(what, wanted="integers", got=ids.dtype, do="Pass a tensor of ids")
    return np.ascontiguousarray(ids.cpu().numpy(), dtype=np.int64)


def require_known(ids: np.ndarray, vocabulary: int | None, name: str) -> None:
    """Refuse an id outside the vocabulary; without a vocabulary, an id below 0 alone."""
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and (vocabulary is None or high < vocabulary):
        return
    raise RequestError(
        f"{name} holds an id outside the vocabulary",
        wanted="0 or more" if vocabulary is None else f"0 to {vocabulary - 1}",
        got=low if low < 0 else high,
        do="Check that tokenizer and model belong together",
    )


def read_embeds(embeds: object, ids: np.ndarray | None, width: int) -> Tensor:
    """Return (B, T, E) embeddings for a model of that `width`, as many rows as there are of
    `ids`."""
    name = "inputs_embeds"
    if not isinstance(embeds, Tensor) or not embeds.is_floating_point() or embeds.dim() != 3:
        what = f"{name} has the wrong shape or type"
        wanted = "a (batch, length, hidden) floating point tensor"
        got = tuple(embeds.shape) if isinstance(embeds, Tensor) else type(embeds).__name__
        raise RequestError(what, wanted=wanted, got=got, do="Pass embeddings")
    shape = tuple(embeds.shape)
    if shape[2] != width:
        do = "Pass what model.get_input_embeddings() or an encoder made for this model gives"
        what = f"{name} has another width than the model"
        raise RequestError(what, wanted=f"{width} values per position", got=shape[2], do=do)
    if 0 in shape:
        wanted, do = "at least one row and one position", "Pass embeddings, or leave them out"
        raise RequestError(f"{name} is empty", wanted=wanted, got=shape, do=do)
    if ids is not None and shape[0] != len(ids):
        do = "Pass one of them, or ids and embeddings of the same rows"
        what = f"{name} and input_ids differ in rows"
        raise RequestError(what, wanted=f"{len(ids)} rows", got=shape[0], do=do)
    return as_numbers(name, embeds, f"(batch, length, {width}) values")


# --- masks ----------------------------------------------------------------------------------------


def read_mask(mask: object, shape: tuple[int, ...]) -> np.ndarray:
    """Return (B, L) bool, which positions are real, all without a mask; RequestError for another
    shape."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    array = as_numbers("attention_mask", mask, f"{shape}").cpu().float().numpy()
    if array.shape != shape:
        raise RequestError(
            "attention_mask has the wrong shape",
            wanted=f"{shape}, one entry per prompt position",
            got=array.shape,
            do="Pass the mask that the tokenizer returned with the ids",
        )
    if not np.isin(array, (0, 1)).all():
        raise RequestError(
            "attention_mask holds other values than 0 and 1",
            wanted="0 or 1",
            got=array[~np.isin(array, (0, 1))][0],
            do="Pass 1 for real positions, 0 for padding",
        )
    return array.astype(bool)


def span_of(row: np.ndarray, index: int, *, guessed: bool) -> tuple[int, int]:
    """Return [first, last) of the real positions of a row; `guessed` from pad ids, not from a
    mask."""
    real = np.flatnonzero(row)
    if len(real) == 0:
        raise RequestError(
            f"row {index} of the prompt is empty",
            wanted="one id that is not the pad id" if guessed else "one position with mask 1",
            got="none",
            do="Drop the row or give it a start token",
        )
    return int(real[0]), int(real[-1]) + 1


def has_holes(mask: Tensor) -> bool:
    """Return True where a row (..., L) has something hidden between what it shows."""
    seen = mask.bool()
    inside = seen.cumsum(-1).bool() & seen.flip(-1).cumsum(-1).flip(-1).bool()
    return bool((inside & ~seen).any())


def holed(real: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return of a row (L,) with holes, as transformers reads it, (L, L) what each position sees,
    and the positions (L,), which count real ones alone."""
    seen = torch.from_numpy(real)
    square = seen.expand(len(real), -1).tril() | torch.eye(len(real), dtype=torch.bool)
    return square, (seen.long().cumsum(0) - 1).where(seen, 0)


def read_square(mask: Tensor, batch: int, length: int) -> Tensor:
    """Return (B, 1 or H, L, L) bool, what each position sees, of such a mask: flags, 0 and 1, or
    what is added to scores, 0 or a number that hides."""
    shape, wanted = tuple(mask.shape), f"({batch}, 1 or heads, {length}, {length})"
    if mask.dim() != 4 or shape[0] not in (1, batch) or shape[2:] != (length, length):
        do = "Pass one entry per pair of prompt positions, or a (batch, length) mask"
        raise RequestError("attention_mask has the wrong shape", wanted=wanted, got=shape, do=do)
    mask = as_numbers("attention_mask", mask, wanted).cpu()
    flags = mask.dtype == torch.bool or bool((mask > 0).any())
    possible = (mask == 0) | ((mask == 1) if flags else (mask <= _HIDES))
    if not bool(possible.all()):
        raise RequestError(
            "a 4-D attention_mask holds numbers that neither show nor hide",
            wanted="0 and 1, or 0 and a large negative number",
            got=float(mask[~possible][0]),
            do="Pass what is seen as True",
        )
    seen = mask.bool() if flags else mask == 0
    # A position that sees nothing is padding, which no other position sees.
    seen = seen | (~seen.any(-1, keepdim=True) & torch.eye(length, dtype=torch.bool))
    for what, broken in (
        ("lets positions see what comes after them", bool(seen.triu(1).any())),
        ("hides positions from themselves", not bool(seen.diagonal(dim1=-2, dim2=-1).all())),
    ):
        if broken:
            do = "Set True on the diagonal, and False above it"
            raise RequestError(f"attention_mask {what}", wanted="a causal mask", do=do)
    return seen.expand(batch, -1, -1, -1)


# --- positions and named inputs -------------------------------------------------------------------


def read_positions(positions: object, rows: int, length: int) -> Tensor:
    """Return position ids of any rank, (..., B, L), (..., 1, L) or (L,), as (..., B or 1, L)."""
    do = "Pass one position per prompt position"
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dim() == 0:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise RequestError(
            "position_ids has the wrong type", wanted="a tensor of integers", got=got, do=do
        )
    positions = as_numbers("position_ids", positions, "integers")
    of_rows = positions.shape[-2] if positions.dim() > 1 else 1
    if positions.dim() > 3 or positions.shape[-1] != length or of_rows not in (1, rows):
        wanted = f"(..., {rows}, {length})"
        what = "position_ids has the wrong shape"
        raise RequestError(what, wanted=wanted, got=tuple(positions.shape), do=do)
    require_positions(positions)
    return positions.cpu()[None] if positions.dim() == 1 else positions.cpu()


def of_row(positions: Tensor, row: int) -> Tensor:
    """Return (..., L) of (..., B or 1, L)."""
    return positions[..., row if positions.shape[-2] > 1 else 0, :]


def read_named(spec: InputSpec, given: object, rows: int, length: int) -> Tensor:
    """Return what a model declares, (B, L, *shape) or, where it is not per token, (B, *shape)."""
    inner = (length, *spec.shape) if spec.per == "token" else spec.shape
    values = as_numbers(spec.name, given, f"{(rows, *inner)}")
    if tuple(values.shape) == inner and (spec.per != "token" or rows == 1):
        values = values.expand(rows, *inner)
    if tuple(values.shape) != (rows, *inner):
        raise RequestError(
            f"{spec.name} has the wrong shape",
            wanted=(rows, *inner),
            got=tuple(values.shape),
            do="Pass one entry per prompt position" if spec.per == "token" else "Pass one per row",
        )
    if not spec.takes(values.dtype):
        what = f"{spec.name} has the wrong type"
        raise RequestError(what, wanted=spec.dtype, got=values.dtype, do="Convert it first")
    return values


def require(name: str, value: object, *methods: str) -> Any:
    """Return the value, which is None or has the methods (`__call__` among them); RequestError if
    not."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if value is None or not missing:
        return value
    wanted = "a function" if methods == ("__call__",) else f"an object with {', '.join(methods)}"
    raise RequestError(
        f"{name} is of another kind",
        wanted=wanted,
        got=shown(value),
        do=f"Pass such an object as {name}, or leave it out",
    )


def read_processors(value: object) -> tuple[Callable[..., object], ...]:
    """Return the processors in a list, in the place of names those of installed packages; none
    without it. RequestError for anything else."""
    listed = () if value is None else value
    found = PROCESSORS.replaced(listed) if isinstance(listed, list | tuple) else None
    if found is not None and all(map(callable, found)):
        return tuple(one for one in found if callable(one))
    raise RequestError(
        "logits_processor is not a list of functions",
        wanted="a list of callables of (input_ids, scores), or of names of installed ones",
        got=shown(_stranger(found or listed, callable)),
        do="Pass logits_processor=[...] with an object that can be called",
    )


def read_text(name: str, value: object) -> str | None:
    """Return the value, which is None or a text; RequestError if not."""
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"{name} is of another kind", wanted="a text", got=shown(value))


def read_hooks(value: object) -> tuple[Hook, ...]:
    """Return the hooks in a list, in the place of names those of installed packages; none without
    it. RequestError for anything else."""
    listed = () if value is None else value
    found: Any = HOOKS.replaced(listed) if isinstance(listed, list | tuple) else None
    if found is not None and all(map(_is_hook, found)):
        return tuple(found)
    raise RequestError(
        "hooks is not a list of hooks",
        wanted="a list of objects of classes that derive from everystep.Hook, or of names of "
        "installed ones",
        got=shown(_stranger(found or listed, _is_hook)),
        do="Pass hooks=[MyHook()]",
    )


def _stranger(listed: object, belongs: Callable[[object], bool]) -> object:
    """Return the first that does not belong in a list; the value itself where it is none."""
    each = listed if isinstance(listed, list | tuple) else ()
    return next((one for one in each if not belongs(one)), listed)


def read_adapters(
    names: object, mixes: object, known: Sequence[str], fixed: Sequence[str] = ()
) -> Mix | list[Mix] | None:
    """Return the adapters of all rows, or of each; None where nothing was said.

    `names`, `mixes`: what was passed as `adapter_names` and as `adapters`, which are read alike: a
    name, several, weights by name, "__base__" or None, or a list with one of these for each row.
    `fixed`: what a wrapped module has, and no row can choose. RequestError for anything else, and
    for an adapter that the model does not have.
    """
    if names is not None and mixes is not None:
        what = "adapter_names and adapters both say which adapters a row has"
        raise RequestError(what, wanted="one of the two", got="both", do="Pass one of them")
    keyword, value = ("adapters", mixes) if names is None else ("adapter_names", names)
    _require_choice(keyword, value, fixed)
    if isinstance(value, list | tuple):
        return [_mix(keyword, one, known) for one in value]
    return None if value is None else _mix(keyword, value, known)


def _require_choice(keyword: str, value: object, fixed: Sequence[str]) -> None:
    """Refuse to ask for an adapter, or for none, where some are fixed; None leaves it to these."""
    asked = [*value] if isinstance(value, list | tuple) else [value]
    if fixed and (strangers := [one for one in asked if one is not None]):
        raise RequestError(
            f"{keyword} chooses adapters, and rows of this wrapped model cannot: those of its "
            "adapters that are active take part in every row",
            wanted=f"{keyword} left out",
            got=shown(strangers[0]),
            do=f"Call set_adapter on the module before the call; it has {', '.join(fixed)}. For "
            "rows of their own, load the folders into a model of this library, with "
            "everystep.load_model and model.load_adapter",
        )


def _mix(keyword: str, value: object, known: Sequence[str]) -> Mix:
    """Return what one row asks for."""
    if value is None or (isinstance(value, str) and value == NOBODY and NOBODY not in known):
        return ()
    given: object = value
    if isinstance(value, str):
        given = {value: 1.0}
    elif isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        given = dict.fromkeys(value, 1.0)
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and is_number(weight) and math.isfinite(weight)
        for name, weight in given.items()
    ):
        raise RequestError(
            f"{keyword} does not say which adapters a row has",
            wanted="a name, or names with weights, as {'formal': 0.7, 'terse': 0.3}",
            got=shown(value),
        )
    if strangers := [name for name in given if name not in known]:
        raise RequestError(
            f"{keyword} has one that the model does not have",
            wanted=", ".join(known) or "none",
            got=shown(strangers[0]),
            do="Load it with model.load_adapter first",
        )
    return tuple((name, float(weight)) for name, weight in given.items())


def _is_hook(value: object) -> bool:
    members = ("on_prompt", "before_step", "after_step")
    named = all(isinstance(getattr(value, name, None), tuple) for name in ("gives", "reads"))
    callables = all(callable(getattr(value, name, None)) for name in members)
    return named and callables and not isinstance(value, type)
