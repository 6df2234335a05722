"""Two hundred hostile connections to a real server: others are served as if there were none."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from everystep.server.exchange import FrontSettings
from tests.server.programs import program
from tests.server.serving import served
from tests.server.test_strangers import HELLO, idle

JSON = b"Content-Type: application/json\r\n"
START = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


# --- what comes one byte at a time ----------------------------------------------------------------


def _body(**more: Any) -> bytes:
    return json.dumps({**HELLO, **more}).encode()


def slow_head(number: int) -> tuple[bytes, bytes]:
    """What is sent at once, and what is sent byte by byte."""
    return b"", START + JSON + b"X-Number: %d\r\n" % number * 40


def slow_body(number: int) -> tuple[bytes, bytes]:
    body = _body(user="x" * 1000)
    return START + JSON + b"Content-Length: %d\r\n\r\n" % len(body), body


def silent(number: int) -> tuple[bytes, bytes]:
    return b"", b""


def slow_reader(number: int) -> tuple[bytes, bytes]:
    body = _body(max_tokens=3000, ignore_eos=True, stream=True, logprobs=5)
    return START + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body, b""


# --- what lies ------------------------------------------------------------------------------------


def flood_of_headers(number: int) -> tuple[bytes, bytes]:
    return START + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 40) for i in range(4000)), b""


def endless_header(number: int) -> tuple[bytes, bytes]:
    return START + b"X: " + b"y" * 300_000, b""


def half_closed(number: int) -> tuple[bytes, bytes]:
    body = _body()
    return START + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body, b""


def too_little(number: int) -> tuple[bytes, bytes]:
    return START + JSON + b"Content-Length: 5000\r\n\r\n" + _body(), b""


def too_much(number: int) -> tuple[bytes, bytes]:
    return START + JSON + b"Content-Length: 5\r\n\r\n" + _body(), b""


def wrong_lengths(number: int) -> tuple[bytes, bytes]:
    lengths = (b"-1", b"1e3", b"0x10", b"99999999999999999999", b"5\r\nContent-Length: 9")
    return START + JSON + b"Content-Length: " + lengths[number % 5] + b"\r\n\r\n" + _body(), b""


def wrong_chunks(number: int) -> tuple[bytes, bytes]:
    sizes = (b"zz", b"-5", b"ffffffffffffffffff", b"5;x=" + b"y" * 9000, b"")
    head = START + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + sizes[number % 5] + b"\r\n" + _body() + b"\r\n0\r\n\r\n", b""


def both_lengths(number: int) -> tuple[bytes, bytes]:
    head = START + JSON + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b""


def no_http(number: int) -> tuple[bytes, bytes]:
    return random.Random(number).randbytes(3000), b""


KINDS: tuple[Callable[[int], tuple[bytes, bytes]], ...] = (
    slow_head,
    slow_head,
    slow_head,
    slow_body,
    slow_body,
    silent,
    slow_reader,
    flood_of_headers,
    endless_header,
    half_closed,
    too_little,
    too_much,
    wrong_lengths,
    wrong_chunks,
    both_lengths,
    no_http,
)


class Crowd:
    """Hostile connections, which go on until they are told to stop."""

    def __init__(self, port: int, count: int) -> None:
        self.over = threading.Event()
        self.slow: list[tuple[socket.socket, Iterator[int]]] = []
        self.all: list[tuple[str, socket.socket]] = []
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            client = socket.create_connection(("127.0.0.1", port))
            client.settimeout(10)
            self.all.append((kind.__name__, client))
            at_once, slowly = kind(number)
            with suppress(OSError):  # a server may close while a flood is still being sent
                client.sendall(at_once)
                if kind is half_closed:
                    client.shutdown(socket.SHUT_WR)
            if slowly:
                self.slow.append((client, iter(slowly)))
        self._thread = threading.Thread(target=self._drip)

    def _drip(self) -> None:
        while not self.over.wait(1.0):
            for client, rest in self.slow:
                with suppress(OSError):
                    client.sendall(bytes([next(rest)]))

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()
        for _, client in self.all:
            client.close()

    def statuses(self, kind: str) -> Counter[str]:
        """How connections of this kind were answered; "" for none, or one that was closed."""
        found: Counter[str] = Counter()
        for name, client in self.all:
            if name == kind:
                try:
                    told = client.recv(4096)
                except OSError:
                    told = b""
                found[told[9:12].decode() if told.startswith(b"HTTP/1.1 ") else ""] += 1
        return found


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
    body = _body()
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
