"""One server that tests share which leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Served, served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """A server over a tiny model, without keys."""
    with served() as one:
        yield one
