"""What there is on this machine: versions, devices, threads, extras. Facts, without judgement."""

from __future__ import annotations

from collections.abc import Mapping

LIBRARIES = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "transformers")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "hub": ("huggingface-hub",),
    "transformers": ("transformers", "gguf", "accelerate", "peft"),
    "grammar": ("llguidance",),
    "vision": ("pillow",),
    "sentencepiece": ("sentencepiece", "protobuf"),
    "audio": ("soundfile",),
    "train": ("pyarrow", "tensorboard", "matplotlib"),
    "server": (
        *("starlette", "uvicorn", "msgspec"),
        *("prometheus-client", "httptools", "python-multipart"),
    ),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "ray": ("ray",),
    "tui": ("textual",),
    "notebook": ("anywidget",),
}
"""The distributions that each extra brings, but for those that the command line needs itself."""


def version_of(distribution: str) -> str | None:
    """Return the version that is installed; None without one."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """Return where models can run, as --device takes it, with the names of GPUs."""
    import torch

    cuda = torch.cuda
    return ["cpu", *(f"cuda:{i} ({cuda.get_device_name(i)})" for i in range(cuda.device_count()))]


def threads() -> int:
    """Return how many threads compute."""
    import torch

    return torch.get_num_threads()
