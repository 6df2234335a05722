"""The engines that benchmarks compare with, and an environment for each with its packages pinned.

An environment is made once in a folder of its own and kept: a file in it names what was installed,
so another pin makes it anew. Knows pip and nothing about models or measuring.
"""

from __future__ import annotations

import os
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

from everystep.files.sources import SourceSettings

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.23.0"


@dataclass(frozen=True)
class Peer:
    """An engine's name and what pip installs; `converts`: its models are made with torch."""

    name: str
    packages: tuple[str, ...]
    converts: bool = False

    @property
    def pins(self) -> tuple[str, ...]:
        """Everything that is installed, torch first: a range could bring another build of it."""
        return (TORCH, *self.packages) if self.converts else self.packages


PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", ("llama-cpp-python==0.3.36",)),
        Peer(
            "onnxruntime-genai",
            ("onnxruntime-genai==0.18.0", "onnx==1.22.0", "onnx-ir==0.2.1", TRANSFORMERS),
            converts=True,
        ),
        Peer("ctranslate2", ("ctranslate2==4.8.5", TRANSFORMERS), converts=True),
        Peer("openvino-genai", ("openvino-genai==2026.4.1.0",)),
        Peer("transformers", (TRANSFORMERS,), converts=True),
    )
}


def quantise_gguf(source: Path, target: Path, kind: str, folder: Path) -> None:
    """`target` is what llama.cpp's quantiser makes of a GGUF file; Unavailable if it cannot."""
    python = str(python_of(PEERS["llama.cpp"], folder))
    line = [python, str(Path(__file__).with_name("quantise_gguf.py"))]
    done = subprocess.run([*line, str(source), str(target), kind], capture_output=True, text=True)
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Unavailable(f"llama.cpp could not round the model: {cause}")


class Unavailable(Exception):
    """A peer cannot take part; the text is the cause."""


def default_folder() -> Path:
    """Where environments and converted models are kept: outside the repository."""
    return SourceSettings.from_environment().cache / "bench" / "peers"


def python_of(peer: Peer, folder: Path) -> Path:
    """The Python of the peer's environment, which is made if it is not there."""
    home = folder / peer.name
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(peer.pins)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making an environment for {peer.name}: {', '.join(peer.pins)}", flush=True)
        venv.create(home, with_pip=True, clear=True)
        for pins in ((peer.pins[0],), peer.pins):
            _pip_install(python, pins, home / "pip.log")
        stamp.write_text(wanted)
    return python


def _pip_install(python: Path, packages: tuple[str, ...], log: Path) -> None:
    line = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages]
    # A package that is compiled takes as many cores as there are, not more.
    cores = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    with log.open("w") as output:
        done = subprocess.run(
            line, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **cores}
        )
    if done.returncode:
        raise Unavailable(f"pip could not install {' '.join(packages)}: {_cause(log)}")


def _cause(log: Path) -> str:
    """The last line of pip's output that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1]
