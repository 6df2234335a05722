"""What tests share which leave it as it was: a server, and the files of its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import TOKENIZER, Served, served, tiny


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """A server over a tiny model, without keys."""
    with served() as one:
        yield one


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the same model, for engines in processes of their own."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    tiny().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path
