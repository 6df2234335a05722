"""The lines of a record: what each kind has, and how numbers and texts stand in it.

The first line is a `record`: the version of the format, the model and the tokenizer. Then, each
with the id of its run:

    run       a prompt with all that was decided about it before its first step
    spelling  texts of ids, for ids that were not spelled before
    step      what one step saw and chose
    tokens    ids that became final
    end       the reason for which a sequence ended
    edit      ids that somebody put after the prompt, in place of what stood there
    set       values that somebody set, which hold from the next choice on
    fork      a run that goes on from another one
    cut       something that was left out, because it was too long

A step has `rows`, one per choice, and `children`: [parent, index, ids, score, end]. A row has the
`ids` of its candidates, their `logits`, and for every stage the `values` that it left, null where
it ruled the candidate out. A run whose `every_stage` is false has one stage for all processors and
hooks together. Numbers of scores are exact: read as float32 they are the bits that were there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

VERSION = 1
MOST_LINE = 2**20
"""Bytes of a line at most."""
Line = Mapping[str, object]


_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
_INF = float("inf")


def exact(value: float) -> float | str | None:
    """Return a number that float32 reads as this one; None for -inf, a name for inf and nan."""
    if -_INF < value < _INF:
        return float("%.9g" % value)  # noqa: UP031 - a record makes some hundred in each step
    return None if value < 0 else "inf" if value > 0 else "nan"


def exact_all(values: list[float]) -> list[float | str | None]:
    """Return such numbers of all values."""
    return [float("%.9g" % one) if -_INF < one < _INF else exact(one) for one in values]  # noqa: UP031


def spelled(text: bytes) -> str | dict[str, str]:
    """Return the text, or its bytes in base64 where they are no UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(text).decode()}


def encoded(line: Line) -> bytes:
    """Return a line as bytes; one that is too long as a line that says so."""
    data = _ENCODE(line).encode()
    if len(data) >= MOST_LINE:
        kinds = {name: line[name] for name in ("run", "step") if name in line}
        cut = {"type": "cut", **kinds, "what": line.get("type"), "bytes": len(data)}
        data = _ENCODE(cut).encode()
    return data + b"\n"
