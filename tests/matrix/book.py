"""The textbook loops on real models: a whole forward for every prefix, and no engine.

The loops are those of `tests.judges.textbook`, which ask a prefix for scores; here they come
from a plain forward of the model over all ids, without a cache. Only where the cell is about a
cache that rounds, its codes are what is computed with: then a fresh one is filled for each prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import everystep as es
from everystep.engine import DoLa, Guidance
from everystep.processors.grammars.mask import GrammarMask
from everystep.stops.ends import MaxLength
from everystep.types import Prompt, Request, Rows
from tests.judges.textbook import Hypothesis, Prefix, told
from tests.matrix.rows import Row
from tests.matrix.subjects import Subject


@dataclass(frozen=True)
class ModelPrefix(Prefix):
    """A request's prompt for a real model. `shift`: what a hook adds to every embedding. `cache`:
    makes the cache that a forward goes through, if it goes through one."""

    model: Any = None
    shift: float = 0.0
    cache: Callable[[], Any] | None = None
    forwards: dict[Any, Any] = field(default_factory=dict)

    def scores_beside(self, tokens: list[int], chosen: list[int] | None) -> Tensor:
        """(V,) processed scores of what may follow the tokens; `chosen` beside them just now."""
        request = self.request
        mixed, readout = self.logits(tokens), request.readout
        if isinstance(readout, DoLa):
            may = self._may_follow(tokens, len(mixed))
            mixed, readout = self._contrasted(mixed, tokens, readout.layers, may), readout.then
        if isinstance(readout, Guidance):
            other = self._out(request.companions[0], tokens, 0.0).logits[0, -1].float()
            other = other.log_softmax(-1)
            mixed = readout.scale * (mixed.log_softmax(-1) - other) + other
        if request.strategy.reads.scores == "log_probs":
            mixed = mixed.log_softmax(-1)
        for processor in request.processors:
            mixed = processor(self._rows(tokens, chosen), mixed[None])[0]
        return mixed

    def _rows(self, tokens: list[int], chosen: list[int] | None) -> Rows:
        sequence, table = self._written(tokens)
        beside = None if chosen is None else np.array([chosen])
        return Rows(table, [sequence], np.array([sequence.visible]), beside)

    def _may_follow(self, tokens: list[int], vocabulary: int) -> Tensor:
        """(V,) bool: what no grammar rules out."""
        free = torch.zeros(1, vocabulary)
        for processor in self.request.processors:
            if isinstance(processor, GrammarMask):
                free = processor(self._rows(tokens, None), free)
        return free[0] == 0

    def _contrasted(
        self, last: Tensor, tokens: list[int], layers: tuple[int, ...], may: Tensor
    ) -> Tensor:
        """(V,) logits contrasted with the layer that differs most from the last one, among the
        likely ones of those that may follow."""
        states = self._out(self.request.prompt, tokens, self.shift).hidden_states
        weights = self.model.state_dict()
        tied = next(name for name in weights if "embed" in name)
        head = weights.get("lm_head.weight", weights[tied])
        early = [(states[layer][0, -1] @ head.T).float() for layer in layers]

        def apart(one: Tensor) -> float:
            p, q = last.softmax(-1), one.softmax(-1)
            m = (p + q) / 2
            return float((m * (m / p).log() + m * (m / q).log()).mean())

        contrast = last.log_softmax(-1) - max(early, key=apart).log_softmax(-1)
        p = last.softmax(-1)
        return contrast.masked_fill(p < 0.1 * p[may].max(), -torch.inf)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(V,) raw logits of what may follow the tokens."""
        return self._out(self.request.prompt, tokens, self.shift).logits[0, -1].float()

    def raw(self, tokens: list[int]) -> Tensor:
        """The same, as the likelihood of a sample asks for it."""
        return self.logits(tokens)

    def hidden(self, tokens: list[int]) -> Tensor:
        """(T, E) last hidden state of every position."""
        return self._out(self.request.prompt, tokens, self.shift).hidden_states[-1][0]

    def _out(self, prompt: Prompt, tokens: Sequence[int], shift: float) -> Any:
        place = id(prompt), tuple(tokens)
        if place not in self.forwards:
            embed = self.model.get_input_embeddings()
            given = embed(torch.tensor(prompt.ids)) if prompt.embeds is None else prompt.embeds
            own = [embed(torch.tensor([token])) for token in tokens]
            embeds = torch.cat([given, *own])[None] + shift
            with torch.no_grad():
                self.forwards[place] = self._forward(embeds)
        return self.forwards[place]

    def _forward(self, embeds: Tensor) -> Any:
        """What the model says of (1, T, E) embeddings; with a cache position by position, so that
        each sees what the cache keeps of those before."""
        asked: dict[str, Any] = {"output_hidden_states": True}
        if self.cache is None:
            return self.model(inputs_embeds=embeds, use_cache=False, **asked)
        cache = self.cache()
        outs = [
            self.model(inputs_embeds=embeds[:, at : at + 1], past_key_values=cache, **asked)
            for at in range(embeds.shape[1])
        ]
        layers = zip(*(out.hidden_states for out in outs), strict=True)
        outs[-1].hidden_states = tuple(torch.cat(layer, dim=1) for layer in layers)
        return outs[-1]


def prefix_of(subject: Subject, request: Request, **how: Any) -> ModelPrefix:
    """The prefix that loops ask about a request of this subject."""
    return ModelPrefix(request, function=None, model=subject.model, **how)  # type: ignore[arg-type]


def book(subject: Subject, row: Row, how: dict[str, Any] | None = None, **more: Any) -> Any:
    """What the textbook says of a call. Where a text and a limit end a sequence at once, the text
    is the reason."""
    request = subject.request(row, **more)
    stops = sorted(request.stops, key=lambda stop: isinstance(stop, MaxLength))
    request = replace(request, hooks=(), stops=tuple(stops))
    return told(prefix_of(subject, request, **(how or {})))


def require_same(
    found: Sequence[es.Generated], wanted: Sequence[Hypothesis], *, within: float = 1e-5
) -> None:
    """The tokens, reasons and scores of both are the same."""
    assert [(one.tokens, one.finish_reason.kind) for one in found] == [
        (one.tokens, one.reason) for one in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert not other.score or abs(one.score - other.score) <= within


def require_equal(
    found: Sequence[es.Generated], wanted: Sequence[es.Generated], *, within: float = 1e-6
) -> None:
    """Two runs came to the same."""
    assert [(one.tokens, one.finish_reason.kind) for one in found] == [
        (one.tokens, one.finish_reason.kind) for one in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert abs(one.score - other.score) <= within
