"""What the system knows of the processes that hold parts of a model."""

from __future__ import annotations

import os
from pathlib import Path

from tests.process_tree import children_of, command_of, sockets_of

LOOPBACK, LISTENS = "0100007F", "0A"


def children() -> list[int]:
    """The processes that hold other parts, of those that this one has started."""
    own = sorted(children_of(os.getpid()))
    return [one for one in own if b"executors.parallel" in command_of(one)]


def listened(pid: int) -> set[str]:
    """The addresses, as the system writes them, at which a process can be reached."""
    held = sockets_of(pid)
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and row[9] in held}
