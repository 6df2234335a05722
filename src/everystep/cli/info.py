"""`everystep info`: what a report of a problem should say about the machine.

Facts alone; what they mean for speed, and what to do about it, is for `everystep doctor` to say.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from everystep._version import __version__
from everystep.cli.machine import LIBRARIES, devices, threads, version_of
from everystep.cli.models import AsJson
from everystep.cli.terminal import write_report, write_table
from everystep.files.sources import DEFAULT_MODEL, SourceSettings, cached_models


def info(as_json: AsJson = False) -> None:
    """Show versions, devices, and where models are kept."""
    # A second of importing that other commands without a model do not need.
    from everystep.executors.native import status

    native = status()
    settings = SourceSettings.from_environment()
    cached = {one.name: str(one.path) for one in cached_models()}
    found = {
        "everystep": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version_of(name) for name in LIBRARIES},
        "devices": devices(),
        "threads": threads(),
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


def _shown(value: Any) -> str:
    if value is None:
        return "not here"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)
