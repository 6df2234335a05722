"""Runs works with the compiled kernels: everything of a step in one call, outside Python.

Rows are tables of pages. The result at a position depends on its row alone, bit for bit: not on
the rows beside it, not on how many tokens are fed at once, not on how pages are shared.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from ctypes import c_int64
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from everystep.cache.formats import CacheDtype
from everystep.cache.pasts import kv_of, past_of
from everystep.errors import InvariantError, RequestError, UnsupportedError, message
from everystep.executors.native import library
from everystep.executors.native.library import GivenEmbeds, RopeRows, StepWork, check
from everystep.executors.native.pages import PagedRows
from everystep.executors.native.program import (
    described_obstacles,
    model_obstacles,
    open_runner,
    program_of,
)
from everystep.executors.native.rope import RopeTable, Turned
from everystep.executors.positions import (
    declared_inputs,
    given_inputs,
    own_positions,
    position_ids,
)
from everystep.executors.process import leave_if_ending, out_of_memory, pause_torch_threads
from everystep.models import Model, refuse_copies
from everystep.types import Answer, InputSpec, Past, Scores, StepOutput, Work

_KV_TYPES: tuple[CacheDtype, ...] = ("float32", "float16", "int8")  # as `cpp/model.h` counts them


def obstacles(model: Model) -> list[str]:
    """Why the native executor cannot run this model on this machine; empty if it can."""
    return spec_obstacles(model.spec) or model_obstacles(model)


def spec_obstacles(spec: object) -> list[str]:
    """Why no model of this specification can be run on this machine; empty if some can."""
    reason = library.status().reason
    return [reason] if reason else described_obstacles(spec)


class NativeExecutor:
    """One engine's executor on a decoder; UnsupportedError where there are `obstacles`.

    As many threads work as torch was set to use when it was opened. `cache_dtype`: the type in
    which pages keep keys and values; None: float32. `ahead`: the other threads begin with what most
    likely comes next, while the caller looks at a step's results.
    """

    __reduce_ex__ = refuse_copies
    device = torch.device("cpu")
    host_threads: int | None = 1
    abilities = frozenset({"truncate", "cut", "embeds", "positions", "hidden", "past", "best"})

    def __init__(
        self, model: Model, cache_dtype: CacheDtype | None = None, *, ahead: bool = True
    ) -> None:
        reasons = obstacles(model)
        if reasons:
            raise UnsupportedError(message("the native executor cannot run this", got=reasons[0]))
        self.vocab_size: int = model.vocab_size
        self.rows = PagedRows()
        self._program = program_of(model)
        self.inputs: Mapping[str, InputSpec] = declared_inputs(model.network)
        self._library = library.load()
        kv_type = _KV_TYPES.index(cache_dtype or "float32")
        self._runner = open_runner(self._library, self._program, kv_type)
        self._threads = torch.get_num_threads()
        self._tables = [RopeTable(rope) for rope in self._program.ropes]
        self._asked = _StepNumbers(len(self._tables))
        self._nothing = torch.empty(0, self.vocab_size)
        self._ahead = ahead
        self._turned: list[Turned] = []
        self._turns: list[weakref.ref[_Turn]] = []
        self._cut_short = False

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want; logits are float32.

        After any error or interrupt the executor can be used, but what its rows hold is unknown.
        CapacityError where memory or threads do not suffice; RequestError where another run of it
        has not ended, in another thread or in the one that was interrupted by this call.
        """
        leave_if_ending()
        turn = self._enter()
        try:
            return self._run(work)
        except (MemoryError, RuntimeError) as error:
            if (shortage := out_of_memory(error)) is None:
                raise
            raise shortage from error
        finally:
            # An error that a caller holds keeps this frame alive.
            del turn

    def _enter(self) -> _Turn:
        """The right to run, for as long as it exists; so no interrupt can keep it from ending."""
        turn = _Turn()
        self._turns.append(weakref.ref(turn, self._turns.remove))
        if self._turns[0]() is not turn:
            raise RequestError(
                message(
                    "a step was asked for inside another step of the same executor",
                    do="Let one thread at a time read a stream",
                )
            )
        return turn

    def _run(self, work: Work) -> StepOutput:
        if self._cut_short:
            self._library.es_rest(self._runner)
            self.rows.recount()
        self._cut_short = True
        # Waiting threads of torch spin, on the cores that are needed now.
        pause_torch_threads()
        output = self._output(work)
        self._cut_short = False
        return output

    def _output(self, work: Work) -> StepOutput:
        axes = self._program.decoder.axes
        places = position_ids(work, axes) if own_positions(work) else None
        self._apply(work)
        room = self._room(work)
        hidden = self._hidden_room(work)
        if len(work.rows):
            self._step(work, room, places, hidden)
        else:
            self._library.es_rest(self._runner)
        best = room.best
        if best is not None and room.hidden is not None:
            best = _ended(best, work, partial(self._read_out, room.hidden))
        return StepOutput(room.logits, _answers(work, hidden), best, room.totals)

    def audit(self) -> dict[int, int]:
        """Row -> cached positions, for every row that is allocated."""
        return self.rows.lengths()

    def guesses(self) -> tuple[int, int]:
        """How many steps were begun before they were asked for, and how many of them were."""
        counts = (c_int64 * 2)()
        self._library.es_guesses(self._runner, counts)
        return counts[0], counts[1]

    def export(self, row: int) -> Past:
        """What the row holds, as a copy, once its verbs were applied."""
        length, shape = self.rows.length(row), self._program.structure
        kv = torch.empty(shape.layers, 2, shape.kv_heads, length, shape.head_dim)
        pages = self.rows.pages(row)
        self._library.es_export(self._runner, pages.ctypes.data, length, kv.data_ptr())
        return past_of(kv)

    # --- rows -------------------------------------------------------------------------------------

    def _apply(self, work: Work) -> None:
        for verb in work.verbs:
            if verb.kind == "allocate":
                self._allocate(verb.row, work)
            elif verb.kind == "fork":
                self.rows.fork(verb.row, verb.value)
            elif verb.kind == "truncate":
                self.rows.truncate(verb.row, verb.value)
            else:
                self.rows.free(verb.row)

    def _allocate(self, row: int, work: Work) -> None:
        self.rows.allocate(row)
        past = work.pasts.get(row)
        if past is not None and past.length:
            self.rows.extend(row, past.length)
            check(self._library.es_reserve(self._runner, self.rows.total))
            kv, pages = kv_of(past).float().contiguous(), self.rows.pages(row)
            self._library.es_import(self._runner, pages.ctypes.data, past.length, kv.data_ptr())

    def _grow(self, work: Work) -> np.ndarray | None:
        """Every fed row has its pages; returns the pages to copy, (2, n) int32, if any."""
        copied = []
        feeds = zip(work.rows.tolist(), work.starts.tolist(), work.counts.tolist(), strict=True)
        for row, start, count in feeds:
            if self.rows.length(row) != start:
                raise InvariantError(message(f"row {row} is fed at {start}", got=self.audit()))
            pair = self.rows.extend(row, count)
            if pair is not None:
                copied.append(pair)
        check(self._library.es_reserve(self._runner, self.rows.total))
        return np.array(copied, np.int32).T.copy() if copied else None

    def _hidden_room(self, work: Work) -> Tensor | None:
        """Where last hidden states go, if a feed wants them."""
        if not any(extra.hidden for extra in work.extras.values()):
            return None
        return torch.empty(len(work.tokens), self._program.structure.width)

    # --- the step ---------------------------------------------------------------------------------

    def _read_out(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(R, E) last hidden states -> (n, V) logits of the given rows, those of their step."""
        states = hidden[rows]
        logits = torch.empty(len(rows), self.vocab_size)
        given = states.data_ptr(), len(rows), logits.data_ptr()
        check(self._library.es_read_out(self._runner, *given))
        return logits

    def _room(self, work: Work) -> _Room:
        """Room for what is reported of the work's wanted positions."""
        wanted = work.logits.tolist()
        most = [0] * len(wanted) if work.best is None else work.best.tolist()
        whole = sum(count for count, best in zip(wanted, most, strict=True) if not best)
        logits = torch.empty(whole, self.vocab_size) if whole else self._nothing
        totals = torch.empty(whole) if whole and work.totals else None
        if whole == sum(wanted):
            return _Room(logits, totals)
        rows, most_best = sum(wanted) - whole, min(max(most), self.vocab_size)
        best = Scores(
            torch.empty(rows, most_best),
            torch.empty(rows, most_best, dtype=torch.int64),
            self.vocab_size,
            totals=torch.empty(rows) if work.totals else None,
        )
        return _Room(logits, totals, best, torch.empty(rows, self._program.structure.width))

    def _step(
        self, work: Work, room: _Room, places: np.ndarray | None, hidden: Tensor | None
    ) -> None:
        copied = self._grow(work)
        turned = [table.rows(work, places) for table in self._tables]
        embeds = [
            (start, values.float().contiguous()) for start, values in given_inputs(work, "embeds")
        ]
        step = self._asked.step(work, self.vocab_size)
        for place, rows in enumerate(turned):
            step.rope[place] = rows.structure
        step.embeds = len(embeds)
        step.embed = (GivenEmbeds * len(embeds))(
            *(GivenEmbeds(start, len(x), x.data_ptr()) for start, x in embeds)
        )
        self._asked.pages(self.rows.table)
        step.logits, step.totals = room.logits.data_ptr(), _address(room.totals)
        best = room.best
        step.most = 0 if best is None else best.values.shape[1]
        step.best_values = None if best is None else best.values.data_ptr()
        step.best_tokens = None if best is None else _address(best.tokens)
        step.best_totals = None if best is None else _address(best.totals)
        step.best_hidden = _address(room.hidden)
        step.hidden = _address(hidden)
        step.copies = 0 if copied is None else copied.shape[1]
        step.copy_from, step.copy_to = (None, None) if copied is None else map(_address, copied)
        step.ahead = self._ahead and all(map(self.rows.has_room, work.rows.tolist()))
        # What was begun ahead reads the tables of the step before, what it begins reads these.
        self._turned = [*self._turned, *turned]
        check(self._library.es_run(self._runner, step, self._threads))
        self._turned = turned


def _answers(work: Work, hidden: Tensor | None) -> dict[int, Answer]:
    """The hidden states (N, E) of the feeds that want them."""
    if hidden is None:
        return {}
    parts = hidden.split(work.counts.tolist())  # type: ignore[no-untyped-call]
    return {f: Answer(hidden=parts[f]) for f, extra in work.extras.items() if extra.hidden}


@dataclass(frozen=True, slots=True, eq=False)
class _Room:
    """Room for what is reported of a work's wanted positions: rows, their totals, and lists of the
    best with the last hidden states of their rows."""

    logits: Tensor
    totals: Tensor | None
    best: Scores | None = None
    hidden: Tensor | None = None


def _ended(best: Scores, work: Work, read: Callable[[Tensor], Tensor]) -> Scores:
    """Lists that were filled, each as long as its feed wants, with what the rest is below."""
    own = np.repeat(work.best, work.logits)  # type: ignore[arg-type]
    most, rest = best.values.shape[1], best.values[:, -1:]
    count = np.minimum(own[own > 0], most)
    if count.min() < most:
        last = torch.from_numpy(count)[:, None]
        rest, beyond = best.values.gather(1, last - 1), torch.arange(most) >= last
        best.values.masked_fill_(beyond, -math.inf)
        best.tokens.masked_fill_(beyond, 0)  # type: ignore[union-attr]
    return replace(best, rest=rest, read=read)


class _Turn:
    """The right to run an executor."""

    __slots__ = ("__weakref__",)


class _StepNumbers:
    """The structure that the library reads, made once; every step writes all of it.

    The numbers of all feeds lie one after another in one piece of memory. An array and its address
    are replaced together, so that no interrupt can part them.
    """

    def __init__(self, ropes: int) -> None:
        self._structure = StepWork(ropes=ropes, rope=(RopeRows * ropes)())
        self._numbers = _addressed(np.empty(256, np.int64))
        self._table = _addressed(np.empty((0, 0), np.int32))

    def step(self, work: Work, vocab_size: int) -> StepWork:
        """The structure with the numbers of the work's feeds."""
        step, best = self._structure, work.best
        best = np.zeros_like(work.rows) if best is None else np.minimum(best, vocab_size)
        fields = (work.tokens, work.rows, work.starts, work.counts, work.logits, best)
        tokens, feeds = len(work.tokens), len(work.rows)
        count = tokens + 5 * feeds
        if count > len(self._numbers[0]):
            self._numbers = _addressed(np.empty(2 * count, np.int64))
        numbers, first = self._numbers
        np.concatenate(fields, out=numbers[:count])
        step.tokens, step.feeds, step.ids = tokens, feeds, first
        after = range(first + 8 * tokens, first + 8 * count, 8 * feeds)
        step.rows, step.starts, step.counts, step.wanted, step.best = after
        return step

    def pages(self, table: np.ndarray) -> None:
        """The structure points to the pages of all rows."""
        if table is not self._table[0]:
            self._table = _addressed(table)
        self._structure.stride, self._structure.pages = table.shape[1], self._table[1]


def _addressed(array: np.ndarray) -> tuple[np.ndarray, int]:
    """An array, and where it lies."""
    return array, array.__array_interface__["data"][0]


def _address(array: np.ndarray | Tensor | None) -> int | None:
    """Where an array lies."""
    if array is None or isinstance(array, Tensor):
        return None if array is None else array.data_ptr()
    address: int = array.__array_interface__["data"][0]
    return address
