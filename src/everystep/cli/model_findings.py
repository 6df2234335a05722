"""What `everystep doctor` finds of a model on this machine."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import everystep as es
from everystep.cli.machine_findings import Finding
from everystep.errors import EverystepError
from everystep.executors.native import status
from everystep.memory import memory_left
from everystep.models.load import step_bytes
from everystep.requests.prepare import row_bytes


def model_findings(path: Path, speed: float) -> list[Finding]:
    """Return all about the model in a folder or file; `speed`: bytes of memory per second."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs slowly is a finding below
            model = es.load_model(path, offline=True)
    except EverystepError as error:
        return [Finding("model", "problem", f"it cannot be loaded: {error}")]
    return [_weights(model), _executor(model), _memory(model), _limit(model, speed)]


def _weights(model: Any) -> Finding:
    parts = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in model.weight_bytes.items())
    return Finding("weights", "ok", parts)


def _executor(model: Any) -> Finding:
    if model.runs_on.startswith("native"):
        return Finding("executor", "ok", model.runs_on)
    if status().instructions is None:
        return Finding("executor", "problem", model.runs_on, "See kernels above")
    do = "Families and types that have kernels are listed in docs/guide/models.md"
    return Finding("executor", "note", model.runs_on, do)


def _memory(model: Any) -> Finding:
    weights, left = sum(model.weight_bytes.values()), memory_left()
    if model.context is None:
        return Finding("model's memory", "ok", f"{weights / 1e9:.2f} GB of weights")
    row = row_bytes(model, model.context)
    found = f"{weights / 1e9:.2f} GB of weights, {row / 1e9:.2f} GB for {model.context} positions"
    if left is not None and row > left:
        found += f", and {left / 1e9:.2f} GB are left"
        return Finding("model's memory", "note", found, "Shorter texts, or --cache-dtype int8")
    return Finding("model's memory", "ok", found)


def _limit(model: Any, speed: float) -> Finding:
    size = step_bytes(model.core)
    if size is None:
        return Finding("speed limit", "ok", "which weights a token reads depends on the text")
    found = f"{size / 1e6:.0f} MB for each token: {speed / size:.0f} tokens a second for one row"
    return Finding("speed limit", "ok", found)
