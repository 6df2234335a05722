"""A front that is killed outright takes everything with it that it had started."""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process_tree import descendants_of
from tests.server.programs import program
from tests.server.serving import PATIENCE

LONG: Any = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
SHAPED: Any = {"prompt": "hello", "max_tokens": 3, "regex": "[ab]{5}"}
ASKED: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


class KilledError(Exception):
    """The program under test was killed, so that it does not end as others do."""


def ended(handle: int) -> bool:
    """Whether the process of a handle has ended within a patient time."""
    ready, _, _ = select.select([handle], [], [], PATIENCE)
    return bool(ready)


@pytest.mark.parametrize("at_work", [False, True])
def test_no_process_is_left_behind(tmp_path: Path, *, at_work: bool) -> None:
    """While the engine waits, and in the middle of a stream."""
    if not (Path("/proc/self/task").exists() and hasattr(os, "pidfd_open")):
        pytest.skip("Linux alone lists the children of a process, and gives handles of them")
    with pytest.raises(KilledError), program(tmp_path, "--port", "0") as (running, url):
        with ExitStack() as held:
            client = held.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
            assert client.post("/v1/completions", json=SHAPED).status_code == 200
            assert client.post("/v1/chat/completions", json=ASKED).status_code == 200
            if at_work:
                answer = held.enter_context(client.stream("POST", "/v1/completions", json=LONG))
                assert next(answer.iter_lines()).startswith("data: ")
            started = descendants_of(running.pid)
            assert len(started) > 1, "the engine, and what compiles grammars or renders templates"
            handles = {one: os.pidfd_open(one) for one in started}
            running.send_signal(signal.SIGKILL)
            assert running.wait(PATIENCE) == -signal.SIGKILL
        try:
            assert [one for one, handle in handles.items() if not ended(handle)] == []
        finally:
            for one, handle in handles.items():
                if not select.select([handle], [], [], 0)[0]:
                    os.kill(one, signal.SIGKILL)
                os.close(handle)
        address = httpx.URL(url)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((address.host, address.port))
            again.listen()
        raise KilledError
