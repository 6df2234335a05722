"""`everystep info`: what a report of a problem should say about the machine."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

from everystep._version import __version__
from everystep.cli.models import AsJson
from everystep.cli.terminal import write_report, write_table
from everystep.files.sources import DEFAULT_MODEL, SourceSettings, cached_models

_LIBRARIES = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "transformers")


def info(as_json: AsJson = False) -> None:
    """Show versions, devices, and where models are kept."""
    # A second of importing that other commands without a model do not need.
    import torch

    from everystep.executors.native import status

    native = status()
    cuda = torch.cuda
    names = [f"cuda:{i} ({cuda.get_device_name(i)})" for i in range(cuda.device_count())]
    settings = SourceSettings.from_environment()
    cached = {one.name: str(one.path) for one in cached_models()}
    found = {
        "everystep": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _LIBRARIES},
        "devices": ["cpu", *names],
        "threads": torch.get_num_threads(),
        "native executor": native.instructions or f"missing: {native.reason}",
        "executable": sys.executable,
        "cache folder": str(settings.cache),
        "offline": settings.offline,
        "default model": DEFAULT_MODEL,
        "default model's file": cached.get(DEFAULT_MODEL),
    }
    if as_json:
        write_report(found)
    else:
        write_table(("what", "here"), [(name, _shown(value)) for name, value in found.items()])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "not here"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)
