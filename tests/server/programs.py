"""`everystep serve` as a program of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everystep.api.model import LanguageModel
from tests.cli.running import everystep
from tests.server.serving import TOKENIZER, tiny


@contextmanager
def program(
    folder: Path, *options: str, model: LanguageModel | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`everystep serve` as people start it, and its address; it ends with 0."""
    (model or tiny()).save_pretrained(folder / "tiny")
    TOKENIZER.save_pretrained(folder / "tiny")
    command = everystep("serve", str(folder / "tiny"), "--threads", "1", *options)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as running:
        assert running.stdout is not None and running.stderr is not None
        errors: list[str] = []
        reading = running.stderr
        threading.Thread(target=lambda: errors.extend(reading), daemon=True).start()
        first = running.stdout.readline()
        found = re.fullmatch(r"serving tiny on (\S+)\n", first)
        assert found, (first, errors)
        try:
            yield running, found[1]
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0, errors
            assert not [line for line in errors if "Traceback" in line], errors
        finally:
            running.kill()
