"""A model in parts on threads of one process, which meet at a barrier where processes would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from everystep.adapters import Adapter
from everystep.cache.formats import CacheDtype, Quantization
from everystep.executors.parallel.own_parts import own_adapter, own_work
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model
from everystep.models.load import named_weights
from everystep.models.loader import HeldWeights
from everystep.nn.split import Split
from everystep.types import StepOutput, Work

T = TypeVar("T")


class Table:
    """Where threads put their parts for each other; `sums`, `joins`: how often each was asked
    for, by all together."""

    def __init__(self, count: int) -> None:
        self.sums = self.joins = 0
        self._counting = threading.Lock()
        self.barrier = threading.Barrier(count, timeout=60)
        self.parts: list[Tensor] = [torch.empty(0)] * count

    def laid(self, number: int, part: Tensor, *, sums: bool) -> list[Tensor]:
        """The parts of all, once all have laid theirs."""
        self.parts[number] = part
        self.barrier.wait()
        with self._counting:
            self.sums += sums
            self.joins += not sums
        found = list(self.parts)
        self.barrier.wait()
        return found


class ThreadSplit(Split):
    """The part of one of several threads."""

    def __init__(self, number: int, count: int, table: Table) -> None:
        self.number, self.count = number, count
        self._table = table

    def total(self, part: Tensor) -> Tensor:
        found = self._table.laid(self.number, part, sums=True)
        whole = found[0].clone()
        for one in found[1:]:
            whole += one
        return whole

    def joined(self, part: Tensor, dim: int, size: int) -> Tensor:
        found = self._table.laid(self.number, part, sums=False)
        whole = torch.cat(found, dim)
        assert whole.shape[dim] == size
        assert all(one.shape[dim] == self._size(n, size) for n, one in enumerate(found))
        return whole if self.is_first else part

    def _size(self, number: int, size: int) -> int:
        first, end = ThreadSplit(number, self.count, self._table).own(size)
        return end - first


class Threads:
    """The parts of a model, and an executor of each."""

    def __init__(
        self,
        model: Model,
        count: int,
        quantization: Quantization | None = None,
        cache_dtype: CacheDtype | None = None,
    ) -> None:
        self.model, self.count, self.table = model, count, Table(count)
        self.splits = [ThreadSplit(number, count, self.table) for number in range(count)]
        weights = HeldWeights({name: one.clone() for name, one in named_weights(model)})
        self.parts = [
            build_model(model.config, weights, dtype=model.dtype, split=one) for one in self.splits
        ]
        self._pool = ThreadPoolExecutor(count)
        self._owned: dict[tuple[int, int], Adapter] = {}
        self.executors = [
            TorchExecutor(one, quantization, cache_dtype, self._read_out) for one in self.parts
        ]

    def together(self, do: Callable[[int], T]) -> list[T]:
        """What each thread does, the first one's first."""
        return list(self._pool.map(do, range(len(self.parts))))

    def run(self, work: Work) -> StepOutput:
        """What the first one's executor gives for a work that all run."""
        return self.together(lambda number: self.executors[number].run(self._own(number, work)))[0]

    def _own(self, number: int, work: Work) -> Work:
        def adapter(whole: Adapter) -> Adapter:
            if (number, whole.number) not in self._owned:
                found = own_adapter(whole, self.model.spec, self.splits[number])
                self._owned[number, whole.number] = found
            return self._owned[number, whole.number]

        return own_work(work, self.model.spec, self.splits[number], adapter)

    def _read_out(self, states: Tensor) -> Tensor:
        def read(number: int) -> Tensor:
            with torch.inference_mode():
                return self.parts[number].network.logits(states)

        return self.together(read)[0]
