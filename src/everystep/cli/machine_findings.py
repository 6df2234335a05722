"""What `everystep doctor` finds of the machine itself."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from everystep._version import __version__
from everystep.cli.machine import EXTRAS, LIBRARIES, devices, threads, version_of
from everystep.errors import EverystepError
from everystep.executors.native import status
from everystep.executors.native.build import COMMAND, compiler, fitting_sets
from everystep.executors.native.library import load
from everystep.files.hub import has_token
from everystep.files.sources import DEFAULT_MODEL, SourceSettings, cached_models
from everystep.memory import memory_left
from everystep.processor import processor_name, usable_processors

_LITTLE = 1 << 30
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """`verdict`: whether all is well, there is something to know, or something is wrong; `do`:
    what helps, empty where nothing is to be done."""

    what: str
    verdict: Literal["ok", "note", "problem"]
    found: str
    do: str = ""


def machine_findings(speed: float, offline: bool) -> list[Finding]:
    """Return everything about the machine; `speed`: bytes of memory per second."""
    settings = SourceSettings.from_environment()
    return [
        *_versions(),
        _processor(),
        _threads(settings),
        _memory(),
        Finding("memory speed", "ok", f"{speed / 1e9:.1f} GB/s"),
        _kernels(settings),
        _torch(),
        *_extras(),
        _cache(settings),
        _default_model(),
        _network(settings, offline),
        _token(),
    ]


def _versions() -> list[Finding]:
    """Return what a report of a fault has to say beside what was called."""
    parts = (f"{name} {version_of(name)}" for name in LIBRARIES if version_of(name) is not None)
    python = f"{platform.python_version()} on {platform.platform()}"
    return [
        Finding("everystep", "ok", __version__),
        Finding("python", "ok", python),
        Finding("libraries", "ok", ", ".join(parts)),
    ]


def _processor() -> Finding:
    best, name = fitting_sets()[0], processor_name()
    if best == "plain":
        return Finding("processor", "note", f"{name}, without AVX2: kernels in plain C++")
    return Finding("processor", "ok", f"{name}, {best}")


def _threads(settings: SourceSettings) -> Finding:
    count, usable = threads(), usable_processors()
    said = settings.variables.get("OMP_NUM_THREADS")
    found = f"{count} for {usable} processors" + (f" (OMP_NUM_THREADS={said})" if said else "")
    if count > usable:
        return Finding(
            "threads", "problem", found, f"Set OMP_NUM_THREADS={usable}: further ones wait"
        )
    if count < usable:
        do = f"OMP_NUM_THREADS={usable} uses all, where each of them is a core of its own"
        return Finding("threads", "note", found, do)
    return Finding("threads", "ok", found)


def _memory() -> Finding:
    left = memory_left()
    if left is None:
        return Finding("memory", "note", "the system does not say how much is left")
    found = f"{left / 1e9:.1f} GB left"
    if left < _LITTLE:
        return Finding("memory", "note", found, "Small models only, or end other programs")
    return Finding("memory", "ok", found)


def _kernels(settings: SourceSettings) -> Finding:
    native, wanted = status(), settings.variables.get("EVERYSTEP_INSTRUCTIONS")
    if native.instructions is None:
        if wanted is not None:
            do = "Unset EVERYSTEP_INSTRUCTIONS"
        elif compiler() is None:
            do = f"Install a C++ compiler (g++ or clang++), then run {COMMAND}"
        else:
            do = f"Run {COMMAND}"
        found = "there are none, so everything runs on torch operators, many times slower"
        return Finding("kernels", "problem", found, do)
    try:
        load()
    except (EverystepError, OSError) as error:
        found = f"{native.instructions}, which cannot be loaded: {error}"
        return Finding("kernels", "problem", found, f"Run {COMMAND}")
    best = fitting_sets()[0]
    if native.instructions != best:
        found = f"{native.instructions}, though the processor has {best}"
        do = "Unset EVERYSTEP_INSTRUCTIONS" if wanted else f"Run {COMMAND}"
        return Finding("kernels", "note", found, do)
    return Finding("kernels", "ok", native.instructions)


def _torch() -> Finding:
    version = version_of("torch")
    cuda = torch.version.cuda
    found = f"{version}, {f'CUDA {cuda}' if cuda else 'without CUDA'}; {', '.join(devices())}"
    if _DRIVER.exists() and not torch.cuda.is_available():
        do = "For the GPU that is here, install a build of torch for its driver"
        return Finding("torch", "note", found, do)
    return Finding("torch", "ok", found)


def _extras() -> Iterator[Finding]:
    for extra, distributions in EXTRAS.items():
        missing = [name for name in distributions if version_of(name) is None]
        if missing:
            found, do = f"without {', '.join(missing)}", f"pip install 'everystep[{extra}]'"
            yield Finding(f"extra {extra}", "note", found, do)
        else:
            here = ", ".join(f"{name} {version_of(name)}" for name in distributions)
            yield Finding(f"extra {extra}", "ok", here)


def _cache(settings: SourceSettings) -> Finding:
    folder = settings.cache
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(there, os.W_OK):
        do = "Set XDG_CACHE_HOME to a folder that you may write to"
        return Finding("cache folder", "problem", f"{folder} cannot be written to", do)
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / 1e9:.1f} GB free"
    if free < _LITTLE:
        return Finding("cache folder", "note", found, "Make room, or set XDG_CACHE_HOME")
    return Finding("cache folder", "ok", found)


def _default_model() -> Finding:
    if any(one.name == DEFAULT_MODEL for one in cached_models()):
        return Finding("default model", "ok", DEFAULT_MODEL)
    return Finding("default model", "note", f"{DEFAULT_MODEL} is not here", "everystep pull")


def _network(settings: SourceSettings, offline: bool) -> Finding:
    if not settings.offline and not offline:
        return Finding("network", "ok", "used where a model is to be fetched")
    do = "Leave out --offline, EVERYSTEP_OFFLINE and HF_HUB_OFFLINE to fetch models"
    return Finding("network", "note", "never used: only models that are here can be loaded", do)


def _token() -> Finding:
    # Its value is nobody's business.
    found = "there is one" if has_token() else "none; gated models alone need one"
    return Finding("token of the hub", "ok", found)
