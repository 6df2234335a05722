"""Values as bytes and back: what a running generation knows, written without pickle.

Plain values, arrays and the classes that are registered here can be written, and nothing else can
be read: a file cannot name code. The bytes are a line of JSON, which describes the structure,
followed by the numbers of all arrays. Whether a value is of the kind that its reader wants is
judged by type annotations: those of the registered classes, and what a reader passes to `fits`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np

from everystep.errors import FormatError, RequestError, shown

C = TypeVar("C", bound=type)
_KINDS: dict[str, type] = {}
_NAMES: dict[type, str] = {}
_REMEMBERED: dict[str, Any] = {}
_WORDS = range(-(2**63), 2**64)  # what an array of 64 bits can hold
_DTYPES = ("int64", "int32", "uint64", "float64", "float32", "bool", "uint8")


class Chain(NamedTuple):
    """Values of which each was added after the earlier ones, the last one first; never changed, so
    that forks share it."""

    last: Any
    earlier: Chain | None

    def values(self) -> list[Any]:
        """Return all of them, the first one first."""
        found: list[Any] = []
        chain: Chain | None = self
        while chain is not None:
            found.append(chain.last)
            chain = chain.earlier
        return found[::-1]


def stored(name: str) -> Callable[[C], C]:
    """Write values of the decorated dataclass or named tuple under this name, by their fields."""

    def register(kind: C) -> C:
        _KINDS[name], _NAMES[kind] = kind, name
        return kind

    return register


def remembered(key: str, annotation: Any) -> str:
    """Return the key, under which the memos of sequences hold values of this kind."""
    _REMEMBERED[key] = annotation
    return key


def to_bytes(value: Any, instead: Callable[[Any], Any] = lambda value: None) -> bytes:
    """Return the value as bytes; raise RequestError for anything that cannot be written.

    `instead` returns what is written in place of a part that cannot be, or None.
    """
    arrays: list[np.ndarray] = []
    form = json.dumps(_form(value, arrays, instead), separators=(",", ":")).encode()
    parts = [len(form).to_bytes(8, "little"), form, *(array.tobytes() for array in arrays)]
    return b"".join(parts)


def from_bytes(data: bytes, again: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return the value that was written; raise FormatError if the bytes are anything else.

    `again` returns what stands for a value of a registered class, such as what it was written for.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise FormatError("these bytes hold no saved generation", got=f"{len(data)} bytes")
    try:
        return _value(json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :], again)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError("a saved generation is damaged", got=error) from error


def fits(value: Any, annotation: Any) -> bool:
    """Return whether the value, with all its parts, is what a type annotation says.

    A float may be a whole number, and an integer has 64 bits at most. `Annotated[Chain, kind]` is a
    chain of values of that kind.
    """
    kind, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is int:
        return type(value) is int and value in _WORDS
    if annotation is float:
        return type(value) is float or fits(value, int)
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is Annotated:
        return value is not None and fits(value, parts[0]) and _all_fit(value.values(), parts[1])
    if kind is tuple:
        if len(parts) == 2 and parts[1] is ...:
            return type(value) is tuple and _all_fit(value, parts[0])
        return type(value) is tuple and len(value) == len(parts) and all(map(fits, value, parts))
    if kind is list:
        return type(value) is list and _all_fit(value, parts[0])
    if kind in (dict, Mapping):
        return (
            type(value) is dict and _all_fit(value, parts[0]) and _all_fit(value.values(), parts[1])
        )
    if is_typeddict(annotation):
        hints = _hints(annotation)
        return (
            type(value) is dict
            and value.keys() == hints.keys()
            and all(fits(value[name], one) for name, one in hints.items())
        )
    return isinstance(value, annotation)


def fits_memo(value: Any) -> bool:
    """Return whether the value is what a sequence may remember; see `remembered`."""
    return fits(value, dict[str, Any]) and all(
        fits(one, _REMEMBERED.get(key, Any)) for key, one in value.items()
    )


def _all_fit(values: Iterable[Any], annotation: Any) -> bool:
    return all(fits(one, annotation) for one in values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the annotations of the fields of a class, those that are initialised."""
    found = get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        return {field.name: found[field.name] for field in dataclasses.fields(kind) if field.init}
    return found


def _form(value: Any, arrays: list[np.ndarray], instead: Callable[[Any], Any]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return {"float": float(value).hex()}
    if isinstance(value, np.ndarray):
        return _array_form(value, arrays)
    if isinstance(value, Chain):
        return {"chain": [_form(one, arrays, instead) for one in value.values()]}
    if type(value) in _NAMES:
        held = value
        if not isinstance(value, tuple):
            held = (getattr(value, f.name) for f in dataclasses.fields(value) if f.init)
        return {
            "kind": _NAMES[type(value)],
            "fields": [_form(one, arrays, instead) for one in held],
        }
    if type(value) in (list, tuple, frozenset):
        return {type(value).__name__: [_form(one, arrays, instead) for one in value]}
    if type(value) is dict:
        return {
            "dict": [
                [_form(k, arrays, instead), _form(v, arrays, instead)] for k, v in value.items()
            ]
        }
    if (other := instead(value)) is not None:
        return _form(other, arrays, instead)
    raise RequestError(
        f"a value of type {type(value).__name__} cannot be saved with a generation",
        wanted="plain values, arrays, or a class registered with everystep.types.stored",
        do="Leave out the processor, criterion or strategy that keeps it",
    )


def _array_form(array: np.ndarray, arrays: list[np.ndarray]) -> dict[str, Any]:
    if array.dtype.name not in _DTYPES:
        raise RequestError("an array of this type cannot be saved", got=array.dtype)
    start = sum(one.nbytes for one in arrays)
    arrays.append(np.ascontiguousarray(array))
    return {"array": [array.dtype.name, list(array.shape), start]}


def _value(form: Any, numbers: memoryview, again: Callable[[Any], Any]) -> Any:
    if not isinstance(form, dict):
        return form
    if "kind" in form:
        fields = [_value(one, numbers, again) for one in form["fields"]]
        return again(_registered(form["kind"], fields))
    ((name, held),) = form.items()
    if name == "float":
        return float.fromhex(held)
    if name == "array":
        return _array(held, numbers)
    if name == "dict":
        return {_value(k, numbers, again): _value(v, numbers, again) for k, v in held}
    values = [_value(one, numbers, again) for one in held]
    if name == "chain":
        chain: Chain | None = None
        for one in values:
            chain = Chain(one, chain)
        return chain
    return {"list": list, "tuple": tuple, "frozenset": frozenset}[name](values)


def _registered(name: str, fields: list[Any]) -> Any:
    kind = _KINDS[name]
    hints = _hints(kind)
    for (field, hint), value in zip(hints.items(), fields, strict=True):
        if not fits(value, hint):
            raise ValueError(f"{field} of a {name}: {shown(value)}")
    return kind(*fields)


def _array(held: list[Any], numbers: memoryview) -> np.ndarray:
    name, shape, start = held
    if name not in _DTYPES or not fits((start, shape), tuple[int, list[int]]):
        raise TypeError(f"an array of {shown(name)}, {shown(shape)}")
    if start < 0 or any(size < 0 for size in shape):
        raise ValueError(f"an array of {name}, {shape}")
    dtype, count = np.dtype(name), int(np.prod(shape, dtype=object)) if shape else 1
    if start + count * dtype.itemsize > len(numbers):
        raise ValueError("an array ends after the file")
    return np.frombuffer(numbers, dtype, count, start).reshape(shape).copy()
