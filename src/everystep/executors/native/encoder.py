"""Runs the encoder of a model with the compiled kernels: all positions of a prompt in one call."""

from __future__ import annotations

from ctypes import addressof, c_int64

import numpy as np
import torch
from torch import Tensor

from everystep.executors.native import library
from everystep.executors.native.library import GivenEmbeds, StepWork, check
from everystep.executors.native.page_tables import PAGE
from everystep.executors.native.program import open_runner, program_of
from everystep.executors.process import in_process, pause_torch_threads
from everystep.models import Model
from everystep.nn.network import Heard


class NativeEncoder:
    """The encoder of a model without obstacles, for one thread at a time."""

    def __init__(self, model: Model) -> None:
        self._program = program_of(model, encoder=True)
        self._library = library.load()
        self._runner = open_runner(self._library, self._program, 0)

    def __call__(self, hidden: Tensor, seen: None, heard: Heard | None = None) -> Tensor:
        """Turn embeddings (1, S, E) into encoder states (1, S, E); add what layers show to `heard`.

        Raise CapacityError where memory or threads do not suffice.
        """
        with in_process():
            pause_torch_threads()
            return self._run(hidden[0].float().contiguous(), heard)[None]

    def _run(self, hidden: Tensor, heard: Heard | None) -> Tensor:
        shape, count = self._program.structure, len(hidden)
        states = torch.empty_like(hidden)
        shown = 0 if heard is None else shape.layers
        layers = torch.empty(shown, count, shape.width)
        weights = torch.empty(shown, shape.heads, count, count)
        pages = np.arange(-(-count // PAGE), dtype=np.int32)
        ids, numbers = np.full(count, -1), np.arange(shown)
        each = (c_int64 * 5)(0, 0, count, 0, 0)  # the row, where it starts, its length, its logits
        pointers = (c_int64 * 1)(weights.data_ptr())
        given = (GivenEmbeds * 1)(GivenEmbeds(0, count, hidden.data_ptr()))
        work = StepWork(
            tokens=count,
            feeds=1,
            ids=ids.ctypes.data,
            embeds=1,
            embed=given,
            pages=pages.ctypes.data,
            stride=len(pages),
            hidden=states.data_ptr(),
            early=shown,
            early_layers=numbers.ctypes.data,
            early_hidden=layers.data_ptr(),
            attentions=addressof(pointers) if shown else None,
        )
        first = addressof(each)
        places = range(first, first + 40, 8)
        work.rows, work.starts, work.counts, work.wanted, work.best = places
        check(self._library.es_reserve(self._runner, len(pages), 0))
        check(self._library.es_run(self._runner, work, torch.get_num_threads()))
        if heard is not None:
            heard.layers += [*layers[:, None], states[None]]
            heard.attentions += [*weights[:, None]]
        return states
