"""Whether two results of one draw are the same, field by field, in words.

Tokens and beam indices must be identical, numbers within TOLERANCE; shapes, types and whether a
field is there at all must agree. Hidden states, attentions and caches are compared where a real
token stands: what a model computes at padding means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tests.parity.draws import Draw
from tests.parity.sides import Outcome, rectangle

TOLERANCE = 1e-8
EXACT_FIELDS = ("sequences", "beam_indices")
STEP_FIELDS = ("scores", "logits")
LAYER_FIELDS = ("hidden_states", "attentions")
# Of models with an encoder; the decoder of one knows no padding.
ENCODER_FIELDS = ("encoder_hidden_states", "encoder_attentions")
DECODER_FIELDS = ("decoder_hidden_states", "decoder_attentions", "cross_attentions")


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
        return [Difference(f"only transformers refused: {expected!r}")]
    return [Difference(f"only this library refused: {found!r}")]


def _fields(draw: Draw, expected: Any, found: Any) -> Iterator[Difference]:
    for name in (one.name for one in fields(expected)):
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
        expected = _roomless(draw, name, expected, found)
        yield from _layers(name, expected, found, lambda one, step: _real(draw, name, one, step))
    elif name in DECODER_FIELDS:
        expected = _roomless(draw, name, expected, found)
        yield from _layers(name, expected, found, lambda one, step: None)
    elif name in ENCODER_FIELDS:
        yield from _layers(name, (expected,), (found,), lambda one, step: _read(draw, name, one))
    elif name == "past_key_values":
        yield from _caches(draw, expected, found)
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


def _layers(
    name: str, expected: Any, found: Any, real: Callable[[Tensor, int], Tensor | None]
) -> Iterator[Difference]:
    """Tuples over steps of tuples over layers; `real`: where such a tensor is compared."""
    if len(expected) != len(found):
        yield Difference(f"{name} has {len(found)} steps and not {len(expected)}")
        return
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        if len(left) != len(right):
            yield Difference(f"{name}[{step}] has {len(right)} layers and not {len(left)}")
            continue
        for layer, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _close(f"{name}[{step}][{layer}]", one, other, real(one, step))


def _roomless(draw: Draw, name: str, expected: Any, found: Any) -> Any:
    """Attentions without what transformers has for the free room of a static cache. It is 0 where
    a token asks: without it those weights still sum to 1, as this library's do."""
    fixed = draw.settings.get("cache_implementation") == "static" or (
        draw.earlier is not None and draw.earlier.kind == "static"
    )
    if not fixed or not name.endswith("attentions"):
        return expected
    return tuple(
        tuple(one[..., : other.shape[-1]] for one, other in zip(left, right, strict=False))
        for left, right in zip(expected, found, strict=False)
    )


def _real(draw: Draw, name: str, tensor: Tensor, step: int) -> Tensor:
    """Where a query (and for attentions its key) is a token of the row, in the tensor's shape."""
    axis = 1 if name == "hidden_states" else 2
    last = draw.span + step
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
        mask[row, : draw.span - len(prompt)] = False
    return mask.repeat_interleave(rows // len(draw.prompts), dim=0)


def _read(draw: Draw, name: str, tensor: Tensor) -> Tensor:
    """Where an encoder's query (and for attentions its key) is a token of the prompt."""
    real = rectangle(draw, draw.padding)[1].bool()
    real = real.repeat_interleave(len(tensor) // len(real), dim=0)
    if name == "encoder_hidden_states":
        return real[:, :, None].expand_as(tensor)
    return (real[:, None, :, None] & real[:, None, None, :]).expand_as(tensor)


def _caches(draw: Draw, expected: Any, found: Any) -> Iterator[Difference]:
    kinds = [f"{type(one).__name__} of {int(one.get_seq_length())}" for one in (expected, found)]
    length = int(expected.get_seq_length())
    if kinds[0] != kinds[1]:
        yield Difference(f"the cache is a {kinds[1]} and not a {kinds[0]}")
    elif draw.shape.encodes:
        real = torch.ones(len(draw.prompts), length, dtype=torch.bool)
        own = expected.self_attention_cache, found.self_attention_cache
        yield from _kept("self", *own, real)
        read = rectangle(draw, draw.padding)[1].bool()
        across = expected.cross_attention_cache, found.cross_attention_cache
        yield from _kept("cross", *across, read)
    else:
        yield from _kept("past", expected, found, _mask(draw, len(draw.prompts), length))


def _kept(name: str, expected: Any, found: Any, tokens: Tensor) -> Iterator[Difference]:
    """Keys and values, (R, K, S, D); `tokens`: (B, T) which of T >= S positions are tokens."""
    if len(expected.layers) != len(found.layers):
        yield Difference(f"{name} has {len(found.layers)} layers and not {len(expected.layers)}")
        return
    for layer, (left, right) in enumerate(zip(expected.layers, found.layers, strict=True)):
        for part in ("keys", "values"):
            one, other = getattr(left, part), getattr(right, part)
            yield from _close(f"{name}[{layer}].{part}", one, other, _places(tokens, one))


def _places(tokens: Tensor, kept: Tensor) -> Tensor:
    """(R, K, S, D) where tokens are, of the last S positions, or of S with room behind."""
    rows, _, length, _ = kept.shape
    real = tokens.repeat_interleave(rows // len(tokens), dim=0)[:, -length:]
    real = torch.nn.functional.pad(real, (0, length - real.shape[1]), value=True)
    return real[:, None, :, None].expand_as(kept)
