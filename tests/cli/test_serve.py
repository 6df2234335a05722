"""`everystep serve`: what it refuses before it loads anything, and how it starts and ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

import everystep as es
from everystep.errors import EverystepError, RequestError
from everystep.server.settings import ServeSettings, read_settings
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.cli.running import Caller, everystep


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
