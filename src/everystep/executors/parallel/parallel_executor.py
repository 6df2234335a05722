"""Runs works on a model in parts: tells the other processes each work, and runs its own part."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from functools import partial
from typing import final

import torch
from torch import Tensor

from everystep.adapters import Adapter
from everystep.cache.formats import CacheDtype, Quantization
from everystep.errors import RankError
from everystep.executors.parallel.crew import Crew
from everystep.executors.parallel.own_parts import own_adapter, own_work
from everystep.executors.parallel.rank_messages import Message, work_form
from everystep.executors.parallel.rank_server import described, digests_of
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, first_layers, refuse_copies
from everystep.nn.modes import inference_mode, outside_autocast
from everystep.types import InputSpec, Past, StepOutput, Work

_WITHOUT_PARTS = frozenset(
    {
        *("Kronecker products", "rotations", "whole modules"),
        *("changed embeddings", "changed heads", "changed experts"),
    }
)
"""What adapters may do that is not known of parts of a model."""


@final
class ParallelExecutor:
    """One engine's executor on a model in parts, which the processes of a crew run together.

    `model`: the first process's part. `layers`: the first so many are run, None for all.
    """

    __reduce_ex__ = refuse_copies
    host_threads: int | None = None

    def __init__(
        self,
        crew: Crew,
        model: Model,
        quantization: Quantization | None = None,
        cache_dtype: CacheDtype | None = None,
        layers: int | None = None,
    ) -> None:
        self._crew, self._model = crew, model
        kept = (
            None
            if quantization is None
            else [quantization.bits, quantization.group, quantization.residual]
        )
        self._asked = {"quantization": kept, "cache_dtype": cache_dtype, "layers": layers}
        own = partial(_read_out, model)
        layout = (quantization, cache_dtype, partial(crew.read_out, own=own))
        self._fresh = partial(TorchExecutor, _first(model, layers), *layout)
        self._part = self._fresh()
        self._own: weakref.WeakKeyDictionary[Adapter, Adapter] = weakref.WeakKeyDictionary()
        self._opened: tuple[int, int] | None = None  # its number, and the crew's generation then
        self.vocab_size: int = self._part.vocab_size
        self.device: torch.device = self._part.device
        self.inputs: Mapping[str, InputSpec] = self._part.inputs
        self.abilities = self._part.abilities - _WITHOUT_PARTS

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want, on all processes.

        Raise RankError where one of them failed, has ended or does not answer. After any error or
        interrupt the executor can be used, but has no rows.
        """
        if self._opened is None:
            self._open()
        opened, self._opened = self._opened, None
        self._crew.ready()
        if opened is None or opened[1] != self._crew.generation:
            raise RankError(
                "the rows of an executor are gone with a process that was started again",
                do="Call again: what still runs is fed again from its ids",
            )
        try:
            output = self._crew.step(
                lambda: self._told("run", opened, work=work_form(work, self._crew.known)),
                lambda: self._part.run(self._own_work(work)),
            )
        except BaseException:
            self._crew.forget(opened[0])
            raise
        self._opened = opened
        return output

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids (n,) -> (n, E)."""
        return self._crew.step(lambda: {"do": "embed", "ids": ids}, lambda: self._part.embed(ids))

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy."""
        opened = self._opened
        heads = self._model.spec.attention.kv_heads

        def own() -> Past:
            past = self._part.export(row)
            join = partial(self._crew.group.joined, dim=0, size=heads)
            return Past(past.length, tuple(tuple(map(join, layer)) for layer in past.layers))

        return self._crew.step(lambda: self._told("export", opened, row=row), own)

    def audit(self) -> dict[int, int]:
        """Return how many positions are cached in every row that is allocated."""
        lost = self._opened is None or self._opened[1] != self._crew.generation
        return {} if lost else self._part.audit()

    def _told(self, do: str, opened: tuple[int, int] | None, **more: object) -> Message:
        return {"do": do, "executor": opened and opened[0], **more}

    def _open(self) -> None:
        """Open an executor in each of the processes, without rows."""
        self._part = self._fresh()
        number = self._crew.number()
        self._crew.step(lambda: {"do": "open", "executor": number, **self._asked}, lambda: None)
        weakref.finalize(self, self._crew.forget, number)
        self._opened = number, self._crew.generation

    def _own_work(self, work: Work) -> Work:
        return own_work(work, self._model.spec, self._crew.group, self._own_adapter)

    def _own_adapter(self, adapter: Adapter) -> Adapter:
        found = self._own.get(adapter)
        if found is None:
            found = own_adapter(adapter, self._model.spec, self._crew.group)
            self._own[adapter] = found
        return found


def _first(model: Model, layers: int | None) -> Model:
    return model if layers is None else first_layers(model, layers)


def _read_out(model: Model, states: Tensor) -> Tensor:
    with inference_mode(), outside_autocast():
        logits = model.network.logits(states)
    return logits if logits.dtype.itemsize >= 4 else logits.float()


def agree(crew: Crew, model: Model) -> None:
    """Raise RankError unless all processes have parts of one model."""
    told = {"do": "agree", "model": described(model)}
    crew.step(lambda: told, lambda: crew.group.total(torch.zeros(1)))


def digest_of_parts(crew: Crew, model: Model) -> str:
    """Return a text that is equal for models in as many parts that agree in every bit."""
    found = crew.step(lambda: {"do": "digest"}, lambda: digests_of(crew.group, model))
    return hashlib.sha256(found.numpy().tobytes()).hexdigest()
