"""An engine that answers no more, or whose step never ends, is ended and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from everystep.errors import EverystepError
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.engine_process import EngineOrders
from everystep.server.host import BEAT, HostedModel
from everystep.server.link import (
    EngineLink,
    HangWatch,
    Mooring,
    ProcessMooring,
    ThreadMooring,
)
from everystep.server.local import listening
from everystep.server.messages import Alive, Tokens
from everystep.server.settings import ServeSettings, read_settings
from everystep.testing import HashExecutor
from everystep.types import StepOutput, Work
from tests.server.serving import (
    LIMITS,
    PATIENCE,
    TOKENIZER,
    Served,
    chunks_of,
    joined,
    tiny,
)
from tests.server.virtual import hash_model

LONG: Any = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True, "seed": 3}


@contextmanager
def hanging(mooring: Mooring) -> Iterator[Served]:
    """A server that takes an engine to hang after two seconds."""
    link = EngineLink(mooring, hang_seconds=2.0)
    front = Front(link, {"tiny": FrontModel(TOKENIZER, tiny().chat_defaults)})
    with listening(front) as port:
        one = Served(front, port)
        with one.client:
            yield one


class Statuses:
    """What /ready says while the body runs."""

    def __init__(self, server: Served) -> None:
        self.found: set[int] = set()
        self._url, self._over = server.url, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._over.wait(0.02):
                self.found.add(client.get("/ready").status_code)

    def __enter__(self) -> Statuses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_process_that_was_stopped_is_ended_and_its_streams_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny().save_pretrained(tmp_path / "tiny")
    TOKENIZER.save_pretrained(tmp_path / "tiny")
    orders = EngineOrders({"tiny": str(tmp_path / "tiny")}, threads=1)
    with hanging(ProcessMooring(orders)) as server, Statuses(server) as statuses:
        wanted = server.completion(**LONG)["choices"][0]["text"]
        stopped = server.front.link.process
        assert stopped is not None and stopped != os.getpid()
        lines = []
        body = {**LONG, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            for number, line in enumerate(answer.iter_lines()):
                lines.append(line)
                if number == 10:
                    os.kill(stopped, signal.SIGSTOP)
        assert joined(chunks_of("\n".join(lines))) == wanted
        assert server.front.link.restarts == 1 and server.front.link.process != stopped
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)
    assert statuses.found == {200, 503}
    assert "the engine hangs" in caplog.text


class Sticking(HashExecutor):
    """The hash model, whose first forward of all never returns."""

    stuck = threading.Event()
    free = threading.Event()

    def run(self, work: Work) -> StepOutput:
        if len(work.rows) and not self.stuck.is_set():
            self.stuck.set()
            self.free.wait()
        return super().run(work)


def test_a_step_that_never_ends_is_noticed_while_its_process_answers() -> None:
    model = hash_model()
    model.executor = lambda *_, **__: Sticking(320, model.width)  # type: ignore[method-assign, assignment, misc]
    mooring = ThreadMooring(lambda: {"tiny": HostedModel(model, TOKENIZER, LIMITS)}, LIMITS)
    try:
        with hanging(mooring) as server, Statuses(server) as statuses:
            texts = {server.completion(**LONG)["choices"][0]["text"] for _ in range(2)}
            assert server.front.link.restarts == 1
        assert len(texts) == 1 and statuses.found == {200, 503}
    finally:
        Sticking.free.set()


def test_what_goes_on_does_not_hang_however_long_it_works() -> None:
    watch = HangWatch(3.0)
    for step in range(100):
        watch.hear(Alive([-1, step]))
        assert watch.passes(0.9) is None
    said = [watch.hear(Alive([-1, 100])) or watch.passes(0.5) for _ in range(8)]
    assert said[:5] == [None] * 5 and "in one step" in str(said[5])


def test_between_two_steps_nothing_hangs_and_silence_does() -> None:
    watch = HangWatch(3.0)
    for _ in range(100):
        watch.hear(Alive([-1, -1]))
        assert watch.passes(0.9) is None
    for _ in range(100):
        watch.hear(Tokens([]))
        assert watch.passes(0.9) is None
    said = [watch.passes(0.5) for _ in range(6)]
    assert said[:4] == [None] * 4 and "nothing" in str(said[4])
    never = HangWatch(0.0)
    assert all(never.passes(0.9) is None for _ in range(10_000))


def test_the_sleep_of_a_machine_is_nobodys_hanging() -> None:
    watch = HangWatch(3.0)
    watch.hear(Alive([7]))
    assert watch.passes(86400.0) is None, "both were asleep"
    watch.hear(Alive([8]))
    assert watch.passes(86400.0) is None
    assert 2 * BEAT < 3.0


def test_the_bound_is_a_setting(tmp_path: Path) -> None:
    assert ServeSettings().hang_seconds == 120.0
    file = tmp_path / "serve.toml"
    file.write_text("hang_seconds = 7.5\n")
    assert read_settings(file, {}).hang_seconds == 7.5
    file.write_text("hang_seconds = -1\n")
    with pytest.raises(EverystepError, match="hang_seconds"):
        read_settings(file, {})


@pytest.mark.parametrize("moment", [0.0, 0.3])
def test_a_server_that_is_ended_while_its_model_is_loaded_ends(moment: float) -> None:
    """At once, and not when an engine that is never ready has said that it is."""

    class LoadsForEver(Mooring):
        def start(self) -> socket.socket:
            own, self._other = socket.socketpair()
            return own

        def end(self) -> None:
            self._other.close()

        def kill(self) -> None:
            raise AssertionError("it is ended by its connection")

    async def ended() -> None:
        link = EngineLink(LoadsForEver())
        starting = asyncio.create_task(link.start())
        await asyncio.sleep(moment)
        starting.cancel()
        await asyncio.wait_for(link.close(), PATIENCE)

    asyncio.run(ended())
