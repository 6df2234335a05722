"""Spans of requests: continued from the client's trace, with numbers and without texts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from everystep.errors import MissingExtraError
from everystep.server.exchange import FrontSettings
from everystep.server.tracing import Tracing
from tests.server.serving import Served, dying, served

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "the canary sings"


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(spans: InMemorySpanExporter) -> Iterator[Served]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with served(settings=FrontSettings(tracing=Tracing(provider))) as one:
        yield one


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    """The span that was made since the last look."""
    end = time.monotonic() + 30  # a span ends after its answer
    while not spans.get_finished_spans() and time.monotonic() < end:
        time.sleep(0.005)
    (found,) = spans.get_finished_spans()
    spans.clear()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_the_clients_trace(
    traced: Served, spans: InMemorySpanExporter, *, stream: bool
) -> None:
    body: Any = {
        "messages": [{"role": "user", "content": CANARY}],
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 7,
        "n": 2,
        "ignore_eos": True,
        "stop": ["never this"],
        "stream": stream,
    }
    headers = {"traceparent": PARENT}
    answer = traced.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    span = only(spans)
    assert span.name == "chat tiny" and span.kind is SpanKind.SERVER
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    told = dict(span.attributes or {})
    assert (
        told.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "everystep",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 7,
            "gen_ai.request.choice.count": 2,
            "gen_ai.request.stream": stream,
            "gen_ai.output.type": "text",
            "gen_ai.response.finish_reasons": ("length", "length"),
            "gen_ai.usage.output_tokens": 10,
        }.items()
    )
    assert str(told["gen_ai.response.id"]).startswith("chatcmpl-")
    assert told["gen_ai.usage.input_tokens"] > 0  # type: ignore[operator]
    assert ("gen_ai.response.time_to_first_chunk" in told) == stream
    assert "canary" not in span.to_json() and "never this" not in span.to_json()


def test_without_a_parent_a_trace_begins(traced: Served, spans: InMemorySpanExporter) -> None:
    for wrong in ("", "00-zz-1-01", "x" * 5000):
        traced.client.post(
            "/v1/completions",
            json={"prompt": CANARY, "max_tokens": 2},
            headers={"traceparent": wrong},
        )
        span = only(spans)
        assert span.parent is None and span.name == "text_completion tiny"
    traced.post("/v1/embeddings", input="hello")
    assert only(spans).name == "embeddings tiny"
    traced.post("/v1/messages", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    assert only(spans).name == "chat tiny"
    traced.client.get("/v1/models")
    traced.post("/tokenize", prompt="hello")
    assert spans.get_finished_spans() == ()


def test_an_error_has_its_kind_and_not_its_text(
    traced: Served, spans: InMemorySpanExporter
) -> None:
    traced.post("/v1/completions", prompt="x", grammar=CANARY, max_tokens=3)
    span = only(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "400"
    assert "canary" not in span.to_json() and span.events == ()
    with dying(traced.front.link):
        asked: Any = {"prompt": "hello", "max_tokens": 9, "stream": True, "ignore_eos": True}
        traced.post("/v1/completions", **asked)
    span = only(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "503"


def test_spans_reach_a_collector() -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            got.append((self.path, self.rfile.read(size)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        tracing = Tracing.exporting(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        with served(settings=FrontSettings(tracing=tracing)) as server:
            server.post("/v1/completions", prompt="hello", max_tokens=2)
        collector.shutdown()
        thread.join()
    assert got and got[0][0] == "/v1/traces"
    data = b"".join(one for _, one in got)
    import gzip

    plain = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    assert b"text_completion tiny" in plain and b"gen_ai.usage.output_tokens" in plain


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtraError, match="otel"):
        Tracing.exporting("http://127.0.0.1:1/v1/traces")
