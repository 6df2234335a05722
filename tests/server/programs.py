"""`everystep serve` as a program of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everystep.api.model import LanguageModel
from tests.cli.running import everystep
from tests.server.serving import TOKENIZER, tiny


@contextmanager
def program(
    folder: Path,
    *options: str,
    model: LanguageModel | None = None,
    errors: list[str] | None = None,
    **started: Any,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`everystep serve` as people start it, and its address; it ends with 0. `errors`: where the
    lines of its standard error go, which is a pipe. `started`: how its process is started."""
    (model or tiny()).save_pretrained(folder / "tiny")
    TOKENIZER.save_pretrained(folder / "tiny")
    command = everystep("serve", str(folder / "tiny"), "--threads", "1", *options)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **started) as running:
        assert running.stdout is not None and running.stderr is not None
        errors = [] if errors is None else errors
        reading = running.stderr
        collecting = threading.Thread(target=errors.extend, args=(reading,), daemon=True)
        collecting.start()
        first = running.stdout.readline()
        found = re.fullmatch(r"serving tiny on (\S+)\n", first)
        assert found, (first, errors)
        try:
            yield running, found[1]
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0, errors
            collecting.join(60)
            assert not [line for line in errors if "Traceback" in line], errors
        finally:
            running.kill()


def marked(mark: str) -> dict[int, str]:
    """The command lines of processes that inherited this mark, NAME=VALUE of the environment, and
    have not ended; this one's own children, such as the program in which templates are rendered,
    are left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                status = (entry / "status").read_text()
                if f"PPid:\t{os.getpid()}\n" not in status:
                    found[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue
    return found


def assert_none_is_left(mark: str) -> None:
    """No process with this mark is there after a while, in which it may still end."""
    deadline = time.monotonic() + 60
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == {}, "after the end no process is left"
