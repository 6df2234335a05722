"""Which executor runs a request: the native one where it can, torch operators otherwise."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from everystep.cache.affine import Quantization
from everystep.errors import UnsupportedError, message
from everystep.executors.base import Executor
from everystep.executors.native import NativeExecutor, obstacles, spec_obstacles, status
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model

ExecutorName = Literal["auto", "native", "torch"]


def open_executor(
    model: Model,
    name: ExecutorName = "auto",
    needs: Set[str] = frozenset(),
    quantization: Quantization | None = None,
) -> Executor:
    """A fresh executor without rows that has the abilities in `needs`.

    `quantization`: how its rows keep what they hold, None for full precision. "auto" takes the
    native one where nothing stands in its way. UnsupportedError where "native" is asked for and
    cannot be had.
    """
    if name == "torch":
        return TorchExecutor(model, quantization)
    reasons = [*obstacles(model), *_missing(needs)]
    if quantization is not None:
        reasons.append("its rows are in full precision")
    if not reasons:
        return NativeExecutor(model)
    if name == "auto":
        return TorchExecutor(model, quantization)
    raise UnsupportedError(
        message(
            "the native executor cannot run this",
            got=reasons[0],
            do="Load the model with executor='auto' or 'torch'",
        )
    )


def holds_panels(name: ExecutorName, spec: object) -> bool:
    """Whether plain requests of a model with this specification get the native executor.

    That is as long as its weights are float32 or codes, on the CPU.
    """
    return name != "torch" and not spec_obstacles(spec)


def chosen(model: Model, name: ExecutorName = "auto") -> str:
    """Which executor plain requests get: "native (INSTRUCTION SET)", or "torch (WHY)"."""
    if name == "torch":
        return "torch (asked for)"
    reasons = obstacles(model)
    return f"torch ({reasons[0]})" if reasons else f"native ({status().instructions})"


def _missing(needs: Set[str]) -> list[str]:
    return [f"it has no {need}" for need in sorted(needs - NativeExecutor.abilities)]
