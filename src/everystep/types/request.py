"""A request, its state while it runs, and what its choices must be able to do.

They speak of each other: a request has a strategy, and a strategy chooses for sequences of
requests. The protocols are such as a class need not import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Steps
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from everystep.types.columns import Columns
from everystep.types.draw_places import Draws, Places
from everystep.types.ends import Finished, FinishReason, Prompt, values_of
from everystep.types.hooks import Hook
from everystep.types.protocols import (
    MATCHING,
    Draft,
    DraftVerification,
    Processor,
    Readout,
    Reads,
    Schedule,
)
from everystep.types.scores import Scores
from everystep.types.table import TokenTable
from everystep.types.work import Past, ResolvedAdapter


class Watcher(Protocol):
    """A listener that is told of every step of a request; see `engine/watching.py`.

    `stages`: whether it is told what each processor left, and not only what all of them did.
    """

    @property
    def stages(self) -> bool: ...

    def __call__(self, step: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Wants:
    """The results that a request's feeds must return beside the logits of its choices.

    `logprobs`, `prompt_logprobs`: how many of the most likely tokens are kept for each chosen and
    each prompt token, beside that token itself; None for neither. `cache`: what rows hold when all
    is over. `history`: the scores of every step, for criteria to read; for calls in lockstep, whose
    rows stay to the end.
    """

    layers: bool = False
    attentions: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache: bool = False
    history: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SecondStates:
    """The encoder states (S, E) that second models of a request look at, a draft model and an
    amateur; None for one that has no encoder."""

    drafter: Tensor | None = None
    amateur: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and every resolved choice; nothing in it changes while it runs.

    `drafter` proposes tokens that the strategy may accept, judged as `verification` says; None for
    none. `companions` are further prompts whose rows mirror each sequence and appear in no output.
    `second`: what the encoders of its draft model and its amateur made of the source.
    `adapters`: (name, weight) pairs of the adapters that all its feeds ask for; `resolved`: what
    their names stand for, one for each, empty where the executor knows the names itself. `hooks`
    see every step and may add to it. `salt`: only requests of equal salt share what their prompts
    begin with, and only of equal `weight_changes`, the count of what had been changed in place in
    the model's weights. `deadline`: a moment of the engine's clock from which on it takes no
    further step, whether it waits or runs; None for no such moment. `watcher`: gets every step of
    the request; nothing that is computed depends on it.
    `linger` keeps finished sequences in the batch, fed with `pad_token`, until all are done; with
    `keeps` their group stays even then, and keeps their rows until it is cancelled or replaced. The
    pad prefix is made of `prefix_token`, or of `pad_token` where that is None. `shift`: visible
    index minus position. `prompt_visible`: how many ids, pad prefix included, stand before the
    first generated one.
    """

    request_id: str
    prompt: Prompt
    strategy: Strategy
    draws: Draws
    processors: tuple[Processor, ...] = ()
    stops: tuple[Stop, ...] = ()
    companions: tuple[Prompt, ...] = ()
    readout: Readout | None = None
    drafter: Drafter | None = None
    verification: DraftVerification = MATCHING
    second: SecondStates = SecondStates()
    wants: Wants = Wants()
    max_length: int = 2**31
    pad_prefix: int = 0
    pad_token: int = 0
    prefix_token: int | None = None
    linger: bool = False
    keeps: bool = False
    adapters: tuple[tuple[str, float], ...] = ()
    resolved: tuple[ResolvedAdapter, ...] = ()
    salt: str | None = None
    weight_changes: int = 0
    hooks: tuple[Hook, ...] = ()
    deadline: float | None = None
    watcher: Watcher | None = None
    shift: int = field(init=False)
    prompt_visible: int = field(init=False)

    def __post_init__(self) -> None:
        shift = self.pad_prefix - self.prompt.hidden
        object.__setattr__(self, "shift", shift)
        object.__setattr__(self, "prompt_visible", self.prompt.length + shift)

    def visible_prompt(self) -> np.ndarray:
        """Return the ids that stand before the first generated one."""
        ids = self.prompt.ids
        token = self.pad_token if self.prefix_token is None else self.prefix_token
        pad = np.full(self.pad_prefix, token, dtype=np.int64)
        return pad if ids is None else np.concatenate([pad, ids])

    @property
    def drafts(self) -> int:
        """The number of drafts of a sequence that are verified at once, at most."""
        return 1 if self.drafter is None else 1 + self.drafter.alternatives

    @property
    def needs(self) -> frozenset[str]:
        """The abilities that its executor must have; see `Executor.abilities`."""
        given = ("embeds", "positions", "mask", "encoder", "past")
        prompts = (self.prompt, *self.companions)
        wanted = ("layers", "attentions")
        return frozenset(
            (
                *(("hidden",) if self.strategy.reads.hidden else ()),
                *(("truncate",) if self.drafter is not None else ()),
                *(("early",) if self.readout is not None and self.readout.layers else ()),
                *(name for name in given for one in prompts if getattr(one, name) is not None),
                *("embeds" for one in prompts if one.injected is not None),
                *("deepstack" for one in prompts if one.is_deep),
                *(name for one in prompts for name in (*one.inputs, *one.whole)),
                *(name for name in wanted if getattr(self.wants, name)),
                *(("past",) if self.wants.cache else ()),
                *(("adapters",) if self.adapters else ()),
                *(name for one in self.resolved for name in one.needs),
                *(adapter_ability(name) for name, _ in self.adapters if not self.resolved),
                *(needs_of_hooks(self.hooks) if self.hooks else ()),
            )
        )


def nobodys(prompt: Prompt) -> Request:
    """Make a request for plain ids that no engine runs; it lets rows of ids be read by hand."""
    return Request("", prompt, cast(Strategy, None), cast(Draws, None))


def needs_of_hooks(hooks: tuple[Hook, ...]) -> frozenset[str]:
    """Return the abilities that an executor must have for what these hooks give and read."""
    given = (name for hook in hooks for name in hook.gives)
    return frozenset((*given, *("hidden" for hook in hooks if "hidden" in hook.reads)))


def adapter_ability(name: str) -> str:
    """Return the ability of an executor that knows the adapter of this name by itself."""
    return f"adapters: {name!r}"


@dataclass(slots=True, eq=False)
class Companion:
    """The state of one companion row: its prompt, how far it is cached, where it lies."""

    prompt: Prompt
    cached: int = 0
    row: int | None = None

    def lose_row(self) -> None:
        """Leave nothing cached but what the prompt brings."""
        self.row, self.cached = None, self.prompt.start


@dataclass(slots=True, eq=False)
class Sequence:
    """One hypothesis: its line in the token table, and how much of it is cached in which row.

    `length` counts positions, with or without ids; `0 <= cached < length` holds between steps.
    The last `provisional` tokens may still be taken back. `line` is -1 before the first feed.
    `memo` is what processors, strategies and hooks remember: immutable values, and memories of what
    changes (see `is_memory`).

    The results of a step go into new sequences: of an existing one only `row`, `cached` and the
    memories change, and all of those can be made again from its ids.
    """

    request: Request
    line: int
    length: int
    cached: int = 0
    row: int | None = None
    score: float = 0.0
    lineage: int = 0
    index: int = 0
    provisional: int = 0
    finish: FinishReason | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    companions: tuple[Companion, ...] = ()

    def lose_row(self) -> None:
        """Leave nothing cached but what the prompt brings."""
        self.row, self.cached = None, self.request.prompt.start

    def forget(self) -> None:
        """Drop the memories; immutable values stay."""
        self.memo = values_of(self.memo)

    @property
    def units(self) -> tuple[Sequence | Companion, ...]:
        """Everything in it that has a cache row: itself and its companions."""
        return (self, *self.companions)

    @property
    def visible(self) -> int:
        """The number of ids, pad prefix included, that others may see."""
        return self.length + self.request.shift

    @property
    def generated(self) -> int:
        """The number of tokens that were chosen so far."""
        return self.length - self.request.prompt.length

    @property
    def pending(self) -> int:
        """The number of positions that its next feed must hold, companions included."""
        missing = self.length - self.cached
        for one in self.companions:
            missing += companion_length(self, one) - one.cached
        return missing


def companion_length(sequence: Sequence, companion: Companion) -> int:
    """Return how many positions a companion holds: its own prompt and the sequence's tokens."""
    return companion.prompt.length + sequence.generated


def took(times: Mapping[str, float], now: float) -> tuple[float, float]:
    """Return the seconds from the beginning until the first tokens, and until now or the end, by
    the times of a group; what ended before a token was opened by its end."""
    began, end = times.get("began", now), times.get("ended", now)
    return times.get("opened", end) - began, end - began


@dataclass(slots=True, eq=False)
class Group:
    """A request with its live and its done sequences.

    `opened` says that the first choice was made; `settled` that the strategy has declared the
    result final although live sequences linger; `rank` is the order of arrival and, in lockstep,
    the place in the caller's batch; `reported` counts tokens reported early. `state`: what the
    strategy knows of the group, an immutable value. `prompt_known`: what is known of how likely
    the prompt is. `pasts`: what the rows of the last live sequences held, by index, where that is
    wanted. `best`: how many of the best logits its choices get in place of whole rows, or 0 for
    whole rows. `forked`: how many positions of its prompt came from another row. `times`: when
    it came in (`began`), had chosen its first tokens (`opened`) and was over (`ended`), by the
    clock of what drives the engine.
    """

    request: Request
    rank: int
    live: list[Sequence] = field(default_factory=list)
    done: list[Finished] = field(default_factory=list)
    state: Any = None
    prompt_known: Any = None
    opened: bool = False
    settled: bool = False
    reported: int = 0
    pasts: tuple[Past, ...] = ()
    best: int = 0
    forked: int = 0
    times: dict[str, float] = field(default_factory=dict)

    def without_live(self) -> Group:
        """Return a group equal to this one, but without live sequences."""
        return Group(
            self.request, self.rank, [], list(self.done), self.state, self.prompt_known,
            self.opened, self.settled, self.reported, self.pasts, self.best,
        )  # fmt: skip

    def become(self, other: Group) -> None:
        """Make this group equal to the other one. Doing it again changes nothing."""
        self.request, self.best = other.request, other.best
        self.live, self.done, self.state = other.live, other.done, other.state
        self.prompt_known, self.pasts = other.prompt_known, other.pasts
        self.opened, self.settled = other.opened, other.settled
        self.reported = other.reported

    @property
    def cached_tokens(self) -> int:
        """The number of positions of its prompt that were not fed for it.

        They came cached, or from the row of another request.
        """
        prompt = self.request.prompt
        return min(max(prompt.start, self.forked), prompt.length)

    @property
    def error(self) -> Exception | None:
        """The error that ended the group, if one did."""
        return next((one.reason.matched for one in self.done if one.reason.kind == "error"), None)

    @property
    def pending(self) -> int:
        """The number of positions that must be fed before the group may choose."""
        return sum([sequence.pending for sequence in self.live])

    @property
    def pending_chunks(self) -> int:
        """The number of them that can be fed in earlier steps: all but the last of each row."""
        return self.pending - len(self.live) * (1 + len(self.request.companions))

    @property
    def rows(self) -> int:
        """The number of cache rows that the group needs to make its next choice and go on."""
        request = self.request
        per_sequence = (1 + len(request.companions)) * request.drafts
        return per_sequence * max(request.strategy.width, len(self.live))

    @property
    def finished(self) -> bool:
        """True if no sequence has a choice left to make."""
        return self.settled or None not in [sequence.finish for sequence in self.live]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R prefixes, one per row of scores, as processors see them.

    `sequences[r]` owns row r; its first `lengths[r]` visible ids (pad prefix included) are the
    prefix. Drafted ids that a row already follows are part of it. `chosen`: (R, n) tokens that
    were chosen beside each row in earlier rounds of this step, None in the first round. `narrowed`:
    whether others are looked for where processors leave none of the scores, as of plausible tokens.
    """

    table: TokenTable
    sequences: list[Sequence]
    lengths: np.ndarray
    chosen: np.ndarray | None = None
    narrowed: bool = False

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def width(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    def ids(self) -> Tensor:
        """Return (R, width) int64 on the CPU; a row's ids beyond its length have no meaning."""
        lines = np.fromiter((s.line for s in self.sequences), np.int64, len(self.sequences))
        return torch.from_numpy(self.table.rectangle(lines, self.width))

    def select(self, indices: np.ndarray) -> Rows:
        chosen = [self.sequences[i] for i in indices]
        beside = None if self.chosen is None else self.chosen[indices]
        return Rows(self.table, chosen, self.lengths[indices], beside, self.narrowed)


Check = Callable[[np.ndarray, np.ndarray], list["FinishReason | None"]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """S sequences whose groups have equal strategies, one row of scores each, group by group.

    `group_of`: (S,) index into `groups`; a group that opens stands here `width` times with the same
    source. `slot`: (S,) the place of each among the `slots` rows of the call's full rectangle.
    `vocabulary`: V. `columns(s)`: the hidden states of all positions of a sequence, where
    its strategy reads them. `stops(parents, tokens)` says of
    (C,) tokens after (C,) sequences which of them end it, and why.
    """

    groups: list[Group]
    sequences: list[Sequence]
    group_of: np.ndarray
    table: TokenTable
    slot: np.ndarray
    slots: int
    draws: Draws
    vocabulary: int
    columns: Callable[[int], Columns]
    stops: Check

    def __len__(self) -> int:
        return len(self.sequences)

    def places(self) -> Places:
        """Return where the next choices of every sequence stand."""
        position = np.array([s.length for s in self.sequences], dtype=np.uint64)
        return places_of(self.sequences, position, self.slot, self.slots)

    def group_places(self, width: int) -> Places:
        """Return where the choices of whole groups of `width` sequences stand.

        A group stands at the first of its sequences, in the place of the group, whatever the
        lineages.
        """
        first = self.sequences[::width]
        position = np.array([s.length for s in first], dtype=np.uint64)
        at = places_of(first, position, self.slot[::width] // width, self.slots // width)
        return replace(at, lineage=np.zeros(len(first), np.uint64))


def places_of(
    sequences: list[Sequence], position: np.ndarray, slot: np.ndarray, slots: int
) -> Places:
    """Return where choices of R sequences stand, each at a position of its row, (R,)."""
    seed = np.array([s.request.draws.seed % 2**64 for s in sequences], dtype=np.uint64)
    lineage = np.array([s.lineage for s in sequences], dtype=np.uint64)
    return Places(seed, lineage, position.astype(np.uint64), slot, slots)


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """All that a strategy may decide, as C parallel entries over a batch's S sequences.

    `parent`: (C,) index into the batch. `tokens`: (C, n) new ids, of which the first `counts[c]`
    count. `score`: (C,) the child's whole score. `finish`: a reason, or None to go on; one of the
    kind "error" ends the whole group. `provisional`: (C,) how many of its last tokens may be taken
    back, or None for none. `memo`: per child the values to put into its memo, or None. `index`:
    (C,) the children's ranks, or None to inherit the parents'. `serial`: (C,) numbers for those
    that end, or None. `lingers`: children that end go on where their request lingers. `settled`:
    batch indices of groups whose result is final. `states`: the new state of every group, or None
    where none has any. `held`: per group the serial numbers of those that have ended and can still
    be part of its result, None for all. A sequence without children is dropped; a child may have no
    tokens and a finish.
    """

    parent: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    score: np.ndarray
    finish: list[FinishReason | None]
    provisional: np.ndarray | None = None
    memo: list[dict[str, Any] | None] | None = None
    index: np.ndarray | None = None
    serial: np.ndarray | None = None
    lingers: bool = False
    settled: tuple[int, ...] = ()
    states: list[Any] | None = None
    held: list[frozenset[int]] | None = None


class Strategy(Protocol):
    """A frozen value that reads scores and returns children; equal strategies choose together.

    It runs no loop, calls no model, touches no cache and writes nothing: a group's state travels in
    `Children`.
    """

    @property
    def width(self) -> int:
        """Sequences per request from the first choice on."""

    @property
    def returns(self) -> int:
        """Sequences in a request's result; while it streams, those of rank < returns."""

    @property
    def streams(self) -> bool:
        """True if chosen tokens may be shown at once; if not, it is a `DecidesLate`."""

    @property
    def reads(self) -> Reads:
        """The parts of a step that it reads."""

    @property
    def rounds(self) -> int:
        """The number of picks in a step; a later round sees what the earlier ones picked."""

    def pick(
        self, batch: Batch, scores: Scores, earlier: tuple[tuple[np.ndarray, ...], ...] = ()
    ) -> tuple[Tensor, ...]:
        """Reduce the scores of S rows to small tensors, all that `select` will get of them.

        Where lists do not decide, it reads whole rows.
        `earlier`: what the earlier rounds of this step picked, on the host.
        """

    def select(self, batch: Batch, picked: tuple[tuple[np.ndarray, ...], ...]) -> Children:
        """Return who continues whom, from what every round picked."""

    def finish(self, group: Group) -> list[Finished]:
        """Return the group's result, best first where there is an order."""


class DecidesLate(Strategy, Protocol):
    """A strategy whose tokens are settled late."""

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """Return the hypotheses that the group's result can still come from."""


class WithState(Strategy, Protocol):
    """A strategy whose groups have a state, which can be saved with them."""

    def knows(self, state: Any) -> bool:
        """Return whether one of its groups may have this state."""


class InRounds(Strategy, Protocol):
    """A strategy with several rounds: in each of them other sequences choose."""

    def turn(
        self, batch: Batch, earlier: tuple[tuple[np.ndarray, ...], ...]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return (n,) the rows that choose next, and (n, m) tokens of the earlier rounds.

        The tokens were chosen beside each row; they are None in the first round. Processors see
        both.
        """


@dataclass(frozen=True, eq=False)
class Candidates:
    """C sequences as they would be after a choice.

    Candidate c is the visible ids of `parents[c]`, less its provisional ones, followed by the id
    `last[c]`. `steps`: scores (R, V) that the call chose from in every step so far, this one
    included; None if they were not asked for. A drafted token is a step of its own, and candidate c
    was chosen from the last of the first `reached[c]`.
    """

    table: TokenTable
    parents: list[Sequence]
    last: np.ndarray
    steps: Steps[Tensor] | None = None
    reached: np.ndarray | None = None

    @classmethod
    def of_rows(cls, ids: np.ndarray) -> Candidates:
        """Make candidates of a rectangle (C, T) of visible ids, each of which just got its last."""
        table = TokenTable(*ids.shape)
        heads = [row[:-1] for row in ids]
        requests = [nobodys(Prompt(ids=head)) for head in heads]
        parents = [
            Sequence(request, table.open(head), len(head))
            for request, head in zip(requests, heads, strict=True)
        ]
        return cls(table, parents, ids[:, -1])

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(C,) visible ids of each candidate, pad prefix and new token included."""
        return np.array([parent.visible - parent.provisional + 1 for parent in self.parents])

    def ids(self, candidate: int) -> np.ndarray:
        """Return all visible ids of one candidate."""
        parent = self.parents[candidate]
        head = self.table.data[parent.line, : parent.visible - parent.provisional]
        return np.append(head, self.last[candidate])

    def tail(self, candidate: int, count: int) -> list[int]:
        """Return the last `count` visible ids of one candidate, or all if there are fewer.

        Padding before its prompt is left out.
        """
        parent = self.parents[candidate]
        end = parent.visible - parent.provisional
        start = max(end + 1 - count, parent.request.pad_prefix)
        head = self.table.data[parent.line, min(start, end) : end]
        return [*head.tolist(), int(self.last[candidate])]

    def scores(self, candidate: int) -> tuple[Tensor, ...] | None:
        """Return (R, V) per step up to a candidate's last token; None if they were not wanted."""
        if self.steps is None or self.reached is None:
            return None
        return tuple(self.steps[: int(self.reached[candidate])])

    def select(self, indices: np.ndarray) -> Candidates:
        chosen = [self.parents[i] for i in indices]
        reached = None if self.reached is None else self.reached[indices]
        return replace(self, parents=chosen, last=self.last[indices], reached=reached)


class Stop(Protocol):
    """A function of candidates; equal stops of different requests are called once."""

    def __call__(self, candidates: Candidates) -> np.ndarray:
        """Return (C,) bool: which candidates end."""

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        """Return why candidate `index`, for which the call said True, ends."""


class WantedDraft(NamedTuple):
    """A draft that is wanted: of a sequence that has not ended, with one id or more, at `most` so
    many. Rank 0 is the likeliest; rank n the likeliest that begins with another id than those of
    all lower ranks."""

    sequence: Sequence
    most: int
    rank: int = 0


class Drafting(Protocol):
    """A drafter at work for one engine."""

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        """Return the ids that may follow the sequence, for each that is asked for."""

    def restart(self) -> None:
        """Drop everything that it held for sequences; it is made again from the ids."""

    def held(self) -> int:
        """Return how many cache rows it holds."""


class Drafter(Protocol):
    """A frozen value that guesses how sequences go on; equal ones work together."""

    @property
    def tokens(self) -> int:
        """The number of ids in a draft, at first or at most."""

    @property
    def schedule(self) -> Schedule:
        """The way in which that number changes."""

    @property
    def alternatives(self) -> int:
        """The number of further drafts of a sequence, verified beside the first, at most."""

    def start(self, vocabulary: int) -> Drafting:
        """Start a drafter for an engine with so many ids, with storage of its own if it needs some.

        Raise RequestError if it cannot draft for them.
        """
