"""What a value may be: a test, the words that say what would pass it, and the form it is kept in.

Fields of configurations, of watermarks and of processors are all of a kind; a kind knows no field.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from everystep.errors import RequestError, shown
from everystep.files.strict_json import whole_number

_LARGEST_OF_32_BITS = (2 - 2**-23) * 2.0**127


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Kind:
    """`accepts` says whether a plain value passes; `stored` makes the form in which it is kept;
    `type` is what type checkers know of it, as source."""

    wanted: str
    accepts: Callable[[Any], bool]
    stored: Callable[[Any], Any] = _same
    type: str = "Any"

    def checked(self, value: Any, name: str, do: str | None = None) -> Any:
        """Return the value as it is kept.

        Raise RequestError, which calls it `name`, if it does not pass.
        """
        if not self.accepts(value):
            require(False, name, self.wanted, value, do)
        return value if self.stored is _same else self.stored(value)


def require(holds: bool, name: str, wanted: str, got: object, do: str | None = None) -> None:
    """Raise RequestError unless it holds."""
    if not holds:
        do = do or f"Give {name} such a value"
        raise RequestError(f"{name} is not valid", wanted=wanted, got=shown(got), do=do)


def plain(value: Any) -> Any:
    """Return tensors, arrays and their scalars as Python numbers and lists, and anything else
    unchanged, also a tensor that has no numbers to give."""
    try:
        return value.tolist()
    except Exception:
        return value


def is_integer(value: Any) -> bool:
    """Return whether a value is a whole number of 64 bits, and not a flag."""
    if isinstance(value, bool):
        return False
    return isinstance(value, Integral) and -(1 << 63) <= int(value) < 1 << 63


def is_number(value: Any) -> bool:
    """Return whether a value is a real number within the range of floats, not a flag or nan."""
    if isinstance(value, bool):
        return False
    return isinstance(value, Real) and value == value and _in_range(value)


def _in_range(value: Any) -> bool:
    """Return whether a float can be made of a value."""
    return abs(value) <= sys.float_info.max or abs(value) == math.inf


def is_list(value: Any, of: Callable[[Any], bool], least: int = 0) -> bool:
    """Return whether a value is a list or tuple of at least `least` values that all pass `of`."""
    return isinstance(value, list | tuple) and len(value) >= least and all(map(of, value))


def _is_id(value: Any) -> bool:
    return is_integer(value) and value >= 0


def _is_word(value: Any) -> bool:
    return is_list(value, _is_id, least=1)


def _ids(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple | range | set) else (value,)


def _as_lists(value: Any) -> Any:
    """Return tuples as lists, all the way down, as they come back from a file."""
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def integer(least: int | None = None) -> Kind:
    """Return the kind of whole numbers, from `least` on."""
    if least is None:
        return Kind("an integer", is_integer, type="int")
    wanted = f"an integer of at least {least}"
    return Kind(wanted, lambda v: is_integer(v) and v >= least, type="int")


def number(wanted: str, passes: Callable[[float], bool]) -> Kind:
    """Return the kind of real numbers that pass a test."""
    return Kind(wanted, lambda value: is_number(value) and passes(value), _within_64_bits, "float")


def _within_64_bits(value: Any) -> Any:
    """Return the number, whole ones beyond 64 bits, which torch does not take, as floats."""
    return value if not isinstance(value, Integral) or is_integer(value) else float(value)


def list_of(
    wanted: str, passes: Callable[[Any], bool], least: int = 0, type: str = "Sequence[Any]"
) -> Kind:
    """Return the kind of lists of at least `least` values, all of which pass a test."""
    return Kind(wanted, lambda value: is_list(value, passes, least), _as_lists, type)


def one_of(*names: Any) -> Kind:
    """Return the kind of a few values; True is not taken for 1."""
    wanted = "one of " + ", ".join(repr(name) for name in names)
    texts = ", ".join(f'"{name}"' for name in names if isinstance(name, str))
    kinds = ["bool"] * any(isinstance(name, bool) for name in names)
    return Kind(
        wanted,
        lambda v: any(type(v) is type(name) and v == name for name in names),
        type=" | ".join([*kinds, *([f"Literal[{texts}]"] if texts else [])]),
    )


def up_to(most: int) -> Kind:
    """Return the kind of whole numbers from 1 to `most`."""
    wanted = f"an integer from 1 to {most}"
    return Kind(wanted, lambda v: is_integer(v) and 1 <= v <= most, type="int")


MOST_ROWS = 1 << 16
"""Rows of one prompt, and results of one, at most."""
MOST_POSITIONS = (1 << 31) - 1
"""Positions of a row at most."""
COUNT = integer(0)
SIZE = integer(1)
ROWS = up_to(MOST_ROWS)
POSITIONS = up_to(MOST_POSITIONS)
FLAG = Kind("True or False", lambda value: isinstance(value, bool), type="bool")
NUMBER = number("a number", lambda _: True)
POSITIVE = number("a number above 0", lambda value: value > 0)
NOT_NEGATIVE = number("a number of at least 0", lambda value: value >= 0)
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
FRACTION_ABOVE_0 = number("a number above 0, at most 1", lambda value: 0 < value <= 1)
FRACTION_BELOW_1 = number("a number from 0 to below 1", lambda value: 0 <= value < 1)
BETWEEN_0_AND_1 = number("a number between 0 and 1, both excluded", lambda value: 0 < value < 1)
PENALTY = number("a number from -2 to 2", lambda value: -2 <= value <= 2)
AT_LEAST_1 = number("a number of at least 1", lambda value: 1 <= value < math.inf)
NAMED = Kind(
    "a mapping of names to values",
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
    type="Mapping[str, Any]",
)
TEXT = Kind("a string", lambda value: isinstance(value, str), type="str")
TEXTS = Kind(
    "a string or a list of strings, none of them empty",
    lambda v: v != "" and is_list([v] if isinstance(v, str) else v, _is_text, least=1),
    _as_lists,
    "str | Sequence[str]",
)
TOKENS = Kind(
    "a token id or a list of token ids",
    lambda value: is_integer(value) or is_list(value, is_integer),
    _as_lists,
    "int | Sequence[int]",
)
IDS = list_of("a list of token ids", _is_id, type="Sequence[int]")
ONE_OR_MORE_IDS = Kind(
    "a token id or a list of token ids, from 0 on", lambda v: all(map(_is_id, _ids(v))), _ids
)
WORDS = list_of(
    "a non-empty list of non-empty lists of token ids", _is_word, 1, "Sequence[Sequence[int]]"
)
FORCED_WORDS = list_of(
    "a list of words (lists of token ids) or of lists of alternative words",
    lambda value: _is_word(value) or is_list(value, _is_word, least=1),
    1,
    "Sequence[Sequence[int] | Sequence[Sequence[int]]]",
)
LAYERS = Kind(
    "'low', 'high' or a list of layer indices",
    lambda value: value in ("low", "high") or is_list(value, is_integer, least=1),
    _as_lists,
    'Literal["low", "high"] | Sequence[int]',
)
DECAY = Kind(
    "a pair (start, factor) of an integer of at least 0 and a number above 0",
    lambda v: is_list(v, is_number) and len(v) == 2 and _is_id(v[0]) and v[1] > 0,
    tuple,
    "tuple[int, float]",
)
MAPPING = Kind(
    "a dict with strings as keys",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    dict,
    "Mapping[str, Any]",
)
OBJECTS = Kind("a list", lambda value: isinstance(value, list | tuple), list, "Sequence[Any]")
SAMPLERS = (
    *("temperature", "top_n_sigma", "top_h", "top_k", "top_p", "min_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "xtc", "mirostat"),
)
SAMPLER_ORDER = Kind(
    "a list of different names among " + ", ".join(SAMPLERS),
    lambda v: is_list(v, lambda name: name in SAMPLERS, least=1) and len({*v}) == len(v),
    list,
    "Sequence[str]",
)
BREAKERS = list_of(
    "a list of non-empty strings and token ids",
    lambda value: _is_text(value) or _is_id(value),
    type="Sequence[str | int]",
)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """Return the (ids, bias) pairs of a bias table in any of its spellings; none if it is no table.

    A file holds a list of pairs, or, written by transformers, a dict whose keys are the text of
    tuples: "(1, 2)".
    """
    if isinstance(value, Mapping):
        return [(_ids_of_key(key), bias) for key, bias in value.items()]
    if is_list(value, lambda pair: isinstance(pair, list | tuple) and len(pair) == 2):
        return [(tuple(plain(ids)) if _is_word(plain(ids)) else (), bias) for ids, bias in value]
    return []


def _is_bias(value: Any) -> bool:
    """Return whether scores of 32 bits can be raised by a value; infinity is among them."""
    return is_number(value) and (abs(value) <= _LARGEST_OF_32_BITS or abs(value) == math.inf)


def _ids_of_key(key: Any) -> tuple[int, ...]:
    if isinstance(key, str):
        parts = [part.strip() for part in key.strip("()").split(",") if part.strip()]
        ids = [whole_number(part) for part in parts]
        return tuple(one for one in ids if one is not None) if None not in ids else ()
    return key if isinstance(key, tuple) else ()


BIASES = Kind(
    "a non-empty dict {(id, id, ...): bias} or list [[[id, id, ...], bias], ...]",
    lambda value: (
        bool(pairs := _pairs(value))
        and all(_is_word(ids) and _is_bias(bias) for ids, bias in pairs)
    ),
    lambda value: {tuple(int(token) for token in ids): float(bias) for ids, bias in _pairs(value)},
    "Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]]",
)


def _biased(value: Any) -> dict[int, float] | None:
    """Return a table of biases by id, whose keys a file holds as text; None for anything else."""
    if not isinstance(value, Mapping) or not value:
        return None
    keys: list[Any] = [whole_number(key) if isinstance(key, str) else key for key in value]
    if not all(map(_is_id, keys)) or len({*keys}) < len(keys):
        return None
    if not all(_is_bias(bias) and abs(bias) < math.inf for bias in value.values()):
        return None
    return {int(k): float(bias) for k, bias in zip(keys, value.values(), strict=True)}


LOGIT_BIAS = Kind(
    "a non-empty dict {token id: finite number}",
    lambda value: _biased(value) is not None,
    _biased,
    "Mapping[int, float]",
)
