"""TLS and unix sockets, with the client that people use."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from everystep.errors import EverystepError
from everystep.server.serving import listening_socket
from everystep.server.settings import ServeSettings
from tests.server.programs import program


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine that nobody has signed but itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl is missing, which makes a certificate")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command += ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def said(transport: httpx.Client, url: str) -> tuple[str, str]:
    """An answer as OpenAI's client reads it, whole and streamed."""
    with transport, openai.OpenAI(base_url=f"{url}/v1", api_key="x", http_client=transport) as one:
        own = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "seed": 1}
        whole = one.completions.create(**own)  # type: ignore[call-overload]
        streamed = one.completions.create(**own, stream=True)  # type: ignore[call-overload]
        return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in streamed)


def test_over_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    public, secret = map(str, certificate)
    (tmp_path / "tls.toml").write_text(f"tls_certificate = {public!r}\ntls_key = {secret!r}\n")
    options = ("--settings", str(tmp_path / "tls.toml"), "--port", "0")
    with program(tmp_path, *options) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=public)
        whole, streamed = said(httpx.Client(verify=trusting, timeout=60), url)
        assert whole == streamed
        with httpx.Client(timeout=60) as stranger, pytest.raises(httpx.ConnectError):
            stranger.get(f"{url}/health")
        with httpx.Client(timeout=60) as plain, pytest.raises(httpx.HTTPError):
            plain.get(f"{url.replace('https', 'http')}/health")


def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    (tmp_path / "uds.toml").write_text(f"uds = {str(path)!r}\n")
    with program(tmp_path, "--settings", str(tmp_path / "uds.toml")) as (_, url):
        assert url == f"unix:{path}" and path.is_socket()
        transport = httpx.HTTPTransport(uds=str(path))
        whole, streamed = said(httpx.Client(transport=transport, timeout=60), "http://localhost")
        assert whole == streamed


def test_a_socket_that_a_killed_server_left_is_no_obstacle_and_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listening_socket(ServeSettings(uds=str(path))).close()
    assert path.is_socket()
    listening_socket(ServeSettings(uds=str(path))).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(EverystepError, match="address"):
        listening_socket(ServeSettings(uds=str(path)))
    assert path.read_text() == "mine"


def test_the_path_of_a_running_server_is_not_taken_by_another_start(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening_socket(ServeSettings(uds=str(path))) as running:
        place = path.stat().st_ino
        for _ in range(3):
            with pytest.raises(EverystepError, match="a server listens there"):
                listening_socket(ServeSettings(uds=str(path)))
        assert path.stat().st_ino == place
        with socket.socket(socket.AF_UNIX) as one:  # those that looked have gone
            one.connect(str(path))
            taken = [running.accept()[0] for _ in range(4)]
            assert taken[-1].send(b"x") == 1 and one.recv(1) == b"x"
        for each in taken:
            each.close()
    assert path.is_socket(), "which has ended, and left it there"
    with listening_socket(ServeSettings(uds=str(path))), socket.socket(socket.AF_UNIX) as one:
        one.connect(str(path))
