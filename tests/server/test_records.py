"""The operator's records: what one key asks for, and nobody else's texts."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everystep.errors import RequestError
from everystep.inspector.counterfactuals import repeat
from everystep.records import read_record
from everystep.server import access
from everystep.server.access import Keys, RecordFolder, digest_of
from everystep.server.exchange import FrontSettings
from everystep.server.settings import ServeSettings
from tests.server.serving import TOKENIZER, Served, served, tiny

BODY: dict[str, Any] = {"model": "tiny", "prompt": "ab ab", "max_tokens": 5, "seed": 3}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture(params=[True, False], ids=["keys", "open"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    keys = Keys([digest_of("mine")]) if request.param else Keys()
    own = {"records": RecordFolder(tmp_path / "records"), "recorded": Keys([digest_of("watch")])}
    with served(settings=FrontSettings(keys=keys, **own)) as one:  # type: ignore[arg-type]
        yield one


def files(server: Served) -> list[Path]:
    folder = server.front.settings.records
    assert folder is not None
    return sorted(folder.folder.iterdir())


def test_one_key_is_recorded_and_no_other(server: Served) -> None:
    other = key("mine") if server.front.settings.keys else {}
    plain = server.client.post("/v1/completions", json=BODY, headers=other)
    assert plain.status_code == 200 and files(server) == []
    found = server.client.post("/v1/completions", json=BODY, headers=key("watch"))
    assert found.json()["choices"] == plain.json()["choices"]
    (file,) = files(server)
    record = read_record(file)
    (run,) = record.runs.values()
    said = TOKENIZER.decode(run.tokens[0], skip_special_tokens=True)
    assert said == found.json()["choices"][0]["text"]
    assert repeat(record, run.name, tiny(), TOKENIZER).difference == 0.0
    many = {**BODY, "prompt": ["ab", "abc"], "stream": False}
    assert server.client.post("/v1/completions", json=many, headers=key("watch")).status_code == 200
    assert len(files(server)) == 3
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
    streamed = {**chat, "stream": True}
    answer = server.client.post("/v1/chat/completions", json=streamed, headers=key("watch"))
    assert answer.status_code == 200 and len(files(server)) == 4
    assert files(server)[0].parent.stat().st_mode & 0o777 == 0o700


def test_no_request_asks_for_it_and_a_full_folder_refuses(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**BODY, "record": "/tmp/x"}
    answer = server.client.post("/v1/completions", json=body, headers=key("watch"))
    assert answer.status_code == 400 and files(server) == []
    monkeypatch.setattr(access, "MOST_RECORDS", 1)
    assert server.client.post("/v1/completions", json=BODY, headers=key("watch")).status_code == 200
    answer = server.client.post("/v1/completions", json=BODY, headers=key("watch"))
    assert answer.status_code == 503 and "full" in answer.text and len(files(server)) == 1
    other = key("mine") if server.front.settings.keys else {}
    assert server.client.post("/v1/completions", json=BODY, headers=other).status_code == 200


def test_it_is_off_unless_a_folder_and_a_key_are_given(tmp_path: Path) -> None:
    assert ServeSettings().front().records is None
    both = {"record_dir": str(tmp_path / "a"), "record_keys": ["watch"]}
    assert ServeSettings(**both).front().recorded.owner("watch") is not None  # type: ignore[arg-type]
    for name in both:
        with pytest.raises(RequestError, match="a folder and a key"):
            ServeSettings(**{name: both[name]}).front()  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="others ask with"):
        ServeSettings(**both, api_keys=["watch"]).front()  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be used"):
        ServeSettings(record_dir=str(tmp_path / "file"), record_keys=["a"]).front()


def test_an_operator_leaves_texts_out(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path / "records", redacted=True)
    settings = FrontSettings(records=folder, recorded=Keys([digest_of("watch")]))
    with served(settings=settings) as one:
        body = {**BODY, "prompt": "Zebra", "stop": "crossing"}
        assert one.client.post("/v1/completions", json=body, headers=key("watch")).is_success
        (file,) = files(one)
    record = read_record(file)
    assert record.header["redacted"] is True and record.texts == {}
    (run,) = record.runs.values()
    assert run.steps and not run.prompt
    data = gzip.decompress(file.read_bytes())
    assert b"Zebra" not in data and b"crossing" not in data
    with pytest.raises(RequestError, match="record_redacted"):
        ServeSettings(record_redacted=True).front()


def test_a_run_its_forks_and_where_it_goes_on_are_recorded(server: Served) -> None:
    runs, watch = "/v1/everystep/runs", key("watch")

    def post(path: str, body: dict[str, Any], **more: str) -> Any:
        answer = server.client.post(f"{runs}{path}", headers={**watch, **more}, **body)
        assert answer.is_success, answer.text
        return answer

    body = {"model": "tiny", "prompt": "ab ab", "max_new_tokens": 6, "seed": 3}
    name = post("", {"json": body}).json()["id"]
    post(f"/{name}/step", {"json": {"steps": 2}})
    twin = post(f"/{name}/fork", {"json": {"temperature": 1.5}}).json()["id"]
    for one in (name, twin):
        post(f"/{one}/step", {"json": {"steps": 1}})
    saved = post(f"/{name}/save", {"json": {}}).content
    (file,) = files(server)
    for one in (name, twin):
        assert server.client.delete(f"{runs}/{one}", headers=watch).is_success
    first, second = read_record(file).runs.values()
    assert len(first.tokens[0]) == 3 and second.parent == (first.name, 2)
    kind = {"content-type": "application/octet-stream"}
    again = post("/resume?model=tiny", {"content": saved}, **kind).json()["id"]
    result = post(f"/{again}/result", {"json": {}}).json()
    (run,) = read_record(next(one for one in files(server) if one != file)).runs.values()
    assert run.tokens[0] == result["run"]["tokens"] and len(files(server)) == 2
    mine = key("mine") if server.front.settings.keys else {}
    assert server.client.post(runs, json=body, headers=mine).is_success
    assert len(files(server)) == 2


def test_an_operator_leaves_out_what_each_processor_did(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"record_dir": str(tmp_path / "records"), "record_keys": ["watch"]}
    settings = ServeSettings(**kept, record_stages=False).front()
    with served(settings=settings) as one:
        body = {**BODY, "temperature": 0.8, "top_k": 5}
        assert one.client.post("/v1/completions", json=body, headers=key("watch")).is_success
        (file,) = files(one)
    (run,) = read_record(file).runs.values()
    assert run.about["every_stage"] is False
    names = {stage.name for step in run.steps for row in step.rows for stage in row.stages}
    assert names == {"all"}
    with pytest.raises(RequestError, match="record_stages"):
        ServeSettings(record_stages=False).front()
