"""Two hundred hostile connections to a real server: others are served as if there were none."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import httpx
import pytest

from bench.parts.crowd import JSON, START, Crowd, beside_crowd, body_of
from everystep.server.exchange import FrontSettings
from tests.server.programs import program
from tests.server.serving import served
from tests.server.test_strangers import HELLO, idle


def test_two_hundred_hostile_connections_cost_nobody_else_anything(tmp_path: Path) -> None:
    with program(tmp_path, "--port", "0") as (_, url), httpx.Client(base_url=url) as client:
        client.timeout = httpx.Timeout(120)

        def ask() -> str:
            answer = client.post("/v1/completions", json={**HELLO, "seed": 1})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        wanted = ask()
        with Crowd(int(url.rpartition(":")[2]), 200) as crowd:
            assert [ask() for _ in range(20)] == [wanted] * 20
            assert client.get("/ready").status_code == 200
            for kind in ("flood_of_headers", "endless_header"):
                found = crowd.statuses(kind)
                assert found["431"] and set(found) <= {"431", ""}, "it was read without end"
            assert set(crowd.statuses("no_http")) <= {"400", ""}
            for kind in ("too_much", "wrong_chunks", "wrong_lengths", "both_lengths"):
                assert set(crowd.statuses(kind)) <= {"400", "408", "413", "415", ""}, kind
            assert set(crowd.statuses("half_closed")) <= {"200", ""}
        deadline = time.monotonic() + 60
        none = 'everystep_num_requests_{}{{model_name="tiny"}} 0.0'
        while none.format("running") not in (said := client.get("/metrics").text):
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        assert none.format("waiting") in said
        assert ask() == wanted


def test_what_the_benchmark_measures_is_answered() -> None:
    with served() as server:
        for connections in (0, 40):
            found = beside_crowd(server.port, "tiny", connections, 6)
            assert (found.connections, found.requests, found.wrong) == (connections, 6, 0)
            assert 0 < found.median_s <= found.longest_s
        assert idle(server)


# --- heads of requests ----------------------------------------------------------------------------


def test_a_head_that_comes_too_slowly_is_answered_and_closed() -> None:
    with served(settings=FrontSettings(head_seconds=0.3)) as server:
        for sent in (b"", b"POST /v1/compl", START + b"X: y\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
                client.sendall(sent)
                told = client.makefile("rb").read()
                assert (b" 408 " in told and b"slow_head" in told) if sent else told == b""
        assert idle(server)


def test_a_second_head_on_a_connection_is_bounded_too() -> None:
    body = body_of()
    whole = START + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with served(settings=FrontSettings(head_seconds=0.3, head_bytes=500)) as server:
        for second, status in ((b"POST /v1", b" 408 "), (START + b"X: " + b"y" * 600, b" 431 ")):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
                client.sendall(whole)
                answer = client.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")
                client.sendall(second)
                assert status in client.makefile("rb").read()
        assert idle(server) and server.completion(**HELLO)


def test_many_requests_on_a_connection_and_long_answers_are_not_bounded_by_that() -> None:
    with served(settings=FrontSettings(head_seconds=0.3, head_bytes=2000)) as server:
        long = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "user": "x" * 5000}
        for _ in range(3):
            assert server.post("/v1/completions", **long).status_code == 200
            assert server.completion(**HELLO)
            time.sleep(0.4)  # idle between two requests, longer than a head may take


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_body_that_nobody_wanted_leaves_the_refusal_as_it_was(size: int) -> None:
    with served() as server:
        headers = {"content-type": "text/plain"}
        answer = server.client.post("/v1/completions", content=b"x" * size, headers=headers)
        assert answer.status_code == 415 and server.completion(**HELLO)
