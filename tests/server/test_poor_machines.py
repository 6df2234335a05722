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
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def saying_nothing(folder: Path, where: str) -> Iterator[str]:
    """The address of a program whose standard error goes where a shell's words say; it ends with
    0."""
    for one in (tiny(), TOKENIZER):
        one.save_pretrained(folder / "tiny")
    command = everystep("serve", str(folder / "tiny"), "--threads", "1", "--port", "0")
    line = ["sh", "-c", f'exec "$@" {where}', "sh", *command]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield re.findall(r"serving tiny on (\S+)", running.stdout.readline())[0]
            running.terminate()
            assert running.wait(PATIENCE) == 0
        finally:
            running.kill()


def test_a_server_needs_no_place_for_what_it_says(tmp_path: Path) -> None:
    """Its standard error is closed when it starts. A closed standard output is refused as for every
    command, with what to do: tests/cli/test_failures.py."""
    with saying_nothing(tmp_path, "2>&-") as url:
        assert answered(url)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_log_on_a_full_disk_fails_no_request(tmp_path: Path) -> None:
    with saying_nothing(tmp_path, "2>/dev/full") as url:
        assert all(answered(url) for _ in range(3))


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
