"""A driver of a Ray cluster: of one that is there, or of one of this machine alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

_STORE_BYTES = 512 << 20
"""Bytes of the object store of an own cluster; what is more goes to the disk."""


@contextmanager
def cluster(address: str | None, cpus: float) -> Iterator[None]:
    """Be a driver of a cluster while the body runs.

    `address`: of one that is there; None for one of this machine alone, with so many CPUs to give
    away, that ends with the body. A program that is a driver already stays the one that it is.
    """
    if ray.is_initialized():
        yield
        return
    # Ray is told by a variable alone that it is to send nothing about its use.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    told: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        own: dict[str, Any] = {"num_cpus": max(1, round(cpus)), "object_store_memory": _STORE_BYTES}
        ray.init("local", include_dashboard=False, **own, **told)
    else:
        ray.init(address, **told)
    try:
        yield
    finally:
        ray.shutdown()
