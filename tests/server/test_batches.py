"""Batch files: the same answers as over HTTP, in order, each once, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from everystep.errors import EverystepError, FormatError, RequestError
from everystep.server.access import Keys, digest_of
from everystep.server.application import FrontSettings
from everystep.server.batch_lines import BatchProgress, FaultyFileError, judged
from everystep.server.batch_run import results_file
from everystep.server.offline import run_batch
from everystep.server.routes import BATCHED
from everystep.server.service import ServedBeside
from everystep.server.settings import ServeSettings
from tests.cli.running import everystep
from tests.server.serving import Served, in_thread, served

COMPLETIONS = "/v1/completions"


def line(id: str, url: str = COMPLETIONS, **body: Any) -> str:
    """A line of a batch file."""
    said = {"custom_id": id, "method": "POST", "url": url, "body": body}
    return json.dumps(said) + "\n"


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def rows(path: Path) -> list[Any]:
    return [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]


def mixed(count: int) -> list[str]:
    """Lines of several routes and lengths; each tenth is wrong."""
    found = []
    for number in range(count):
        body: dict[str, Any] = {"prompt": f"hello {number}", "max_tokens": 1 + number * 7 % 23}
        body |= {"temperature": 1, "seed": number, "return_token_ids": True}
        if number % 10 == 9:
            body["temprature"] = 1
        found.append(line(f"n{number}", **body))
    messages = [{"role": "user", "content": "hello"}]
    found.append(line("chat", "/v1/chat/completions", messages=messages, max_tokens=3, seed=1))
    found.append(line("score", "/v1/everystep/score", texts=["hello the"]))
    found.append(line("tokens", "/tokenize", prompt="hello"))
    return found


def plain(body: Any) -> Any:
    """An answer without what differs each time."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_rows_are_the_answers_of_the_server_in_order(
    server: Served, tmp_path: Path, folder: Path
) -> None:
    lines = mixed(30)
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    most = 0

    def told(so_far: BatchProgress, count: int) -> None:
        nonlocal most
        assert count == len(lines) and so_far.rows == most + 1, "a row at a time"
        most = so_far.rows

    settings = ServeSettings(model=str(folder))
    done = asyncio.run(run_batch(source, target, settings, mooring=in_thread(), told=told))
    found = rows(target)
    assert [one["custom_id"] for one in found] == [json.loads(one)["custom_id"] for one in lines]
    assert (done.rows, done.failed) == (len(lines), 3)
    assert len({one["id"] for one in found}) == len(found)
    for one, asked in zip(found, map(json.loads, lines), strict=True):
        answer = server.post(asked["url"], **asked["body"])
        assert one["response"]["status_code"] == answer.status_code and one["error"] is None
        assert plain(one["response"]["body"]) == plain(answer.json()), asked
    before = target.read_bytes()
    asyncio.run(run_batch(source, target, settings, mooring=in_thread()))
    assert target.read_bytes() == before, "what is done is not done again"


def test_a_stream_is_refused_as_a_row(tmp_path: Path, folder: Path) -> None:
    source = written(
        tmp_path / "in", [line("a", prompt="x", stream=True), line("b", prompt="x", stream=3)]
    )
    asyncio.run(
        run_batch(source, tmp_path / "out", ServeSettings(model=str(folder)), mooring=in_thread())
    )
    first, second = rows(tmp_path / "out")
    assert first["response"]["status_code"] == second["response"]["status_code"] == 400
    assert "no stream" in first["response"]["body"]["error"]["message"]
    assert "stream is impossible" in second["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("lines", "code", "at"),
    [
        ([line("a", prompt="x"), line("b", prompt="x"), line("a", prompt="y")], "duplicate", 3),
        ([line("a", prompt="x"), "{\n"], "invalid_json_line", 2),
        (["[" * 100_000 + "\n"], "invalid_json_line", 1),
        (['{"custom_id": 1, "method": "POST", "url": "x", "body": {}}\n'], "invalid_json_line", 1),
        (['{"custom_id": "a", "method": "POST", "url": "/v1/files"}\n'], "invalid_json_line", 1),
        (['{"custom_id": "a", "custom_id": "b", ' + line("c")[1:]], "invalid_json_line", 1),
        ([line("a").replace("{}", '{"n": 1, "n": 2}')], "invalid_json_line", 1),
        ([line("a", "/v1/batches")], "invalid_url", 1),
        ([line("", prompt="x")], "invalid_custom_id", 1),
        ([line("x" * 513, prompt="x")], "invalid_custom_id", 1),
        ([line("a").replace("POST", "GET")], "invalid_method", 1),
        ([line("a").replace("{}", "[]")], "invalid_body", 1),
        ([], "empty_file", 1),
        ([line(str(n)) for n in range(5)], "too_many_lines", 5),
    ],
)
def test_a_whole_file_is_judged_before_any_line(
    tmp_path: Path, lines: list[str], code: str, at: int
) -> None:
    source = written(tmp_path / "in", lines)
    with pytest.raises(FaultyFileError) as raised:
        judged(source, BATCHED, most=4)
    assert [(one.code[: len(code)], one.line) for one in raised.value.faults] == [(code, at)]
    assert len(str(raised.value)) < 2000


def test_results_of_another_file_are_refused(tmp_path: Path, folder: Path) -> None:
    source = written(tmp_path / "in", [line("a", prompt="x")])
    other = written(tmp_path / "out", ['{"custom_id":"b","response":null}\n'])
    settings = ServeSettings(model=str(folder))
    with pytest.raises(RequestError, match="another batch file"):
        asyncio.run(run_batch(source, other, settings, mooring=in_thread()))
    assert rows(other)[0]["custom_id"] == "b", "and left as they are"
    written(other, ["what is no row\n"])
    with pytest.raises(FormatError, match="row 1"):
        asyncio.run(run_batch(source, other, settings, mooring=in_thread()))
    with results_file(tmp_path / "busy"), pytest.raises(EverystepError, match="another process"):
        asyncio.run(run_batch(source, tmp_path / "busy", settings, mooring=in_thread()))


def killed(command: list[str], target: Path, grows: int) -> int:
    """Run the command, kill it when so many more rows are written, and return how many are."""
    had = target.read_bytes().count(b"\n") if target.exists() else 0
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as program:
        deadline = time.monotonic() + 120
        while program.poll() is None and time.monotonic() < deadline:
            if target.exists() and target.read_bytes().count(b"\n") >= had + grows:
                os.kill(program.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        program.wait(60)
    return target.read_bytes().count(b"\n")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_command_goes_on_where_it_was(tmp_path: Path, folder: Path, kills: int) -> None:
    lines = mixed(30 + 40 * kills)
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = everystep("run-batch", str(source), "-o", str(target), str(folder), "--threads", "1")
    before = 0
    for _ in range(kills):
        after = killed(command, target, 12)
        assert before < after < len(lines), "it was killed in the middle, and had gone on"
        before = after
    with target.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"n1')  # what a full disk leaves
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"{len(lines)} lines, {3 + 4 * kills} of them without an answer\n")
    found = rows(target)
    assert [one["custom_id"] for one in found] == [json.loads(one)["custom_id"] for one in lines]
    whole = tmp_path / "whole.jsonl"
    settings = ServeSettings(model=str(folder))
    asyncio.run(run_batch(source, whole, settings, mooring=in_thread()))
    for one, other in zip(found, rows(whole), strict=True):
        assert texts(one) == texts(other), "seeded answers do not depend on kills"


def texts(row: Any) -> Any:
    """What was answered, without ids, times and what the cache held."""
    body = row["response"]["body"]
    return body.get("choices") or body.get("data") or body.get("error") or body


# --- on a server ----------------------------------------------------------------------------------


def over(client: openai.OpenAI, id: str) -> Any:
    """The batch, when it is over."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.02)
    raise AssertionError("the batch is not over")


def asked(client: openai.OpenAI, lines: list[str]) -> Any:
    """A batch of these lines."""
    content = "".join(lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.status) == (len(content), "in.jsonl", "processed")
    assert client.files.content(file.id).read() == content
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"who": "me"},
    )


def one_route(count: int) -> list[str]:
    return [one for one in mixed(count) if json.loads(one)["url"] == COMPLETIONS]


def test_a_batch_by_openais_client(tmp_path: Path) -> None:
    lines = one_route(30)
    with (
        served(beside=ServedBeside(tmp_path)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        batch = asked(client, lines)
        assert batch.status in ("validating", "in_progress") and batch.metadata == {"who": "me"}
        done = over(client, batch.id)
        assert done.status == "completed" and done.completed_at >= done.created_at
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (30, 27, 3)
        answers = client.files.content(done.output_file_id).text.splitlines()
        errors = client.files.content(done.error_file_id).text.splitlines()
        ids = [json.loads(one)["custom_id"] for one in answers]
        assert ids == [f"n{n}" for n in range(30) if n % 10 != 9]
        assert [json.loads(one)["custom_id"] for one in errors] == ["n9", "n19", "n29"]
        for row in map(json.loads, answers):
            (own,) = [json.loads(one) for one in lines if f'"{row["custom_id"]}"' in one]
            assert texts(row) == server.completion(**own["body"])["choices"]
        assert [one.id for one in client.batches.list()] == [done.id]
        purposes = {one.id: one.purpose for one in client.files.list()}
        assert sorted(purposes.values()) == ["batch", "batch_output", "batch_output"]
        assert [one.id for one in client.files.list(purpose="batch")] == [done.input_file_id]
        assert client.files.delete(done.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(done.input_file_id)
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(done.id)


def test_faults_of_a_file_are_told_and_nothing_is_asked(tmp_path: Path) -> None:
    with (
        served(beside=ServedBeside(tmp_path)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        again = [line("a", prompt="x"), line("a", prompt="y"), line("b", "/tokenize", prompt="x")]
        batch = over(client, asked(client, again).id)
        assert (batch.status, batch.output_file_id) == ("failed", None)
        told = [(one.line, one.code) for one in batch.errors.data]
        assert told == [(2, "duplicate_custom_id"), (3, "invalid_url")]
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.NotFoundError):
            client.batches.create(
                input_file_id="file-../../x", endpoint=COMPLETIONS, completion_window="24h"
            )
        for body in (b"", b"--x\r\n", b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--"):
            kind = {"content-type": "multipart/form-data; boundary=x"}
            answer = server.client.post("/v1/files", content=body, headers=kind)
            assert answer.status_code == 400 and len(answer.content) < 2000
        kind = {"content-type": "multipart/form-data"}
        assert server.client.post("/v1/files", content=b"x", headers=kind).status_code == 400
        assert server.client.get("/v1/files?limit=0").status_code == 400


def test_batches_need_a_folder(server: Served) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/files/x/content"):
        answer = server.client.get(path)
        assert answer.status_code == 404 and "--files DIR" in answer.json()["error"]["message"]


def test_a_key_sees_its_own_files_and_batches(tmp_path: Path) -> None:
    settings = FrontSettings(keys=Keys([digest_of("a"), digest_of("b")]))
    with served(settings=settings, beside=ServedBeside(tmp_path)) as server:
        address = f"{server.url}/v1"
        with (
            openai.OpenAI(base_url=address, api_key="a", max_retries=0) as mine,
            openai.OpenAI(base_url=address, api_key="b", max_retries=0) as other,
        ):
            batch = over(mine, asked(mine, one_route(2)).id)
            assert not [*other.files.list()] and not [*other.batches.list()]
            for forbidden in (
                lambda: other.files.content(batch.output_file_id),
                lambda: other.files.delete(batch.input_file_id),
                lambda: other.batches.retrieve(batch.id),
                lambda: other.batches.cancel(batch.id),
                lambda: other.batches.create(
                    input_file_id=batch.input_file_id,
                    endpoint=COMPLETIONS,
                    completion_window="24h",
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    forbidden()
            assert server.client.get("/v1/files").status_code == 401


def test_a_batch_goes_on_with_the_next_server_and_can_be_cancelled(tmp_path: Path) -> None:
    lines = [
        line(f"n{n}", prompt="hello", max_tokens=60, ignore_eos=True, seed=n, temperature=1)
        for n in range(150)
    ]
    with served(beside=ServedBeside(tmp_path)) as server, client_of(server) as client:
        batch = asked(client, lines)
        other = asked(client, lines)
        while not (some := client.batches.retrieve(batch.id).request_counts.completed):
            time.sleep(0.01)
    with served(beside=ServedBeside(tmp_path)) as server, client_of(server) as client:
        begun = client.batches.retrieve(batch.id)
        assert begun.status == "in_progress"
        file = begun.input_file_id
        with pytest.raises(openai.ConflictError):
            client.files.delete(file)
        client.batches.cancel(other.id)
        assert over(client, other.id).status == "cancelled"
        done = over(client, batch.id)
        assert done.request_counts.completed == 150 > some
        found = client.files.content(done.output_file_id).text.splitlines()
        assert [json.loads(one)["custom_id"] for one in found] == [f"n{n}" for n in range(150)]
        client.files.delete(file)


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        served(beside=ServedBeside(tmp_path)),
        pytest.raises(EverystepError, match="another server"),
        served(beside=ServedBeside(tmp_path)),
    ):
        pass
    with served(beside=ServedBeside(tmp_path)) as server:
        assert httpx.get(f"{server.url}/v1/files").json()["data"] == []
