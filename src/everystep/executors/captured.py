"""Steps that are captured once and replayed: what a GPU needs for small steps.

There, starting the kernels of a step one by one takes longer than they run. A step that feeds one
position to each of its rows, and wants logits alone, has one of a few shapes; the first of a shape
runs operator by operator, the second is captured as a graph, and those after it are one start each.
All of them do the same arithmetic. Steps of any other kind are left to the caller.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from everystep.cache.context import CacheContext
from everystep.cache.fixed_plan import MOST_LINES, FixedShape, fixed_step, lay_out
from everystep.cache.rows import RowCache
from everystep.devices import on_device
from everystep.models import Model
from everystep.models.decoder import Decoder
from everystep.nn.linear import weights_of
from everystep.nn.network import Network, StepInputs
from everystep.types import Extra, Work

_MOST_STEPS = 64
_MOST_RESULT_BYTES = 1 << 30

_MOST_KEPT_BYTES = 1 << 30

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""What captures a step: it takes what runs the step and returns what runs it again, and the tensor
that has the result then."""

ReadOut = Callable[[Tensor], Tensor]


class CudaCapture:
    """A way to capture steps of a CUDA device: graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A pool whose graphs are all gone takes no other: this one stays.
        self._anchor = self(lambda: torch.zeros(1, device=device))

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream), _nothing_collected():
            # Other threads may do as they like meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = step()
            finally:
                graph.capture_end()
        here.wait_stream(self._stream)
        return graph.replay, out


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Let no graph that nobody holds be destroyed within, which would end a capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@dataclass(slots=True)
class CaptureCounts:
    """Numbers of steps so far: run operator by operator, as the first of their shape or as steps of
    another kind (`other`), captured, and replayed, the captured ones among them."""

    first: int = 0
    captured: int = 0
    replayed: int = 0
    other: int = 0


@dataclass(slots=True, eq=False)
class _Step:
    """A shape's step: its numbers on the device, and once it is captured, what runs it again, and
    what has its logits (lines, V) then."""

    sheet: Tensor
    replay: Replay | None = None
    logits: Tensor | None = None


class CapturedSteps:
    """The captured steps of one executor after another, on the rows of `cache`.

    `read_out`: hidden states after the last layer (n, E) -> logits (n, V), by operators alone.
    `counts`: those of the executor that has them now. `in_order`: no step was left half done.
    """

    def __init__(
        self, network: Decoder, cache: RowCache, capture: Capture | None, read_out: ReadOut
    ) -> None:
        self.cache = cache
        self.counts = CaptureCounts()
        self.in_order = True
        self._network = network
        self._capture = capture
        self._read_out = read_out
        self._steps: OrderedDict[FixedShape, _Step] = OrderedDict()
        self._allocations = 0

    def on(self, cache: RowCache) -> CapturedSteps:
        """Return one that has captured nothing yet, for the same executor on other rows."""
        steps = CapturedSteps(self._network, cache, self._capture, self._read_out)
        steps.counts = self.counts
        return steps

    def run(self, work: Work, places: np.ndarray) -> Tensor | None:
        """Run a work whose verbs were applied, and return its logits (F, V).

        `places`: (F,) or (axes, F) position ids. None, and nothing has changed, where it is no step
        of the kind that can be captured.
        """
        if self._capture is None or not is_single(work) or len(self.cache.lines) > MOST_LINES:
            self.counts.other += bool(len(work.rows))
            return None
        shape, sheet = lay_out(self.cache, work, places)
        return self._logits(shape, sheet)[: len(work.rows)].clone()

    def _logits(self, shape: FixedShape, sheet: np.ndarray) -> Tensor:
        """Return (lines, V) logits, those of the feeds first, in the order of these."""
        if self._allocations != self.cache.counts.allocations:
            # Graphs read addresses, and keys and values have moved.
            self._steps.clear()
            self._allocations = self.cache.counts.allocations
        if shape not in self._steps:
            if len(self._steps) == _MOST_STEPS:
                self._steps.popitem(last=False)
            step = self._steps[shape] = _Step(on_device(self._network.device, sheet))
            self.counts.first += 1
            return self._forward(shape, step.sheet)
        self._steps.move_to_end(shape)
        step = self._steps[shape]
        # Of pageable memory, which CUDA takes away before it returns.
        step.sheet.copy_(torch.from_numpy(sheet), non_blocking=True)
        if step.replay is None and self._capture is not None:
            self._captured(shape, step, self._capture)
        if step.replay is None or step.logits is None:
            return self._forward(shape, step.sheet)
        self.counts.replayed += 1
        step.replay()
        return step.logits

    def _captured(self, shape: FixedShape, step: _Step, capture: Capture) -> None:
        """Capture the step; where that cannot be done, warn, and let no other be tried."""
        try:
            step.replay, step.logits = capture(lambda: self._forward(shape, step.sheet))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._capture = None
            what = str(error).partition("\n")[0]
            warnings.warn(
                f"steps cannot be captured here, so each starts its kernels one by one: {what}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self.counts.captured += 1
            while len(self._steps) > 1 and self._result_bytes() > _MOST_RESULT_BYTES:
                self._steps.popitem(last=False)

    def _result_bytes(self) -> int:
        """Return the bytes of all results, each of which has memory of its own."""
        return sum(one.logits.nbytes for one in self._steps.values() if one.logits is not None)

    def _forward(self, shape: FixedShape, sheet: Tensor) -> Tensor:
        one = fixed_step(shape, sheet)
        hidden = self._network.embed(one.tokens)
        # Lengths matter to ropes that cannot be captured.
        inputs = StepInputs(hidden, one.positions, torch.empty(0, dtype=torch.int64))
        found = self._network.forward(inputs, CacheContext(self.cache, one.plan))
        return self._read_out(found[one.order])


_KEPT: WeakKeyDictionary[Model, tuple[object, CapturedSteps]] = WeakKeyDictionary()


def keep_when_gone(executor: object, model: Model, made_by: object, steps: CapturedSteps) -> None:
    """Let the next executor of the model have the steps, their rows removed, once this is gone."""
    gone = weakref.finalize(executor, _keep, weakref.ref(model), made_by, steps)
    gone.atexit = False


def _keep(model: weakref.ref[Model], made_by: object, steps: CapturedSteps) -> None:
    alive = model()
    if alive is not None and steps.in_order and steps.cache.nbytes <= _MOST_KEPT_BYTES:
        steps.cache.clear()
        _KEPT[alive] = made_by, steps


def kept_steps(model: Model, made_by: object) -> CapturedSteps | None:
    """Return what an earlier executor of the model left that was made by the same; else None.

    Nobody else gets it then.
    """
    kept = _KEPT.pop(model, None)
    return None if kept is None or kept[0] != made_by else kept[1]


def is_single(work: Work) -> bool:
    """Return whether a work feeds one id to each of its rows, and wants logits alone."""
    if not len(work.rows) or len(work.rows) != len(work.tokens):
        return False
    if not (work.logits == 1).all() or (work.tokens < 0).any():
        return False
    if work.best is not None and work.best.any():
        return False
    return all(_only_positions(extra) for extra in work.extras.values())


def _only_positions(extra: Extra) -> bool:
    wants = extra.hidden or extra.layers or extra.attentions or extra.early
    brings = extra.inputs or extra.adapters or extra.whole or extra.mask is not None
    return not (wants or brings)


def can_be_captured(network: Network) -> bool:
    """Return whether steps of the network, on rows that are no codes, start the same kernels
    whatever is fed."""
    if not isinstance(network, Decoder):
        return False
    if network.split is not None or network.around or network.recomputes:
        return False
    if network.changes_rows is not None or network.changes_states is not None:
        return False
    ropes = (layer.rope for layer in network.spec.layers)
    if any(rope is not None and rope.scaling.by_length for rope in ropes):
        return False
    maps = [
        one
        for layer in network.layers
        for one in (layer.qkv, layer.out, layer.up, layer.down, network.head)
    ]
    # Which experts run depends on what is fed.
    if any(layer.experts is not None for layer in network.layers) or None in maps:
        return False
    weights = (weight for one in maps if one is not None for weight in weights_of(one.matrix()))
    return isinstance(network.table, Tensor) and all(isinstance(one, Tensor) for one in weights)
