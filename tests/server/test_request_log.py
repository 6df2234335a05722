"""The log of requests on a pipe: an object of JSON for each request, and nothing of a client."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from everystep.server.request_log import LogObjects, LogWriter, lost_lines
from tests.cli.running import everystep
from tests.server.programs import program
from tests.server.serving import TOKENIZER, served, tiny

CANARY = "CANARY7391"


def test_a_line_of_json_for_each_request_on_a_pipe(tmp_path: Path) -> None:
    errors: list[str] = []
    seen: list[tuple[str, str, int, str]] = []
    keys = ("--api-key", CANARY, "--allow-origin", "http://pages.example")
    with program(tmp_path, "--port", "0", *keys, errors=errors) as (_, url):
        headers = {"Authorization": f"Bearer {CANARY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:

            def ask(route: str, method: str, path: str, **own: Any) -> httpx.Response:
                answer = client.request(method, path, **own)
                known = answer.headers.get("x-request-id", "")
                seen.append((method, route, answer.status_code, known))
                return answer

            def post(path: str, **body: Any) -> httpx.Response:
                return ask(path, "POST", path, json=body)

            asked = {"prompt": CANARY, "max_tokens": 3, "ignore_eos": True, "user": CANARY}
            used = post("/v1/completions", **asked).json()["usage"]
            post("/v1/completions", **asked, stream=True)
            post("/v1/completions", **asked, regex=f"({CANARY}")
            post("/v1/completions", **asked, n=17)
            post("/v1/chat/completions", messages=[{"role": "user", "content": CANARY}], n=2)
            post("/tokenize", prompt=CANARY)
            ask("/v1/models/{name}", "GET", f"/v1/models/{CANARY}")
            ask("/v1/everystep/runs/{id}", "DELETE", f"/v1/everystep/runs/{CANARY}?{CANARY}")
            ask("(unknown)", "GET", f"/{CANARY}%0d%0a{CANARY}", headers={"User-Agent": CANARY})
            ask("/v1/everystep/load", "GET", "/v1/everystep/load")
            ask("/ready", "GET", "/ready")
            asks = {"Access-Control-Request-Method": "POST", "Origin": "http://pages.example"}
            ask("(unknown)", "OPTIONS", "/v1/completions", headers=asks)
            ask("/v1/models", "GET", "/v1/models", headers={"Authorization": f"Bearer x{CANARY}"})
            assert seen[-1][2] == 401
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + CANARY.encode() * 10_000)
            assert connection.recv(12) == b"HTTP/1.1 431"
    assert CANARY not in "".join(errors)
    assert errors[0].startswith("everystep: loading ")
    objects = [json.loads(one) for one in errors if one.startswith("{")]
    words = [one for one in errors[1:] if not one.startswith("{")]
    assert all("UserWarning" in one or one.startswith(" ") for one in words), "of the engine alone"
    lines = [one for one in objects if "route" in one]
    found = [(o["method"], o["route"], o["status"], o.get("request_id", "")) for o in lines]
    wanted = [*seen, ("(unknown)", "(unknown)", 431, "")]
    assert sorted(found) == sorted(wanted), "there is one for each"
    for one in objects:
        polled = one.get("route") == "/v1/everystep/load"
        assert "time" in one and one["level"] == ("debug" if polled else "info")
    assert all(0 <= one["seconds"] < 60 for one in lines)
    by_id = {one.get("request_id"): one for one in lines}
    for _, _, _, known in seen[:2]:
        assert by_id[known]["prompt_tokens"] == used["prompt_tokens"]
        assert by_id[known]["completion_tokens"] == 3
    assert "completion_tokens" not in by_id[seen[2][3]]


def test_a_defect_is_an_object_with_its_traceback() -> None:
    try:
        raise ValueError("two\nlines \udc80")
    except ValueError:
        about = ("everystep.server", logging.ERROR, "here", 1, "%s: a defect", ("id",))
        record = logging.LogRecord(*about, sys.exc_info())
    (line,) = LogObjects().format(record).splitlines()
    shown = json.loads(line)
    assert (shown["level"], shown["message"]) == ("error", "id: a defect")
    assert "ValueError: two\nlines" in shown["traceback"]


def test_an_error_in_a_stream_is_in_the_line_of_its_request(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "everystep")
    with served() as server:
        end = server.front.link._fail_all
        body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            end(CANARY, always=True)
            assert CANARY in "".join(lines)
    (line,) = [one for one in caplog.records if one.name == "everystep.server.requests"]
    assert line.getMessage().endswith(" ended with 503") and " 200 " in line.getMessage()
    assert CANARY not in caplog.text


# --- a reader who takes nothing -------------------------------------------------------------------


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("everystep", logging.INFO, "", 0, text, None, None)


def test_lines_that_nobody_takes_are_counted_and_keep_nobody_waiting() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as taken:
        os.set_blocking(reading, True)
        writer = LogWriter(stream, most=50)
        sent, size = 2000, 200  # bytes, far more than a pipe has room for
        for number in range(sent):
            writer.emit(record(f"{number:<{size - 1}}"))
        assert writer.lost > 0 and lost_lines() == 0, "it is no handler of the log"
        lost, lines = writer.lost, list[str]()
        writer.emit(record("first"))  # or is lost too, where nothing was taken yet
        while not lines or lines[-1] != "again\n":
            lines.append(taken.readline())
            if writer.lost + len(lines) > sent:
                writer.emit(record("again"))
        told = [int(one.split()[0]) for one in lines if "lines of the log are missing" in one]
        numbers = [int(one) for one in lines if one.strip().isdigit()]
        assert numbers == sorted(numbers) and len({*numbers}) == sent - lost
        assert sum(told) == writer.lost >= lost, "each that is missing is told once"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a pipe is made small")
def test_a_server_goes_on_where_nobody_reads_its_log(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "tiny")
    TOKENIZER.save_pretrained(tmp_path / "tiny")
    command = everystep("serve", str(tmp_path / "tiny"), "--port", "0", "--threads", "1")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as running:
        assert running.stdout is not None and running.stderr is not None
        fcntl.fcntl(running.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        url = running.stdout.readline().split()[-1]
        with httpx.Client(base_url=url, timeout=20) as client:
            for number in range(100):  # lines of some 150 bytes
                assert client.get("/v1/models").status_code == 200, number
            asked = {"prompt": "hello", "max_tokens": 3}
            assert client.post("/v1/completions", json=asked).status_code == 200
            assert "everystep_log_lines_lost 0.0" in client.get("/metrics").text
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, "its end does not wait for the reader either"
