"""The program of a fan's process: deploys replicas, and hands them what one front asks.

Its connection to the front is a socket that it was started with. What it is to deploy comes as
arguments, as JSON; it reads no other.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

import msgspec

from everystep.server.ray.cluster import cluster
from everystep.server.ray.deployment import deployed
from everystep.server.ray.fan import ReplicaFan
from everystep.server.ray.orders import ReplicaOrders
from everystep.server.request_log import write_warnings


def main(descriptor: str, orders: str) -> None:
    """Serve the front at the other end of this descriptor."""
    write_warnings()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's; it says when to end
    read = msgspec.json.decode(orders, type=ReplicaOrders)
    with (
        socket.socket(fileno=int(descriptor)) as connection,
        cluster(read.address, read.most * read.cpus),
        deployed(read) as replicas,
    ):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ctrl-C; Ray has its own until here
        asyncio.run(ReplicaFan(replicas, read.affinity_tokens).serve(connection))


if __name__ == "__main__":
    main(*sys.argv[1:])
