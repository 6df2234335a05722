"""Spans of requests by OpenTelemetry's GenAI conventions, for operators who ask for them.

A span has numbers, names of models and reasons; no text of a prompt or of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from everystep.errors import MissingExtraError, RequestError, shown
from everystep.server.answering import Usage
from everystep.server.asking import Wanted
from everystep.server.fields import Json

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_LIBRARIES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_OPERATIONS = {"cmpl-": "text_completion", "embd-": "embeddings"}
"""What a request does, by what its ids begin with; the others are chats."""
_ASKED = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_new_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""Keywords of a request -> attributes."""


def require_otel(endpoint: str) -> None:
    """Raise MissingExtraError where the libraries are not installed, RequestError for what is no
    address."""
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        raise RequestError(
            "otlp_endpoint is no address",
            wanted="http://localhost:4318/v1/traces, say",
            got=shown(endpoint)[:80],
        )
    for library in _LIBRARIES:
        try:
            import_module(library)
        except ImportError as error:
            raise MissingExtraError.of("--otlp-endpoint", "opentelemetry", "otel") from error


class RequestTrace:
    """The span of one request, which ends with it."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def asked(self, wanted: Wanted) -> None:
        """Note what is asked for."""
        told: dict[str, str | int | float | bool] = {
            name: wanted.keywords[keyword]
            for keyword, name in _ASKED.items()
            if type(wanted.keywords.get(keyword)) in (int, float)
        }
        told["gen_ai.request.model"] = wanted.to.name
        told["gen_ai.request.stream"] = wanted.stream
        if wanted.n != 1:
            told["gen_ai.request.choice.count"] = wanted.n
        form = "json" if "schema" in wanted.keywords else "text"
        told["gen_ai.output.type"] = form
        self._span.update_name(f"{self._operation} {wanted.to.name}")
        self._span.set_attributes(told)

    @property
    def _operation(self) -> str:
        attributes: Mapping[str, Json] = getattr(self._span, "attributes", None) or {}
        return str(attributes.get("gen_ai.operation.name", "chat"))

    def answered(self, id: str, usage: Usage, reasons: list[str], first: float | None) -> None:
        """Note what came of it; `first`: seconds to the first token, where that is known."""
        self._span.set_attributes(
            {
                "gen_ai.response.id": id,
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.input_tokens": usage.prompt,
                "gen_ai.usage.output_tokens": usage.completion,
                "gen_ai.usage.cache_read.input_tokens": usage.cached,
            }
        )
        if first is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", first)

    def failed(self, error: BaseException) -> None:
        """Note that it failed, and the kind of the error alone: its text may quote a prompt."""
        from opentelemetry.trace import Status, StatusCode

        status = getattr(error, "status", None)
        self._span.set_attribute("error.type", str(status or type(error).__name__))
        self._span.set_status(Status(StatusCode.ERROR))


class Tracing:
    """A place that spans of requests go to."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("everystep.server")

    @classmethod
    def exporting(cls, endpoint: str) -> Tracing:
        """Return what sends spans to this address by OTLP over HTTP, from a thread of its own.

        MissingExtraError where the libraries are not installed.
        """
        require_otel(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "everystep"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    @contextmanager
    def request(self, headers: Mapping[str, str], prefix: str) -> Iterator[RequestTrace]:
        """Trace a request while the body runs, within the trace that its headers name."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = _OPERATIONS.get(prefix, "chat")
        span = self._tracer.start_span(
            operation,
            TraceContextTextMapPropagator().extract(dict(headers)),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": "everystep"},
        )
        trace = RequestTrace(span)
        try:
            yield trace
        except BaseException as error:
            trace.failed(error)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._provider.shutdown()
