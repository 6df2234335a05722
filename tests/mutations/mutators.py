"""Broken inputs made of whole ones: bytes that are changed anywhere, JSON whose values are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Mutator = Callable[[random.Random, bytes], bytes]

NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
VALUES: tuple[Any, ...] = (
    *(
        -1,
        0,
        1,
        2,
        3,
        255,
        2**31 - 1,
        2**31,
        2**63,
        2**64,
        10**40,
        10**399,
        1.5,
        -0.0,
        1e-300,
        1e300,
    ),
    *(
        float("nan"),
        float("inf"),
        True,
        False,
        None,
        "",
        "4",
        "abc",
        "\ud800",
        "²",
        "x" * 3000,
        "/etc",
    ),
    *([], {}, [[]], [[[[]]]], [1], [None], ["a"], [1.5], {"": ""}, {"a": [1]}, [{}], [[1], [2, 3]]),
)


def truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(rng: random.Random, data: bytes) -> bytes:
    """One to four bits are others."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[_place(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def renumbered(rng: random.Random, data: bytes) -> bytes:
    """A number of 1 to 8 bytes is a bad one, or nearly the size of the file."""
    width = rng.choice((1, 2, 4, 8))
    number = rng.choice((*NUMBERS, len(data), len(data) + 1)) % (1 << (8 * width))
    place = _place(rng, data)
    return data[:place] + number.to_bytes(width, "little") + data[place + width :]


def spliced(rng: random.Random, data: bytes) -> bytes:
    """What follows one place comes from another."""
    return data[: _place(rng, data)] + data[rng.randrange(len(data)) :]


def repeated(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted((_place(rng, data), _place(rng, data)))
    return data[:end] + data[start:end] * rng.randint(1, 3) + data[end:]


def swapped(rng: random.Random, data: bytes) -> bytes:
    a, b, c = sorted((_place(rng, data), _place(rng, data), rng.randrange(len(data))))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _place(rng: random.Random, data: bytes) -> int:
    """Mostly near the start, where headers are."""
    return min(rng.randrange(len(data)), rng.randrange(len(data)))


BYTES: tuple[Mutator, ...] = (
    truncated,
    flipped,
    flipped,
    renumbered,
    renumbered,
    spliced,
    repeated,
    swapped,
)


def revalued(rng: random.Random, data: bytes) -> bytes:
    """One to three values of a JSON document are others, are gone, or stand twice."""
    document = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        document = _changed(rng, document)
    return json.dumps(document).encode()


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        act = rng.random()
        if act < 0.1:
            del copy[key]
        elif act < 0.2 and isinstance(copy, dict):
            copy[rng.choice((f"{key}x", "", str(key).upper()))] = copy.pop(key)
        elif act < 0.2:
            copy.insert(key, copy[key])
        else:
            copy[key] = _changed(rng, copy[key])
        return copy
    return rng.choice(VALUES)


JSON: tuple[Mutator, ...] = (*(revalued,) * 6, truncated, flipped, spliced, repeated)
