"""The generator of load counts the tokens that were asked for, over HTTP and without it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from tests.reading import ROOT
from tests.server.serving import served


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "bench")
    yield import_module("parts.load")


def test_tokens_over_http_are_counted(generator: ModuleType) -> None:
    prompts = [["hello", "the and"], ["of", "in a"], ["it was", "hello"]]
    with served() as server:
        asks = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
        found = generator.load(generator.OverHttp(server.port, "tiny", asks), prompts, 7)
        require_counted(found, 6, 7)
        with pytest.raises(ConnectionError, match="404"):
            generator.load(generator.OverHttp(server.port, "nobody", asks), [["a"]], 1)


def test_tokens_of_sockets_are_counted(generator: ModuleType) -> None:
    ours, theirs = socket.socketpair()

    def answer() -> None:
        with theirs, theirs.makefile("rwb") as file:
            for line in file:
                for _ in range(json.loads(line)["max_tokens"]):
                    file.write(b'data: {"text": "a"}\n\n')
                file.write(b"data: [DONE]\n\n")
                file.flush()

    thread = threading.Thread(target=answer)
    thread.start()
    with ours:
        found = generator.load(generator.OverSockets([ours]), [["a", "b", "c"]], 5)
    thread.join(10)
    require_counted(found, 3, 5)


def test_an_answer_may_end_with_its_last_chunk(generator: ModuleType) -> None:
    """As those of `transformers serve` do, which say no [DONE]."""

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb") as file:
            for _ in range(2):
                heads = iter(lambda: file.readline().strip(), b"")
                size = [int(one.split()[-1]) for one in heads if one.startswith(b"Content-Length")]
                tokens = json.loads(file.read(size[0]))["max_tokens"]
                file.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                end = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
                for event in (*[b'data: {"choices": [{"text": "a"}]}\n\n'] * tokens, end):
                    file.write(b"%x\r\n%s\r\n" % (len(event), event))
                file.write(b"0\r\n\r\n")
                file.flush()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        target = generator.OverHttp(listening.getsockname()[1], "a", {})
        found = generator.load(target, [["a", "b"]], 5)
        thread.join(10)
    require_counted(found, 2, 5)


def require_counted(found: Any, answers: int, tokens: int) -> None:
    assert [len(one.events) for one in found.answers] == [tokens] * answers
    assert all(len(one.gaps) == tokens - 1 and min(one.gaps) >= 0 for one in found.answers)
    assert all(one.first > 0 for one in found.answers)
    assert found.seconds >= max(one.events[-1] - one.began for one in found.answers)


def test_what_a_stream_waits_for_is_told_in_its_steps(generator: ModuleType) -> None:
    heavy = import_module("parts.heavy")
    names = [one.name for one in heavy.heavy_asks()]
    assert names[:3] == ["4 MB of text", "100,000 ids", "a schema of 200 kB"]
    with served() as server:
        found = heavy.beside(server.port, "tiny", heavy.heavy_asks()[2])
    assert found.status == 200 and found.steps > 0 and found.longest > 0
