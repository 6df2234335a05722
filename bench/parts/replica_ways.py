"""Ways to a replica, each running while somebody asks: ours, Ray's proxy, and none.

All of them answer the same requests on /v1/completions: an application that computes nothing and
sends as many events as are asked for, or everystep with a tiny model.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from parts.load import OverHttp

from everystep.server.application import Front
from everystep.server.link import EngineLink
from everystep.server.service import Service
from everystep.server.serving import mooring_of
from everystep.server.settings import ServeSettings, front_model
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

PATIENCE = 120
ASKS: Mapping[str, Any] = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
"""Fields of requests beside prompt and length."""
MODEL = "tiny"
_ROOT = Path(__file__).parents[2]
_EVENT = b'data: {"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'


def model_folder(folder: Path) -> Path:
    """Return the folder of a tiny model, written into this one."""
    made = folder / MODEL
    sizes = {"vocab_size": 320, "max_position_embeddings": 4096}
    tiny_llama(dtype=torch.float32, **sizes).save_pretrained(made)
    tiny_tokenizer(320).save_pretrained(made)
    return made


def bare_application() -> Callable[..., Any]:
    """Return an application that sends events at once."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        count = json.loads(body)["max_tokens"] if body else 0
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in [*([_EVENT] * count), b"data: [DONE]\n\n"]:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return application


def own_application() -> Callable[..., Any]:
    """Return everystep's application with an engine in a process of its own; the folder of the
    model is an environment variable."""
    settings = ServeSettings(model=os.environ["EVERYSTEP_BENCH_MODEL"], threads=1)
    model = front_model(settings.model, settings.pictures(), offline=True)
    front = Front(EngineLink(mooring_of(settings)), {MODEL: model}, settings.front())
    service = Service(front)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send, service)
        else:
            await front.application(scope, receive, send)

    return application


async def _live(receive: Any, send: Any, service: Service | None = None) -> None:
    await receive()
    if service is not None:
        await service.start()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    if service is not None:
        await service.close()
    await send({"type": "lifespan.shutdown.complete"})


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _paths() -> str:
    """Return where Python finds everystep and these parts, in other processes too."""
    own = (_ROOT / "src", _ROOT / "bench", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(map(str, own))


def _wait(port: int, lives: Callable[[], bool] = lambda: True) -> OverHttp:
    """Return what asks this port, once it answers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and lives():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return OverHttp(port, MODEL, ASKS)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise TimeoutError("nobody answers at the port")


@contextmanager
def _program(port: int, *line: str) -> Iterator[OverHttp]:
    """A program that serves on the port."""
    environment = {**os.environ, "PYTHONPATH": _paths()}
    command = [sys.executable, "-m", *line]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            yield _wait(port, lambda: process.poll() is None)
        finally:
            process.terminate()


@contextmanager
def on_uvicorn() -> Iterator[OverHttp]:
    """The application that computes nothing, on uvicorn."""
    port = _free_port()
    line = ("uvicorn", "--factory", "parts.replica_ways:bare_application", "--port", str(port))
    with _program(port, *line, "--log-level", "error") as target:
        yield target


@contextmanager
def on_serve(folder: Path, *more: str) -> Iterator[OverHttp]:
    """`everystep serve` with a model of one thread."""
    port = _free_port()
    line = ("everystep", "serve", str(folder), "--threads", "1", "--port", str(port), *more)
    with _program(port, *line) as target:
        yield target


@contextmanager
def ray_with_proxy(folder: Path) -> Iterator[tuple[str, int]]:
    """A Ray cluster of this machine with a proxy: its address, and the proxy's port."""
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    os.environ["EVERYSTEP_BENCH_MODEL"] = str(folder)
    os.environ["PYTHONPATH"] = _paths()
    import ray
    from ray import serve

    from everystep.server.ray.cluster import cluster

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    port = _free_port()
    with cluster(None, 3):
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        try:
            yield ray.get_runtime_context().gcs_address, port
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def behind_proxy(application: Callable[[], Any], port: int) -> Iterator[OverHttp]:
    """An application in a replica of its own behind Ray's proxy."""
    from ray import serve

    options: dict[str, Any] = {"max_ongoing_requests": 64, "ray_actor_options": {"num_cpus": 1}}
    deployed: Any = serve.deployment(**options)(serve.ingress(application)())
    serve.run(deployed.bind(), name="behind", route_prefix="/")
    try:
        yield _wait(port)
    finally:
        serve.delete("behind")
