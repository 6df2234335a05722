"""What a prompt gives beyond ids, cut to the positions of a feed, and whether it fits the model.

Everything is given by absolute position, so that chunks, forks and preemption change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from everystep.errors import InvariantError, RequestError
from everystep.types import Given, InputSpec, Prompt, Request


@dataclass(frozen=True, slots=True)
class Span:
    """The `count` positions from `start` on of a row that begins with a prompt."""

    prompt: Prompt
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def inside(self) -> int:
        """The number of its positions that are the prompt's; the others are generated."""
        return min(self.count, max(self.prompt.length - self.start, 0))

    def inputs(self, declared: Mapping[str, InputSpec]) -> tuple[Given, ...]:
        """Embeddings, and what the model declares."""
        prompt, found = self.prompt, []
        if prompt.embeds is not None and self.inside:
            part = prompt.embeds[self.start - prompt.before :][: self.inside]
            found.append(Given("embeds", 0, part))
        found += self._injected()
        for name, values in prompt.inputs.items():
            per = declared[name].per
            if per == "token":
                part = self._with_after(values, declared[name].after)
            else:
                count = self.count if per == "row" else self.inside
                part = values.expand(count, *values.shape)
            if len(part):
                found.append(Given(name, 0, part))
        return tuple(found)

    def _with_after(self, values: Tensor, after: str) -> Tensor:
        """Cut an input per token to these positions, and add what generated ones are given."""
        part, beyond = values[self.start : self.stop], self.count - self.inside
        if after == "nothing" or not beyond:
            return part
        last = values[-1:] if after == "last" else torch.zeros_like(values[-1:])
        return torch.cat([part, last.expand(beyond, *last.shape[1:])])

    def whole(self) -> Mapping[str, Tensor]:
        """Return what the prompt is given as a whole, where it is fed here."""
        if not self.prompt.whole or not self.inside:
            return {}
        if self.start or self.inside < self.prompt.length:
            wanted, got = f"all {self.prompt.length} positions", (self.start, self.stop)
            raise InvariantError("a prompt was cut that is fed whole", wanted=wanted, got=got)
        return self.prompt.whole

    def _injected(self) -> list[Given]:
        """Cut what is injected here into one piece per run of neighbouring positions."""
        if self.prompt.injected is None or not self.inside:
            return []
        injected, found = self.prompt.injected, list[Given]()
        places, deep = injected.positions, injected.deepstack
        first, last = np.searchsorted(places, (self.start, self.stop)).tolist()
        cuts = np.flatnonzero(np.diff(places[first:last]) > 1) + first + 1
        ends = [first, *cuts.tolist(), last] if last > first else []
        for a, b in pairwise(ends):
            place = int(places[a]) - self.start
            found.append(Given("embeds", place, injected.embeds[a:b]))
            if deep is not None:
                found.append(Given("deepstack", place, deep[a:b]))
        return found

    def positions(self) -> Tensor | None:
        """Position ids: those that are given, then those after the greatest of them on any axis."""
        own = self.prompt.positions
        if own is None:
            return None
        known = own.shape[-1]
        beyond = (max(place - known, 0) for place in (self.start, self.stop))
        after = self.prompt.follows + torch.arange(*beyond)
        after = after.expand(*own.shape[:-1], len(after))
        return torch.cat([own[..., self.start : self.stop], after], dim=-1)

    def mask(self) -> Tensor | None:
        """(1 or heads, count, stop) bool, as `Prompt.mask` says; None where every earlier position
        is seen."""
        own, length = self.prompt.mask, self.prompt.length
        if own is None or (not self.inside and bool(own[..., -1, :].all())):
            return None
        own = own.view(-1, length, length)
        seen = torch.ones(len(own), self.count, self.stop, dtype=torch.bool).tril(self.start)
        known = min(self.stop, length)
        seen[:, : self.inside, :known] &= own[:, self.start : self.start + self.inside, :known]
        seen[:, self.inside :, :known] = own[:, -1:, :known]
        return seen


def overlaid(inputs: tuple[Given, ...], given: tuple[Given, ...]) -> tuple[Given, ...]:
    """The inputs of a feed, with those in the place of others of the same name and position that
    are given besides."""
    kept = list(inputs)
    for name, start, values in given:
        stop, before, kept = start + len(values), kept, []
        for one in before:
            first, last = one.start, one.start + len(one.values)
            if one.name != name or last <= start or first >= stop:
                kept.append(one)
                continue
            if first < start:
                kept.append(Given(name, first, one.values[: start - first]))
            if last > stop:
                kept.append(Given(name, stop, one.values[stop - first :]))
    return (*kept, *given)


def require_fitting(request: Request, declared: Mapping[str, InputSpec]) -> None:
    """RequestError if an input of one of the request's prompts lacks the form that the model
    reads."""
    for prompt in (request.prompt, *request.companions):
        for what, wanted, got in _misfits(prompt, declared):
            raise RequestError(f"{what} does not fit", wanted=wanted, got=got)


def _misfits(
    prompt: Prompt, declared: Mapping[str, InputSpec]
) -> Iterator[tuple[str, object, object]]:
    """Yield each misfit as its subject, what was wanted and what was given."""
    for name, values in prompt.inputs.items():
        spec = declared[name]
        shape = spec.shape_of(prompt.length, values)
        if tuple(values.shape) != shape:
            yield f"the input {name!r}", shape, tuple(values.shape)
        if not spec.takes(values.dtype):
            yield f"the input {name!r}", spec.dtype, values.dtype
    length, positions, mask = prompt.length, prompt.positions, prompt.mask
    if positions is not None:
        given, axes = tuple(positions.shape), declared.get("positions")
        if given[-1] < length:
            yield "position_ids", f"(..., {length})", given
        elif axes is not None and given[:-1] not in ((), (1,), axes.shape):
            yield "position_ids", (*axes.shape, length), given
        if positions.numel() and int(positions.min()) < 0:
            yield "position_ids", "numbers from 0 on", int(positions.min())
    if mask is not None:
        given, heads = tuple(mask.shape), declared.get("mask")
        if mask.dtype != torch.bool:
            yield "the mask", torch.bool, mask.dtype
        if given[-2:] != (length, length) or (heads and given[:-2] not in ((), (1,), heads.shape)):
            yield "the mask", f"(length, length) or (heads, length, length), {length}", given
        elif bool(mask.triu(1).any()):
            yield "the mask", "positions that see none after them", "one that does"
        elif not bool(mask.diagonal(dim1=-2, dim2=-1).all()):
            yield "the mask", "positions that see themselves", "one that does not"
