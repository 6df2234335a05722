"""Replicas of the engine on Ray Serve: their deployment, and the handle that reaches them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import ray.exceptions
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from everystep.server.messages import Ready, ReplicaState
from everystep.server.ray.fan import ReplicaGone, Replicas
from everystep.server.ray.orders import ReplicaOrders
from everystep.server.ray.replica import EngineReplica

log = logging.getLogger("everystep.server")

_ROUTER: Any = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_NAME = "EngineReplica"
_HEALTH_SECONDS = 5.0


def deployment_options(orders: ReplicaOrders) -> dict[str, Any]:
    """Return the options of the deployment."""
    rows = orders.engine.max_rows
    scale: dict[str, Any] = {"num_replicas": orders.replicas}
    if orders.most > orders.replicas:
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=orders.replicas,
                max_replicas=orders.most,
                target_ongoing_requests=orders.load,
                look_back_period_s=max(1.0, min(30.0, orders.scale_up_seconds)),
                upscale_delay_s=orders.scale_up_seconds,
                downscale_delay_s=orders.scale_down_seconds,
            )
        }
    return {
        **scale,
        # A few more than fit, as in the line of a front; the others go to the next replica.
        "max_ongoing_requests": rows + max(2, rows // 8),
        "graceful_shutdown_timeout_s": orders.drain_seconds,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": _HEALTH_SECONDS,
        "max_constructor_retry_count": 3,
        "ray_actor_options": {"num_cpus": orders.cpus},
        "request_router_config": RequestRouterConfig(request_router_class=_ROUTER),
    }


def application(orders: ReplicaOrders) -> serve.Application:
    """Return the application of Ray Serve that has these replicas, for `serve.run`."""
    deployed = serve.deployment(name=_NAME, **deployment_options(orders))(EngineReplica)
    return deployed.bind(orders.engine, orders.merge_seconds, orders.hang_seconds)


class ServedReplicas(Replicas):
    """The replicas of an application of Ray Serve, as its handle reaches them."""

    def __init__(self, handle: serve.handle.DeploymentHandle[Any], name: str) -> None:
        self._handle, self._name = handle, name

    async def facts(self) -> Ready:
        return msgspec.msgpack.decode(await self._handle.facts.remote(), type=Ready)

    async def follow(self, asked: bytes, session: str | None) -> AsyncGenerator[bytes, None]:
        said: dict[str, Any] = {} if session is None else {"session_id": session}
        parts: Any = self._handle.options(stream=True, **said).follow.remote(asked)
        over = False
        try:
            async for part in parts:
                yield part
            over = True
        except ray.exceptions.RayError as error:
            over = True
            raise ReplicaGone(str(error)[:400]) from error
        finally:
            if not over:
                parts.cancel()

    async def count(self) -> int:
        return await asyncio.to_thread(self._running)

    async def state(self, session: str) -> ReplicaState:
        told = await self._handle.options(session_id=session).state.remote()
        return msgspec.msgpack.decode(told, type=ReplicaState)

    def _running(self) -> int:
        found = serve.status().applications.get(self._name)
        known = None if found is None else found.deployments.get(_NAME)
        states = {} if known is None else known.replica_states
        return sum(count for state, count in states.items() if state == "RUNNING")


@contextmanager
def deployed(orders: ReplicaOrders) -> Iterator[ServedReplicas]:
    """Have replicas on the cluster of this driver while the body runs."""
    serve.start(proxy_location="Disabled")  # the front speaks HTTP
    name = orders.application
    handle = serve.run(application(orders), name=name, route_prefix=None)
    try:
        yield ServedReplicas(handle, name)
    finally:
        try:
            serve.delete(name)
        except TimeoutError:  # Ray waits for a minute, and goes on with it afterwards
            log.warning("the replicas of %s have not ended within a minute", name)
        if orders.address is None:
            serve.shutdown()  # type: ignore[no-untyped-call]
