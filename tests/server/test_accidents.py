"""What went wrong in servers of others, tried here; docs/reliability.md has the whole list."""

from __future__ import annotations

import hmac
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import Route

from everystep.server.access import Keys, digest_of
from everystep.server.chat_page import PAGE_PATHS
from everystep.server.exchange import FrontSettings
from tests.process_tree import children_of, sockets_of
from tests.server.programs import program
from tests.server.serving import TOKENIZER, Served, chunks_of, joined, served
from tests.server.test_strangers import HELLO, idle

LEAKS = re.compile(r"0x[0-9a-f]{6,}|/home/|/tmp/|/root/|site-packages|Traceback|File \"")
LONG: Any = {"prompt": "hello the", "max_tokens": 60, "ignore_eos": True}


def alternatives(depth: int) -> Any:
    """A schema whose alternatives are doubled at each level."""
    one: Any = {"type": "integer"}
    for number in range(depth):
        one = {"oneOf": [one, {"type": "array", "items": one, "minItems": number}]}
    return one


def chain(depth: int) -> Any:
    """The same doubling in the room of a line per level: each names the next one twice."""
    levels: Any = {f"level{depth}": {"type": "integer"}}
    for number in range(depth):
        further = {"$ref": f"#/$defs/level{number + 1}"}
        listed = {"type": "array", "items": further, "minItems": number}
        levels[f"level{number}"] = {"oneOf": [further, listed]}
    return {"$ref": "#/$defs/level0", "$defs": levels}


def told_apart(depth: int) -> Any:
    """A chain of objects that differ in the name of their property, which a grammar can follow."""
    levels: Any = {f"level{depth}": {"const": 1}}
    for number in range(depth):
        further = {"$ref": f"#/$defs/level{number + 1}"}
        levels[f"level{number}"] = {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {name: further},
                    "required": [name],
                    "additionalProperties": False,
                }
                for name in ("a", "b")
            ]
        }
    return {"$ref": "#/$defs/level0", "$defs": levels}


HOSTILE_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "(a+)+b"},
    {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": "(?=a)b"},
    {"regex": "["},
    {"schema": alternatives(5)},
    {"schema": alternatives(10)},
    {"schema": chain(20)},
    {"schema": chain(40)},
    {"schema": {"$ref": "#"}},
    {"schema": {"$ref": "http://127.0.0.1:9/x.json"}},
    {"schema": {"type": "array", "minItems": 10**9, "items": {}}},
    {"schema": {"type": "string", "pattern": "(a|aa)+$", "maxLength": 10**9}},
    {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    {"grammar": "start: start start"},
    {"grammar": "start: nothing"},
    {"choices": ["a" * 300_000]},
)


def test_hostile_grammars_are_errors_or_work_and_change_no_neighbour(server: Served) -> None:
    neighbours = [{**LONG, "seed": number, "temperature": 1} for number in range(15)]
    wanted = [server.completion(**one)["choices"][0]["text"] for one in neighbours]
    with ThreadPoolExecutor(15) as pool:
        streams = [
            pool.submit(server.post, "/v1/completions", **one, stream=True) for one in neighbours
        ]
        for hostile in HOSTILE_GRAMMARS:
            answer = server.post("/v1/completions", **HELLO, **hostile)
            assert answer.status_code in (200, 400), (hostile, answer.text)
            assert len(answer.content) < 4096, str(hostile)[:80]
        assert [joined(chunks_of(one.result().text)) for one in streams] == wanted
    assert idle(server) and server.client.get("/ready").status_code == 200


@pytest.mark.parametrize("depth", [20, 40])
def test_chains_of_alternatives_are_refused_or_followed_to_their_end(
    server: Served, depth: int
) -> None:
    answer = server.post("/v1/completions", **HELLO, schema=chain(depth))
    assert answer.status_code == 400 and "'oneOf'" in answer.json()["error"]["message"]
    body = {"prompt": "hello", "max_tokens": 3000, "schema": told_apart(depth)}
    (choice,) = server.completion(**body)["choices"]
    found, count = json.loads(choice["text"]), 0
    while isinstance(found, dict):
        ((name, found),) = found.items()
        assert name in ("a", "b")
        count += 1
    assert (count, found, choice["finish_reason"]) == (depth, 1, "stop")


def test_ids_at_the_border_of_the_vocabulary(server: Served) -> None:
    wanted = server.completion(**LONG)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.completion, **LONG)
        for ids, status in (
            ([319], 200),
            ([320], 400),
            ([2**31], 400),
            ([-1], 400),
            ([2**70], 400),
        ):
            answer = server.post("/v1/completions", **{**HELLO, "prompt": [5, *ids]})
            assert answer.status_code == status, (ids, answer.text)
        assert beside.result()["choices"][0]["text"] == wanted


SALTS = ("", "\0", "x" * 10_000, "ü\u202e日本", "'; drop", "../../etc", "\n", "\ud7ff", "None")


@pytest.mark.parametrize("salt", [*SALTS, None, 5, [], {"a": 1}, True])
def test_any_salt_is_taken_or_refused(server: Served, salt: object) -> None:
    assert server.post("/v1/completions", **HELLO, cache_salt=salt).status_code in (200, 400)
    assert server.completion(**HELLO)


def test_special_tokens_in_contents_stay_text(server: Served) -> None:
    special = [*TOKENIZER.all_special_tokens]
    assert "<|im_end|>" in special
    for token in special[:12]:
        for role in ("user", "tool"):  # what an application writes itself may have them
            one = {"role": role, "content": f"a {token} b"}
            answer = server.post("/tokenize", messages=[one, {"role": "user", "content": "c"}])
            if answer.status_code == 400:
                continue
            ids = answer.json()["tokens"]
            plain = server.post(
                "/tokenize",
                messages=[{"role": role, "content": "a  b"}, {"role": "user", "content": "c"}],
            ).json()["tokens"]
            id = TOKENIZER.convert_tokens_to_ids(token)
            assert ids.count(id) == plain.count(id), (token, role)


def test_errors_are_short_and_tell_nothing_of_the_machine(server: Served) -> None:
    """Reports of others were thousands of times longer than what they were about."""
    big = "x" * 100_000
    bodies: list[dict[str, Any]] = [
        {**HELLO, big: 1},
        {**HELLO, **{f"field{number}": [] for number in range(3000)}},
        {**HELLO, "model": big},
        {**HELLO, "temperature": big},
        {**HELLO, "stop": [{"a": big}] * 50},
        {**HELLO, "schema": {big: big}},
        {**HELLO, "regex": big + "("},
        {**HELLO, "logit_bias": {big: 1}},
        {"prompt": [[5], "x"] * 2000},
        {"prompt": []},
        {**HELLO, "strategy": big},
    ]
    for body in bodies:
        answer = server.post("/v1/completions", **body)
        assert answer.status_code in (400, 404), answer.text[:200]
        assert len(answer.content) < 4096 and not LEAKS.search(answer.text), answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_an_error_that_is_not_ours_is_told_to_the_log_alone(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from everystep.drivers.session import Session

    tried = []

    def broken(*_: Any, **__: Any) -> Any:
        tried.append(1)
        raise OSError("/home/me/secret at 0x7f0000000000")

    monkeypatch.setattr(Session, "own_request", broken)
    answer = server.post("/v1/completions", **HELLO)
    assert answer.headers["x-should-retry"] == "false"
    tried.clear()
    own: Any = {"base_url": f"{server.url}/v1", "api_key": "x", "max_retries": 2}
    with openai.OpenAI(**own) as client, pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", **HELLO)
    assert len(tried) == 1, "what fails for itself fails again"
    monkeypatch.undo()
    assert answer.status_code == 500 and not LEAKS.search(answer.text)
    assert "secret" not in answer.text and "/home/me/secret" in caplog.text
    assert server.completion(**HELLO)


def test_what_may_go_well_later_may_be_tried_again(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "x-should-retry" not in server.post("/v1/completions", **HELLO, x=1).headers
    monkeypatch.setattr(server.front, "draining", True)
    answer = server.post("/v1/completions", **HELLO)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers, "clients decide by the status"


# --- who asks -------------------------------------------------------------------------------------


def test_every_route_is_closed_without_a_key() -> None:
    with served(settings=FrontSettings(keys=Keys([digest_of("secret")]))) as server:
        routes = [one for one in server.front.application.routes if isinstance(one, Route)]
        assert len(routes) > 25
        opened = set()
        for route in routes:
            path = re.sub(r"\{[^}]*\}", "x", route.path)
            for method in route.methods or ():
                answer = server.client.request(method, path, json={} if method == "POST" else None)
                if answer.status_code != 401:
                    opened.add(route.path)
        assert opened == {
            "/health",
            "/ready",
            *PAGE_PATHS,
        }  # the page has no data, and asks for a key


RIGHT = (
    {"Authorization": "Bearer schl\xfcssel"},
    {"Authorization": "bearer   schl\xfcssel"},
    {"X-Api-Key": "schl\xfcssel"},
    {"Authorization": "Basic c2VjcmV0", "X-Api-Key": "schl\xfcssel"},
    {"Authorization": "Bearer schl\xc3\xbcssel"},  # in UTF-8, as a shell sends it
    {"X-Api-Key": "schl\xc3\xbcssel"},
)
WRONG = (
    *("", "Bearer", "Bearer \xff\xfe", "Bearer " + "x" * 9000, "\xe9" * 100),
    *("Bearer a b c", "Bearer schl\xfcsse", "Bearer schl\xfcssell", "Bearer Schl\xfcssel"),
    *("Bearer schlussel", "Bearer schl\xfcssel x", "Bearer x schl\xfcssel"),
    *("Bearer Bearer schl\xfcssel", 'Bearer "schl\xfcssel"', "Bearer schl\xfcssel,", "Bearer null"),
    *("Bearer\tschl\xfcssel", "Bearerschl\xfcssel", "schl\xfcssel", "Token schl\xfcssel"),
    *("Bearer schl\xc3\xbcsse", "Bearer schl\xc3\xbcssel\xc3", "Bearer schl\xc3ssel"),
    *("Basic schl\xfcssel", "Basic c2VjcmV0", f"Bearer {digest_of('schlüssel')}"),
)


def test_headers_of_keys_in_any_form() -> None:
    """None opens but the key itself; nor does its digest, which is what a file of keys holds."""
    with served(settings=FrontSettings(keys=Keys([digest_of("schlüssel")]))) as server:

        def status(headers: dict[str, str]) -> int:
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            return server.client.post("/v1/completions", json=HELLO, headers=raw).status_code

        assert [status(headers) for headers in RIGHT] == [200] * len(RIGHT)
        for value in WRONG:
            assert status({"Authorization": value}) == 401, value[:40]
        for value in ("", "schl\xfcsse", "Bearer schl\xfcssel", digest_of("schlüssel")):
            assert status({"X-Api-Key": value}) == 401, value
        for path in ("/v1/completions?api_key=schlüssel", "/v1/completions?key=schlüssel"):
            assert server.client.post(path, json=HELLO).status_code == 401


def test_each_key_is_compared_whole_whichever_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in a time that tells nothing, for which the standard library has a function."""
    digests = [digest_of(one) for one in ("first", "second", "third")]
    compared: list[tuple[Any, Any]] = []
    true = hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return true(one, other)

    with served(settings=FrontSettings(keys=Keys(digests))) as server:
        monkeypatch.setattr(hmac, "compare_digest", counted)
        for said, status in (("first", 200), ("third", 200), ("thirD", 401), ("", 401)):
            compared.clear()
            headers = {"X-Api-Key": said}
            assert server.client.get("/v1/models", headers=headers).status_code == status
            told = digest_of(said).encode()
            assert compared == [(told, one.encode()) for one in digests], said


def test_a_name_that_callers_give_mixes_nothing_up(server: Served) -> None:
    bodies = [{**HELLO, "prompt": f"number {number}", "seed": number} for number in range(64)]
    wanted = [server.completion(**one)["choices"][0]["text"] for one in bodies]
    headers = {"X-Request-Id": "the-same"}

    def ask(body: dict[str, Any]) -> tuple[str, str]:
        answer = server.client.post("/v1/completions", json=body, headers=headers)
        return answer.json()["choices"][0]["text"], answer.headers["x-request-id"]

    with ThreadPoolExecutor(16) as pool:
        found = [*pool.map(ask, bodies)]
    assert [text for text, _ in found] == wanted
    assert len({id for _, id in found}) == 64, "ids are the server's own"


def test_nothing_that_a_client_wrote_is_logged_or_counted(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "everystep")
    canary = "CANARY7391"
    body = {**HELLO, "prompt": f"{canary}\r\nx", "user": canary, "stop": [canary]}
    headers = {"X-Request-Id": canary, "Authorization": f"Bearer {canary}", "User-Agent": canary}
    assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    for wrong in ({**body, "model": canary}, {**body, canary: 1}, {**body, "regex": f"({canary}"}):
        assert server.client.post("/v1/completions", json=wrong).status_code in (400, 404)
    server.client.get(f"/{canary}%0d%0aX-Injected: 1?{canary}")
    server.client.get(f"/v1/responses/{canary}")
    server.client.request("DELETE", f"/v1/everystep/runs/{canary}?{canary}")

    def routes_of_lines() -> list[str]:
        lines = [one for one in caplog.records if one.name == "everystep.server.requests"]
        return [one.getMessage().split()[1] for one in lines]

    deadline = time.monotonic() + 60
    while len(routes_of_lines()) < 7 and time.monotonic() < deadline:
        time.sleep(0.01)  # a line is written once the answer has gone
    routes = routes_of_lines()
    assert routes.count("/v1/completions") == 4, "there is a line for each request, and no other"
    assert routes[4:] == ["(unknown)", "/v1/responses/{id}", "/v1/everystep/runs/{id}"]
    assert canary not in caplog.text and "Injected" not in caplog.text
    assert canary not in server.client.get("/metrics").text


def test_names_of_models_open_nothing_and_make_no_series(server: Served) -> None:
    def series() -> int:
        return len([one for one in server.client.get("/metrics").text.split("\n") if one])

    assert server.post("/v1/completions", **HELLO, model="nobody").status_code == 404
    server.client.get("/v1/models/nobody")
    known, opened, watching = series(), list[str](), True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and "nobody" in str(arguments[0]):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    for number in range(300):
        name = ("../nobody", "/etc/nobody", "nobody\0", "file://nobody", "nobody")[number % 5]
        answer = server.post("/v1/completions", **HELLO, model=f"{name}{number}")
        assert answer.status_code == 404, answer.text
    watching = False
    assert opened == [] and series() == known


def test_one_port_is_open_in_all_of_its_processes(tmp_path: Path) -> None:
    if not Path("/proc/net/tcp").exists():
        pytest.skip("/proc/net/tcp is missing, which lists what listens")
    with program(tmp_path, "--port", "0") as (running, url):
        assert httpx.post(f"{url}/v1/completions", json=HELLO, timeout=60).status_code == 200
        children = children_of(running.pid)
        assert children, "the engine is a process of its own"
        inodes = set[str]().union(*map(sockets_of, (running.pid, *children)))
        listening = []
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[9] in inodes and (parts[3] == "0A" or table.startswith("udp")):
                    listening.append(int(parts[1].rpartition(":")[2], 16))
        assert listening == [int(url.rpartition(":")[2])]


# --- streams --------------------------------------------------------------------------------------


class Overheard(httpx.HTTPTransport):
    """Keeps the bytes of every answer beside who reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = bytearray()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        answer.stream = Kept(answer.stream, self.heard)
        return answer


class Kept(httpx.SyncByteStream):
    """The bytes of an answer, which are added to others when they are read."""

    def __init__(self, pieces: Any, heard: bytearray) -> None:
        self._pieces, self._heard = pieces, heard

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._heard += piece
            yield piece

    def close(self) -> None:
        self._pieces.close()


def test_a_silent_stream_has_comments_that_clients_skip() -> None:
    with served(settings=FrontSettings(ping_seconds=0.002)) as server:
        body = {**LONG, "max_tokens": 200, "stream": True}
        text = server.post("/v1/completions", **body).text
        assert ": ping\n" in text and "\nid:" not in text
        wanted = server.completion(**{**LONG, "max_tokens": 200})["choices"][0]["text"]
        assert joined(chunks_of(text)) == wanted
        between = Overheard()
        own: Any = {"base_url": f"{server.url}/v1", "http_client": httpx.Client(transport=between)}
        with openai.OpenAI(**own, api_key="x") as client:
            chunks: Iterator[Any] = client.completions.create(  # type: ignore[call-overload]
                model="tiny", prompt="hello the", max_tokens=200, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert "".join(one.choices[0].text for one in chunks) == wanted
        lines = bytes(between.heard).split(b"\n")
        assert lines.count(b": ping") > 0, "the client had none to skip"


def test_a_stream_is_the_same_wherever_its_bytes_are_cut(server: Served) -> None:
    body = {**LONG, "max_tokens": 12, "stream": True, "temperature": 1.5, "seed": 8}
    raw = server.post("/v1/completions", **body).content
    for cut in range(1, len(raw)):
        events = [*_events(iter((raw[:cut], raw[cut:])))]
        assert events[-1] == "[DONE]" and all(json.loads(one) for one in events[:-1])


def _events(pieces: Iterator[bytes]) -> Iterator[str]:
    """The data of each event, read as the standard says."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for one in whole:
            yield one.decode().removeprefix("data: ")
    assert rest == b""


def test_pictures_by_address_are_refused_and_nothing_is_fetched(server: Served) -> None:
    asked = threading.Event()
    hook_on = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if hook_on and event == "socket.connect" and "198.51.100." in str(arguments[1]):
            asked.set()

    sys.addaudithook(hook)
    for url in ("http://198.51.100.7/x.png", "file:///etc/passwd", "data:image/png;base64,AA"):
        part = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "user", "content": [part]}]
        answer = server.post("/v1/chat/completions", messages=messages)
        assert answer.status_code == 400 and "messages[0].content[0]" in answer.text
    hook_on = False
    assert not asked.is_set()
