"""What the first process tells the others: works, adapters and short orders, as bytes.

A message is plain values and arrays, as saved generations are written, with tensors among them:
nothing in it can be code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.adapters import (
    Adapter,
    AdapterChange,
    AfterLayer,
    Delta,
    Dense,
    InputScaling,
    Magnitude,
    NormChange,
    OutputScaling,
)
from everystep.errors import InvariantError
from everystep.types import Extra, Given, Past, Verb, Work
from everystep.types.stored import from_bytes, stored, to_bytes

_CHANGES: Mapping[str, type[AdapterChange]] = {
    one.__name__: one for one in (AfterLayer, Delta, Dense, InputScaling, Magnitude, OutputScaling)
}
"""The changes of adapters that a process can have a part of."""


@stored("sent tensor")
class SentTensor(NamedTuple):
    """The type, the shape and the bytes of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


Message = dict[str, Any]


def to_message(values: Message) -> bytes:
    """Return a message as bytes."""
    return to_bytes(_sent(values))


def from_message(data: bytes) -> Message:
    """Return the message that was sent."""
    found: Message = _received(from_bytes(data))
    return found


def _sent(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        name = str(value.dtype).removeprefix("torch.")
        return SentTensor(name, tuple(value.shape), flat.numpy())
    if type(value) is dict:
        return {key: _sent(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return [_sent(one) for one in value]
    return value


def _received(value: Any) -> Any:
    if isinstance(value, SentTensor):
        dtype = getattr(torch, value.dtype)
        if not isinstance(dtype, torch.dtype):
            raise InvariantError("a message has a tensor of no type", got=value.dtype)
        return torch.from_numpy(value.data).view(dtype).reshape(value.shape)
    if type(value) is dict:
        return {key: _received(one) for key, one in value.items()}
    return [_received(one) for one in value] if type(value) is list else value


# --- works ----------------------------------------------------------------------------------------


def work_form(work: Work, number: Callable[[Adapter], int]) -> Message:
    """Return a work as plain values; `number`: of an adapter that the others know by it."""
    arrays = {name: getattr(work, name) for name in _ARRAYS}
    return {
        **arrays,
        "best": work.best,
        "totals": work.totals,
        "verbs": [list(one) for one in work.verbs],
        "pasts": {row: [past.length, list(past.layers)] for row, past in work.pasts.items()},
        "extras": {feed: _extra_form(extra, number) for feed, extra in work.extras.items()},
    }


_ARRAYS = ("rows", "starts", "counts", "logits", "tokens")


def work_of(form: Message, adapters: Mapping[int, Adapter]) -> Work:
    """Return the work that `work_form` wrote."""
    return Work(
        verbs=tuple(Verb(*one) for one in form["verbs"]),
        **{name: form[name] for name in _ARRAYS},
        extras={feed: _extra_of(one, adapters) for feed, one in form["extras"].items()},
        pasts={
            row: Past(length, tuple(map(tuple, layers)))
            for row, (length, layers) in form["pasts"].items()
        },
        best=form["best"],
        totals=form["totals"],
    )


def _extra_form(extra: Extra, number: Callable[[Adapter], int]) -> Message:
    return {
        "inputs": [list(one) for one in extra.inputs],
        "positions": extra.positions,
        "mask": extra.mask,
        "adapters": [list(one) for one in extra.adapters],
        "resolved": [number(one) for one in extra.resolved if isinstance(one, Adapter)],
        "wanted": [extra.hidden, extra.layers, extra.attentions],
        "early": list(extra.early),
    }


def _extra_of(form: Message, adapters: Mapping[int, Adapter]) -> Extra:
    hidden, layers, attentions = form["wanted"]
    return Extra(
        tuple(Given(*one) for one in form["inputs"]),
        form["positions"],
        form["mask"],
        tuple((name, weight) for name, weight in form["adapters"]),
        hidden=hidden,
        layers=layers,
        attentions=attentions,
        early=tuple(form["early"]),
        resolved=tuple(adapters[one] for one in form["resolved"]),
    )


# --- adapters -------------------------------------------------------------------------------------


def adapter_form(adapter: Adapter) -> Message:
    """Return an adapter as plain values and tensors."""
    return {
        "targets": {key: list(map(_change_form, all_)) for key, all_ in adapter.targets.items()},
        "norms": {key: [one.weight, one.bias] for key, one in adapter.norms.items()},
    }


def adapter_of(form: Message) -> Adapter:
    """Return the adapter that `adapter_form` wrote."""
    return Adapter(
        {key: tuple(map(_change_of, all_)) for key, all_ in form["targets"].items()},
        {key: NormChange(*one) for key, one in form["norms"].items()},
    )


def _change_form(change: AdapterChange) -> Message:
    own: Any = change
    held = {one.name: getattr(change, one.name) for one in fields(own)}
    inside = {
        name: _change_form(one) if isinstance(one, AdapterChange) else one
        for name, one in held.items()
    }
    return {"kind": type(change).__name__, **inside}


def _change_of(form: Message) -> AdapterChange:
    values = {
        name: _change_of(one) if isinstance(one, dict) else one
        for name, one in form.items()
        if name != "kind"
    }
    return _CHANGES[form["kind"]](**values)
