"""The orders of replicas, as settings say them. Nothing here needs Ray."""

from __future__ import annotations

import os
import secrets

import msgspec

from everystep.server.engine_process import EngineOrders
from everystep.server.settings import ServeSettings


class ReplicaOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The orders of replicas: those of their engines, how many there are, and when that changes.

    `most`: replicas at most, where load asks for more. `load`: prompts at work in each that are
    aimed at. `drain_seconds`: for which a replica that is to end may go on with its answers.
    `address`: of a cluster that is there; `application`: its name on it.
    """

    engine: EngineOrders
    replicas: int
    most: int
    load: float
    scale_up_seconds: float
    scale_down_seconds: float
    affinity_tokens: int
    merge_seconds: float
    drain_seconds: float
    hang_seconds: float
    address: str | None
    application: str

    @property
    def cpus(self) -> float:
        """The CPUs of a replica."""
        return float(self.engine.threads or 1)


def sharing(settings: ServeSettings, replicas: int) -> ServeSettings:
    """Return settings whose number of threads is said: of a machine that these replicas share, each
    has its part; of a cluster, whose nodes may be any, one."""
    if settings.threads is not None:
        return settings
    own = max(1, len(os.sched_getaffinity(0)) // replicas) if settings.ray_address is None else 1
    return msgspec.structs.replace(settings, threads=own)


def replica_orders(settings: ServeSettings) -> ReplicaOrders:
    """Return what the replicas of these settings are told."""
    replicas = settings.replicas or 1
    most = max(replicas, settings.max_replicas or 0)
    own = sharing(settings, most)
    return ReplicaOrders(
        engine=own.orders(own.sources()),
        replicas=replicas,
        most=most,
        load=own.replica_load or max(1.0, own.max_rows / 2),
        scale_up_seconds=own.scale_up_seconds,
        scale_down_seconds=own.scale_down_seconds,
        affinity_tokens=own.affinity_tokens,
        merge_seconds=own.merge_seconds,
        drain_seconds=max(own.drain_seconds, own.deadline or 0.0),
        hang_seconds=own.hang_seconds,
        address=own.ray_address,
        application=own.ray_application or f"everystep-{secrets.token_hex(6)}",
    )
