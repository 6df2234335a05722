"""Runs works on a module of another library, with rows in the cache objects that it makes.

Feeds that fit one rectangle go through the module in one forward: rows that begin, and rows that go
on by the same number of positions. Where the module cannot tell padding from positions, only rows
of one length share a rectangle.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everystep.bridge.answers import answer_of, early_of
from everystep.bridge.findings import Findings
from everystep.bridge.foreign import Foreign
from everystep.bridge.foreign_errors import FAILURES, attributed, is_its_own, named
from everystep.bridge.forward_arguments import Block, arguments, kind_of, step_of
from everystep.bridge.named_inputs import declared
from everystep.bridge.own_inputs import Carried, carries, require_new
from everystep.bridge.pasts import cache_of, past_of_row
from everystep.bridge.sheets import Place, Sheet, assembled, columns_across, emptied, keep_spare
from everystep.errors import ForeignModelError
from everystep.executors.process import in_process
from everystep.nn.modes import ordinary_mode
from everystep.types import Answer, InputSpec, Past, StepOutput, Work, adapter_ability
from everystep.types.given_tensors import flaw_of

_ROOM = 64


class ForeignExecutor:
    """One engine's executor on a module of another library.

    `own`: the module prepares its inputs in a way of its own, which is called for each row.
    """

    host_threads: int | None = None

    def __init__(self, foreign: Foreign, findings: Findings, *, own: bool = False) -> None:
        self._own = own
        self._foreign = foreign
        # What a module carries on cannot be taken back.
        bound = {"cuts": False, "ragged": False, "bare": False}
        self._findings = replace(findings, **bound) if own else findings
        self._forgets, self._opaque = findings.forgets, findings.opaque
        self._freed: list[Carried] = []
        self._shows_once = False
        self.vocab_size: int = findings.vocab_size
        self.device: torch.device = foreign.device
        named = () if foreign.encodes else declared(foreign)
        self.inputs: Mapping[str, InputSpec] = {one.name: one for one in named}
        self._places: dict[int, Place] = {}
        self._cut_short = False
        # Listed anew when a row begins: a walk through all modules takes longer than our own work.
        self._parts: tuple[nn.Module, ...] = ()
        self.abilities = self._able()

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids (n,) -> (n, E), on the device of the module."""
        with torch.no_grad():
            return self._foreign.embed(ids.to(self.device))

    def _able(self) -> frozenset[str]:
        foreign, findings = self._foreign, self._findings
        able = {"hidden", "layers"} if findings.several else set()
        able |= {"truncate"} if findings.cuts else set()
        able |= {"cut"} if findings.cuts and not self._forgets else set()
        able |= {"mask"} if findings.masks else set()
        able |= {"past"} if findings.exports else set()
        able |= {"encoder"} if foreign.encodes else set()
        able |= {"early"} if findings.several and foreign.head and not foreign.encodes else set()
        able |= self.inputs.keys()
        able |= {"positions"} if foreign.positions else set()
        if "inputs_embeds" in foreign.names and not foreign.encodes:
            able.add("embeds")
        if findings.several and foreign.weighs:
            able.add("attentions")
        if foreign.adapters:
            able.update({"adapters", *map(adapter_ability, foreign.adapters)})
        return frozenset(able)

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want.

        `logits` are float64 for a float64 model and float32 otherwise. Raise CapacityError where
        memory runs out. After any error or interrupt the executor can be used, but has no rows.
        """
        if not self._parts or any(verb[0] == "allocate" for verb in work.verbs):
            self._parts = self._foreign.parts()
        with in_process(), ordinary_mode(), self._foreign.at_rest(self._parts):
            if self._cut_short:
                self._drop(self._places.values())
                self._places = {}
            self._cut_short = True
            output = self._run(work)
        self._cut_short = False
        return output

    def audit(self) -> dict[int, int]:
        """Return how many positions are cached in every row that is allocated."""
        if self._cut_short:
            return {}
        return {row: place.length for row, place in self._places.items()}

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy."""
        with ordinary_mode(), torch.no_grad():
            return past_of_row(self._places[row])

    # --- rows -------------------------------------------------------------------------------------

    def _apply(self, work: Work) -> None:
        places = self._places
        for kind, row, value in work.verbs:
            if kind == "allocate":
                places[row] = self._begun(work, row)
            elif kind == "fork":
                places[row] = places[value].forked()
            elif kind == "truncate":
                places[row].length = value
            else:
                self._drop([places.pop(row)] if row in places else [])

    def _drop(self, places: Iterable[Place]) -> None:
        """Drop rows; remember those from which tokens were chosen."""
        rows = (place.carried for place in places if place.carried is not None)
        self._freed += [row for row in rows if row.chosen]

    def _begun(self, work: Work, row: int) -> Place:
        """Return the place of a new row, with what it holds from the start."""
        states, past = work.encoders.get(row), work.pasts.get(row)
        carried = Carried() if self._own else None
        if past is None:
            return Place(states=states, carried=carried)
        cache = cache_of(past, self._findings.cache, self.device)
        leads = np.zeros(1, dtype=np.int64)
        sheet = Sheet(cache, leads, past.length, self._seen(leads, past.length))
        if states is not None:
            sheet.encoded = self._encoded([states], columns_across(cache))
        return Place(sheet, 0, past.length, states, carried)

    def _sheet(self, places: list[Place]) -> Sheet:
        """Return a sheet with these places, in this order, and nothing after them."""
        first = places[0].on
        if self._opaque:
            shared = sum(one.sheet is first for one in self._places.values()) > 1
            return replace(first, cache=copy.deepcopy(first.cache)) if shared else first
        if len(places) == len(first.leads) and all(
            place.sheet is first
            and place.index == index
            and place.length + first.leads[index] == first.width
            for index, place in enumerate(places)
        ):
            own = {id(place) for place in places}
            others = self._forgets and any(
                one.sheet is first and id(one) not in own for one in self._places.values()
            )
            if not others:
                return first
        cache, width = assembled([place.source for place in places])
        leads = width - np.array([place.length for place in places], dtype=np.int64)
        made = Sheet(cache, leads, width, self._seen(leads, width))
        made.spare = max(place.sheet.spare for place in places if place.sheet is not None)
        if first.encoded is not None:
            if all(place.sheet is first for place in places):
                index = torch.tensor([place.index for place in places], device=self.device)
                made.encoded = (first.encoded[0][index], first.encoded[1][index])
            else:
                made.encoded = self._encoded([p.states for p in places], columns_across(cache))
        return made

    def _seen(self, leads: np.ndarray, width: int) -> Tensor:
        """Return (R, width and more) int64, 0 in the empty columns of each row."""
        seen = torch.ones(len(leads), width + _ROOM, dtype=torch.int64)
        for row in leads.nonzero()[0].tolist():
            seen[row, : leads[row]] = 0
        return seen.to(self.device)

    def _encoded(self, states: list[Tensor | None], width: int = 0) -> tuple[Tensor, Tensor]:
        """Return (R, S, E) encoder states and (R, S) which are real; S is at least `width`."""
        rows = [one for one in states if one is not None]
        width = max(width, *map(len, rows))
        real = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, own in enumerate(rows):
            real[row, : len(own)] = 1
        grown = [F.pad(own, (0, 0, 0, width - len(own))) for own in rows]
        return torch.stack(grown).to(self.device), real.to(self.device)

    # --- feeds ------------------------------------------------------------------------------------

    def _run(self, work: Work) -> StepOutput:
        self._apply(work)
        if not len(work.rows):
            return StepOutput(self._no_logits())
        found: dict[int, Tensor] = {}
        answers: dict[int, Answer] = {}
        together = self._together(work)
        for feeds in together:
            logits = self._forward(work, feeds, answers)
            wanted = work.logits[feeds]
            if len(together) == 1 and (wanted == wanted[0]).all():
                kept = logits[:, logits.shape[1] - wanted[0] :].flatten(0, 1)
                return StepOutput(_wide(kept), answers)
            for row, feed in enumerate(feeds):
                found[feed] = logits[row, logits.shape[1] - wanted[row] :]
        return StepOutput(_wide(torch.cat([found[feed] for feed in sorted(found)])), answers)

    def _together(self, work: Work) -> list[list[int]]:
        """Return the feeds, those together that share a forward."""
        groups: dict[Any, list[int]] = {}
        ragged, extras = self._findings.ragged, work.extras
        for feed, (row, count) in enumerate(zip(work.rows, work.counts, strict=True)):
            length = self._places[row].length
            alike = (length == 0) if ragged else length
            extra = extras.get(feed)
            apart = self._own or self._opaque
            alone = feed if apart or (extra is not None and extra.whole) else None
            states = self._places[row].states
            # Nothing hides the states that a longer source has beside a shorter one.
            read = None if self._foreign.source is None or states is None else len(states)
            key = (
                alone,
                alike,
                read,
                None if ragged and not length else count,
                kind_of(extra),
            )
            groups.setdefault(key, []).append(feed)
        return list(groups.values())

    def _forward(self, work: Work, feeds: list[int], answers: dict[int, Answer]) -> Tensor:
        """Return (R, n, V) logits of the last n positions of the feeds; n is the most wanted."""
        block = Block.of(work, feeds)
        places = [self._places[row] for row in work.rows[feeds].tolist()]
        if places[0].length and block.length > 1 and not self._findings.several:
            steps = [step_of(work, feeds, step) for step in range(block.length)]
            each = list(range(len(feeds)))
            return torch.cat([self._forward(step, each, {}) for step in steps], dim=1)
        sheet, given = self._prepared(block, places)
        output = self._called(block, places[0], sheet, given)
        sheet.cache = getattr(output, self._foreign.cache_name)
        sheet.width += block.length
        for index, (place, feed) in enumerate(zip(places, feeds, strict=True)):
            place.sheet, place.index = sheet, index
            place.length += int(work.counts[feed])
            if feed in work.extras:
                answers[feed] = answer_of(output, block, index, sheet)
                early, head = work.extras[feed].early, self._foreign.head
                if early and head is not None:
                    states = early_of(output, early, index, int(work.logits[feed]), head)
                    answers[feed] = replace(answers[feed], early=states)
        logits: Tensor = output.logits
        return logits

    def _called(self, block: Block, place: Place, sheet: Sheet, given: dict[str, Any]) -> Any:
        """Return what the module returns.

        Raise RequestError if it refuses what a prompt is given, ForeignModelError if it fails
        otherwise, or returns no logits of the block.
        """
        with attributed(self._foreign.base, block.described, block.extras[0].whole):
            if place.carried is not None:
                output = self._called_as_it_says(block, place, place.carried, sheet, given)
            else:
                output = self._foreign.call(given)
        rows, wanted = len(block.feeds), int(block.work.logits[list(block.feeds)].max())
        logits = getattr(output, "logits", None)
        got = flaw_of(logits)
        if isinstance(logits, Tensor) and got is None:
            fits = logits.dim() == 3 and logits.shape[::2] == (rows, self.vocab_size)
            if fits and logits.shape[1] >= wanted and logits.is_floating_point():
                return output
            got = f"{logits.dtype} of shape {tuple(logits.shape)}"
        raise ForeignModelError(
            f"{named(self._foreign.base)} returned logits that do not fit what it was fed",
            wanted=f"floats of shape ({rows}, {wanted} or more, {self.vocab_size})",
            got=got,
            do="Return the logits of every position that is fed",
        )

    def _prepared(self, block: Block, places: list[Place]) -> tuple[Sheet, dict[str, Any]]:
        """Return the sheet that a forward extends, and what the module is called with.

        Where rows begin, the sheet has no cache yet.
        """
        foreign, findings = self._foreign, self._findings
        spare = 0
        if findings.cuts and self._forgets:
            spare = max(0, int(block.work.logits[list(block.feeds)].max()) - 1)
        if places[0].length:
            sheet = self._sheet(places)
        else:
            cache = emptied(findings.cache) if spare else None
            sheet = Sheet(cache, block.empty, 0, self._seen(block.empty, block.length))
            if foreign.encodes:
                sheet.encoded = self._encoded([place.states for place in places])
        keep_spare(sheet, spare)
        return sheet, arguments(block, sheet, foreign, findings)

    def _called_as_it_says(
        self, block: Block, place: Place, carried: Carried, sheet: Sheet, given: dict[str, Any]
    ) -> Any:
        """Return what the module returns for a row whose inputs it prepares itself."""
        cache = emptied(self._findings.cache) if sheet.cache is None else sheet.cache
        if whole := block.extras[0].whole:
            carried.shown, carried.told_again = frozenset(whole), False
        elif self._shows_once:
            carried.forget_shown()
        elif carried.shown and not carried.told_again:
            return self._called_first_after_prompt(block, place, carried, cache, given)
        return self._prepared_by_itself(block, place, carried, cache, given)

    def _called_first_after_prompt(
        self, block: Block, place: Place, carried: Carried, cache: Any, given: dict[str, Any]
    ) -> Any:
        """Return the same for the first forward after a prompt that was given something as a whole.

        transformers hands that to every forward. Where this one fails with it, it goes to the
        prompt's alone.
        """
        before, untouched = carried.copied(), copy.deepcopy(cache)
        try:
            output = self._prepared_by_itself(block, place, carried, cache, given)
        except FAILURES as error:
            if not is_its_own(error):
                raise
            self._tell_of_shown(carried.shown, error)
            place.carried, self._shows_once = before, True
            before.forget_shown()
            return self._prepared_by_itself(block, place, before, untouched, given)
        carried.told_again = True
        return output

    def _prepared_by_itself(
        self, block: Block, place: Place, carried: Carried, cache: Any, given: dict[str, Any]
    ) -> Any:
        foreign = self._foreign
        prepared, told = carried.prepared(foreign, given, cache, place.length)
        if not place.length and carries(foreign.base):
            require_new(carried, self._freed)
        output = foreign.forward(prepared)
        carried.update(foreign, output, told, chooses=bool(block.work.logits[block.feeds[0]]))
        return output

    def _tell_of_shown(self, names: Iterable[str], error: Exception) -> None:
        """Warn of inputs that the module cannot be given again."""
        whose, listed = named(self._foreign.base), ", ".join(sorted(names))
        warnings.warn(
            f"{whose} fails if it gets {listed} after the prompt ({error}), though its own "
            "prepare_inputs_for_generation hands that to every forward; it is given to the "
            "prompt's alone. Return it there only while nothing is cached",
            stacklevel=2,
        )

    def _no_logits(self) -> Tensor:
        wide = self._foreign.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return torch.empty(0, self.vocab_size, dtype=dtype, device=self.device)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype.itemsize >= 4 else logits.float()
