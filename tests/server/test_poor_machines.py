"""Machines that lack something: a home, a standard output, descriptors, a disk with room; and
machines that many ask at once."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from everystep.server.host import EngineLimits
from everystep.server.link import QueueLimits
from tests.cli.running import everystep
from tests.server.programs import program
from tests.server.serving import (
    PATIENCE,
    TOKENIZER,
    Served,
    chunks_of,
    in_thread,
    joined,
    served,
    tiny,
)

ASKED: Any = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}


def answered(url: str) -> bool:
    """Whether a request has a whole answer, on a connection of its own."""
    answer = httpx.post(f"{url}/v1/completions", json=ASKED, timeout=PATIENCE)
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def test_a_server_needs_no_home(tmp_path: Path) -> None:
    """Nor a folder for caches, nor one to work in that it may write to."""
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o500)
    bare = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    bare.pop("HOME", None)
    with program(tmp_path, "--port", "0", env=bare, cwd=empty) as (_, url):
        assert answered(url)
        assert httpx.get(url).status_code == 200
    assert list(empty.iterdir()) == []


def test_a_server_needs_no_place_for_what_it_says(tmp_path: Path) -> None:
    """Its standard error is closed when it starts. A closed standard output is refused as for every
    command, with what to do: tests/cli/test_failures.py."""
    for one in (tiny(), TOKENIZER):
        one.save_pretrained(tmp_path / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = everystep("serve", str(tmp_path / "tiny"), "--threads", "1", "--port", str(port))
    closing = ["sh", "-c", 'exec "$@" >/dev/null 2>&-', "sh", *command]
    with subprocess.Popen(closing) as running:
        try:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and running.poll() is None:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            assert answered(f"http://127.0.0.1:{port}")
            running.terminate()
            assert running.wait(PATIENCE) == 0
        finally:
            running.kill()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_log_on_a_full_disk_fails_no_request(tmp_path: Path) -> None:
    lines = tmp_path / "tiny-output"
    for one in (tiny(), TOKENIZER):
        one.save_pretrained(tmp_path / "tiny")
    command = everystep("serve", str(tmp_path / "tiny"), "--threads", "1", "--port", "0")
    with (
        lines.open("w") as output,
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command, stdout=output, stderr=full) as running,
    ):
        try:
            deadline = time.monotonic() + PATIENCE
            while not lines.read_text().endswith("\n") and time.monotonic() < deadline:
                assert running.poll() is None
                time.sleep(0.1)
            url = re.findall(r"http://[\d.:]+", lines.read_text())[0]
            assert all(answered(url) for _ in range(3))
            running.terminate()
            assert running.wait(PATIENCE) == 0
        finally:
            running.kill()


def test_descriptors_that_run_out_stop_nobody_who_is_connected(tmp_path: Path) -> None:
    """Further clients wait in the system's line until others have gone, and the log says so in a
    few lines."""
    few, errors = 80, list[str]()

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    with program(tmp_path, "--port", "0", errors=errors, preexec_fn=bounded) as (running, url):
        address = httpx.URL(url)
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            assert client.get("/health").status_code == 200
            idle = [socket.create_connection((address.host, address.port)) for _ in range(2 * few)]
            descriptors = Path(f"/proc/{running.pid}/fd")
            deadline = time.monotonic() + PATIENCE
            while descriptors.exists() and len(list(descriptors.iterdir())) < few - 1:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for stream in (False, True):
                answer = client.post("/v1/completions", json={**ASKED, "stream": stream})
                assert answer.status_code == 200
            for one in idle:
                one.close()
        assert answered(url), "who comes when others have gone"
    assert 1 <= sum("no descriptor is left" in line for line in errors) < 100
    assert len(errors) < 200 and not any("asyncio" in line for line in errors)


async def _streams(server: Served, count: int) -> list[str]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:

        async def text(seed: int) -> str:
            body = {**ASKED, "stream": True, "seed": seed, "temperature": 1.0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return joined(chunks_of(answer.text))

        return await asyncio.gather(*(text(seed % 50) for seed in range(count)))


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_as_many_streams_at_once_have_their_own_texts(count: int) -> None:
    most = EngineLimits(max_rows=64)
    with served(in_thread(limits=most), queue=QueueLimits(requests=count)) as server:
        found = asyncio.run(_streams(server, count))
        alone = [
            server.completion(**ASKED, seed=seed, temperature=1.0)["choices"][0]["text"]
            for seed in range(50)
        ]
        assert found == [alone[number % 50] for number in range(count)]
        assert len(set(alone)) > 25
        rows = server.client.get("/metrics").text
        assert 'everystep_num_requests_running{model_name="tiny"} 0.0' in rows
