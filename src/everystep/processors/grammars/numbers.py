"""Numbers of a schema, which the library reads as 64-bit floats: what it would round is refused.

Also bounded is what a schema's multiples cost: an expression with a state per remainder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from everystep.errors import UnsupportedError

_EXACT = 2**53
"""Up to here every whole number is a float."""
_INT64 = 2**63
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_MOST_REMAINDERS = 50_000
"""How many remainders the multiples of a schema may have: a second of compiling."""


def check_numbers(place: str, schema: dict[str, Any]) -> None:
    """UnsupportedError, with both numbers, for a number that the library would change."""
    for name in ("const", "enum"):
        for value in _numbers(schema.get(name)):
            if abs(value) > _EXACT and _written(value) != value:
                raise _rounded(name, place, value)
    for name in _BOUNDS & schema.keys():
        value = schema[name]
        if not _is_followed(name, value, schema.get("type")):
            raise _rounded(name, place, value)


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a JSON value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield one


def _written(value: int | float) -> int | None:
    """Return what the library writes for a number beyond 2^53: all digits of what fits into 64
    bits, and else the shortest digits, filled up with zeros; None for what it cannot write."""
    if abs(value) > sys.float_info.max:
        return None
    near = float(value)
    if near == -_INT64:
        return None
    if near == _INT64:
        return _INT64 - 1
    return int(near) if abs(near) < _INT64 else int(Decimal(repr(near)))


def _is_followed(name: str, value: int | float, kind: Any) -> bool:
    """Return True where the library keeps to this bound exactly."""
    if abs(value) < _EXACT or (abs(value) == _EXACT and not name.startswith("exclusive")):
        return True
    outward = value > 0 if name == "maximum" else name == "minimum" and value < 0
    return kind == "integer" and outward and abs(value) < _INT64 and _written(value) == value


def _rounded(name: str, place: str, value: int | float) -> UnsupportedError:
    kept = _written(value)
    found = "no number" if kept is None else f"{kept} in its place"
    return UnsupportedError(
        f"schema has {value} as {name!r} at {place}, which the grammar library reads as another "
        "number, or not at all",
        wanted="a whole number up to 2^53, or one that it reads as it is",
        got=found if kept != value else "a bound that it may miss",
        do="Use a smaller number, a text with a pattern, or check the answer",
    )


def check_multiples(values: Iterable[int | float], meetings: int) -> None:
    """UnsupportedError for multiples that could keep the library busy for long.

    `meetings`: how many further schemas may hold of the same number, as those of 'allOf' do.
    """
    several = {Decimal(repr(value)).normalize() for value in values}
    least = min([0, *(int(one.as_tuple().exponent) for one in several)])
    scaled = sorted((int(one.scaleb(-least)) for one in several), reverse=True)
    apart = sum(int("".join(map(str, one.as_tuple().digits))) for one in several)
    together = math.prod(scaled[: meetings + 1]) if meetings else 0
    together = min(together, math.lcm(*scaled))
    worst = max(apart, together)
    if worst > _MOST_REMAINDERS:
        raise UnsupportedError(
            "schema has too many, or too large, numbers in 'multipleOf'",
            wanted=f"at most {_MOST_REMAINDERS} remainders of all of them, of the least common "
            "multiple where several may hold of one number",
            got=worst,
            do="Use smaller numbers, or check the answer",
        )
