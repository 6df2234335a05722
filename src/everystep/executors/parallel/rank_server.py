"""What the other processes of a model in parts do: each step that the first one tells them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from everystep.adapters import Adapter
from everystep.cache.formats import Quantization
from everystep.errors import RankError, RequestError
from everystep.executors.parallel.group import OVER, RankGroup, call_for, readiness
from everystep.executors.parallel.own_parts import own_adapter, own_work
from everystep.executors.parallel.rank_messages import Message, adapter_of, from_message, work_of
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, first_layers
from everystep.models.load import named_shapes, part_digest
from everystep.nn.modes import inference_mode, outside_autocast

_GLANCE = 0.02


@final
class RankServer:
    """A process that holds a part of a model, and takes the steps that the first one takes.

    `parent`: the number of the process that it ends with; None where others end it.
    """

    def __init__(self, group: RankGroup, model: Model, parent: int | None = None) -> None:
        self._group, self._model, self._parent = group, model, parent
        self._executors: dict[int, TorchExecutor] = {}
        self._adapters: dict[int, Adapter] = {}
        self._own: dict[int, Adapter] = {}
        self._acts: dict[str, Callable[[Message], object]] = {
            "agree": self._agree,
            "open": self._open,
            "run": self._run,
            "embed": lambda message: self._plain().embed(message["ids"]),
            "read out": self._read_out,
            "export": self._export,
            "digest": self._digest,
        }

    def serve(self, meeting: int = 1) -> None:
        """Come to one meeting after another, until it is over."""
        group = self._group
        while self._called(meeting):
            try:
                group.note(readiness(group.number, meeting), "1")
                group.meet(meeting)
                while True:
                    with group.stepping():
                        self._act(from_message(group.receive()))
            except RankError:  # the first one has left, or another has
                pass
            except Exception as error:
                group.fail(error)
            finally:
                group.leave()
            meeting += 1

    def _called(self, meeting: int) -> bool:
        """Wait until the first process calls for this meeting or a later one; return False once it
        is over."""
        while True:
            if self._parent is not None and os.getppid() != self._parent:
                return False
            try:
                if self._group.noted(OVER) is not None:
                    return False
                if self._group.noted(call_for(meeting)) is not None:
                    return True
            except RuntimeError:  # the store is gone, and all others with it
                return False
            time.sleep(_GLANCE)

    def _act(self, message: Message) -> None:
        for number in message["gone"]:
            if number < 0:
                self._adapters.pop(-number - 1, None)
                self._own.pop(-number - 1, None)
            else:
                self._executors.pop(number, None)
        for number, form in message["new"].items():
            self._adapters[number] = adapter_of(form)
        self._acts[message["do"]](message)

    def _agree(self, message: Message) -> None:
        own = described(self._model)
        if message["model"] != own:
            what = "processes have loaded parts of different models"
            raise RequestError(what, wanted=message["model"], got=own)
        self._group.total(torch.zeros(1))

    def _open(self, message: Message) -> None:
        model, layers, kept = self._model, message["layers"], message["quantization"]
        part = model if layers is None else first_layers(model, layers)
        how = None if kept is None else Quantization(*kept)
        self._executors[message["executor"]] = TorchExecutor(part, how, message["cache_dtype"])

    def _run(self, message: Message) -> None:
        work = work_of(message["work"], self._adapters)
        own = own_work(work, self._model.spec, self._group, self._own_adapter)
        self._executors[message["executor"]].run(own)

    def _own_adapter(self, adapter: Adapter) -> Adapter:
        number = next(key for key, one in self._adapters.items() if one is adapter)
        if number not in self._own:
            self._own[number] = own_adapter(adapter, self._model.spec, self._group)
        return self._own[number]

    def _plain(self) -> TorchExecutor:
        return TorchExecutor(self._model)

    def _read_out(self, message: Message) -> None:
        with inference_mode(), outside_autocast():
            self._model.network.logits(message["states"])

    def _export(self, message: Message) -> None:
        past = self._executors[message["executor"]].export(message["row"])
        for layer in past.layers:
            for one in layer:
                self._group.joined(one, 0, self._model.spec.attention.kv_heads)

    def _digest(self, message: Message) -> None:
        del message
        digests_of(self._group, self._model)


def described(model: Model) -> str:
    """Return a text that the parts of one model have in common."""
    numbers = sum(math.prod(shape) for _, shape in named_shapes(model))
    return f"a {model.config.model_type} of {numbers} parameters in {model.dtype}"


def digests_of(group: RankGroup, model: Model) -> Tensor:
    """Return (ranks, 64) the digests of all parts to the first process."""
    own = torch.frombuffer(bytearray(part_digest(model).encode()), dtype=torch.uint8)
    return group.joined(own[None], 0, group.count)
