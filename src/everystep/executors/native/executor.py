"""Runs works with the compiled kernels: everything of a step in one call, outside Python.

Rows are tables of pages. The result at a position depends on its row alone, bit for bit: not on
the rows beside it, not on how many tokens are fed at once, not on how pages are shared.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from ctypes import Array, c_int64
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from everystep.adapters import STEERED_LAYERS
from everystep.cache.formats import CacheDtype
from everystep.cache.pasts import with_across
from everystep.errors import RequestError, UnsupportedError
from everystep.executors.native import library
from everystep.executors.native.across import StatesOfRows
from everystep.executors.native.changes import NATIVE_CHANGES, AdaptersOfStep
from everystep.executors.native.library import GivenEmbeds, RopeRows, StepWork, check
from everystep.executors.native.program import obstacles, open_runner, program_of
from everystep.executors.native.rope import RopeTable
from everystep.executors.native.stores import KeyStore, Opened, StateStore, addressed, exported
from everystep.executors.native.wanted import WantedLayers
from everystep.executors.positions import (
    declared_inputs,
    given_inputs,
    own_positions,
    position_ids,
    require_places,
)
from everystep.executors.process import in_process, pause_torch_threads
from everystep.models import Model, embedded, refuse_copies
from everystep.models.decoder import Decoder
from everystep.nn.network import Network, holds_states
from everystep.types import MOST_BEST, InputSpec, Past, Scores, StepOutput, Work

_KV_TYPES: tuple[CacheDtype, ...] = ("float32", "float16", "int8")  # as `cpp/model.h` counts them


def abilities_of(network: Network) -> frozenset[str]:
    """Return what an executor on a network can do."""
    able = {"truncate", "embeds", "past", "best", "hidden", "layers"}
    if isinstance(network, Decoder):
        able |= {"adapters", *NATIVE_CHANGES}
        # What is added to the last map of a layer is added to what comes out of it.
        if all(one.down is not None and one.mlp_post_norm is None for one in network.layers):
            able.add(STEERED_LAYERS)
    if network.encodes:
        return frozenset(able | {"cut", "attentions", "encoder"})
    if holds_states(network.stores):
        return frozenset(able | {"early"})
    return frozenset(able | {"cut", "attentions", "positions", "early", "deepstack"})


class NativeExecutor:
    """One engine's executor on a network; UnsupportedError where there are `obstacles`.

    As many threads work as torch was set to use when it was opened. `cache_dtype`: the type in
    which pages keep keys and values; None: float32. `ahead`: the other threads begin with what most
    likely comes next, while the caller looks at a step's results.
    """

    __reduce_ex__ = refuse_copies
    device = torch.device("cpu")
    host_threads: int | None = 1

    def __init__(
        self, model: Model, cache_dtype: CacheDtype | None = None, *, ahead: bool = True
    ) -> None:
        reasons = obstacles(model)
        if reasons:
            what = "the native executor cannot run this"
            raise UnsupportedError(what, got=reasons[0])
        self.vocab_size: int = model.vocab_size
        self.abilities: frozenset[str] = abilities_of(model.network)
        self.across = StatesOfRows() if model.network.encodes else None
        self._program = program_of(model)
        self.inputs: Mapping[str, InputSpec] = declared_inputs(model.network)
        self._library = library.load()
        kv_type = _KV_TYPES.index(cache_dtype or "float32")
        self._runner = open_runner(self._library, self._program, kv_type)
        opened = Opened(self._library, self._runner, self._program.structure)
        self._store = (StateStore if holds_states(model.network.stores) else KeyStore)(opened)
        self.rows = self._store.rows
        self._threads = torch.get_num_threads()
        self._tables = [RopeTable(rope) for rope in self._program.ropes]
        ropes = (RopeRows * len(self._tables))()
        self._asked = StepWork(ropes=len(self._tables), rope=ropes)
        self._numbers = addressed(np.empty(256, np.int64))
        self._reserved = 0, 0
        self._nothing = torch.empty(0, self.vocab_size)
        self._ahead = ahead
        self._kept: list[object] = []  # what the last step was given, and what was begun reads
        self._turns: list[weakref.ref[_Turn]] = []
        self._cut_short = False

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want; logits are float32.

        After any error or interrupt the executor can be used, but what its rows hold is unknown.
        Raise CapacityError where memory or threads do not suffice, and RequestError where another
        run of it has not ended, in another thread or in the one that this call interrupted.
        """
        turn = self._enter()
        try:
            with in_process():
                return self._run(work)
        finally:
            # An error that a caller holds keeps this frame alive.
            del turn

    def _enter(self) -> _Turn:
        """Return the right to run, for as long as it exists; no interrupt keeps it from ending."""
        turn = _Turn()
        self._turns.append(weakref.ref(turn, self._turns.remove))
        if self._turns[0]() is not turn:
            raise RequestError(
                "a step was asked for inside another step of the same executor",
                do="Let one thread at a time read a stream",
            )
        return turn

    def _run(self, work: Work) -> StepOutput:
        if self._cut_short:
            self._library.es_rest(self._runner)
            self.rows.recount()
            if self.across is not None:
                self.across.forget()
        self._cut_short = True
        # Waiting threads of torch spin, on the cores that are needed now.
        pause_torch_threads()
        output = self._output(work)
        self._cut_short = False
        return output

    def _output(self, work: Work) -> StepOutput:
        given = own_positions(work)
        places = position_ids(work, self._program.network.axes) if given else None
        require_places(self._program.network, work)
        self._apply(work)
        if not len(work.rows):
            self._library.es_rest(self._runner)
            return StepOutput(self._nothing)
        most = [0] * len(work.rows) if work.best is None else work.best.tolist()
        room, listed = self._room(work, most)
        layers = None
        if any(map(WantedLayers.wanted_by, work.extras.values())):
            layers = WantedLayers(work, self._program.structure, self.across)
        self._step(work, room, listed, places, layers)
        best = room.best
        if best is not None and min(most) < max(most):
            room = replace(room, best=_ended(best, work))
        answers = {} if layers is None else layers.answers()
        return replace(room, answers=answers) if answers else room

    def audit(self) -> dict[int, int]:
        """Return how many positions are cached in every row that is allocated."""
        return self.rows.lengths()

    def guesses(self) -> tuple[int, int]:
        """Return how many steps were begun before they were asked for, and how many were wanted."""
        counts = (c_int64 * 2)()
        self._library.es_guesses(self._runner, counts)
        return counts[0], counts[1]

    def experts_read(self) -> int:
        """Return how many experts of all layers were read so far, what was begun ahead included."""
        return int(self._library.es_experts_read(self._runner))

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids (n,) -> (n, E)."""
        return embedded(self._program.network, ids)

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy, once its verbs were applied."""
        past = self._store.export(row)
        if self.across is None:
            return past
        opened, line = self._store.opened, self.across.line(row)
        return with_across(past, exported(opened, self.across.pages, line, across=True))

    # --- rows -------------------------------------------------------------------------------------

    def _apply(self, work: Work) -> None:
        for verb in work.verbs:
            if verb.kind == "allocate":
                self._allocate(verb.row, work)
            elif verb.kind == "fork":
                self.rows.fork(verb.row, verb.value)
                if self.across is not None:
                    self.across.fork(verb.row, verb.value)
            elif verb.kind == "truncate":
                self.rows.truncate(verb.row, verb.value)
            else:
                self.rows.free(verb.row)
                if self.across is not None:
                    self.across.free(verb.row)

    def _allocate(self, row: int, work: Work) -> None:
        self.rows.allocate(row)
        if row in work.encoders:
            self._look_at(row, work.encoders[row])
        past = work.pasts.get(row)
        if past is None or not past.length:
            return
        self._store.hold(row, past.length)
        self._reserve()
        self._store.fill(row, past)

    def _look_at(self, row: int, states: Tensor) -> None:
        """Let the row look at encoder states (S, E), if its model has layers that do."""
        pages = None if self.across is None else self.across.look_at(row, states)
        if pages is None:
            return
        self._reserve()
        held = states.detach().to("cpu", torch.float32).contiguous()
        given = held.data_ptr(), len(held), pages.ctypes.data, self._threads
        check(self._library.es_keep_states(self._runner, *given))

    def _reserve(self) -> None:
        """Reserve memory of the library for every page."""
        across = 0 if self.across is None else self.across.pages.pool.total
        wanted = self.rows.pool.total, across
        if self._reserved != wanted:
            check(self._library.es_reserve(self._runner, *wanted))
            self._reserved = wanted

    # --- the step ---------------------------------------------------------------------------------

    def _read_out(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Turn (R, E) last hidden states of a step into (n, V) logits of the given rows."""
        states = hidden[rows]
        logits = torch.empty(len(rows), self.vocab_size)
        given = states.data_ptr(), len(rows), logits.data_ptr()
        check(self._library.es_read_out(self._runner, *given))
        return logits

    def _room(self, work: Work, most: list[int]) -> tuple[StepOutput, Tensor | None]:
        """Make room for what is reported of the wanted positions.

        Return it, and room for the last hidden states (R, E) of those whose best are listed.
        `most`: how many each feed wants of them.
        """
        wanted = work.logits.tolist()
        whole = sum([count for count, best in zip(wanted, most, strict=True) if not best])
        logits = torch.empty(whole, self.vocab_size) if whole else self._nothing
        totals = torch.empty(whole) if whole and work.totals else None
        rows, listed = sum(wanted) - whole, min(max(most), self.vocab_size)
        if not rows:
            return StepOutput(logits, totals=totals), None
        hidden, values = torch.empty(rows, self._program.structure.width), torch.empty(rows, listed)
        best_rows = torch.empty(rows, self.vocab_size) if work.whole else None
        best = Scores(
            values,
            torch.empty(rows, listed, dtype=torch.int64),
            self.vocab_size,
            rest=torch.from_numpy(values.numpy()[:, -1:]),  # faster than a slice of torch's
            totals=torch.empty(rows) if work.totals else None,
            read=partial(self._read_out, hidden),
        )
        return StepOutput(logits, best=best, totals=totals, best_rows=best_rows), hidden

    def _step(
        self,
        work: Work,
        room: StepOutput,
        listed: Tensor | None,
        places: np.ndarray | None,
        layers: WantedLayers | None,
    ) -> None:
        step, best = self._asked, room.best
        held, longest = self._store.write(step, work)
        self._reserve()
        turned = [table.rows(work, places, longest) for table in self._tables]
        embeds, added = _floats_given(work, "embeds"), _floats_given(work, "deepstack")
        self._write_feeds(step, work)
        for place, rows in enumerate(turned):
            step.rope[place] = rows
        step.embeds, step.embed = len(embeds), _listed(embeds)
        step.deep, step.added = len(added), _listed(added)
        step.deep_layers = added[0][1].shape[1] if added else 0
        learned = None
        if places is not None and self._program.structure.positions:
            learned = addressed(places.reshape(-1, len(work.tokens))[0].astype(np.int32))
        step.positions = learned and learned[1]
        results = (room.logits, room.totals, listed, room.best_rows)
        step.logits, step.totals, step.best_hidden, step.best_logits = map(_address, results)
        step.early = step.early_rows = 0
        step.hidden = step.attentions = step.across_attentions = None
        if layers is not None:
            layers.write(step)
        lists = (None, None, None) if best is None else (best.values, best.tokens, best.totals)
        step.most = 0 if best is None else best.values.shape[1]
        step.best_values, step.best_tokens, step.best_totals = map(_address, lists)
        seen = self._write_across(step, work.rows.tolist())
        adapters = AdaptersOfStep(work, self._program.adapters)
        adapters.write(step)
        step.ahead = self._ahead
        # What was begun ahead reads what the step before was given, what it begins reads this.
        given = [*turned, adapters]
        self._kept = [*self._kept, *given]
        check(self._library.es_run(self._runner, step, self._threads))
        del seen, held  # they were kept for the step
        self._kept = given

    def _write_across(self, step: StepWork, rows: list[int]) -> object:
        """Write the encoder states of rows into the structure; return what it points to."""
        if self.across is None:
            return None
        lines, counts = map(addressed, self.across.seen_by(rows))
        step.across_rows, step.across_counts = lines[1], counts[1]
        table = self.across.pages.table
        step.across_pages, step.across_stride = addressed(table)[1], table.shape[1]
        return lines, counts

    def _write_feeds(self, step: StepWork, work: Work) -> None:
        """Write the numbers of all feeds into the structure, one after another in one array."""
        best = work.best
        if best is None:
            best = np.zeros_like(work.rows)
        elif self.vocab_size < MOST_BEST:
            best = np.minimum(best, self.vocab_size)
        tokens, feeds = len(work.tokens), len(work.rows)
        count = tokens + 5 * feeds
        if count > len(self._numbers[0]):
            self._numbers = addressed(np.empty(2 * count, np.int64))
        numbers, first = self._numbers
        fields = (work.tokens, work.rows, work.starts, work.counts, work.logits, best)
        np.concatenate(fields, out=numbers[:count])
        after = range(first + 8 * tokens, first + 8 * count, 8 * feeds)
        step.tokens, step.feeds, step.ids = tokens, feeds, first
        step.rows, step.starts, step.counts, step.wanted, step.best = after


def _ended(best: Scores, work: Work) -> Scores:
    """End each filled list where its feed wants it to end, and bound the rest."""
    own = np.repeat(work.best, work.logits)  # type: ignore[arg-type]
    last = torch.from_numpy(np.minimum(own[own > 0], best.values.shape[1]))[:, None]
    rest, beyond = best.values.gather(1, last - 1), torch.arange(best.values.shape[1]) >= last
    best.values.masked_fill_(beyond, -math.inf)
    best.tokens.masked_fill_(beyond, 0)  # type: ignore[union-attr]
    return replace(best, rest=rest)


def _floats_given(work: Work, name: str) -> list[tuple[int, Tensor]]:
    """Return where values of the named input begin, and the values as the library reads them."""
    return [(start, x.float().contiguous()) for start, x in given_inputs(work, name)]


def _listed(given: list[tuple[int, Tensor]]) -> Array[GivenEmbeds]:
    """Return the structures for these values, which must be kept until the step is done."""
    each = [GivenEmbeds(start, len(x), x.data_ptr()) for start, x in given]
    return (GivenEmbeds * len(each))(*each)


class _Turn:
    """The right to run an executor."""

    __slots__ = ("__weakref__",)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
