"""Runs works on torch operators, with keys and values in cache rows of its own.

A work becomes one forward of the network over all fed positions, packed; logits are computed only
where they are wanted. The executor chooses nothing and waits for the device nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from everystep.adapters import EVERY_CHANGE, EVERY_PART, adapted, uses_of
from everystep.cache.context import CacheContext
from everystep.cache.formats import CacheDtype, Quantization
from everystep.cache.plan import Plan, runs
from everystep.cache.rows import RowCache
from everystep.devices import on_device
from everystep.executors.captured import (
    Capture,
    CaptureCounts,
    CapturedSteps,
    ReadOut,
    can_be_captured,
    keep_when_gone,
    kept_steps,
)
from everystep.executors.positions import (
    declared_inputs,
    given_inputs,
    position_ids,
    require_places,
    row_lengths,
)
from everystep.executors.process import in_process
from everystep.executors.shortlists import best_of_all
from everystep.models import Model, embedded, refuse_copies
from everystep.models.decoder import Decoder
from everystep.nn.modes import inference_mode, outside_autocast
from everystep.nn.network import Full, Network, Placed, StepInputs, Window
from everystep.nn.split import Split
from everystep.types import Answer, Extra, InputSpec, Past, StepOutput, Work


class TorchExecutor:
    """One engine's executor on a model of this library.

    `quantization`: how rows keep what they hold, None for full precision, which is `cache_dtype`
    or, without it, the type of the model. `read_out`: for a part of a model, what turns hidden
    states after the last norm (n, E) into logits (n, V), whenever it is called. `capture`: makes
    what captures steps of one position per row on a device, to replay them; None: each step runs
    operator by operator. `captures`: how many were captured and replayed so far. `modes`: torch's,
    in which it computes.
    """

    __reduce_ex__ = refuse_copies
    host_threads: int | None = None

    def __init__(
        self,
        model: Model,
        quantization: Quantization | None = None,
        cache_dtype: CacheDtype | None = None,
        read_out: ReadOut | None = None,
        capture: Callable[[torch.device], Capture] | None = None,
        modes: Callable[[], AbstractContextManager[None]] = inference_mode,
    ) -> None:
        network = model.network
        self._network, self._modes = network, modes
        self._split = network.split if isinstance(network, Decoder) else None
        self._read_out = read_out
        self.vocab_size: int = network.spec.vocab_size
        self.device: torch.device = network.device
        self.inputs: Mapping[str, InputSpec] = declared_inputs(network)
        across = network.across if network.encodes else None
        layout = (network.own_stores, network.dtype, network.device, across)
        self._fresh_rows = partial(RowCache, *layout, quantization or cache_dtype)
        self.captures = CaptureCounts()
        self._captured: CapturedSteps | None = None
        self.cache = self._fresh_rows()
        if capture is not None and not self.cache.coded and can_be_captured(network):
            self._take_steps(model, capture, cache_dtype)
        self._cut_short = False
        self.abilities = self._able()

    def _take_steps(
        self,
        model: Model,
        capture: Callable[[torch.device], Capture],
        cache_dtype: CacheDtype | None,
    ) -> None:
        """Have steps captured: go on with what an earlier executor captured, if it left that."""
        made_by = capture, cache_dtype
        steps = kept_steps(model, made_by)
        if steps is None:
            network = cast(Decoder, self._network)
            read_out = partial(_whole_logits, network)
            steps = CapturedSteps(network, self.cache, capture(self.device), read_out)
        steps.counts = self.captures
        self._captured, self.cache = steps, steps.cache
        keep_when_gone(self, model, made_by, steps)

    def _begin_again(self) -> None:
        """Forget what a step that was cut short has left."""
        self.cache = self._fresh_rows()
        if self._captured is not None:
            self._captured = self._captured.on(self.cache)

    def _able(self) -> frozenset[str]:
        network = self._network
        able = {"early", "embeds", "hidden", "layers", "past", "truncate"}
        able.update(one.name for one in network.inputs)
        if not self.cache.forgets:
            able.add("cut")
        if self._split is not None:
            able.add("best")
        if isinstance(network, Decoder):
            able |= {"adapters", *EVERY_CHANGE, *EVERY_PART}
        # Models with an encoder have relative positions only, recurrent layers none at all.
        if any(isinstance(one, Full | Window) for layer in network.stores for one in layer):
            own = {"encoder"} if network.encodes else {"positions", "mask"}
            able.update({"attentions", *own})
        return frozenset(able)

    def follow(self, model: Model) -> None:
        """Go on with a model that differs from its own in the tensors of weights alone, where no
        steps are captured."""
        self._network = model.network

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want.

        `logits` are float64 for a float64 model and float32 otherwise. Raise CapacityError where
        memory runs out. After any error or interrupt the executor can be used, but has no rows.
        """
        with in_process(), self._modes(), outside_autocast():
            if self._cut_short:
                self._begin_again()
            self._cut_short = True
            if self._captured is not None:
                self._captured.in_order = False
            output = self._run(work)
        self._cut_short = False
        if self._captured is not None:
            self._captured.in_order = True
        return output

    def _run(self, work: Work) -> StepOutput:
        places = position_ids(work, self._network.axes)
        require_places(self._network, work)
        self.cache.apply(work)
        if not len(work.rows):
            return StepOutput(self._no_logits())
        if self._captured is not None:
            logits = self._captured.run(work, places)
            if logits is not None:
                return StepOutput(logits)
        context = CacheContext.of(self.cache, work)
        network = self._adapted(work, context.plan)
        inputs = self._inputs(work, network, torch.from_numpy(places), context.plan)
        hidden = network.forward(inputs, context)
        rows = _wanted(work, context.plan)
        answers = self._answers(work, network, context, hidden)
        if rows is not None and not len(rows):
            return StepOutput(self._no_logits(), answers)
        wanted = hidden if rows is None else hidden[on_device(self.device, rows)]
        network = network if rows is None else network.at(rows)
        if work.best is None or not isinstance(network, Decoder) or network.split is None:
            return StepOutput(_whole_logits(network, wanted), answers)
        return self._listed(work, network, network.split, network.finish(wanted), answers)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids (n,) -> (n, E), on the device of the model."""
        with self._modes():
            return embedded(self._network, ids)

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy."""
        with self._modes():
            return self.cache.export(row)

    def audit(self) -> dict[int, int]:
        """Return how many positions are cached in every row that is allocated."""
        return {} if self._cut_short else self.cache.lengths()

    def _inputs(self, work: Work, network: Network, places: Tensor, plan: Plan) -> StepInputs:
        """Return what the network reads, in packed order."""
        lengths = torch.from_numpy(np.repeat(row_lengths(work), work.counts))
        chosen = slice(None) if plan.order is None else torch.from_numpy(plan.order)
        return StepInputs(
            self._embedded(work, network, chosen, plan),
            on_device(self.device, places[..., chosen]),
            lengths[chosen],
            {one.name: self._placed(work, one, plan) for one in self._network.inputs},
        )

    def _adapted(self, work: Work, plan: Plan) -> Network:
        """Return the network, with the adapters that feeds ask for."""
        if not isinstance(self._network, Decoder):
            return self._network
        asked = [
            (uses_of(extra), torch.arange(int(work.counts[feed])) + int(plan.begins[feed]))
            for feed, extra in work.extras.items()
            if extra.adapters
        ]
        return adapted(self._network, asked) if asked else self._network

    def _placed(self, work: Work, declared: InputSpec, plan: Plan) -> Placed:
        """Return all that feeds give of a declared input, in packed order."""
        places, parts = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, *declared.shape)]
        for start, values in given_inputs(work, declared.name, plan.begins):
            places.append(torch.arange(start, start + len(values)))
            parts.append(values)
        given = [part.to(self.device, declared.dtype) for part in parts]
        return Placed(torch.cat(places).to(self.device), torch.cat(given))

    def _embedded(self, work: Work, network: Network, chosen: slice | Tensor, plan: Plan) -> Tensor:
        """Return (N, E) embeddings in packed order; `chosen`: which tokens those are."""
        embeds = list(given_inputs(work, "embeds", plan.begins))
        tokens = on_device(self.device, torch.from_numpy(work.tokens)[chosen])
        if not embeds:
            return network.embed(tokens)
        hidden = network.embed(tokens.clamp(min=0))
        for start, values in embeds:
            hidden[start : start + len(values)] = values.to(hidden)
        return hidden

    def _answers(
        self, work: Work, network: Network, context: CacheContext, hidden: Tensor
    ) -> dict[int, Answer]:
        """Return what feeds want beyond logits; each from its own positions alone."""
        answers = {}
        for f, extra in work.extras.items():
            if extra.hidden or extra.layers or extra.attentions or extra.early:
                first = int(context.plan.begins[f])
                span = slice(first, first + int(work.counts[f]))
                answers[f] = self._answer(f, extra, network, span, context, hidden)
                if extra.early and context.kept is not None:
                    read = slice(span.stop - int(work.logits[f]), span.stop)
                    states = torch.stack([context.kept[layer][read] for layer in extra.early])
                    head = network.at(torch.arange(read.start, read.stop))
                    answers[f] = replace(answers[f], early=head.early_logits(states))
        return answers

    def _answer(
        self,
        feed: int,
        extra: Extra,
        network: Network,
        span: slice,
        context: CacheContext,
        hidden: Tensor,
    ) -> Answer:
        last = None
        if extra.hidden or extra.layers:
            last = network.at(torch.arange(span.start, span.stop)).finish(hidden[span])
        layers = own = across = None
        if extra.layers and context.kept is not None and last is not None:
            # As in transformers, the last entry is the normalised one.
            layers = (*(one[span] for one in context.kept[:-1]), last)
        if extra.attentions:
            own = tuple(map(self._of_all_heads, context.attentions[feed]))
            across = tuple(context.cross_attentions[feed]) if self._network.encodes else None
        return Answer(last if extra.hidden else None, layers, own, across)

    def _of_all_heads(self, weights: Tensor) -> Tensor:
        """Return (H, count, S) weights of all heads, of which this process may have some."""
        if self._split is None:
            return weights
        return self._split.joined(weights, 0, self._network.heads)

    def _listed(
        self,
        work: Work,
        network: Decoder,
        split: Split,
        states: Tensor,
        answers: Mapping[int, Answer],
    ) -> StepOutput:
        """Return the best logits where feeds want those, of hidden states (R, E) after the last
        norm, of which each process knows those of its part of the vocabulary."""
        most = np.repeat(np.minimum(cast(np.ndarray, work.best), self.vocab_size), work.logits)
        own, listed = network.own_logits(states), torch.from_numpy(most > 0)
        own = own if own.dtype.itemsize >= 4 else own.float()
        logits = self._no_logits()
        if not bool(listed.all()):
            logits = split.joined(own[~listed], 1, self.vocab_size)
        if not bool(listed.any()):
            return StepOutput(logits, answers)
        best = best_of_all(own[listed], torch.from_numpy(most[most > 0]), split, self.vocab_size)
        if self._read_out is not None:
            best = replace(best, read=partial(_read_again, self._read_out, states[listed]))
        return StepOutput(logits, answers, best)

    def _no_logits(self) -> Tensor:
        wide = self._network.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return torch.empty(0, self.vocab_size, dtype=dtype, device=self.device)


def _whole_logits(network: Network, hidden: Tensor) -> Tensor:
    """Turn (R, E) hidden states after the last layer into logits (R, V)."""
    logits = network.logits(network.finish(hidden))
    return logits if logits.dtype.itemsize >= 4 else logits.float()


def _read_again(read_out: ReadOut, states: Tensor, rows: Tensor) -> Tensor:
    return read_out(states[rows])


def _wanted(work: Work, plan: Plan) -> Tensor | None:
    """Return packed places whose logits are wanted, in feed order; None where all are."""
    if plan.order is None and np.array_equal(work.counts, work.logits):
        return None
    return torch.from_numpy(runs(plan.begins + work.counts - work.logits, work.logits))
