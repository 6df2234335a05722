"""Runs works with the compiled kernels: everything of a step in one call, outside Python.

Rows are tables of pages. The result at a position depends on its row alone, bit for bit: not on
the rows beside it, not on how many tokens are fed at once, not on how pages are shared.
"""

from __future__ import annotations

import weakref
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass
from operator import add

import numpy as np
import torch
from torch import Tensor

from everystep.cache.formats import CacheDtype
from everystep.cache.pasts import kv_of, past_of
from everystep.errors import InvariantError, UnsupportedError, message
from everystep.executors.native import library
from everystep.executors.native.library import GivenEmbeds, RopeRows, StepWork
from everystep.executors.native.pages import PagedRows
from everystep.executors.native.program import described_obstacles, model_obstacles, program_of
from everystep.executors.positions import check_positions, row_lengths, row_positions
from everystep.models import Model
from everystep.nn.rotary import Rope, rotary_table
from everystep.types import Best, Past, StepOutput, Work

_LEAST_TABLE = 512
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

    As many threads work as torch was set to use when it was opened. Those of torch wait for more
    work by spinning, which would take their cores from these: so around a run torch uses one.
    `cache_dtype`: the type in which pages keep keys and values; None: float32. `ahead`: the other
    threads begin with what most likely comes next, while the caller looks at a step's results.
    """

    device = torch.device("cpu")
    max_rows: int | None = None
    host_threads: int | None = 1
    abilities = frozenset({"truncate", "embeds", "positions", "columns", "past", "best"})

    def __init__(
        self, model: Model, cache_dtype: CacheDtype | None = None, *, ahead: bool = True
    ) -> None:
        reasons = obstacles(model)
        if reasons:
            raise UnsupportedError(message("the native executor cannot run this", got=reasons[0]))
        self.vocab_size: int = model.vocab_size
        self.rows = PagedRows()
        self._program = program_of(model)
        self._library = library.load()
        kv_type, runner = _KV_TYPES.index(cache_dtype or "float32"), c_void_p()
        _check(self._library.es_open(self._program.structure, kv_type, byref(runner)))
        self._runner = runner.value
        weakref.finalize(self, self._library.es_close, self._runner)
        self._columns: dict[int, Tensor] = {}
        self._threads = torch.get_num_threads()
        self._tables = [_RopeTable(rope) for rope in self._program.ropes]
        self._asked = _Asked(len(self._tables))
        self._nothing = torch.empty(0, self.vocab_size)
        self._ahead = ahead
        self._turned: list[_Turned] = []

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want; logits are float32."""
        check_positions(work)
        self._apply(work)
        told = self._told(work)
        if len(work.rows):
            hidden = self._hidden_room(work)
            self._step(work, told, hidden)
            self._extend_columns(work, hidden)
        else:
            self._library.es_rest(self._runner)
        return StepOutput(
            told.logits, columns=dict(self._columns), best=told.best, totals=told.totals
        )

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
                if verb.value in self._columns:
                    self._columns[verb.row] = self._columns[verb.value]
            elif verb.kind == "truncate":
                self.rows.truncate(verb.row, verb.value)
                if verb.row in self._columns:
                    self._columns[verb.row] = self._columns[verb.row][: verb.value]
            else:
                self.rows.free(verb.row)
                self._columns.pop(verb.row, None)

    def _allocate(self, row: int, work: Work) -> None:
        self.rows.allocate(row)
        if row in work.columns:
            self._columns[row] = torch.empty(0, self._program.structure.width)
        past = work.pasts.get(row)
        if past is not None and past.length:
            self.rows.extend(row, past.length)
            _check(self._library.es_reserve(self._runner, self.rows.total))
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
        _check(self._library.es_reserve(self._runner, self.rows.total))
        return np.array(copied, np.int32).T.copy() if copied else None

    def _hidden_room(self, work: Work) -> Tensor | None:
        """Where last hidden states go, if a row of this work keeps them."""
        if not self._columns or self._columns.keys().isdisjoint(work.rows.tolist()):
            return None
        return torch.empty(len(work.tokens), self._program.structure.width)

    def _extend_columns(self, work: Work, hidden: Tensor | None) -> None:
        if hidden is None:
            return
        ends = np.cumsum(work.counts).tolist()
        for row, end, count in zip(work.rows.tolist(), ends, work.counts.tolist(), strict=True):
            if row in self._columns:
                # A new tensor: forks of the row go on with the old one.
                own = hidden[end - count : end]
                self._columns[row] = torch.cat([self._columns[row], own])

    # --- the step ---------------------------------------------------------------------------------

    def _told(self, work: Work) -> _Told:
        """Room for what the work is told of its wanted positions."""
        wanted = work.logits.tolist()
        most = [0] * len(wanted) if work.best is None else work.best.tolist()
        whole = sum(count for count, best in zip(wanted, most, strict=True) if not best)
        logits = torch.empty(whole, self.vocab_size) if whole else self._nothing
        totals = torch.empty(whole) if whole and work.totals else None
        if whole == sum(wanted):
            return _Told(logits, totals)
        shape = (sum(wanted) - whole, min(max(most), self.vocab_size))
        sums = np.empty(shape[0], np.float32) if work.totals else None
        return _Told(
            logits, totals, Best(np.empty(shape, np.float32), np.empty(shape, np.int64), sums)
        )

    def _step(self, work: Work, told: _Told, hidden: Tensor | None) -> None:
        copied = self._grow(work)
        turned = [table.rows(work) for table in self._tables]
        embeds = [values.float().contiguous() for _, values in work.embeds]
        step = self._asked.step(work, self.vocab_size)
        for place, rows in enumerate(turned):
            step.rope[place] = rows.structure
        given = zip(work.embeds, embeds, strict=True)
        step.embeds = len(embeds)
        step.embed = (GivenEmbeds * len(embeds))(
            *(GivenEmbeds(at, len(x), x.data_ptr()) for (at, _), x in given)
        )
        self._asked.pages(self.rows.table)
        step.logits, step.totals = told.logits.data_ptr(), _address(told.totals)
        best = told.best
        step.most = 0 if best is None else best.values.shape[1]
        step.best_values = None if best is None else _address(best.values)
        step.best_tokens = None if best is None else _address(best.tokens)
        step.best_totals = None if best is None else _address(best.totals)
        step.hidden = _address(hidden)
        step.copies = 0 if copied is None else copied.shape[1]
        step.copy_from, step.copy_to = (None, None) if copied is None else map(_address, copied)
        step.ahead = self._ahead and all(map(self.rows.has_room, work.rows.tolist()))
        _check(self._library.es_run(self._runner, step, self._threads))
        # Until now the step that was begun before may have read the tables of the last one.
        self._turned = turned


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """Room for what a work is told of its wanted positions."""

    logits: Tensor
    totals: Tensor | None
    best: Best | None = None


class _Asked:
    """The structure that the library reads, made once; a step writes what is new in it.

    The numbers of all feeds lie one after another in one piece of memory, whose address is known.
    """

    def __init__(self, ropes: int) -> None:
        self._structure = StepWork(ropes=ropes, rope=(RopeRows * ropes)())
        self._table: np.ndarray | None = None
        self._make_room(256)

    def step(self, work: Work, vocab_size: int) -> StepWork:
        """The structure with the numbers of the work's feeds."""
        step, best = self._structure, work.best
        best = np.zeros_like(work.rows) if best is None else np.minimum(best, vocab_size)
        fields = (work.tokens, work.rows, work.starts, work.counts, work.logits, best)
        tokens, feeds = len(work.tokens), len(work.rows)
        if tokens + 5 * feeds > len(self._numbers):
            self._make_room(2 * (tokens + 5 * feeds))
        np.concatenate(fields, out=self._numbers[: tokens + 5 * feeds])
        step.tokens, step.feeds, step.ids = tokens, feeds, self._first
        behind = range(self._first + 8 * tokens, self._first + 8 * (tokens + 5 * feeds), 8 * feeds)
        step.rows, step.starts, step.counts, step.wanted, step.best = behind
        return step

    def pages(self, table: np.ndarray) -> None:
        """The structure points to the pages of all rows."""
        if table is not self._table:
            self._table, self._structure.stride = table, table.shape[1]
            self._structure.pages = _address(table)

    def _make_room(self, count: int) -> None:
        self._numbers = np.empty(count, np.int64)
        self._first = self._numbers.ctypes.data


def _address(array: np.ndarray | Tensor | None) -> int | None:
    """Where an array lies."""
    if array is None or isinstance(array, Tensor):
        return None if array is None else array.data_ptr()
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, slots=True, eq=False)
class _Turned:
    """The rows of a table that a work turns by; keeps alive what `structure` points to."""

    structure: RopeRows
    tables: tuple[Tensor, Tensor]
    rows: np.ndarray | None


class _RopeTable:
    """Cos and sin of one kind of rope, kept where they do not depend on a row's length."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._held = 0
        self._kept: _Turned | None = None

    def rows(self, work: Work) -> _Turned:
        """What each token of the work turns by."""
        own = work.positions
        if own is None and not self._rope.scaling.by_length:
            # And the position after, should the library go on by itself.
            return self._kept_for(1 + max(map(add, work.starts.tolist(), work.counts.tolist())))
        places = row_positions(work) if own is None else own.flatten().cpu().numpy()
        if self._rope.scaling.by_length:
            lengths = torch.from_numpy(np.repeat(row_lengths(work), work.counts))
            tables = self._table(torch.from_numpy(places), lengths)
            return self._turned(tables, np.arange(len(places), dtype=np.int32))
        return self._turned(self._kept_for(int(places.max()) + 1).tables, places.astype(np.int32))

    def _kept_for(self, length: int) -> _Turned:
        """The table of at least so many positions, for tokens that turn by their own."""
        if self._kept is None or self._held < length:
            self._held = max(_LEAST_TABLE, 2 * length)
            self._kept = self._turned(self._table(torch.arange(self._held), None), None)
        return self._kept

    def _turned(self, tables: tuple[Tensor, Tensor], rows: np.ndarray | None) -> _Turned:
        cos, sin = tables
        at = None if rows is None else rows.ctypes.data
        structure = RopeRows(cos.data_ptr(), sin.data_ptr(), at, self._rope.dim)
        return _Turned(structure, tables, rows)

    def _table(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """(N, dim) each."""
        table = rotary_table(self._rope, positions, lengths, torch.float32)
        return table.cos[:, 0].contiguous(), table.sin[:, 0].contiguous()


def _check(failed: bool | int) -> None:
    if failed == 2:
        raise InvariantError(message("an id beyond the vocabulary was fed"))
    if failed == 3:
        raise InvariantError(message("matrices that are joined are not whole panels"))
    if failed:
        raise MemoryError("the native executor ran out of memory")
