"""`everystep serve --replicas N` without an address: a Ray cluster that begins and ends with it."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

import everystep as es
from tests.reading import ROOT
from tests.server.programs import assert_none_is_left, marked, program
from tests.server.serving import PATIENCE, TOKENIZER, tiny

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed; the extra ray brings it"
)
MARK = f"EVERYSTEP_TEST={secrets.token_hex(8)}"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home folder of what is started, which is marked and told nothing about Ray."""
    monkeypatch.setenv(*MARK.split("="))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.slow
def test_a_server_with_replicas_has_a_cluster_of_its_own_and_leaves_nothing(home: Path) -> None:
    wanted = es.generate(tiny(), TOKENIZER, "hello", max_new_tokens=12, seed=1)
    with (
        program(home, "--replicas", "1", "--port", "0") as (_, address),
        httpx.Client(base_url=address, timeout=PATIENCE) as client,
    ):
        body = {"prompt": "hello", "max_tokens": 12, "seed": 1}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == wanted
        assert client.get("/v1/everystep/load").json()["replicas"] == 1
        commands = marked(MARK).values()
        for name in ("gcs_server", "raylet/raylet", "ServeReplica"):
            assert any(name in command for command in commands), f"{name} is of this cluster"
        assert (home / ".ray" / "auth_token").stat().st_size > 0, "whoever asks Ray needs it"
    assert_none_is_left(MARK)
