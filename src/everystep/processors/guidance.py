"""Processors that look beyond a row: at the scores of another prompt, or at what other beams chose.

Inside `generate()` a companion row guides instead; these classes are for loops of the caller's own.
The formula is the one that the readout uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.config.kinds import NUMBER, POSITIVE, SIZE, integer, number, require
from everystep.devices import on_device
from everystep.errors import RequestError
from everystep.processors.base import LogitsProcessor
from everystep.processors.stacking import Argument
from everystep.types import Rows


def guided(logits: Tensor, other: Tensor, scale: float) -> Tensor:
    """Return scale * (log p - log q) + log q of two (R, V) logits (Sanchez et al. 2023)."""
    given = torch.log_softmax(logits, dim=-1)
    against = torch.log_softmax(other, dim=-1)
    return scale * (given - against) + against


def contrasted(
    logits: Tensor, other: Tensor, alpha: float, beta: float, allowed: Tensor | None = None
) -> Tensor:
    """Return log p - beta * log q of two (R, V) logits (Li et al. 2023).

    It is -inf where p is below alpha times its highest among the `allowed`, (R, V) bool.
    """
    given = torch.log_softmax(logits, dim=-1)
    against = torch.log_softmax(other.to(given), dim=-1)
    implausible = given < highest(given, allowed) + math.log(alpha)
    return (given - beta * against).masked_fill_(implausible, -math.inf)


def highest(values: Tensor, allowed: Tensor | None) -> Tensor:
    """Return (R, 1) the highest of (R, V) values, among those that are `allowed`, (R, V) bool."""
    among = values if allowed is None else values.masked_fill(~allowed, -math.inf)
    return among.amax(dim=-1, keepdim=True)


class UnbatchedClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Guides away from another prompt, which the model reads in calls of its own.

    `model`: callable as `model(ids, attention_mask=, use_cache=, past_key_values=)` whose output
    has `logits` and `past_key_values`. `unconditional_ids`: (R, T), or None for the last id of what
    the first call is given. An object serves one generation: it remembers what the model read.
    """

    def __init__(
        self,
        guidance_scale: float,
        model: Any,
        unconditional_ids: Tensor | None = None,
        unconditional_attention_mask: Tensor | None = None,
        use_cache: bool = True,
    ) -> None:
        self.guidance_scale = NUMBER.checked(guidance_scale, "guidance_scale")
        require(callable(model), "model", "a model, which can be called", model)
        self.model = model
        self.use_cache = use_cache
        self._ids = unconditional_ids
        self._mask = unconditional_attention_mask
        self._past: Any = None
        self._begun = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process (R, V) scores of (R, T) ids -> (R, V)."""
        if self.guidance_scale == 1:
            return torch.log_softmax(scores, dim=-1)
        return guided(scores, self._read(input_ids)[:, -1], self.guidance_scale)

    def _read(self, input_ids: Tensor) -> Tensor:
        """Return logits of the other prompt, to which the newest id is added."""
        newest = input_ids[:, -1:]
        if not self._begun:
            self._begun = True
            self._ids = newest if self._ids is None else self._ids
            self._mask = torch.ones_like(self._ids) if self._mask is None else self._mask
        else:
            kept = [] if self.use_cache else [self._ids]
            self._ids = torch.cat([*kept, newest], dim=1)  # type: ignore[list-item]
            self._mask = torch.cat([self._mask, torch.ones_like(newest)], dim=1)  # type: ignore[list-item]
        output = self.model(
            self._ids,
            attention_mask=self._mask,
            use_cache=self.use_cache,
            past_key_values=self._past,
        )
        self._past = getattr(output, "past_key_values", None)
        logits = getattr(output, "logits", None)
        require(isinstance(logits, Tensor), "model", "one that returns logits", output)
        return cast(Tensor, logits)


class LoopGuidance(LogitsProcessor):
    """Guides the rows of a caller's loop away from prompts of their own.

    `read`: returns what the model makes of (R, T) ids, beside (R, S + T) which of all are no
    padding, after the S positions of a cache. `ids`, `real`: (R, T) the prompts and what is no
    padding of them; `length`: how many ids the loop begins with. What was read is kept, and read
    again where a loop has reordered its rows or taken ids back.
    """

    def __init__(
        self,
        scale: float,
        read: Callable[[Tensor, Tensor, Any], Any],
        ids: Tensor,
        real: Tensor,
        length: int,
    ) -> None:
        self.scale, self._read = scale, read
        self._ids, self._real, self._length = ids, real, length
        self._held = ids[:, :0]
        self._past: Any = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process (R, V) scores of (R, T) ids -> (R, V)."""
        new = input_ids[:, self._length :].to(self._ids)
        line, real = (
            torch.cat([self._ids, new], dim=1),
            F.pad(self._real, (0, new.shape[1]), value=1),
        )
        held = self._held.shape[1]
        if self._past is None or held >= line.shape[1] or not line[:, :held].equal(self._held):
            self._past, held = None, 0
        output = self._read(line[:, held:], real, self._past)
        self._past, self._held = output.past_key_values, line
        return guided(scores, output.logits[:, -1].to(scores), self.scale)


@dataclass(frozen=True)
class ClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """A guidance of the first half of twice as many scores as rows away from the second."""

    guidance_scale: float

    checked: ClassVar[tuple[Argument, ...]] = (
        Argument("guidance_scale", number("a number above 1", lambda value: value > 1)),
    )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process (2 * R, V) scores of (R, T) ids -> (R, V)."""
        given, against = _halves(input_ids, scores)
        return against + (given - against) * self.guidance_scale


@dataclass(frozen=True)
class DiaClassifierFreeGuidanceLogitsProcessor(ClassifierFreeGuidanceLogitsProcessor):
    """A `ClassifierFreeGuidanceLogitsProcessor` that adds the difference to the first half.

    With `guidance_top_k`, the first half itself, only where the guided scores are highest.
    """

    guidance_top_k: int | None = None

    checked = (
        *ClassifierFreeGuidanceLogitsProcessor.checked,
        Argument("guidance_top_k", SIZE, optional=True),
    )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        given, against = _halves(input_ids, scores)
        mixed = given + (given - against) * self.guidance_scale
        if self.guidance_top_k is None:
            return mixed
        best = torch.topk(mixed, k=self.guidance_top_k, dim=-1).indices
        outside = torch.ones_like(mixed, dtype=torch.bool).scatter(-1, best, False)
        return given.masked_fill(outside, -math.inf)


def _halves(input_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    rows = input_ids.shape[0]
    if scores.shape[0] != 2 * rows:
        raise RequestError(
            "guidance needs the scores of both prompts, the negative ones last",
            wanted=f"{2 * rows} rows of scores for {rows} of input_ids",
            got=f"{scores.shape[0]}",
            do="Run both halves through the model as one batch",
        )
    return scores[:rows], scores[rows:]


@dataclass(frozen=True)
class HammingDiversityLogitsProcessor(LogitsProcessor):
    """A token loses `diversity_penalty` for each beam of an earlier group that chose it now.

    Source: Vijayakumar et al. 2016; the class of that name in transformers 4.55.
    """

    diversity_penalty: float
    num_beams: int
    num_beam_groups: int

    checked = (
        Argument("diversity_penalty", POSITIVE),
        Argument("num_beams", integer(2)),
        Argument("num_beam_groups", integer(2)),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, beams = self.num_beam_groups, self.num_beams
        require(groups <= beams, "num_beam_groups", f"at most num_beams={beams}", groups)

    def __call__(
        self,
        input_ids: Tensor | Rows,
        scores: Tensor,
        current_tokens: Tensor | None = None,
        beam_group_idx: int = 0,
    ) -> Tensor:
        """Process (R, V) scores of one group's beams -> (R, V).

        `current_tokens`: (batch * num_beams,) what each beam has chosen in this step so far; rows
        of the engine's say that themselves.
        """
        if isinstance(input_ids, Rows):
            beside = input_ids.chosen
            return scores if beside is None else self._lowered(scores, torch.from_numpy(beside))
        size = self.num_beams // self.num_beam_groups
        start = beam_group_idx * size
        if start == 0:
            return scores
        require(current_tokens is not None, "current_tokens", "a token per beam", None)
        earlier = current_tokens.view(-1, self.num_beams)[:, :start]  # type: ignore[union-attr]
        width = min(start + size, self.num_beams) - start
        return self._lowered(scores, earlier.repeat_interleave(width, dim=0))

    def _lowered(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return (R, V) scores without what the (R, n) chosen tokens cost."""
        counts = torch.zeros(scores.shape, dtype=torch.int64)
        counts.scatter_add_(1, chosen.cpu(), torch.ones_like(chosen, device="cpu"))
        return scores - self.diversity_penalty * on_device(scores.device, counts)
