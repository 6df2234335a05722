"""What the system knows of the processes that hold parts of a model."""

from __future__ import annotations

import os
import re
from pathlib import Path

LOOPBACK, LISTENS = "0100007F", "0A"


def children() -> list[int]:
    """The processes that hold other parts, of those that this one has started."""
    own = Path(f"/proc/{os.getpid()}/task")
    each = " ".join((one / "children").read_text() for one in own.iterdir()).split()
    return [
        int(one)
        for one in each
        if b"executors.parallel" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


def listened(pid: int) -> set[str]:
    """The addresses, as the system writes them, at which a process can be reached."""
    links = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()]
    held = {found[1] for one in links if (found := re.fullmatch(r"socket:\[(\d+)\]", one))}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and row[9] in held}
