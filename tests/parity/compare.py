"""Whether two results of one draw are the same, field by field, in words.

Tokens and beam indices must be identical, numbers within TOLERANCE; shapes, types and whether a
field is there at all must agree. Hidden states and attentions are compared where a real token
stands: what a model computes at padding means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tests.parity.draws import Draw
from tests.parity.sides import Outcome

TOLERANCE = 1e-8
EXACT_FIELDS = ("sequences", "beam_indices")
STEP_FIELDS = ("scores", "logits")
LAYER_FIELDS = ("hidden_states", "attentions")
# Capabilities that wait for caches of the reference's kind.
LATER_FIELDS = ("past_key_values",)


@dataclass(frozen=True)
class Difference:
    """In words, and how far numbers are apart; infinitely far where anything else differs."""

    text: str
    gap: float = math.inf

    def __str__(self) -> str:
        return self.text


def differences(draw: Draw, expected: Outcome, found: Outcome) -> list[Difference]:
    """What differs, in words; nothing where both sides refused."""
    if expected.error is not None or found.error is not None:
        return _refusals(expected.error, found.error)
    if isinstance(expected.result, Tensor):
        return list(_exact("sequences", expected.result, found.result))
    names = type(expected.result).__name__, type(found.result).__name__
    if names[0] != names[1]:
        return [Difference(f"the result is a {names[1]} and not a {names[0]}")]
    return list(_fields(draw, expected.result, found.result))


def _refusals(expected: Exception | None, found: Exception | None) -> list[Difference]:
    if expected is not None and found is not None:
        return []
    if expected is not None:
        return [Difference(f"only the reference refused: {expected!r}")]
    return [Difference(f"only this library refused: {found!r}")]


def _fields(draw: Draw, expected: Any, found: Any) -> Iterator[Difference]:
    for name in (one.name for one in fields(expected) if one.name not in LATER_FIELDS):
        left, right = getattr(expected, name), getattr(found, name, None)
        if (left is None) != (right is None):
            yield Difference(f"{name} is {_kind(right)} and not {_kind(left)}")
        elif left is not None:
            yield from _field(draw, name, left, right)


def _field(draw: Draw, name: str, expected: Any, found: Any) -> Iterator[Difference]:
    if name in EXACT_FIELDS:
        yield from _exact(name, expected, found)
    elif name in STEP_FIELDS:
        yield from _steps(name, expected, found)
    elif name in LAYER_FIELDS:
        yield from _layers(draw, name, expected, found)
    elif isinstance(expected, Tensor):
        yield from _close(name, expected, found)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _exact(name: str, expected: Tensor, found: Tensor) -> Iterator[Difference]:
    if (problem := _form(name, expected, found)) is not None:
        yield Difference(problem)
    elif not torch.equal(expected, found):
        yield Difference(f"{name} is\n{found.tolist()} and not\n{expected.tolist()}")


def _form(name: str, expected: Any, found: Any) -> str | None:
    """What differs in type and shape."""
    if not isinstance(found, Tensor):
        return f"{name} is {_kind(found)} and not a tensor"
    left, right = (tuple(expected.shape), expected.dtype), (tuple(found.shape), found.dtype)
    return None if left == right else f"{name} is {right} and not {left}"


def _steps(name: str, expected: Any, found: Any) -> Iterator[Difference]:
    if len(expected) != len(found):
        yield Difference(f"{name} has {len(found)} steps and not {len(expected)}")
        return
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        yield from _close(f"{name}[{step}]", left, right)


def _close(
    name: str, expected: Tensor, found: Any, where: Tensor | None = None
) -> Iterator[Difference]:
    """Within TOLERANCE at the places of `where`, infinities and nan at the same ones."""
    if (problem := _form(name, expected, found)) is not None:
        yield Difference(problem)
        return
    near = torch.isclose(found, expected, rtol=0.0, atol=TOLERANCE, equal_nan=True)
    wrong = ~near if where is None else ~near & where
    if wrong.any():
        gap = (found - expected)[wrong].abs().max().item()
        first = tuple(wrong.nonzero()[0].tolist())
        yield Difference(
            f"{name} differs by {gap:.3g} in {int(wrong.sum())} places, first at {first}: "
            f"{found[first].item()!r} and not {expected[first].item()!r}",
            math.inf if math.isnan(gap) else gap,
        )


def _layers(draw: Draw, name: str, expected: Any, found: Any) -> Iterator[Difference]:
    """Tuples over steps of tuples over layers, of (rows, positions, ...) or with heads between."""
    if len(expected) != len(found):
        yield Difference(f"{name} has {len(found)} steps and not {len(expected)}")
        return
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        if len(left) != len(right):
            yield Difference(f"{name}[{step}] has {len(right)} layers and not {len(left)}")
            continue
        for layer, (one, other) in enumerate(zip(left, right, strict=True)):
            real = _real(draw, name, one, step)
            yield from _close(f"{name}[{step}][{layer}]", one, other, real)


def _real(draw: Draw, name: str, tensor: Tensor, step: int) -> Tensor:
    """Where a query (and for attentions its key) is a token of the row, in the tensor's shape."""
    axis = 1 if name == "hidden_states" else 2
    last = draw.shape.width + step
    mask = _mask(draw, tensor.shape[0], last)
    queries = mask[:, last - tensor.shape[axis] :]
    if name == "hidden_states":
        return queries[:, :, None].expand_as(tensor)
    keys = mask[:, last - tensor.shape[3] :]
    return (queries[:, None, :, None] & keys[:, None, None, :]).expand_as(tensor)


def _mask(draw: Draw, rows: int, length: int) -> Tensor:
    """(rows, length) of the left-padded rectangle, its generated part included."""
    mask = torch.ones(len(draw.prompts), length, dtype=torch.bool)
    for row, prompt in enumerate(draw.prompts):
        mask[row, : draw.shape.width - len(prompt)] = False
    return mask.repeat_interleave(rows // len(draw.prompts), dim=0)
