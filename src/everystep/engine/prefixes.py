"""What prompts share is fed once: a group that begins forks the longest prefix that a row holds.

    running group   [ prompt          | tokens ]      a row of a group that is at work
    kept row        [ prompt          | tokens ]      of one that has ended: a holder of its own
    new group       [ the same ... | the rest  ]      forks up to where they differ, feeds the rest

A group that would find more in a row that an earlier one is just filling waits for it. Rows of
ended groups are kept within a budget of positions and in the room that running groups leave, and
the one that was of no use for longest goes first. Nothing here is state of a generation: kept rows
can be dropped at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.engine.ledger import Ledger
from everystep.nn.digests import digest_of
from everystep.types import Group, InputSpec, Past, Prompt, Request, Sequence, TokenTable

NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Reuse:
    """`kept`: how many positions the rows of ended groups may hold together. `least`: how many
    positions must be shared; fewer are fed faster than found, and no group waits for them."""

    kept: int = 0
    least: int = 16


NO_REUSE = Reuse(least=NO_LIMIT)
"""No row is of use to another group: for weights that may change between two steps."""


class Room(NamedTuple):
    """The space that running groups leave: cache rows, and positions in them.

    `counted`: of encoder states, those that running groups look at, by identity; their positions
    are counted there.
    """

    rows: int
    positions: int = NO_LIMIT
    counted: frozenset[int] = frozenset()


class Occupied:
    """The positions that rows hold. Those of encoder states count once, whoever looks at them."""

    def __init__(self, held: Iterable[tuple[int, Tensor | None]] = ()) -> None:
        self._own = 0
        self._read: dict[int, tuple[int, int]] = {}  # how many look at states, and their size
        for positions, encoder in held:
            self.add(positions, encoder)

    @property
    def read(self) -> frozenset[int]:
        """The encoder states that are looked at, by identity."""
        return frozenset(self._read)

    def add(self, positions: int, encoder: Tensor | None) -> None:
        """Count positions of a row, and the states that it looks at."""
        self._own += positions
        if encoder is not None:
            looks, size = self._read.get(id(encoder), (0, len(encoder)))
            self._read[id(encoder)] = looks + 1, size

    def remove(self, positions: int, encoder: Tensor | None) -> None:
        """Count no longer what was added."""
        self._own -= positions
        if encoder is not None:
            looks, size = self._read.pop(id(encoder))
            if looks > 1:
                self._read[id(encoder)] = looks - 1, size

    def count(self, without: frozenset[int] = frozenset()) -> int:
        """Return how many positions there are, without those of these states."""
        return self._own + sum(
            [size for one, (_, size) in self._read.items() if one not in without]
        )


class Key(NamedTuple):
    """Only rows with equal keys may hold the same: who shares, what the weights are, what the
    first positions are where a row began with a past, which is compared by identity, and what they
    look at beside an encoder.

    `resolved`: the numbers of what the names of adapters stand for. `changes`: how often the
    weights had been changed in place. `source`: a digest of the encoder states, None without any.
    """

    salt: str | None
    adapters: tuple[tuple[str, float], ...]
    resolved: tuple[int, ...]
    changes: int
    past: Past | None
    source: str | None = None


def key_of(request: Request) -> Key:
    """Return what a row must have in common with those of this request, but for encoder states."""
    numbers = tuple(one.number for one in request.resolved)
    return Key(request.salt, request.adapters, numbers, request.weight_changes, request.prompt.past)


@dataclass(slots=True, eq=False)
class Kept:
    """The holder of an ended group's row, which holds the positions of `content` (n, k), and looks
    at `encoder` states (S, E), if there are any. `used`: when it was last of use, in steps of a
    counter."""

    row: int
    key: Key
    content: np.ndarray
    used: int
    encoder: Tensor | None = None


class Prefixes:
    """Finds rows that hold a prefix, and keeps those of ended groups.

    `declared`: the inputs that prompts may give, by name. `cuts`: whether rows can be cut back to
    any length; where they cannot, a row is of use to those alone that continue all of it.
    """

    def __init__(
        self,
        reuse: Reuse,
        table: TokenTable,
        ledger: Ledger,
        declared: Mapping[str, InputSpec],
        *,
        cuts: bool,
    ) -> None:
        self.reuse = reuse
        self.kept: list[Kept] = []
        self._table, self._ledger = table, ledger
        self._declared, self._cuts = declared, cuts
        self._clock = 0
        self._digests: dict[int, tuple[Prompt, np.ndarray]] = {}
        self._sources: dict[int, tuple[Tensor, str]] = {}

    def join(self, group: Group, running: list[Group], room: Room) -> int | None:
        """Fork the longest prefix of a group without rows from another row, and count its
        positions; None if the group is to wait for an earlier one that is just feeding what they
        share.

        `room`: what is left when all running groups have the rows that they need.
        """
        lead, several = group.live[0], len(group.live) > 1
        if any(sequence.row is not None for sequence in group.live) or not _shares(group.request):
            return 0
        end = group.request.prompt.length if several else lead.length
        if end - 1 - lead.cached < self.reuse.least:
            return 0
        own, key = self._content(lead, end - 1), self._key(group.request)
        best, source, coming = lead.cached, None, 0
        for holder, held, more in self._holders(own, key, group, running):
            coming = max(coming, more)
            if held > best and held - lead.cached >= self.reuse.least:
                best, source = held, holder
        if coming - best >= self.reuse.least:
            return None
        if source is None:
            return 0
        self._take(lead, source, best, room)
        return best

    def _holders(
        self, own: np.ndarray, key: Key, group: Group, running: list[Group]
    ) -> Iterator[tuple[Sequence | Kept, int, int]]:
        """Holders of what begins like `own`, how much of it they hold and how much they will."""
        for other in running:
            request = other.request
            if other is group or not other.live or not _shares(request):
                continue
            if self._key(request) != key:
                continue
            holder = other.live[0]
            shared = _agreement(own, self._content(holder, holder.length))
            held = 0 if holder.row is None else self._usable(shared, holder.cached)
            yield holder, held, shared if self._cuts and other.rank < group.rank else 0
        for kept in self.kept:
            if kept.key == key:
                shared = _agreement(own, kept.content)
                yield kept, self._usable(shared, len(kept.content)), 0

    def _usable(self, shared: int, held: int) -> int:
        """Count the shared positions that can be forked from a row that holds so many."""
        if self._cuts:
            return min(shared, held)
        return held if held <= shared else 0

    def _take(self, lead: Sequence, source: Sequence | Kept, count: int, room: Room) -> None:
        """The sequence holds the first `count` positions of the source."""
        if isinstance(source, Kept):
            source.used = self._tick()
        self.shrink(room, spared=source)
        held = len(source.content) if isinstance(source, Kept) else source.cached
        if isinstance(source, Kept) and len(self.kept) > room.rows:
            # There is no room for both.
            self.kept.remove(source)
            row = source.row
        else:
            assert source.row is not None, "a holder has a row"
            row = self._ledger.fork(source.row)
        if count < held:
            self._ledger.truncate(row, count)
        lead.row, lead.cached = row, count

    # --- rows of ended groups ---------------------------------------------------------------------

    def keep(self, sequence: Sequence) -> None:
        """The row of a sequence that ends becomes that of a holder, if it may be of use."""
        row, request = sequence.row, sequence.request
        if row is None or not self.reuse.kept or not _shares(request):
            return
        known, encoder = self._content(sequence, sequence.cached), request.prompt.encoder
        size = len(known) + (0 if encoder is None else len(encoder))
        fits = self.reuse.least <= len(known) and size <= self.reuse.kept
        if not fits or not (self._cuts or len(known) == sequence.cached):
            return
        key = self._key(request)
        for one in [one for one in self.kept if one.key == key]:
            shared = _agreement(one.content, known)
            if self._usable(shared, len(one.content)) == len(known):
                one.used = self._tick()
                return
            if self._cuts and shared == len(one.content):
                self._drop(one)
        if len(known) < sequence.cached:
            self._ledger.truncate(row, len(known))
        self.kept.append(Kept(row, key, known.copy(), self._tick(), encoder))
        sequence.lose_row()
        self.shrink(Room(NO_LIMIT))

    def shrink(self, room: Room, spared: Sequence | Kept | None = None) -> None:
        """Drops kept rows, those unused for longest first, until they fit the room and the budget;
        the spared one stays."""
        if not self.kept:
            return
        held = self._occupied()
        for one in sorted(self.kept, key=lambda one: one.used):
            fits = len(self.kept) <= room.rows and held.count(room.counted) <= room.positions
            if fits and held.count() <= self.reuse.kept:
                return
            if one is not spared:
                held.remove(len(one.content), one.encoder)
                self._drop(one)

    def positions(self) -> int:
        """Count the positions that kept rows hold, those of encoder states among them."""
        return self._occupied().count()

    def _occupied(self) -> Occupied:
        return Occupied((len(one.content), one.encoder) for one in self.kept)

    def forget(self) -> None:
        """No row is kept; the ledger has lost them all."""
        self.kept.clear()

    def _drop(self, one: Kept) -> None:
        self.kept.remove(one)
        self._ledger.free(one.row)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _key(self, request: Request) -> Key:
        """Return what a row must have in common with those of this request."""
        key, states = key_of(request), request.prompt.encoder
        return key if states is None else key._replace(source=self._source(states))

    def _source(self, states: Tensor) -> str:
        """Return a digest of encoder states, which is worked out once for each tensor."""
        known = self._sources.get(id(states))
        if known is None:
            if len(self._sources) > 64:
                self._sources.clear()
            known = self._sources[id(states)] = (states, digest_of(states))
        return known[1]

    # --- what positions are made of ---------------------------------------------------------------

    def _content(self, sequence: Sequence, end: int) -> np.ndarray:
        """(n, k) int64: what determines the first n <= end positions of the sequence's row; equal
        where they hold the same. Where a prompt brings more than ids, tokens after it are left out,
        for what they are given follows from all of it."""
        request, prompt = sequence.request, sequence.request.prompt
        head = self._of_prompt(prompt)
        if prompt.brings or end <= prompt.length:
            return head[:end]
        first = request.prompt_visible
        own = self._table.data[sequence.line, first : first + end - prompt.length]
        return np.concatenate([head, own[:, None]])

    def _of_prompt(self, prompt: Prompt) -> np.ndarray:
        """(length, k): ids, and a digest of what else each position is given, if anything is."""
        if not prompt.brings:
            ids = np.empty(0, np.int64) if prompt.ids is None else prompt.ids
            return np.pad(ids, (prompt.length - len(ids), 0))[:, None]
        known = self._digests.get(id(prompt))
        if known is None or known[0] is not prompt:
            if len(self._digests) > 64:
                self._digests.clear()
            known = self._digests[id(prompt)] = (prompt, _digests(prompt, self._declared))
        return known[1]


def _shares(request: Request) -> bool:
    """Tell whether rows of the request may hold what others hold, and whether it needs nothing of
    positions that it does not feed."""
    prompt, wants = request.prompt, request.wants
    sees = wants.layers or wants.attentions or wants.prompt_logprobs is not None
    return (
        prompt.mask is None
        and not prompt.whole
        and not request.hooks
        and not (sees or request.strategy.reads.hidden)
    )


def _agreement(one: np.ndarray, other: np.ndarray) -> int:
    """Count the rows of (n, k) and (m, l) that are equal, from the first on."""
    if one.shape[1] != other.shape[1]:
        return 0
    count = min(len(one), len(other))
    differ = (one[:count] != other[:count]).any(axis=1).nonzero()[0]
    return int(differ[0]) if len(differ) else count


def _digests(prompt: Prompt, declared: Mapping[str, InputSpec]) -> np.ndarray:
    """(length, 3): the id of each position, or -1, and 128 bits of all that it is given beside."""
    length, header = prompt.length, []
    parts: list[np.ndarray] = []

    def add(name: str, values: Tensor, before: int = 0) -> None:
        plain = values.detach().cpu().contiguous()
        header.append((name, str(plain.dtype), tuple(plain.shape[1:])))
        rows = plain.view(torch.uint8).numpy().reshape(len(plain), -1)
        parts.append(np.pad(rows, ((before, 0), (0, 0))))

    if prompt.embeds is not None:
        add("embeds", prompt.embeds, prompt.before)
    if prompt.positions is not None:
        add("positions", prompt.positions[..., :length].movedim(-1, 0))
    if (inside := prompt.injected) is not None:
        places = torch.tensor(inside.positions)
        marks = torch.zeros(length, dtype=torch.bool).index_fill(0, places, True)
        add("marks", marks[:, None])
        for name, part in (("injected", inside.embeds), ("deepstack", inside.deepstack)):
            if part is not None:
                whole = part.new_zeros(length, *part.shape[1:])
                whole[places.to(part.device)] = part
                add(name, whole)
    for name, values in sorted(prompt.inputs.items()):
        whole = values if declared[name].per == "token" else values.expand(length, *values.shape)
        add(name, whole)
    begin, joined = blake2b(repr(header).encode(), digest_size=16), np.concatenate(parts, axis=1)
    found = np.full((length, 3), -1, dtype=np.int64)
    if prompt.ids is not None and prompt.embeds is None:
        found[length - len(prompt.ids) :, 0] = prompt.ids
    for place, row in enumerate(joined):
        digest = begin.copy()
        digest.update(row.tobytes())
        found[place, 1:] = np.frombuffer(digest.digest(), dtype=np.int64)
    return found
