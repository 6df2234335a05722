"""What every textbook loop asks of a request's prompt with some tokens after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from everystep.engine import DoLa
from everystep.processors.base import Permitting
from everystep.testing.hash_function import HashFunction
from everystep.types import (
    AfterStep,
    BeforeStep,
    Next,
    PromptMoment,
    Request,
    Rows,
    Sequence,
    TokenTable,
)
from everystep.types.draw_places import Places
from everystep.types.hooks import UNCHANGED
from everystep.types.request import Candidates
from tests.judges.hash_reading import keys_of, logits, logits_after, masked, states_of
from tests.judges.textbook_dola import dola
from tests.judges.textbook_mixing import mix

T = TypeVar("T")
NEVER = -1.0e9  # the score of a hypothesis that there is not


def is_found(score: float) -> bool:
    """Not a copy of the hypothesis that opens a search, nor after a token that may not follow."""
    return not score <= NEVER / 2


@dataclass(frozen=True)
class Hypothesis:
    """One sequence of a result: its generated ids, its score (0 without scores), how it ended."""

    tokens: tuple[int, ...]
    score: float
    reason: str


@dataclass(frozen=True)
class Hummed:
    """What hooks know after some tokens."""

    memories: tuple[Any, ...]
    forced: tuple[int, ...] = ()
    stops: bool = False


def remembered(ask: Callable[[Any, list[int]], T]) -> Callable[[Any, list[int]], T]:
    """A question to a prefix that is worked out once for the same tokens, which alone decide it."""

    @wraps(ask)
    def answer(prefix: Any, tokens: list[int]) -> T:
        place = (ask.__name__, *tokens)
        if place not in prefix.known:
            prefix.known[place] = ask(prefix, tokens)
        found: T = prefix.known[place]
        return found

    return answer


@dataclass(frozen=True)
class Prefix:
    """A request's prompt, asked about with different tokens after it.

    `known`: answers that were given, by question and tokens.
    """

    request: Request
    function: HashFunction
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @remembered
    def scores(self, tokens: list[int]) -> Tensor:
        """(V,) processed scores of what may follow the tokens."""
        return self.scores_beside(tokens, None)

    def scores_beside(self, tokens: list[int], chosen: list[int] | None) -> Tensor:
        """The same, where these were chosen beside them just now."""
        forced = self.hummed(tokens).forced
        if forced:
            mixed = torch.full((self.function.vocab_size,), -torch.inf)
            mixed[forced[0]] = 0.0
            return mixed
        may = self._may_follow(tokens)
        scores = self._processed(self._read_out(tokens, may), tokens, chosen)
        narrows = self.request.readout is not None and self.request.readout.narrows
        if narrows and (scores == -torch.inf).all():
            # Nothing likely is left: the likely are looked for among what is not ruled out.
            may = may & (self._processed(self.raw(tokens), tokens, chosen) > -torch.inf)
            scores = self._processed(self._read_out(tokens, may), tokens, chosen)
        return scores

    def _read_out(self, tokens: list[int], may: Tensor) -> Tensor:
        """(V,) what the readout makes of the logits, the likely being those of `may`."""
        states, keys = self._read(tokens)
        mixed, readout = logits_after(self.function, states, keys), self.request.readout
        if isinstance(readout, DoLa):
            mixed = dola(self.function, states[-1], mixed, readout.layers, may)
            readout = readout.then
        return mix(self.request, readout, mixed, tokens, logits, self.function, may)

    def _processed(self, mixed: Tensor, tokens: list[int], chosen: list[int] | None) -> Tensor:
        return self._stages(mixed, tokens, chosen)[-1]

    def _stages(self, mixed: Tensor, tokens: list[int], chosen: list[int] | None) -> list[Tensor]:
        if self.request.strategy.reads.scores == "log_probs":
            mixed = mixed.log_softmax(-1)
        found = [mixed]
        for processor in self.request.processors:
            found.append(processor(self._rows(tokens, chosen), found[-1][None].clone())[0])
        return found

    def stages(self, tokens: list[int]) -> list[Tensor] | None:
        """(V,) scores before the first processor and as each of them left them; None where hooks
        force a token, or where all that is likely is ruled out."""
        found = self._stages(self._read_out(tokens, self._may_follow(tokens)), tokens, None)
        readout = self.request.readout
        anew = readout is not None and readout.narrows and bool((found[-1] == -torch.inf).all())
        return None if anew or self.hummed(tokens).forced else found

    def _rows(self, tokens: list[int], chosen: list[int] | None) -> Rows:
        sequence, table = self._written(tokens)
        beside = None if chosen is None else np.array([chosen])
        return Rows(table, [sequence], np.array([sequence.visible]), beside)

    def _may_follow(self, tokens: list[int]) -> Tensor:
        """(V,) bool: what no grammar, allowed sequence or function of prefixes rules out."""
        free = torch.zeros(1, self.function.vocab_size)
        for processor in self.request.processors:
            if isinstance(processor, Permitting):
                free = processor(self._rows(tokens, None), free)
        return free[0] == 0

    def raw(self, tokens: list[int]) -> Tensor:
        """(V,) logits of what may follow the tokens, as the model says."""
        return logits_after(self.function, *self._read(tokens))

    def hidden(self, tokens: list[int]) -> Tensor:
        """(T, E) hidden state of every position."""
        states, _ = self._read(tokens)
        return self.function.hidden(np.array(states, np.uint64))

    def reason(self, tokens: list[int]) -> str | None:
        """Why the tokens end here, by the first stop that says so; None if they go on."""
        sequence, table = self._written(tokens[:-1])
        candidate = Candidates(table, [sequence], np.array(tokens[-1:]))
        for stop in self.request.stops:
            if stop(candidate)[0]:
                return stop.reason(candidate, 0).kind
        return "criteria" if self.hummed(tokens).stops else None

    def places(self, tokens: list[int], lineage: int) -> Places:
        """Where the choice after the tokens stands."""
        numbers = (self.request.draws.seed, lineage, self.request.prompt.length + len(tokens))
        seed, lineages, position = (np.array([number], np.uint64) for number in numbers)
        return Places(seed, lineages, position, slot=np.array([0]), slots=1)

    @remembered
    def hummed(self, tokens: list[int]) -> Hummed:
        """What the request's hooks know after the tokens, worked out from the first one on."""
        hooks, request = self.request.hooks, self.request
        if not hooks:
            return Hummed(())
        if not tokens:
            moment = PromptMoment(request, self._embed)
            return Hummed(tuple(hook.on_prompt(moment) for hook in hooks))
        before = self.hummed(tokens[:-1])
        sequence, table = self._written(tokens[:-1])
        seen = {"scores": lambda: self.scores(tokens[:-1])}
        seen["hidden"] = lambda: self.hidden(tokens[:-1])[-1]
        memories, forced, stops = [], before.forced[1:], False
        for hook, memory in zip(hooks, before.memories, strict=True):
            step = AfterStep(
                request, tokens[-1], sequence.length, memory, hook.reads,
                lambda name: seen[name](), table.data[sequence.line],
            )  # fmt: skip
            then = hook.after_step(step) or Next()
            memories.append(memory if then.memory is UNCHANGED else then.memory)
            forced = forced if then.force is None else tuple(then.force)
            stops = stops or then.stop is not False
        return Hummed(tuple(memories), forced, stops)

    @remembered
    def _read(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """The state after every position of the prompt and the tokens, and the keys of inputs."""
        fed = [self._fed(tokens[:count]) for count in range(len(tokens) + 1)]
        keys = [key for keys in fed for key in keys]
        return states_of(self.function, self.request.prompt, keys), keys

    @remembered
    def _fed(self, tokens: list[int]) -> list[int]:
        """The keys of what is fed when the tokens are chosen: the prompt, or the last of them."""
        request, prompt = self.request, self.request.prompt
        if tokens:
            start, keys = prompt.length + len(tokens) - 1, [self.function.token_key(tokens[-1])]
        else:
            start, keys = 0, keys_of(self.function, prompt, [])
        given: dict[str, Tensor] = {}
        for hook, memory in zip(request.hooks, self.hummed(tokens).memories, strict=True):
            sequence, table = self._written(tokens)
            line = table.data[sequence.line]
            step = BeforeStep(request, start, len(keys), memory, given, self._embed, line)
            given |= hook.before_step(step) or {}
        if "embeds" in given:
            keys = self.function.keys(given["embeds"])
        return [masked(self.function, prompt, place, key) for place, key in enumerate(keys, start)]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.function.embed(ids.numpy())

    def _written(self, tokens: list[int]) -> tuple[Sequence, TokenTable]:
        """A sequence without memory or rows, and the table that its ids stand in."""
        request, table = self.request, TokenTable(1)
        ids = [] if request.prompt.ids is None else request.prompt.ids.tolist()
        line = table.open(np.array([request.pad_token] * request.pad_prefix + ids + tokens, int))
        return Sequence(request, line, request.prompt.length + len(tokens)), table
