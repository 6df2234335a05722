"""The engine's process is killed: the front stays, and streams go on the same way."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from everystep.server.engine_process import EngineOrders
from everystep.server.host import HostedModel
from everystep.server.link import ProcessMooring
from tests.server.serving import (
    LIMITS,
    TOKENIZER,
    MortalMooring,
    Served,
    chunks_of,
    joined,
    served,
    tiny,
)

LONG: Any = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True}
STEER: Any = {"0": [3.0, -3.0] * (tiny().width // 2)}


@pytest.fixture(scope="module")
def one_server(folder: Path) -> Iterator[Served]:
    with served(ProcessMooring(EngineOrders({"tiny": str(folder)}, threads=1))) as one:
        yield one


@pytest.fixture
def apart(one_server: Served) -> Served:
    """A server whose engine is a process of its own, and is there."""
    wait_ready(one_server)
    return one_server


def wait_ready(server: Served) -> None:
    deadline = time.monotonic() + 60
    while not server.front.link.ready and time.monotonic() < deadline:
        time.sleep(0.01)


def kill(server: Served) -> int:
    """Kill the engine's process once one is ready, and return its number."""
    wait_ready(server)
    process = server.front.link.process
    assert process is not None and process != os.getpid()
    os.kill(process, signal.SIGKILL)
    return process


def streamed(server: Served, killed: list[int], at: int, **body: Any) -> str:
    """The whole body of a stream during which, after so many lines, the engine is killed."""
    lines = []
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for number, line in enumerate(answer.iter_lines()):
            lines.append(line)
            if number == at:
                killed.append(kill(server))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1, "seed": 7, "n": 3, "steer": STEER},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"num_beams": 3}, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.2, "logprobs": 2}, marks=pytest.mark.slow),
    ],
)
def test_streams_go_on_the_same_way(apart: Served, more: dict[str, Any]) -> None:
    more = {"seed": 11, **more}
    wanted = [c["text"] for c in apart.completion(**LONG, **more)["choices"]]
    killed: list[int] = []
    chunks = chunks_of(streamed(apart, killed, 30, **LONG, **more))
    assert killed
    assert [joined(chunks, index) for index in range(len(wanted))] == wanted
    assert apart.front.link.process not in killed


def test_what_a_clock_ends_fails_and_says_so(apart: Served) -> None:
    body = streamed(apart, [], 10, **LONG, timeout=600)
    assert '"error"' in body and "[DONE]" not in body, "half an answer is not a whole one"


def test_health_is_503_for_as_long_as_there_is_no_engine() -> None:
    mooring = MortalMooring(lambda: {"tiny": HostedModel(tiny(), TOKENIZER, LIMITS)}, LIMITS)
    with served(mooring) as server:
        wanted = server.completion(prompt="hello", max_tokens=3)["choices"]
        assert server.client.get("/health").json() == {"status": "ok"}
        for number in (1, 2):
            mooring.die()
            deadline = time.monotonic() + 60
            while server.front.link.ready and time.monotonic() < deadline:
                time.sleep(0.002)
            for _ in range(5):
                for path, seconds in (("/health", "2"), ("/ready", "5")):
                    answer = server.client.get(path)
                    assert answer.status_code == 503, path
                    assert answer.headers["retry-after"] == seconds
                refused = server.post("/v1/completions", prompt="hello", max_tokens=3)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_starting"
            assert "everystep_engine_ready 0.0" in server.client.get("/metrics").text
            mooring.let.set()
            wait_ready(server)
            assert server.client.get("/health").status_code == 200
            assert server.client.get("/ready").status_code == 200
            assert server.completion(prompt="hello", max_tokens=3)["choices"] == wanted
            assert f"everystep_engine_restarts {number}.0" in server.client.get("/metrics").text


@pytest.mark.slow
def test_unstreamed_answers_are_whole_and_health_tells(apart: Served) -> None:
    wanted = apart.completion(**LONG)["choices"]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(apart.completion(**LONG)["choices"]))
    thread.start()
    deadline = time.monotonic() + 30
    while not apart.front.link.running and not answers and time.monotonic() < deadline:
        time.sleep(0.001)
    kill(apart)
    statuses = set()
    with httpx.Client(base_url=apart.url) as client:
        while thread.is_alive():
            statuses.add(client.get("/health").status_code)
            time.sleep(0.01)
    thread.join()
    assert answers == [wanted] and statuses <= {200, 503}


@pytest.mark.slow
def test_an_ask_that_engines_die_with_is_given_up(apart: Served) -> None:
    killed: list[int] = []
    with apart.client.stream(
        "POST", "/v1/completions", json={**LONG, "max_tokens": 4000, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        for _ in range(2):
            begun = apart.front.link.restarts
            while apart.front.link.waiting or not apart.front.link.ready:
                time.sleep(0.001)
            killed.append(kill(apart))
            deadline = time.monotonic() + 60
            while apart.front.link.restarts == begun and time.monotonic() < deadline:
                time.sleep(0.001)
        rest = "\n".join(lines)
    assert "the engine died while it worked on this" in rest and "[DONE]" not in rest
    wait_ready(apart)
    assert apart.completion(prompt="hello", max_tokens=2)


@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_under_load_let_no_stream_end_in_silence(apart: Served, times: int) -> None:
    """Six clients stream all the while: each stream is whole and right, or says what went wrong."""
    chance, over = random.Random(times), threading.Event()
    asked: list[Any] = [{**LONG, "max_tokens": 60, "seed": n, "temperature": 1} for n in range(6)]
    wanted = [apart.completion(**one)["choices"][0]["text"] for one in asked]
    fates: list[str] = []

    def ask(number: int) -> None:
        while not over.is_set():
            body = {**asked[number], "stream": True}
            answer = apart.client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                fates.append("refused" if answer.status_code == 503 else answer.text)
                time.sleep(0.05)
            elif '"error"' in answer.text:
                silent = "[DONE]" in answer.text or "the engine died" not in answer.text
                fates.append(answer.text if silent else "told")
            else:
                right = joined(chunks_of(answer.text)) == wanted[number]
                fates.append("right" if right else answer.text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    killed = []
    for _ in range(times):
        known = apart.front.link.restarts
        while not apart.front.link.running:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.3)
        killed.append(kill(apart))
        while apart.front.link.restarts == known:
            time.sleep(0.001)
    wait_ready(apart)
    count = len(fates)
    while len(fates) < count + 12:
        time.sleep(0.01)
    over.set()
    for one in threads:
        one.join()
    assert len(set(killed)) == times
    assert set(fates) <= {"right", "refused", "told"} and fates.count("right") > 12, set(fates)
    link = apart.front.link
    assert (link.running, link.waiting) == (0, 0)
