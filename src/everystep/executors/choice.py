"""Which executor runs a request: the native one where it can, torch operators otherwise."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from everystep.errors import UnsupportedError, message
from everystep.executors.base import Executor
from everystep.executors.native import NativeExecutor, obstacles, status
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model

ExecutorName = Literal["auto", "native", "torch"]


def open_executor(
    model: Model, name: ExecutorName = "auto", needs: Set[str] = frozenset()
) -> Executor:
    """A fresh executor without rows that has the abilities in `needs`.

    "auto" takes the native one where nothing stands in its way. UnsupportedError where "native" is
    asked for and cannot be had.
    """
    if name == "torch":
        return TorchExecutor(model)
    reasons = [*obstacles(model), *_missing(needs)]
    if not reasons:
        return NativeExecutor(model)
    if name == "auto":
        return TorchExecutor(model)
    raise UnsupportedError(
        message(
            "the native executor cannot run this",
            got=reasons[0],
            do="Load the model with executor='auto' or 'torch'",
        )
    )


def chosen(model: Model, name: ExecutorName = "auto") -> str:
    """Which executor plain requests get: "native (INSTRUCTION SET)", or "torch (WHY)"."""
    if name == "torch":
        return "torch (asked for)"
    reasons = obstacles(model)
    return f"torch ({reasons[0]})" if reasons else f"native ({status().instructions})"


def _missing(needs: Set[str]) -> list[str]:
    return [f"it has no {need}" for need in sorted(needs - NativeExecutor.abilities)]
