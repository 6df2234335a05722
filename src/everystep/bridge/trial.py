"""Finds out what a module can do, by letting it read a few ids in several ways.

Only what gives the same numbers counts: rows padded on the left beside each row alone, positions
fed at once beside one after another, a row that was cut back beside one that was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.bridge.executor import ForeignExecutor
from everystep.bridge.findings import Findings
from everystep.bridge.foreign import Foreign, library
from everystep.bridge.foreign_errors import attributed
from everystep.bridge.sheets import is_kept, is_linear, layers_of
from everystep.errors import ModelClassError, UnsupportedError
from everystep.nn.modes import ordinary_mode
from everystep.types import Extra, Verb, Work

_LONG, _SHORT, _READ = 5, 3, 4
_CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3}
_CLOSE_HALF = 2e-2
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError, AttributeError)
_FOLLOWING = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies follow the length."""
Feed = tuple[int, int, int]
"""A row, and the first and the last place + 1 of what it is fed."""


def examine(foreign: Foreign) -> Findings:
    """Find out what the module can do; it is left as it was.

    Raise ModelClassError for a module without logits, UnsupportedError for one without a cache
    object.
    """
    ids = _plain_ids(foreign)
    with ordinary_mode(), foreign.at_rest(foreign.parts()):
        found: list[Findings] = []
        foreign.watch(lambda: found.append(_first(foreign, ids)))
        return _Trial(foreign, ids, found[0]).findings()


def _plain_ids(foreign: Foreign) -> np.ndarray:
    """Return (5,) ids that mean nothing to the module."""
    config = foreign.config
    marks = (
        config,
        getattr(config, "text_config", config),
        getattr(foreign.base, "generation_config", None),
    )
    special: set[object] = set()
    for one in marks:
        for name, value in vars(one).items() if one is not None else ():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list | tuple) else (value,))
    count = len(foreign.table)
    plain = [one for one in range(min(count, len(special) + 100)) if one not in special]
    return np.array((plain or [0])[-_LONG:] * _LONG, dtype=np.int64)[:_LONG]


def _first(foreign: Foreign, ids: np.ndarray) -> Findings:
    """Return the cache object that the module makes, and the width of its logits."""
    row = torch.from_numpy(ids)[None].to(foreign.device)
    given: dict[str, Any] = {"input_ids": row}
    if foreign.source is not None:
        given = {"encoder_outputs": (_states(foreign, ids)[None],)}
    if foreign.encodes:
        given["decoder_input_ids"] = row
    with attributed(foreign.base, lambda: f"{len(ids)} plain ids, to see what it can do", {}):
        output = foreign.call(given)
    logits, cache = getattr(output, "logits", None), getattr(output, foreign.cache_name, None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ModelClassError(
            "the model has no language head",
            wanted="logits (rows, positions, vocabulary)",
            got=type(output).__name__,
            do="Load it with an AutoModel class that has a head",
        )
    if tuple(logits.shape[:2]) != (1, len(ids)):
        raise ModelClassError(
            "the model gives logits of other positions than it was fed",
            wanted=f"(1, {len(ids)}, vocabulary) for one row of {len(ids)} ids",
            got=tuple(logits.shape),
            do="Return the logits of every position, or take logits_to_keep in forward",
        )
    if cache is None or (not hasattr(cache, "layers") and not hasattr(cache, "is_updated")):
        raise UnsupportedError(
            "the model keeps no cache object",
            wanted="one with layers, as transformers 5 makes them",
            got=type(cache).__name__,
            do="Call the model's own generate",
        )
    return Findings(cache, logits.shape[-1])


def _states(foreign: Foreign, ids: np.ndarray) -> Tensor:
    """Return (4, E) encoder states: those of ids, or any where something else is encoded."""
    if foreign.source is None:
        read = torch.from_numpy(ids[None, :_READ])
        states: Tensor = foreign.encode({"input_ids": read, "attention_mask": read.new_ones(1, 4)})[
            0
        ]
        return states[0]
    config = foreign.encoder.config
    width = getattr(config, "output_hidden_size", config.hidden_size)
    drawn = torch.randn(_READ, width, generator=torch.Generator().manual_seed(0))
    return drawn.to(foreign.device, foreign.dtype)


def _reads_lengths(config: Any) -> bool:
    """Return whether a configuration lets a row depend on how long the others are, beyond lengths
    that a trial would take long to reach: frequencies that follow the longest row, and positions
    that are chosen among so many columns, empty ones included."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "index_topk", None) is not None:
        return True
    waiting = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if one.get("rope_type", one.get("type")) in _FOLLOWING:
                return True
            waiting += one.values()
    return False


class _Trial:
    """Works on two rows, of 5 and of 3 ids, run in several ways."""

    def __init__(self, foreign: Foreign, ids: np.ndarray, base: Findings) -> None:
        self.foreign, self.base = foreign, base
        self.ids = {0: ids, 1: ids[-_SHORT:][::-1].copy()}
        self.states = _states(foreign, ids) if foreign.encodes else None

    def findings(self) -> Findings:
        """Return what holds."""
        alone = self._logits(self.base, [[(0, 0, 4)], [(1, 0, 2)], [(0, 4, 5)], [(1, 2, 3)]])
        several = self._same(alone[0], replace(self.base, several=True), [[(0, 0, 2)], [(0, 2, 4)]])
        found = replace(self.base, several=several)
        together = [[(0, 0, 4), (1, 0, 2)], [(0, 4, 5), (1, 2, 3)]]
        wanted = torch.cat([alone[2], alone[3]])
        mixes = not found.opaque and not _reads_lengths(self.foreign.config)
        ragged = mixes and self._same(wanted, replace(found, ragged=True), together)
        layers = layers_of(found.cache)
        if not found.opaque and all(is_kept(one) and not is_linear(one) for one in layers):
            cut = replace(found, cuts=True)
            works = [[(0, 0, 4)], [(0, 2, 4)]]
            found = replace(found, cuts=self._same(alone[0], cut, works))
        masks, bare = self._takes_masks(found, alone[2]), self._is_bare(found, alone)
        return replace(found, ragged=ragged, masks=masks, bare=bare)

    def _is_bare(self, found: Findings, alone: list[Tensor]) -> bool:
        """Return whether a class of transformers gives the same bits without a mask that hides
        nothing.

        What a class of the caller's makes of a mask is not for a few ids to tell.
        """
        if library(self.foreign.base) != "transformers":
            return False
        works = [[(0, 0, 4)], [(0, 4, 5)]]
        try:
            bare = self._logits(replace(found, bare=True), works)
        except _REFUSALS:
            return False
        return torch.equal(bare[0], alone[0]) and torch.equal(bare[1], alone[2])

    def _takes_masks(self, found: Findings, wanted: Tensor) -> bool:
        """Return whether masks are read: one that hides nothing changes nothing; another hides."""
        if self.foreign.encodes or found.forgets:
            return False
        open_mask = torch.ones(1, _LONG, _LONG, dtype=torch.bool).tril()
        hole = open_mask.clone()
        hole[:, 2:, 0] = False
        works = [[(0, 0, _LONG)]]
        same = self._same(wanted, found, works, Extra(mask=open_mask))
        return same and not self._same(wanted, found, works, Extra(mask=hole))

    def _same(
        self,
        wanted: Tensor,
        findings: Findings,
        works: list[list[Feed]],
        extra: Extra | None = None,
    ) -> bool:
        """Return whether the last of the works gives these logits."""
        try:
            got = self._logits(findings, works, extra)[-1]
        except _REFUSALS:
            return False
        near = _CLOSE.get(self.foreign.dtype, _CLOSE_HALF) * float(wanted.abs().max())
        return got.shape == wanted.shape and bool((got - wanted).abs().max() <= near)

    def _logits(
        self, findings: Findings, works: list[list[Feed]], extra: Extra | None = None
    ) -> list[Tensor]:
        """Return what an executor with these findings answers to each work."""
        executor = ForeignExecutor(self.foreign, findings)
        found, held = [], dict[int, int]()
        for feeds in works:
            verbs = [Verb("allocate", row) for row, *_ in feeds if row not in held]
            verbs += [Verb("truncate", row, a) for row, a, _ in feeds if held.get(row, a) > a]
            held |= {row: b for row, _, b in feeds}
            work = self._work(verbs, feeds, extra)
            last = torch.from_numpy(work.counts.cumsum() - 1)
            found.append(executor.run(work).logits.cpu()[last])
        return found

    def _work(self, verbs: list[Verb], feeds: list[Feed], extra: Extra | None) -> Work:
        rows, starts, stops = (np.array(one, dtype=np.int64) for one in zip(*feeds, strict=True))
        tokens = np.concatenate([self.ids[row][a:b] for row, a, b in feeds])
        counts = stops - starts
        extras = {} if extra is None else {0: extra}
        states = self.states
        encoders = (
            {} if states is None else {one.row: states for one in verbs if one.kind == "allocate"}
        )
        return Work(tuple(verbs), rows, starts, counts, counts, tokens, extras, encoders)
