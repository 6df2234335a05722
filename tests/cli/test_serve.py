"""`everystep serve`: what it refuses before it loads anything, and how it starts and ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

import everystep as es
from everystep.errors import EverystepError, RequestError
from everystep.files.sources import DEFAULT_MODEL
from everystep.server.settings import ServeSettings, read_settings
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.cli.running import Caller, everystep
from tests.server.programs import program


def _is_taken(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["--host", "0.0.0.0"], 2, "the address is public, and there is no key"),
        (["--host", "::"], 2, "Give --api-key or --key-file, or --public-without-key"),
        (["--host", "0.0.0.0", "--key-file", "nowhere"], 1, "there is no file of keys nowhere"),
        (["--model", "tiny"], 2, "wanted --model NAME=VALUE"),
        (["--model", "a=b", "--model", "a=c"], 2, "--model a is given twice"),
        (["--port", "99999999"], 2, "a setting is impossible; got Expected `int` <= 65535"),
        (["--settings", "nowhere.toml"], 1, "there is no file nowhere.toml"),
        (["--key-file", "nowhere"], 1, "there is no file of keys nowhere"),
        (["--adapter", "poet=no-folder"], 1, "no-folder is not the folder of an adapter"),
        (["--adapter", "poet=no-folder@0.5"], 2, "--adapter has a weight"),
        (["--steer", "vectors.safetensors"], 2, "wanted --steer NAME=VALUE"),
        (["--steer", "polite=no-such-vectors"], 1, "no-such-vectors does not exist"),
        (["--record-key", "k"], 2, "records need a folder and a key of their own"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    call: Caller, monkeypatch: pytest.MonkeyPatch, line: list[str], code: int, said: str
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("everystep.server.serving.front_model", never)
    monkeypatch.setattr("everystep.server.serving.listening_socket", never)
    outcome = call("serve", "./nothing-here", *line)
    assert (outcome.code, outcome.out) == (code, ""), outcome
    assert said in outcome.err
    assert "loading" not in outcome.err and "nothing-here" not in outcome.err


def test_an_address_that_another_has_is_refused_before_anything_is_loaded(call: Caller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        outcome = call("serve", "./nothing-here", "--port", port)
    assert outcome.code == 2 and f"127.0.0.1:{port}" in outcome.err
    assert "the address cannot be had" in outcome.err and "loading" not in outcome.err
    outcome = call("serve", "./nothing-here", "--port", "0")
    assert outcome.code == 1 and "loading ./nothing-here" in outcome.err
    assert "there is no file or folder './nothing-here'" in outcome.err


def test_a_public_address_is_served_with_a_key_or_where_that_is_said() -> None:
    for way in ({"api_keys": ["k"]}, {"public_without_key": True}, {"uds": "a.socket"}):
        read_settings(None, {"host": "0.0.0.0", **way}).require_possible()
    with pytest.raises(RequestError, match="there is no key"):
        read_settings(None, {"host": "0.0.0.0"}).require_possible()


def test_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "x/y.gguf"\nport = 9\nmax_rows = 4\n[adapters]\na = "b"\n')
    read = read_settings(file, {"port": 10})
    assert (read.port, read.max_rows, read.adapters) == (10, 4, {"a": "b"})
    assert read.sources() == {"y": "x/y.gguf"}
    for text, said in (("max_row = 4", "max_rows"), ("port = 'x'", "port"), ("port =", "TOML")):
        file.write_text(text)
        with pytest.raises(EverystepError, match=said):
            read_settings(file, {})
    assert ServeSettings(models={"a": "b"}).sources() == {"a": "b"}
    assert [*ServeSettings(model="m", models={"a": "b"}).sources()] == ["m", "a"]


def test_a_server_starts_answers_drains_and_ends(tmp_path: Path) -> None:
    tiny_llama(vocab_size=320, max_position_embeddings=4096).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer(320).save_pretrained(tmp_path / "tiny")
    vectors = {0: torch.tensor([9.0, -9.0] * 16)}
    save_file({"0": vectors[0]}, tmp_path / "polite.safetensors")
    beside = ("--steer", f"polite={tmp_path / 'polite.safetensors'}", "--threads", "1")
    command = everystep("serve", str(tmp_path / "tiny"), "--port", "0", *beside)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        errors = program.stderr
        threading.Thread(target=errors.read, daemon=True).start()
        first = program.stdout.readline()
        found = re.fullmatch(r"serving tiny on (http://127\.0\.0\.1:\d+)\n", first)
        assert found, first
        with httpx.Client(base_url=found[1], timeout=60) as client:
            body = {"prompt": "hello", "max_tokens": 9, "steer": "polite"}
            told = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            loaded = es.load(tmp_path / "tiny")
            assert told == es.generate(*loaded, "hello", max_new_tokens=9, steer=vectors)
            assert told != es.generate(*loaded, "hello", max_new_tokens=9)
            body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                program.send_signal(signal.SIGTERM)
                assert [*lines][-2:] == ["data: [DONE]", ""], "what is under way comes to its end"
        deadline = time.monotonic() + 60
        while program.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert program.returncode == 0


def test_a_server_of_models_and_an_adapter_with_a_key_drains_and_is_ended(tmp_path: Path) -> None:
    wanted, options = _models_of_three(tmp_path), ("--api-key", "open sesame", "--threads", "1")
    command = everystep("serve", *_options_of_three(tmp_path), "--port", "0", *options)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as program:
        assert program.stdout is not None
        said = program.stdout.readline()
        while not said.endswith("Ctrl-C ends it\n") and program.poll() is None:
            said += program.stdout.readline()
        found = re.match(r"serving tiny on (http://127\.0\.0\.1:\d+)\n", said)
        assert found, said
        address = found[1]
        key = {"Authorization": "Bearer open sesame"}
        with httpx.Client(base_url=address, timeout=60) as client:
            _ask_as_printed(client, said, address)
            for opened in ({}, {"Authorization": "Bearer KEY"}, {"X-Api-Key": "open sesame2"}):
                for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                    assert client.get(path, headers=opened).status_code == 401, (path, opened)
                asked = {"prompt": "hello", "max_tokens": 1}
                answer = client.post("/v1/completions", json=asked, headers=opened)
                assert answer.status_code == 401
            assert client.get("/v1/models", headers={"X-Api-Key": "open sesame"}).is_success
            for name, text in wanted.items():
                asked = {"prompt": "hello", "max_tokens": 12, "model": name}
                answer = client.post("/v1/completions", json=asked, headers=key)
                told = answer.json()
                assert (told["model"], told["choices"][0]["text"]) == (name, text)
            asked = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked, headers=key) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert client.get("/ready").status_code == 200
                program.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + 60
                while client.get("/ready").status_code == 200 and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert client.get("/ready").status_code == 503
                assert client.get("/health").status_code == 200, "what is under way goes on"
                asked = {"prompt": "hello", "max_tokens": 1}
                refused = client.post("/v1/completions", json=asked, headers=key)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
                assert refused.json()["error"]["code"] == "draining"
                assert all(next(lines) is not None for _ in range(10)) and program.poll() is None
                program.send_signal(signal.SIGTERM)
                with pytest.raises(httpx.RemoteProtocolError):
                    assert "data: [DONE]" not in [*lines]
        assert program.wait(60) == -signal.SIGTERM


def test_a_stream_that_is_longer_than_the_drain_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("drain_seconds = 0.3\n")
    options = ("--port", "0", "--settings", str(tmp_path / "serve.toml"))
    with program(tmp_path, *options) as (running, url), httpx.Client(timeout=60) as client:
        asked = {"prompt": "hello", "max_tokens": 3900, "ignore_eos": True, "seed": 1}
        asked |= {"n": 8, "temperature": 1.0}
        said: list[httpx.Response] = []
        whole = threading.Thread(
            target=lambda: said.append(client.post(f"{url}/v1/completions", json=asked))
        )
        whole.start()
        streamed = {**asked, "stream": True}
        with client.stream("POST", f"{url}/v1/completions", json=streamed) as answer:
            lines = answer.iter_lines()
            next(lines)
            began = time.monotonic()
            running.send_signal(signal.SIGTERM)
            *_, last, empty = lines
        taken = time.monotonic() - began
        assert empty == "" and last.startswith("data: "), "no stream ends in silence"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"].startswith("the server has been stopped")
        whole.join()
        assert (said[0].status_code, said[0].json()["error"]) == (503, error)
        assert taken > 0.3 and running.wait(60) == 0


@pytest.mark.slow
@pytest.mark.skipif(_is_taken(8000), reason="port 8000 is taken, where the default server listens")
def test_without_an_argument_the_default_model_is_served() -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(everystep("serve"), **pipes) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stderr.readline() == f"everystep: loading {DEFAULT_MODEL}\n", "at once"
        threading.Thread(target=running.stderr.read, daemon=True).start()
        said = running.stdout.readline()
        while not said.endswith("Ctrl-C ends it\n") and running.poll() is None:
            said += running.stdout.readline()
        address = "http://127.0.0.1:8000"
        assert said.startswith(f"serving {DEFAULT_MODEL} on {address}\n")
        typed = re.search(r"curl (\S+) -H 'Content-Type: (.+)' \\\n\s+-d '(.+)'\n", said)
        assert typed, said
        url, kind, body = typed.groups()
        assert url == f"{address}/v1/chat/completions"
        asked = {**json.loads(body), "max_tokens": 5, "temperature": 0}
        with httpx.Client(timeout=60) as client:
            headers = {"Content-Type": kind}
            answer = client.post(url, content=json.dumps(asked), headers=headers).json()
            (python,) = [one.strip() for one in said.splitlines() if "OpenAI(" in one]
            names: dict[str, Any] = {"OpenAI": openai.OpenAI}
            exec(python, names)  # it is what people are told to type
            with names["client"] as known:
                assert [one.id for one in known.models.list()] == [DEFAULT_MODEL]
            assert f"a page to talk on: {address}/ " in said
            assert client.get(f"{address}/").headers["content-type"].startswith("text/html")
        model, tokenizer = es.load(DEFAULT_MODEL, offline=True)
        options: Any = {"max_new_tokens": 5, "do_sample": False}
        wanted = str(es.chat(model, tokenizer, asked["messages"], **options))
        assert answer["choices"][0]["message"]["content"] == wanted
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0


def _models_of_three(folder: Path) -> dict[str, str]:
    """Write two models and an adapter of the first; what each says, by the name it is served by."""
    models = [tiny_llama(seed, vocab_size=320, max_position_embeddings=4096) for seed in (0, 1)]
    for model, name in zip(models, ("tiny", "other"), strict=True):
        model.save_pretrained(folder / name)
        tiny_tokenizer(320).save_pretrained(folder / name)
    first, tokenizer = es.load(folder / "tiny")
    adapter = first.add_adapter("made", es.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in adapter.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype) * 0.5)
    first.save_adapter(folder / "adapter", "made")
    found = {
        "tiny": es.generate(first, tokenizer, "hello", max_new_tokens=12),
        "poet": es.generate(first, tokenizer, "hello", max_new_tokens=12, adapter_names="made"),
        "second": es.generate(*es.load(folder / "other"), "hello", max_new_tokens=12),
    }
    assert len(set(found.values())) == 3
    return found


def _options_of_three(folder: Path) -> list[str]:
    """The options that serve these."""
    named = ["--model", f"second={folder / 'other'}", "--adapter", f"poet={folder / 'adapter'}"]
    return [str(folder / "tiny"), *named]


def _ask_as_printed(client: httpx.Client, said: str, address: str) -> None:
    """What is printed to type next works, once KEY is the key."""
    typed = re.search(r"curl (\S+) -H '(.+): (.+)' \\\n\s+-H '(.+): (.+)' -d '(.+)'\n", said)
    assert typed, said
    url, kind, json_, name, value, body = typed.groups()
    headers = {kind: json_, name: value.replace("KEY", "open sesame")}
    assert url == f"{address}/v1/chat/completions"
    answer = client.post(url, content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["choices"], answer.text
    (python,) = [one for one in said.splitlines() if "OpenAI(" in one]
    assert python.strip() == f'client = OpenAI(base_url="{address}/v1", api_key="KEY")'
    page, fields = re.findall(rf"{re.escape(address)}/\S*", said.splitlines()[-1])
    assert client.get(page).headers["content-type"].startswith("text/html")
    assert client.get(fields, headers={name: "Bearer open sesame"}).json()["openapi"]
