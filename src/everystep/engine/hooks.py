"""What hooks give for the positions of a step.

What hooks know of a sequence is a value, `Hooked`, which travels in children like any other; it
keeps the memories of every position, so that a position that is fed again is given the same. A
drafted position is given what follows from the memory so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.adapters import CHANGED_EMBEDDINGS
from everystep.devices import on_device
from everystep.engine.feed import Feeds, Grant, chunk_of, fed, write_draft
from everystep.engine.guests import Failed, Host
from everystep.errors import (
    NOBODYS,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.executors.base import Executor
from everystep.types import (
    BeforeStep,
    Given,
    Group,
    Hooked,
    InputSpec,
    PromptMoment,
    Request,
    Sequence,
    TokenTable,
)
from everystep.types.given_tensors import flaw_of, misfit_of
from everystep.types.hooks import Hook
from everystep.types.stored import Chain, remembered

HOOKED = remembered("hooks", Hooked)
"""The name under which a sequence remembers what hooks know of it."""
_PROMPT = "what hooks give for the prompt"
_NO_INPUTS = ("positions", "mask")

Gifts = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PromptGifts:
    """The gifts of hooks for a prompt that is fed in chunks: a memory that is the same all
    along."""

    gifts: Gifts

    def copy(self) -> PromptGifts:
        return self

    def rewind(self, length: int) -> None:
        """It says nothing of what follows the prompt."""


def require_known_gifts(request: Request, declared: Mapping[str, InputSpec]) -> None:
    """RequestError if a hook wants to give something that the model does not read; UnsupportedError
    for embeddings beside an adapter that changes those of ids."""
    known = ("embeds", *(name for name in declared if name not in _NO_INPUTS))
    readable = ("scores", "logits", "hidden")
    for hook in request.hooks:
        for what, names, allowed in (
            ("gives", hook.gives, known),
            ("reads", hook.reads, readable),
        ):
            for name in [one for one in names if one not in allowed]:
                near = nearest(name, allowed)
                raise UnknownArgumentError(
                    f"{type(hook).__name__}.{what} has an unknown name",
                    wanted=", ".join(allowed),
                    got=shown(name),
                    do=f"Perhaps you meant {near}" if near else f"Leave it out of {what}",
                )
        changed = any(CHANGED_EMBEDDINGS in one.needs for one in request.resolved)
        if changed and "embeds" in hook.gives:
            raise UnsupportedError(
                f"{type(hook).__name__} gives embeddings, and an adapter changes those of ids",
                wanted="an adapter of other parts, or a hook that gives no embeds",
                got=", ".join(name for name, _ in request.adapters),
                do="Merge the adapter into the weights with merge_adapter",
            )


@dataclass(slots=True, eq=False)
class Hooking:
    """The guest that asks hooks what they give; it keeps nothing of any request.

    `width`: E of the model's embeddings, once it was needed.
    """

    host: Host
    width: int | None = None

    @property
    def executor(self) -> Executor:
        """The executor, which knows embeddings and the inputs that its model declares."""
        return self.host.executor

    def open(self, request: Request) -> None:
        """Prepare nothing: hooks are asked step by step."""

    def before(self, grants: list[Grant], feeds: Feeds, groups: list[Group]) -> Failed:
        """Add what hooks give for all positions that the feeds will hold; return the groups whose
        hooks fail."""
        failed: Failed = []
        for grant in grants:
            if grant.group.request.hooks:
                try:
                    self._ask_group(grant, feeds)
                except NOBODYS:
                    raise
                except Exception as error:
                    failed.append((grant.group, error))
        return failed

    def after(self, feeds: Feeds) -> None:
        """Note nothing: what hooks know of a sequence travels in children."""

    def restart(self) -> None:
        """Drop nothing, as nothing is held."""

    def held(self) -> int:
        """Count no rows: hooks hold none."""
        return 0

    def _ask_group(self, grant: Grant, feeds: Feeds) -> None:
        if grant.group in feeds.ready:
            for sequence in fed(grant.group, feeds):
                drafted = len(write_draft(sequence, feeds))
                self._ask_for(sequence, sequence.length + drafted - sequence.cached, feeds)
            return
        for unit, _, source, count in chunk_of(grant, feeds.table):
            if unit is source:
                self._ask_for(source, count, feeds)

    def _ask_for(self, sequence: Sequence, count: int, feeds: Feeds) -> None:
        """Notes what is given for the next `count` positions of the sequence."""
        request, start = sequence.request, sequence.cached
        line, stop, prompt = feeds.table.shown(sequence.line), start + count, request.prompt
        state: Hooked | None = sequence.memo.get(HOOKED)
        if state is None:
            moment = PromptMoment(request, self.embed)
            memories = tuple([hook.on_prompt(moment) for hook in request.hooks])
            state = Hooked(Chain((0, memories), None), prompt.length)
            sequence.memo[HOOKED] = state
        parts: list[tuple[int, int, Gifts]] = []
        if start < prompt.length:
            last = min(stop, prompt.length)
            parts.append((0, last - start, self._of_prompt(sequence, state, last, line)))
        # What lingers after its end is fed pad tokens, of which hooks know nothing.
        known = stop if sequence.finish is None else min(stop, state.length)
        for position in range(max(start, prompt.length), known):
            gifts = self.gifts(request, state.at(position), position, 1, line)
            parts.append((position - start, 1, gifts))
        if stop > sequence.length:
            foreseen = [one for *_, one in parts[sequence.length - stop :]]
            agrees = partial(self._agrees, sequence, feeds.table, foreseen)
            feeds.adding(sequence).agrees = agrees
        if any(gifts for *_, gifts in parts):
            feeds.adding(sequence).given = _joined(parts, self.executor.inputs)

    def _agrees(
        self, sequence: Sequence, table: TokenTable, foreseen: list[Gifts], place: int, now: Hooked
    ) -> bool:
        """Tell whether the position after `place` drafted tokens was given what hooks give now
        that they know these tokens."""
        line = table.shown(sequence.line)
        gifts = self.gifts(sequence.request, now.memories, now.length - 1, 1, line)
        return _equal(gifts, foreseen[place - 1])

    def _of_prompt(self, sequence: Sequence, state: Hooked, stop: int, line: np.ndarray) -> Gifts:
        """Return the gifts for the prompt's positions from the cached ones on up to `stop`."""
        request, first = sequence.request, sequence.request.prompt.start
        length = request.prompt.length
        kept: PromptGifts | None = sequence.memo.get(_PROMPT)
        if kept is None:
            gifts = self.gifts(request, state.at(length - 1), first, length - first, line)
            kept = PromptGifts(gifts)
        if stop < length:
            sequence.memo[_PROMPT] = kept
        else:
            sequence.memo.pop(_PROMPT, None)
        part = slice(sequence.cached - first, stop - first)
        declared = self.executor.inputs
        return {n: v[part] if _per_token(n, declared) else v for n, v in kept.gifts.items()}

    def gifts(
        self,
        request: Request,
        memories: tuple[Any, ...],
        start: int,
        count: int,
        line: np.ndarray,
    ) -> Gifts:
        """Ask all hooks for their gifts at these positions, and return them by name."""
        given: dict[str, Tensor] = {}
        for hook, memory in zip(request.hooks, memories, strict=True):
            if type(hook).before_step is Hook.before_step:  # it gives nothing
                continue
            earlier = {name: values.clone() for name, values in given.items()}
            step = BeforeStep(request, start, count, memory, earlier, self.embed, line)
            found = hook.before_step(step)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise nonsense(hook, "before_step", "a mapping, or None", found)
            given = {**given, **{n: self._checked(hook, n, x, count) for n, x in found.items()}}
        return given

    def embed(self, ids: Tensor | np.ndarray) -> Tensor:
        """(n,) ids -> the embeddings (n, E) that the model reads in their place."""
        own = torch.tensor(ids) if isinstance(ids, np.ndarray) else torch.as_tensor(ids)
        return self.executor.embed(own)

    def _checked(self, hook: Hook, name: str, values: Any, count: int) -> Tensor:
        """A copy of the values, if they are what the model reads under this name."""
        if name not in hook.gives:
            raise RequestError(
                f"{type(hook).__name__}.before_step gives {name!r} and does not say so",
                wanted=f"one of gives = {shown(hook.gives)}",
                do="Name in gives what before_step may give",
            )
        if name == "embeds":
            if self.width is None:
                self.width = self.embed(torch.zeros(1, dtype=torch.int64)).shape[-1]
            misfit = misfit_of(values, (count, self.width))
        else:
            spec = self.executor.inputs[name]
            shape = spec.shape_of(count, values if flaw_of(values) is None else torch.empty(0))
            misfit = misfit_of(values, shape, holds="any")
            if misfit is None and not spec.takes(values.dtype):
                misfit = str(spec.dtype), str(values.dtype)
        if misfit is not None:
            raise nonsense(hook, name, *misfit)
        found: Tensor = values.detach().clone()  # a hook may write to its own again
        return on_device(self.executor.device, found)


def nonsense(hook: Hook, what: str, wanted: object, got: object) -> RequestError:
    """The error of a hook that answers something else than was wanted."""
    shown = got if isinstance(got, str | torch.dtype) else type(got).__name__
    name = type(hook).__name__
    do = f"Return that from {name}"
    return RequestError(
        f"what {name} gives as {what} does not fit", wanted=wanted, got=shown, do=do
    )


def _equal(one: Gifts, other: Gifts) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


def _per_token(name: str, declared: Mapping[str, InputSpec]) -> bool:
    return name == "embeds" or declared[name].per == "token"


def _joined(
    parts: list[tuple[int, int, Gifts]], declared: Mapping[str, InputSpec]
) -> tuple[Given, ...]:
    """(start, count, gifts) one after another -> values by name, neighbours as one."""
    runs: dict[str, list[tuple[int, list[Tensor]]]] = {}
    ends: dict[str, int] = {}
    for start, count, gifts in parts:
        for name, given in gifts.items():
            values = given if _per_token(name, declared) else given.expand(count, *given.shape)
            own = runs.setdefault(name, [])
            if ends.get(name) == start:
                own[-1][1].append(values)
            else:
                own.append((start, [values]))
            ends[name] = start + count
    return tuple(
        Given(name, start, values[0] if len(values) == 1 else torch.cat(values))
        for name, own in runs.items()
        for start, values in own
    )
