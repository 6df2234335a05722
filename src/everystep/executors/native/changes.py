"""Adapters as the library reads them: what their changes add, scale and turn, panel by panel.

A copy belongs to a network and to one `Adapter`, whose values never change; it lives as long as
both. So one that has learned since is another copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from everystep.adapters import (
    AFTER,
    Adapter,
    AdapterChange,
    AdapterUse,
    AfterLayer,
    Delta,
    Dense,
    InputChange,
    InputScaling,
    Kronecker,
    Magnitude,
    OutputScaling,
    Rotation,
    Shift,
    ordered,
    uses_of,
)
from everystep.errors import InvariantError
from everystep.executors.native.library import (
    AdapterMatrices,
    ChangesOfLayer,
    ChangesOfMap,
    ChangeWeights,
    FoldsOfRead,
    FoldWeights,
    LinearMapC,
    Matrix,
    StackWeights,
    StepWork,
    TurnedMap,
    TurnedPanels,
    TurnsOfRead,
    TurnWeights,
)
from everystep.executors.native.packing import Packing
from everystep.models.decoder import Decoder
from everystep.nn.network import Network
from everystep.nn.panels import PANEL, SIXTEEN_BITS
from everystep.types import Work

_READS = ("qkv", "out", "up", "down")  # as `cpp/model.h` counts what is read
_MAPS = ("qkv", "out", "gate", "up", "down")  # and the maps


NATIVE_CHANGES = frozenset(
    one.needs for one in (InputScaling, Kronecker, Rotation) if one.needs is not None
)
"""What changes need that the library makes beside what every executor can."""


class _Affine(NamedTuple):
    """A change of rows from `start` on: (1 + w gain) y + w scale (up x + shift) with a weight w.

    `down`: (rank, in), where x is what it makes of what is read; None: x is what is read.
    """

    start: int
    rows: int
    down: Tensor | None = None
    up: Tensor | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None
    scale: float = 1.0


def _affine(change: AdapterChange, bias: Tensor | None) -> _Affine:
    """Write a change of rows whose map has this bias (rows,) in that form."""
    at = change.start, change.rows
    if isinstance(change, Delta):
        a, b = (change.a, change.b) if len(change.a) else (None, None)  # no rank is left of it
        return _Affine(*at, a, b, shift=change.shift, scale=change.scale)
    if isinstance(change, Dense):
        return _Affine(*at, up=change.matrix)
    if isinstance(change, OutputScaling):
        return _Affine(*at, gain=change.factors - 1)
    if isinstance(change, Magnitude):
        delta, gain = change.delta, change.gains - 1
        by = change.gains * delta.scale
        shift = torch.zeros_like(gain) if delta.shift is None else by * delta.shift
        if bias is not None:
            shift = shift - gain * bias  # the bias keeps its length
        return _Affine(*at, delta.a, by[:, None] * delta.b, gain, shift)
    if isinstance(change, AfterLayer | Shift):
        return _Affine(*at, shift=change.vector)
    raise InvariantError(f"the kernels know no {type(change).__name__}")


@dataclass(frozen=True, slots=True, eq=False)
class _Map:
    """A linear map of a layer: rows `begin` to `end` of its projection's, and where the panels have
    them: `places`: (rows,) 16 times the panel plus the lane."""

    begin: int
    end: int
    places: Tensor

    @staticmethod
    def of(linear: LinearMapC, begin: int = 0) -> _Map:
        """Return the map whose rows begin there among those of its projection."""
        sizes = [part.rows for part in linear.parts[: linear.count]]
        whole, places = 0, [torch.empty(0, dtype=torch.int64)]
        for size in sizes:
            places.append(whole + torch.arange(size))
            whole += -(-size // PANEL) * PANEL
        return _Map(begin, begin + sum(sizes), torch.cat(places))

    def stretch(self, start: int, rows: int) -> _Stretch | None:
        """Return where rows of the projection lie in this map; None where they lie in another."""
        first, stop = max(start, self.begin), min(start + rows, self.end)
        if first >= stop:
            return None
        places = self.places[first - self.begin : stop - self.begin]
        panel = int(places[0]) // PANEL
        panels = int(places[-1]) // PANEL + 1 - panel
        return _Stretch(slice(first - start, stop - start), panel, panels, places - panel * PANEL)

    def change(self, packing: Packing, own: _Affine, first: int) -> ChangeWeights | None:
        """Pack the part of a change that changes this map; None where it changes another.

        `first`: where what it reads begins in what is made of the map's input.
        """
        at = self.stretch(own.start, own.rows)
        if at is None:
            return None
        return ChangeWeights(
            panel=at.panel,
            panels=at.panels,
            first=-1 if own.down is None else first,
            stretch=own.start,
            up=Matrix() if own.up is None else packing.matrix(_narrow(at.padded(own.up))),
            gain=packing.floats(None if own.gain is None else at.padded(own.gain)),
            shift=packing.floats(None if own.shift is None else at.padded(own.shift)),
            scale=own.scale,
        )


class _Stretch(NamedTuple):
    """Rows `cut` of a change in panels of a map, from `panel` on; `places`: (rows,) in these."""

    cut: slice
    panel: int
    panels: int
    places: Tensor

    def padded(self, rows: Tensor) -> Tensor:
        """Return rows of a change where they lie in the panels, with zeros elsewhere."""
        found = rows.new_zeros(self.panels * PANEL, *rows.shape[1:])
        found[self.places] = rows[self.cut]
        return found


def _narrow(values: Tensor) -> Tensor:
    """Return the values in 16 bits where these hold each of them, and in 32 otherwise: half is read
    in half the time."""
    wide = values.float()
    for dtype in SIXTEEN_BITS:
        narrow = wide.to(dtype)
        if torch.equal(narrow.float(), wide):
            return narrow
    return wide


class PackedAdapter:
    """An adapter in panels; `structure` is what the library reads."""

    def __init__(self, adapter: Adapter, network: Network, stack: StackWeights) -> None:
        self._packing = Packing()
        count = stack.layers
        layers = (ChangesOfLayer * count)()
        most, most_down, turns = 0, 0, 0
        for index in range(count):
            for place, read in enumerate(_READS):
                changes = adapter.targets.get(f"layers.{index}.{read}", ())
                turned = [one for one in changes if isinstance(one, Rotation | InputScaling)]
                changes = tuple(
                    one for one in changes if not isinstance(one, Rotation | InputScaling)
                )
                if read == "down":  # what is added to it is added to what comes out of the layer
                    changes = (*changes, *adapter.targets.get(f"{AFTER}{index}", ()))
                if changes or turned:
                    bias = getattr(cast(Decoder, network).layers[index], read).bias
                    maps = _maps_of(stack.layer[index], read)
                    most = max(most, self._put(layers[index], place, changes, maps, bias))
                    ranks = layers[index].down[place].rows
                    most_down = max(most_down, -(-ranks // PANEL) * PANEL)
                    self._turn(layers[index], place, turned, maps)
                    turns = max(turns, len(turned))
        self._packing.alive.append(layers)
        self.structure = AdapterMatrices(count, most, most_down, turns, layers)

    def _put(
        self,
        layer: ChangesOfLayer,
        place: int,
        changes: Sequence[AdapterChange],
        maps: dict[str, _Map],
        bias: Tensor | None,
    ) -> int:
        """Pack the changes of what one projection gives; return how many values are made of what
        it reads."""
        affine = {
            number: _affine(one, _rows_of(bias, one))
            for number, one in enumerate(changes)
            if not isinstance(one, Kronecker)
        }
        downs = [one.down for one in affine.values() if one.down is not None]
        if downs:
            layer.down[place] = self._packing.matrix(_narrow(torch.cat(downs)))
        begin, behind = 0, -(-sum(map(len, downs)) // PANEL) * PANEL
        found: dict[str, list[ChangeWeights]] = {name: [] for name in maps}
        folds = []
        for number, change in enumerate(changes):
            if isinstance(change, Kronecker):
                fold, parts = self._fold(change, behind, maps)
                folds.append(fold)
                behind += fold.size
            else:
                own = affine[number]
                each = ((x, one.change(self._packing, own, begin)) for x, one in maps.items())
                parts = {name: one for name, one in each if one is not None}
                begin += 0 if own.down is None else len(own.down)
            for name, packed in parts.items():
                found[name].append(packed)
        for name, packed_all in found.items():
            layer.maps[_MAPS.index(name)] = ChangesOfMap(*self._each(ChangeWeights, packed_all))
        layer.folds[place] = FoldsOfRead(*self._each(FoldWeights, folds))
        return behind

    def _fold(
        self, change: Kronecker, first: int, maps: dict[str, _Map]
    ) -> tuple[FoldWeights, dict[str, ChangeWeights]]:
        """Pack a product of two small matrices whose outputs, panel by panel, come to lie from
        `first` on, and what adds them to each map."""
        size, places, parts = 0, torch.zeros(change.rows, dtype=torch.int64), {}
        for name, one in maps.items():
            at = one.stretch(change.start, change.rows)
            if at is not None:
                places[at.cut] = size + at.places
                given = {"panel": at.panel, "panels": at.panels, "first": first + size}
                parts[name] = ChangeWeights(**given, stretch=change.start, scale=1.0)
                size += at.panels * PANEL
        self._packing.alive.append(places)
        rows, columns = change.left.shape
        inner_rows, inner_columns = change.right.shape
        fold = FoldWeights(
            stretch=change.start,
            first=first,
            size=size,
            rows=rows,
            columns=columns,
            inner_rows=inner_rows,
            inner_columns=inner_columns,
            left=self._packing.floats(change.left),
            right=self._packing.floats(change.right.T),
            places=places.data_ptr(),
        )
        return fold, parts

    def _turn(
        self,
        layer: ChangesOfLayer,
        place: int,
        turned: Sequence[InputChange],
        maps: dict[str, _Map],
    ) -> None:
        """Pack the changes of what one projection reads."""
        turns, floats = [], self._packing.floats
        panels: dict[str, list[TurnedPanels]] = {name: [] for name in maps}
        for one in turned:
            if isinstance(one, Rotation):
                blocks, size, _ = one.turns.shape
                given = {"blocks": blocks, "size": size, "blocks_of_turns": floats(one.turns)}
                turns.append(TurnWeights(stretch=one.start, **given))
            elif isinstance(one, InputScaling):
                given = {"blocks": 1, "size": len(one.factors), "factors": floats(one.factors)}
                turns.append(TurnWeights(stretch=one.start, **given))
            else:
                raise InvariantError(f"the kernels know no {type(one).__name__}")
            for name, linear in maps.items():
                at = linear.stretch(one.start, one.rows)
                if at is not None:
                    lanes = floats(at.padded(torch.ones(one.rows)))
                    panels[name].append(TurnedPanels(at.panel, at.panels, one.start, lanes))
        layer.turns[place] = TurnsOfRead(*self._each(TurnWeights, turns))
        for name, found in panels.items():
            layer.turned[_MAPS.index(name)] = TurnedMap(*self._each(TurnedPanels, found))

    def _each(self, kind: Any, found: Sequence[Structure]) -> tuple[int, Any]:
        """Return the number of structures, and where they lie."""
        each = (kind * len(found))(*found)
        self._packing.alive.append(each)
        return len(found), each


def _rows_of(bias: Tensor | None, change: AdapterChange) -> Tensor | None:
    return None if bias is None else bias[change.start : change.start + change.rows]


def _maps_of(layer: object, read: str) -> dict[str, _Map]:
    """Return the maps that a projection is in a packed layer."""
    if read in ("qkv", "out"):
        return {read: _Map.of(getattr(layer, read))}
    dense = layer.dense  # type: ignore[attr-defined]
    if read == "down":
        return {read: _Map.of(dense.down)}
    gate = _Map.of(dense.gate)
    return {"gate": gate, "up": _Map.of(dense.up, gate.end)}


class PackedAdapters:
    """The packed copies of a network's adapters, each as long as somebody holds its adapter."""

    def __init__(self, network: Network, stack: StackWeights) -> None:
        self._own = network, stack
        self._packed: WeakKeyDictionary[Adapter, PackedAdapter] = WeakKeyDictionary()

    def of(self, adapter: Adapter) -> PackedAdapter:
        """Return the copy of an adapter, made when it is first asked for."""
        found = self._packed.get(adapter)
        if found is None:
            found = self._packed[adapter] = PackedAdapter(adapter, *self._own)
        return found


class AdaptersOfStep:
    """The adapters that the feeds of a step ask for; to be kept until nothing is computed of them,
    what is begun ahead included."""

    def __init__(self, work: Work, packed: PackedAdapters) -> None:
        self._asked = {
            feed: ordered(uses_of(extra))
            for feed, extra in sorted(work.extras.items())
            if extra.adapters
        }
        self._held: dict[PackedAdapter, int] = {}
        for use in self._each():
            self._held.setdefault(packed.of(use.adapter), len(self._held))
        counts = np.zeros(len(work.rows) + 1, np.int64)
        for feed, uses in self._asked.items():
            counts[feed + 1] = len(uses)
        self._begins = np.cumsum(counts)
        places = (self._held[packed.of(one.adapter)] for one in self._each())
        self._places = np.fromiter(places, np.int64)
        self._weights = np.fromiter((one.weight for one in self._each()), np.float32)
        self._structures = (AdapterMatrices * len(self._held))(
            *(one.structure for one in self._held)
        )

    def _each(self) -> Iterator[AdapterUse]:
        return (one for uses in self._asked.values() for one in uses)

    def write(self, step: StepWork) -> None:
        """Ask the step for them."""
        if not self._asked:
            step.adapters = 0
            step.use_begins = step.use_adapters = step.use_weights = None
            return
        step.adapters, step.adapter = len(self._held), self._structures
        step.use_begins = self._begins.ctypes.data
        step.use_adapters = self._places.ctypes.data
        step.use_weights = self._weights.ctypes.data
