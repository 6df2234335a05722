"""Which executor runs a request: the native one where it can, torch operators otherwise."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

import torch

from everystep.cache.formats import CacheDtype, Quantization
from everystep.errors import RequestError, UnsupportedError
from everystep.executors.base import Executor
from everystep.executors.captured import CudaCapture, can_be_captured
from everystep.executors.native import (
    NativeEncoder,
    NativeExecutor,
    abilities_of,
    obstacles,
    read_rows,
    spec_obstacles,
    status,
)
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Encode, Model
from everystep.nn.panels import ReadRows

ExecutorName = Literal["auto", "native", "torch"]


def open_executor(
    model: Model,
    name: ExecutorName = "auto",
    needs: Set[str] = frozenset(),
    quantization: Quantization | None = None,
    cache_dtype: CacheDtype | None = None,
) -> Executor:
    """Open an executor without rows that has the abilities in `needs`.

    `quantization`: how its rows keep what they hold, None for full precision. "auto" takes the
    native one where nothing stands in its way, and on a CUDA device torch operators that are
    captured as graphs; "torch" runs them one by one. `cache_dtype`: the type of what they hold in
    full precision, None for the model's. Raise UnsupportedError where "native" is asked for and
    cannot be had, RequestError where rows are to be kept in two ways.
    """
    if quantization is not None and cache_dtype is not None:
        raise RequestError(
            "cache_dtype and a quantised cache both say how rows keep what they hold",
            wanted="one of the two",
            got=f"cache_dtype={cache_dtype!r} and a quantised cache",
            do="Load the model without cache_dtype, or leave the quantised cache out",
        )
    missing = sorted(needs - abilities_of(model.network))
    reasons = [*obstacles(model), *(f"it has no {need}" for need in missing)]
    if quantization is not None:
        reasons.append("its rows are in full precision")
    if name == "torch" or (name == "auto" and reasons):
        captures = name == "auto" and model.device.type == "cuda"
        capture = CudaCapture if captures else None
        return TorchExecutor(model, quantization, cache_dtype, capture=capture)
    if reasons:
        raise UnsupportedError(
            "the native executor cannot run this",
            got=reasons[0],
            do="Load the model with executor='auto' or 'torch'",
        )
    return NativeExecutor(model, cache_dtype)


def encoder_of(model: Model, name: str = "auto") -> Encode | None:
    """Return the compiled kernels as the model's encoder, or None where its own network must do."""
    return None if name == "torch" or obstacles(model) else NativeEncoder(model)


def refuse_cache_dtype(model: Model, cache_dtype: CacheDtype | None) -> None:
    """Raise UnsupportedError if rows of this model cannot keep keys and values in this type."""
    if cache_dtype is not None and model.network.encodes:
        raise UnsupportedError(
            "a model with an encoder keeps keys and values in the type that it computes in",
            got=f"cache_dtype={cache_dtype!r}",
            do="Leave cache_dtype out",
        )


def panels_of(name: ExecutorName, spec: object) -> ReadRows | None:
    """Return what reads the rows of panels, where plain requests of a model with this specification
    get the native executor; else None.

    They get it as long as its weights are float32 or codes, on the CPU.
    """
    return None if name == "torch" or spec_obstacles(spec) else read_rows


def slow_path(model: Model, name: ExecutorName = "auto") -> str | None:
    """Return why plain requests get torch operators on a CPU though nobody asked for them.

    The text also says what helps. None where they do not.
    """
    reasons = obstacles(model)
    if name != "auto" or model.device.type != "cpu" or not reasons:
        return None
    if status().reason:
        return reasons[0]
    if model.dtype == torch.float64:
        return f"{reasons[0]}. Load it with dtype=torch.float32"
    return f"{reasons[0]}. docs/guide/models.md lists the families that have kernels"


def chosen(model: Model, name: ExecutorName = "auto", needs: Set[str] = frozenset()) -> str:
    """Return the executor that requests with these needs get, plain ones without any: "native
    (INSTRUCTION SET)", or "torch (WHY)"."""
    if name == "torch":
        return "torch (asked for)"
    missing = sorted(needs - abilities_of(model.network))
    reasons = [*obstacles(model), *(f"it has no {need}" for need in missing)]
    if not reasons:
        return f"native ({status().instructions})"
    captured = model.device.type == "cuda" and can_be_captured(model.network)
    return f"torch ({reasons[0]}{', its steps are captured' if captured else ''})"
