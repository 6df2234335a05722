"""An engine in a process of its own, asked through its standard input and output.

The other side is `engines/protocol.py`. Knows how to start, ask and end one, and nothing of models.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts.environments import Unavailable

ENGINES = Path(__file__).parents[1] / "engines"


class EngineProcess:
    """Answers questions until it is closed; `about` is what it says of itself."""

    def __init__(self, python: str, script: str, model: Path, threads: int) -> None:
        """Returns when the model is loaded; Unavailable, with the cause, if it cannot be."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, until close()
        self._process = subprocess.Popen(
            [python, str(ENGINES / script), str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.about = self._read()

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """The answer; Unavailable, with the cause, if the process ended over it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(self._cause()) from None
        return self._read()

    def close(self) -> None:
        """The process has ended."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(self._cause())
        return json.loads(line)

    def _cause(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else f"it ended with status {self._process.returncode}"
