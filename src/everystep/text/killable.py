"""Processes that answer questions and can be ended in the middle of one.

A question goes to the input of a process and its answer comes from its output, each with its length
before it. What takes too long is ended, and then there is no answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from io import FileIO
from typing import cast

from everystep.text import caged

# How it shows that a process has ended, or says what it never would.
SILENT = (OSError, ValueError, TypeError, LookupError, RecursionError)


def started(line: list[str], names: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Return a process that runs this command; OSError where none starts. `names`: its environment,
    that of this process without."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    # In a session of its own Ctrl-C in the terminal does not reach it. Its pipes have no buffer:
    # that has a lock, and a process that is forked while another thread holds the lock could never
    # close the pipe.
    return subprocess.Popen(
        line, bufsize=0, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True, env=names
    )


def exchanged(
    process: subprocess.Popen[bytes], question: bytes | None, deadline: float, most: int
) -> bytes | None:
    """Send a question, if any, and return the answer of at most so many bytes; None if there is
    none by the moment `deadline`, when the process is ended."""
    clock = threading.Timer(max(deadline - time.monotonic(), 0), kill, (process,))
    clock.daemon = True
    clock.start()
    try:
        if question is not None:
            caged.send(cast(FileIO, process.stdin), question)
        return caged.receive(cast(FileIO, process.stdout), most)
    except SILENT:
        return None
    finally:
        clock.cancel()


def runs(process: subprocess.Popen[bytes]) -> bool:
    """Return whether it has not ended; its number stays its own until somebody waits for it."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll() is None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it may have started, which is the group that it leads."""
    if process.returncode is not None:  # its number may be another's by now
        return
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close this end of its input and output."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            cast(FileIO, pipe).close()
