"""Strangers: keys, rebinding, bodies that lie, floods, and clients that go away."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from everystep.errors import RequestError
from everystep.server.access import Hosts, Keys, digest_of, is_loopback, key_of, read_keys
from everystep.server.exchange import FrontSettings
from everystep.server.link import QueueLimits
from tests.server.serving import Served, served

HELLO: Any = {"prompt": "hello", "max_tokens": 3}
LONG: Any = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}


def idle(server: Served, seconds: float = 30.0) -> bool:
    """Whether nothing is under way any more, soon."""
    deadline = time.monotonic() + seconds
    link = server.front.link
    while time.monotonic() < deadline:
        if not (server.front.open or link.running or link.waiting):
            return True
        time.sleep(0.01)
    return False


# --- keys and names -------------------------------------------------------------------------------


def test_a_key_opens_and_others_do_not() -> None:
    settings = FrontSettings(keys=Keys([digest_of("secret"), digest_of("other")]))
    with served(settings=settings) as server:
        for headers in ({}, {"Authorization": "Bearer secreT"}, {"Authorization": "secret"}):
            answer = server.client.post("/v1/completions", json=HELLO, headers=headers)
            assert answer.status_code == 401, headers
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/openapi.json", "/version", "/tokenize", "/x"):
            assert server.client.get(path).status_code == 401, path
        assert server.client.get("/health").status_code == 200
        texts = []
        for headers in (
            {"Authorization": "Bearer secret"},
            {"authorization": "bearer other"},
            {"X-Api-Key": "secret"},
        ):
            answer = server.client.post("/v1/completions", json=HELLO, headers=headers)
            assert answer.status_code == 200
            texts.append(answer.json()["choices"][0]["text"])
        assert len(set(texts)) == 1


def test_keys_share_no_rows_of_the_cache() -> None:
    settings = FrontSettings(keys=Keys([digest_of("a"), digest_of("b")]))
    with served(settings=settings) as server:

        def cached(key: str, **more: Any) -> int:
            body = {"prompt": "hello the and of it was in " * 4, "max_tokens": 2, **more}
            headers = {"Authorization": f"Bearer {key}"}
            answer = server.client.post("/v1/completions", json=body, headers=headers).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("a") == 0 and cached("a") > 0, "the cache is on"
        assert cached("b") == 0 and cached("b", cache_salt="x") == 0
        assert cached("a", cache_salt="x") == 0 and cached("a", cache_salt="x") > 0


def test_a_file_of_keys_holds_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f"# two\n{hashlib.sha256(b'k').hexdigest()}  # mine\n\n{digest_of('l').upper()}\n"
    )
    keys = Keys(read_keys(file))
    assert keys.owner("k") == digest_of("k") and keys.owner("l") and keys.owner("m") is None
    file.write_text("secret\n")
    with pytest.raises(RequestError, match="line 1"):
        read_keys(file)
    assert key_of("Bearer  x ", "") == "x" and key_of("Basic x", "y") == "y"


def test_a_page_of_another_name_cannot_ask(server: Served) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil.example"):
        answer = server.client.get("/v1/models", headers={"Host": host})
        assert answer.status_code == 403, host
    for host in ("localhost", "localhost:9", "127.0.0.1:1", "[::1]:80", "192.168.1.4"):
        assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200, host
    answer = server.client.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert Hosts(["Me.example"]).accepts("me.example:8000")
    assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("0.0.0.0")


def test_a_page_of_an_allowed_origin_reads_answers() -> None:
    ours, keys = "http://page.example:3000", Keys([digest_of("secret")])
    with served(settings=FrontSettings(keys=keys, origins=(ours,))) as server:
        asked = {
            "Origin": ours,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        # A browser asks first, without a key.
        before = server.client.options("/v1/completions", headers=asked)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == ours
        assert "authorization" in before.headers["access-control-allow-headers"]
        own = {"Origin": ours, "Authorization": "Bearer secret"}
        for body in (HELLO, {**HELLO, "stream": True}):
            answer = server.client.post("/v1/completions", json=body, headers=own)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == ours
        without = server.client.post("/v1/completions", json=HELLO, headers={"Origin": ours})
        assert without.status_code == 401
        other = {**own, "Origin": "http://evil.example"}
        answer = server.client.post("/v1/completions", json=HELLO, headers=other)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
        refused = server.client.options("/v1/completions", headers={**asked, **other})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


def test_a_mistake_beside_a_stream_ends_the_answer(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for news that do not come any more."""

    async def wrong(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake")
        yield

    monkeypatch.setattr(server.front.link, "follow", wrong)
    answer = server.client.post("/v1/completions", json=HELLO)
    assert answer.status_code == 500 and "a mistake" not in answer.text
    answer = server.client.post("/v1/completions", json={**HELLO, "stream": True})
    assert answer.status_code == 500
    monkeypatch.undo()
    assert server.client.post("/v1/completions", json=HELLO).status_code == 200 and idle(server)


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b'{"prompt": "x", "temperature": 1e999}', "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', "application/json", 400),
        (b"[" * 200_000, "application/json", 400),
        (b'{"schema": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "x"}', "application/x-www-form-urlencoded", 415),
        (b"", "application/json", 400),
    ],
)
def test_hostile_bodies(server: Served, body: bytes, kind: str, status: int) -> None:
    headers = {"content-type": kind}
    answer = server.client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 4096
    assert server.completion(**HELLO)


def test_a_body_that_is_too_long_or_too_slow() -> None:
    with served(settings=FrontSettings(body_bytes=1000, body_seconds=0.3)) as server:
        assert server.post("/v1/completions", prompt="x" * 2000).status_code == 413
        pieces = (b"x" * 400 for _ in range(5))  # chunked: no length is said
        headers = {"content-type": "application/json"}
        answer = server.client.post("/v1/completions", content=pieces, headers=headers)
        assert answer.status_code == 413
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            client.sendall(head.encode())
            assert client.recv(100).startswith(b"HTTP/1.1 408")
        assert idle(server)


# --- load -----------------------------------------------------------------------------------------


def test_a_full_line_refuses_and_says_when_to_come_again() -> None:
    with served(queue=QueueLimits(requests=4)) as server:
        statuses: list[tuple[int, str | None]] = []

        def ask() -> None:
            answer = server.post("/v1/completions", **{**LONG, "max_tokens": 60})
            statuses.append((answer.status_code, answer.headers.get("retry-after")))

        threads = [threading.Thread(target=ask) for _ in range(60)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        refused = [after for status, after in statuses if status == 429]
        assert {status for status, _ in statuses} == {200, 429}
        assert all(after is not None and 1 <= int(after) <= 60 for after in refused)
        assert idle(server) and server.completion(**HELLO)


def test_a_longer_line_is_to_be_waited_for_longer() -> None:
    pauses = []
    for prompts in (30, 90, 270):  # of which 16 rows have room for some
        with served(queue=QueueLimits(requests=4)) as server:
            body = {**LONG, "prompt": ["hello"] * prompts, "stream": True}
            with server.client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # which ends the request when it is given up
                next(lines)
                refused = server.post("/v1/completions", **HELLO)
            assert refused.status_code == 429, refused.text
            pauses.append(int(refused.headers["retry-after"]))
    assert pauses[0] < pauses[1] < pauses[2] <= 60, pauses


def test_clients_that_go_away_free_their_rows(server: Served) -> None:
    for stream in (True, False):
        body = json.dumps({**LONG, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(6)]
        for number, client in enumerate(clients):
            client.sendall((head + body)[: None if number % 3 else -5])
        if stream:
            assert clients[1].recv(100)
        else:
            time.sleep(0.3)
        for client in clients:
            client.close()
        assert idle(server), "a client that has gone is worked for"
    assert server.completion(**HELLO)


def test_slow_clients_cost_nobody_else_anything(server: Served) -> None:
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for client in clients:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
    began = time.monotonic()
    server.completion(**HELLO)
    assert idle(server)
    for client in clients:
        client.close()
    assert time.monotonic() - began < 30


def test_a_deadline_before_the_first_token(server: Served) -> None:
    answer = server.post("/v1/completions", **LONG, timeout=0.001)
    assert answer.status_code in (200, 408)
    late = server.completion(**{**LONG, "timeout": 0.5})["choices"][0]
    assert (late["finish_reason"], late["stop_reason"]) in (("length", "time"), ("length", None))
