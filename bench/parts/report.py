"""What every benchmark has in common: options, the machine, and a dated file in bench/results/.

A result names the day, the machine, the versions and every option, so that nobody has to ask how
a figure came about. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from everystep.processor import processor_name

RESULTS = Path(__file__).parents[1] / "results"


def options(document: str, threads: int) -> argparse.ArgumentParser:
    """A parser of what all benchmarks take; `document` begins with the question that one asks."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--out", metavar="NAME", help="the result's file, in bench/results/")
    return parser


def write(
    name: str,
    args: argparse.Namespace,
    content: Mapping[str, Any],
    packages: tuple[str, ...] = (),
    versions: Mapping[str, str] | None = None,
) -> Path:
    """`content` is in a file of today that is called `name`, after how it was measured.

    `packages`: those of this environment that took part; `versions`: of others.
    """
    installed = {package: version(package) for package in ("everystep", "torch", *packages)}
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": processor_name(), "cores": os.cpu_count()},
        "versions": {**installed, "python": platform.python_version(), **(versions or {})},
        "settings": {key: _plain(value) for key, value in vars(args).items() if key != "out"},
        **content,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / (args.out or f"{result['date']}-{name}.json")
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return path


def latest(name: str) -> dict[str, Any] | None:
    """The newest result that is called `name`, if there is one."""
    found = sorted(RESULTS.glob(f"????-??-??-{name}.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def _plain(value: object) -> object:
    if not isinstance(value, Path):
        return value
    home = Path.home()
    return f"~/{value.relative_to(home)}" if value.is_relative_to(home) else str(value)
