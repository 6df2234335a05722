"""Hostile connections to a server, and what a normal request takes beside them.

Kinds are: a byte a second, a reader that takes nothing, floods of headers, heads and bodies that
lie about their length, connections that are closed on one side.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

JSON = b"Content-Type: application/json\r\n"
START = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


# --- what comes one byte at a time ----------------------------------------------------------------


def body_of(**more: Any) -> bytes:
    return json.dumps({"prompt": "hello", "max_tokens": 3, **more}).encode()


def slow_head(number: int) -> tuple[bytes, bytes]:
    """What is sent at once, and what is sent byte by byte."""
    return b"", START + JSON + b"X-Number: %d\r\n" % number * 40


def slow_body(number: int) -> tuple[bytes, bytes]:
    body = body_of(user="x" * 1000)
    return START + JSON + b"Content-Length: %d\r\n\r\n" % len(body), body


def silent(number: int) -> tuple[bytes, bytes]:
    return b"", b""


def slow_reader(number: int) -> tuple[bytes, bytes]:
    body = body_of(max_tokens=3000, ignore_eos=True, stream=True, logprobs=5)
    return START + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body, b""


# --- what lies ------------------------------------------------------------------------------------


def flood_of_headers(number: int) -> tuple[bytes, bytes]:
    return START + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 40) for i in range(4000)), b""


def endless_header(number: int) -> tuple[bytes, bytes]:
    return START + b"X: " + b"y" * 300_000, b""


def half_closed(number: int) -> tuple[bytes, bytes]:
    body = body_of()
    return START + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body, b""


def too_little(number: int) -> tuple[bytes, bytes]:
    return START + JSON + b"Content-Length: 5000\r\n\r\n" + body_of(), b""


def too_much(number: int) -> tuple[bytes, bytes]:
    return START + JSON + b"Content-Length: 5\r\n\r\n" + body_of(), b""


def wrong_lengths(number: int) -> tuple[bytes, bytes]:
    lengths = (b"-1", b"1e3", b"0x10", b"99999999999999999999", b"5\r\nContent-Length: 9")
    return START + JSON + b"Content-Length: " + lengths[number % 5] + b"\r\n\r\n" + body_of(), b""


def wrong_chunks(number: int) -> tuple[bytes, bytes]:
    sizes = (b"zz", b"-5", b"ffffffffffffffffff", b"5;x=" + b"y" * 9000, b"")
    head = START + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + sizes[number % 5] + b"\r\n" + body_of() + b"\r\n0\r\n\r\n", b""


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


# --- what a request takes beside them -------------------------------------------------------------


@dataclass(frozen=True)
class BesideCrowd:
    """What a request of a few tokens takes while so many hostile connections are open: the median
    and the longest of them, in seconds. `wrong`: answers that were other than 200."""

    connections: int
    requests: int
    median_s: float
    longest_s: float
    wrong: int


def beside_crowd(port: int, model: str, connections: int, requests: int = 40) -> BesideCrowd:
    """Ask a server one request after another, each on a connection of its own."""
    body = json.dumps({"prompt": "hello", "max_tokens": 3, "model": model, "seed": 1}).encode()
    seconds, wrong = list[float](), 0

    def ask() -> None:
        nonlocal wrong
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        wrong += answer.status != 200
        connection.close()
        seconds.append(time.perf_counter() - began)

    if connections:
        with Crowd(port, connections):
            for _ in range(requests):
                ask()
    else:
        for _ in range(requests):
            ask()
    return BesideCrowd(connections, requests, statistics.median(seconds), max(seconds), wrong)
