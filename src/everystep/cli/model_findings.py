"""What `everystep doctor` finds of a model on this machine, and of adapters."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import everystep as es
from everystep.adapters import AdapterContents, adapter_contents
from everystep.cli.adapters import AskedAdapter
from everystep.cli.machine_findings import Finding
from everystep.errors import EverystepError
from everystep.executors.choice import chosen
from everystep.executors.native import status
from everystep.memory import memory_left
from everystep.models.load import step_bytes
from everystep.requests.prepare import row_bytes


def model_findings(path: Path, speed: float) -> tuple[Any, list[Finding]]:
    """Return the model in a folder or file, None where it cannot be loaded, and all about it.

    `speed`: bytes of memory per second.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs slowly is a finding below
            model = es.load_model(path, offline=True)
    except EverystepError as error:
        return None, [Finding("model", "problem", f"it cannot be loaded: {error}")]
    return model, [_weights(model), _executor(model), _memory(model), _limit(model, speed)]


def adapter_findings(asked: AskedAdapter, model: Any) -> list[Finding]:
    """Return what the folder of an adapter holds, and how the model runs it, None for no model."""
    what = f"adapter {asked.name}"
    try:
        held = adapter_contents(asked.folder)
    except EverystepError as error:
        return [Finding(what, "problem", f"it cannot be read: {error}")]
    if held.kind is None:
        found = f"a {held.settings.get('peft_type')}, which is none of the kinds that are read"
        return [Finding(what, "problem", found, "docs/guide/adapters.md lists them")]
    contents = Finding(what, "ok", _contents(held))
    if model is None:
        do = "Name the model too, everystep doctor MODEL --adapter DIR, to see whether it runs it"
        return [replace(contents, verdict="note", do=do)]
    return [contents, _adapted(asked, model)]


def _contents(held: AdapterContents) -> str:
    """Return the kind of an adapter, its size, and for which model and by what it was written."""
    numbers = sum(math.prod(shape) for shape in held.shapes.values())
    rank, base = held.settings.get("r"), held.settings.get("base_model_name_or_path")
    parts = [f"{held.kind}", f"{numbers:,} numbers in {len(held.shapes)} tensors"]
    parts += [f"rank {rank}"] if rank else []
    parts += [f"for {base}"] if base else []
    version = held.settings.get("peft_version")
    return ", ".join(parts + ([f"by PEFT {version}"] if version else []))


def _adapted(asked: AskedAdapter, model: Any) -> Finding:
    """Return whether the model runs an adapter, and on which executor."""
    what = f"adapter {asked.name} runs on"
    try:
        needs = model.load_adapter(asked.folder, asked.name).now().needs
    except EverystepError as error:
        return Finding(what, "problem", f"this model cannot run it: {error}")
    runs_on = chosen(model.core, needs=needs)
    if runs_on.startswith("native") or not model.runs_on.startswith("native"):
        return Finding(what, "ok", runs_on)
    do = "Merge it, for the model's own speed: docs/guide/adapters.md says how"
    return Finding(what, "note", runs_on, do)


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
