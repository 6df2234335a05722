"""One of two processes that torchrun starts: `python -m tests.executors.parallel.ranks FOLDER`.

The second fails once in the middle of a step, and is stopped once; the first is interrupted once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import everystep as es
from everystep.executors.parallel.rank_server import RankServer
from everystep.models.decoder import Decoder

IDS = torch.tensor([[5, 6, 7, 8]])
CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
PATIENCE = 3.0


def tried(call: Callable[[], Any]) -> Any:
    """What a call gives, or the name and text of its error."""
    try:
        return call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def breaks_once(at: int, error: BaseException) -> None:
    """Let the forward of this process of that number end by the error, after half of its layers."""
    added, steps = Decoder._added, list[int]()

    def broken(*given: Any) -> Any:
        steps.append(1)
        if len(steps) == at:
            raise error
        return added(*given)

    Decoder._added = broken  # type: ignore[method-assign]


def notes_what_is_left(folder: Path) -> None:
    """Let this process write down, when it ends, how many executors it still has."""
    serve = RankServer.serve

    def noting(server: RankServer, meeting: int = 1) -> None:
        serve(server, meeting)
        (folder / "left").write_text(str(len(server._executors)))

    RankServer.serve = noting  # type: ignore[method-assign]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1":
        (folder / "pid").write_text(str(os.getpid()))
        breaks_once(15, ValueError("of one process alone"))
        notes_what_is_left(folder)
    model = es.load_model(folder, parallel=2, parallel_timeout=PATIENCE)
    # The other serves from here on, and ends with this one.
    other = int((folder / "pid").read_text())

    def call() -> Any:
        return model.generate(IDS, **CALL).tolist()

    found = {"raising": tried(call), "after raising": tried(call)}
    added = Decoder._added
    breaks_once(9, KeyboardInterrupt("in mid-step"))
    found |= {"interrupted": tried(call)}
    Decoder._added = added  # type: ignore[method-assign]
    found |= {"after the interrupt": tried(call)}
    os.kill(other, signal.SIGSTOP)
    began = time.monotonic()
    found |= {"silent": tried(call), "silent seconds": time.monotonic() - began}
    os.kill(other, signal.SIGCONT)
    found |= {"after the silence": tried(call)}
    found |= {"a second model": tried(lambda: es.load_model(folder, parallel=2))}
    found |= {"another number": tried(lambda: es.load_model(folder, parallel=1 + 1 + 2))}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
