"""Errors have one answer each, whatever route they come from, and no stream ends in silence."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from everystep.errors import CapacityError, EverystepError, OversizeError, RequestError
from everystep.server.asking import UnknownModelError
from everystep.server.exchange import OPENAI_FORM, Exchange, FrontSettings, HttpError
from everystep.server.faults import as_http_error
from everystep.server.live_runs import BusyRunError, TooManyRunsError, UnknownRunError
from everystep.server.quotas import QuotaError

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [],
    "query_string": b"",
}


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (HttpError(418, "tea", code="teapot", retry=9), 418, "teapot", 9),
        (RequestError("no"), 400, None, None),
        (OversizeError("long"), 400, "context_length_exceeded", None),
        (UnknownModelError("no"), 404, "model_not_found", None),
        (UnknownRunError("no"), 404, "run_not_found", None),
        (BusyRunError("no"), 409, "run_busy", None),
        (TooManyRunsError("no"), 429, "too_many_runs", 30),
        (CapacityError("no"), 429, None, 60),
        (EverystepError("no"), 400, None, None),
    ],
)
def test_an_error_has_one_answer(
    error: Exception, status: int, code: str | None, retry: int | None
) -> None:
    found = as_http_error(error)
    assert found is not None and str(found) == str(error)
    assert (found.status, found.code, found.retry) == (status, code, retry)


def test_a_quota_says_when_it_has_room() -> None:
    found = as_http_error(QuotaError("no", wanted="less", seconds=6.5))
    assert found is not None and (found.status, found.code, found.retry) == (429, "quota", 7)


def test_what_is_not_ours_is_a_defect() -> None:
    assert as_http_error(ValueError("a path")) is None


def test_a_stream_with_a_defect_ends_with_an_error_and_tells_the_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def chunks() -> AsyncIterator[Any]:
        yield {"n": 1}
        raise ValueError("/a/secret/path")

    async def main() -> HttpError | None:
        exchange = Exchange(FrontSettings(), OPENAI_FORM, SCOPE, receive, send)
        try:
            return await exchange.stream(chunks())
        finally:
            exchange.stop_listening()

    with caplog.at_level(logging.ERROR, "everystep.server"):
        error = asyncio.run(main())
    assert error is not None and error.status == 500
    bodies = [one["body"] for one in sent if one["type"] == "http.response.body"]
    assert json.loads(bodies[0].removeprefix(b"data: ")) == {"n": 1}
    assert b"error" in bodies[-1] and b"secret" not in b"".join(bodies)
    assert sent[-1]["more_body"] is False and "/a/secret/path" in caplog.text
